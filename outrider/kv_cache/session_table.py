"""Which tokens a replica holds of which session, and whether a coordinator's view agrees.

    who       writes tokens                       truth about what is held
    target    after `Engine.forward`              `Engine.length`
    draft     after `Drafter.propose`             `Engine.length`

A round in a service: `align(head)`, and `begin(head)` where nothing is held; run
`Aligned.new_tokens`, at once or in parts, and what belongs to the service (the proposal, its own
draws); `record` what was run.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from outrider.engine.interface import Engine
from outrider.errors import BadRequest, InvariantError, check
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.messages import Resync, RoundHead
from outrider.tokens import EMPTY_DIGEST, TokenSequence


class Aligned(NamedTuple):
    """A session that stands where its coordinator says, and what must be run next."""

    sequence: TokenSequence
    """The tokens held, one slot each; owned by the table, valid until its next call."""
    new_tokens: tuple[int, ...]
    """The committed tokens that are not held; at least one, so that the step has a last row."""

    @property
    def committed(self) -> tuple[int, ...]:
        """All committed tokens of the session."""
        return (*self.sequence.ids, *self.new_tokens)


class _Entry:
    """One session: its tokens, and how many tokens a coordinator vouched for."""

    def __init__(self, age_rank: int) -> None:
        self.age_rank = age_rank
        self.parked = False
        self.sequence = TokenSequence()
        self.confirmed_length = 0
        """Committed tokens at the last `align`; behind them stand guesses."""


class SessionTable:
    """session id -> tokens, beside an engine's slots.

    At most `sequences_max` sessions; the one unused for longest makes room, and is asked for
    again by `Resync` when it comes back. So one step may align `sequences_max` sessions at most.
    Not for more than one thread at a time.
    """

    sequences_max = SEQUENCES_PER_REPLICA_MAX

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._entries)

    def align(self, head: RoundHead) -> Aligned | Resync:
        """Cuts the session back to what it holds of the committed tokens that `head` states: the
        prefix, and as much of `head.append` as is held already, such as a prefix that was run in
        part. The last token is never among those held: its logits are gone. A session that holds
        nothing may `begin` on what others have left.

        Returns `Resync` where the stated prefix is not held: with the longest prefix <=
        `base_length` that this table knows to be committed. Nothing is cut then.
        Raises `BadRequest` for an empty prefix.
        """
        if head.base_length + len(head.append) == 0:
            raise BadRequest("append", "the prefix is empty; at least one token is needed")
        session_id, sequence = head.session_id, self._entry(head).sequence
        if not sequence.holds(head.base_length, head.prefix_digest):
            return self._resync(head)
        self._entries[session_id].confirmed_length = head.committed_length
        if not head.append:
            again = sequence.since(head.base_length - 1)[:1]
            self._cut(session_id, sequence, head.base_length - 1)
            return Aligned(sequence, again)
        held = sequence.since(head.base_length, head.committed_length - 1)
        pairs = enumerate(zip(head.append, held, strict=False))
        num_held = next((i for i, (given, known) in pairs if given != known), len(held))
        self._cut(session_id, sequence, head.base_length + num_held)
        return Aligned(sequence, head.append[num_held:])

    def begin(self, head: RoundHead) -> Aligned:
        """Begins a session that is aligned and holds nothing on what others of its tenant have left
        of the same tokens, which the engine's `find` tells before. A step of it follows."""
        entry = self._entries.get(head.session_id)
        if entry is None or len(entry.sequence):
            raise InvariantError(f"session {head.session_id} cannot begin")
        num_shared = self._engine.attach(head.session_id, head.append, head.tenant)
        entry.sequence.extend(head.append[:num_shared])
        return Aligned(entry.sequence, head.append[num_shared:])

    def record(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Notes that these tokens were run after those held: as many of them as the engine has
        taken slots for. Returns the length held now."""
        sequence = self._known(session_id).sequence
        missing = self._engine.length(session_id) - len(sequence)
        check(
            0 <= missing <= len(token_ids),
            f"the engine holds {missing} slots more than the table; {len(token_ids)} were run",
        )
        sequence.extend(token_ids[:missing])
        return len(sequence)

    def keep(self, session_id: str, length: int) -> int:
        """Gives up what a session holds behind its first `length` tokens. Returns the length held
        now, which is less where the engine has evicted it."""
        sequence = self._synced(session_id, self._known(session_id))
        self._cut(session_id, sequence, min(length, len(sequence)))
        return len(sequence)

    def rewind(self, session_id: str) -> Aligned | None:
        """Cuts a session that was aligned back to its committed tokens but the last, which can be
        run once more for its logits; None where these are not held any more."""
        entry = self._entries.get(session_id)
        if entry is None:
            return None
        sequence, length = self._synced(session_id, entry), entry.confirmed_length
        if len(sequence) < length or length == 0:
            return None
        last = sequence.since(length - 1, length)
        self._cut(session_id, sequence, length - 1)
        return Aligned(sequence, last)

    def length(self, session_id: str) -> int:
        """Tokens held of a session; 0 for an unknown one."""
        entry = self._entries.get(session_id)
        return 0 if entry is None else len(self._synced(session_id, entry))

    def age_rank(self, session_id: str) -> float:
        """Orders sessions by when they were first seen: the smaller, the older. Those that are
        unknown come last."""
        entry = self._entries.get(session_id)
        return math.inf if entry is None else entry.age_rank

    def holders(self) -> list[str]:
        """The sessions that hold slots and are not parked, the oldest first."""
        held = [
            (entry.age_rank, name)
            for name, entry in self._entries.items()
            if len(entry.sequence) and not entry.parked
        ]
        return [name for _, name in sorted(held)]

    def park(self, session_id: str) -> None:
        """The session is idle until it is aligned again: the engine may take its slots.
        Unknown ones are ignored."""
        entry = self._entries.get(session_id)
        if entry is not None:
            entry.parked = True
            self._engine.mark_idle(session_id)

    def free(self, session_id: str) -> None:
        """Frees the slots of a session that is not forgotten; unknown ones are ignored."""
        entry = self._entries.get(session_id)
        if entry is not None:
            entry.sequence.truncate(0)
            entry.confirmed_length = 0
            self._engine.release(session_id)

    def release(self, session_id: str) -> None:
        """Forgets the session and frees its slots; unknown ones are ignored."""
        self._entries.pop(session_id, None)
        self._engine.release(session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        check(len(self._entries) <= self.sequences_max, "the table has outgrown its limit")
        for session_id, entry in self._entries.items():
            slots, tokens = self._engine.length(session_id), len(entry.sequence)
            check(slots in (0, tokens), f"{session_id}: {slots} slots for {tokens} tokens")

    def _known(self, session_id: str) -> _Entry:
        entry = self._entries.get(session_id)
        if entry is None:
            raise InvariantError(f"session {session_id} is not in the table")
        return entry

    def _entry(self, head: RoundHead) -> _Entry:
        entry = self._entries.get(head.session_id)
        if entry is None:
            while len(self._entries) >= self.sequences_max:
                self.release(next(iter(self._entries)))
            self._num_seen += 1
            entry = self._entries[head.session_id] = _Entry(self._num_seen)
            self._engine.release(head.session_id)
            return entry
        entry.parked = False
        self._entries.move_to_end(head.session_id)
        self._synced(head.session_id, entry)
        return entry

    def _synced(self, session_id: str, entry: _Entry) -> TokenSequence:
        """The session's tokens, of which those without slots are forgotten: the engine may have
        evicted them."""
        sequence = entry.sequence
        slots = self._engine.length(session_id)
        if slots < len(sequence):
            sequence.truncate(slots)
            entry.confirmed_length = min(entry.confirmed_length, slots)
        elif slots > len(sequence):
            # A step that failed between `forward` and `record` left slots of unknown tokens.
            self._engine.keep(session_id, len(sequence))
        return sequence

    def _resync(self, head: RoundHead) -> Resync:
        """What was committed once stays committed, so the confirmed prefix is the safe offer.
        It holds no guesses, which the whole sequence would. Where it is not shorter than the
        stated prefix, the two views have parted inside it, at an unknown place."""
        entry = self._entries[head.session_id]
        held = min(entry.confirmed_length, len(entry.sequence))
        length = held if held < head.base_length else 0
        digest = entry.sequence.digest(length) if length else EMPTY_DIGEST
        return Resync(head.key, length, digest)

    def _cut(self, session_id: str, sequence: TokenSequence, length: int) -> None:
        if length == len(sequence):
            return
        self._engine.keep(session_id, length)
        sequence.truncate(length)
