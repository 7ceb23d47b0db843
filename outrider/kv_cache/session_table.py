"""The tokens that a replica holds of each session, and whether a coordinator's view agrees.

In a round, a service calls `align(head)`, and `begin(head)` if no token is held. It runs
`Aligned.new_tokens`, at once or in parts, and its own tokens: a target the proposal, a draft its
draws. Then it calls `record`. `Engine.length` decides how many of these tokens are held.
"""

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
    """A session that agrees with its coordinator, and what to run next."""

    sequence: TokenSequence
    """The tokens held, one slot each. Owned by the table, and valid until its next call."""
    new_tokens: tuple[int, ...]
    """The committed tokens that are not held; at least one, whose logits are wanted."""

    @property
    def committed(self) -> tuple[int, ...]:
        """All committed tokens of the session."""
        return (*self.sequence.ids, *self.new_tokens)


class _Entry:
    """One session: its tokens, and how many of them are known to be committed."""

    def __init__(self, age_rank: int) -> None:
        self.age_rank = age_rank
        self.sequence = TokenSequence()
        self.confirmed_length = 0
        """Committed tokens at the last `align`. Tokens that are held after these are guesses."""


class SessionTable:
    """The tokens of each session whose slots an engine holds.

    Holds at most `sequences_max` sessions. Forgets the least recently used session if it needs
    room, so one step may align at most `sequences_max` sessions. For one thread at a time.
    """

    sequences_max = SEQUENCES_PER_REPLICA_MAX

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._entries)

    def align(self, head: RoundHead) -> Aligned | Resync:
        """Cuts the session back to those of the committed tokens that it holds: the prefix that
        `head` states, and the first tokens of `head.append`, if for example a part of them was run
        before. The last committed token is never kept, as its logits are gone. If nothing is held,
        call `begin` next.

        If the stated prefix is not held, returns a `Resync` with the longest shorter prefix that is
        known to be committed, and cuts nothing. Raises `BadRequest` if `head` has no tokens.
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
        """Begins an aligned session that holds nothing, on its tenant's cached pages of the same
        tokens, which `Engine.find` returns in advance. A step of the session must follow."""
        entry = self._entries.get(head.session_id)
        if entry is None or len(entry.sequence):
            raise InvariantError(f"session {head.session_id} cannot begin")
        num_shared = self._engine.attach(head.session_id, head.append, head.tenant)
        entry.sequence.extend(head.append[:num_shared])
        return Aligned(entry.sequence, head.append[num_shared:])

    def record(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Appends tokens that were run: the first ones, as many as the engine has taken slots for.
        Returns the length held now."""
        sequence = self._known(session_id).sequence
        missing = self._engine.length(session_id) - len(sequence)
        check(
            0 <= missing <= len(token_ids),
            f"the engine holds {missing} slots more than the table; {len(token_ids)} were run",
        )
        sequence.extend(token_ids[:missing])
        return len(sequence)

    def keep(self, session_id: str, length: int) -> int:
        """Cuts a session to its first `length` tokens. Returns the length held now, which is
        smaller if the engine has evicted the session."""
        sequence = self._synced(session_id, self._known(session_id))
        self._cut(session_id, sequence, min(length, len(sequence)))
        return len(sequence)

    def rewind(self, session_id: str) -> Aligned | None:
        """Cuts an aligned session back to its committed tokens without the last one, so that this
        can be run again for its logits. None if they are no longer held."""
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
        """Orders sessions by when they were first seen, the oldest first and unknown ones last."""
        entry = self._entries.get(session_id)
        return math.inf if entry is None else entry.age_rank

    def holders(self) -> list[str]:
        """The sessions that hold slots, the oldest first."""
        held = [(entry.age_rank, name) for name, entry in self._entries.items() if entry.sequence]
        return [name for _, name in sorted(held)]

    def free(self, session_id: str) -> None:
        """Frees the slots of a session without forgetting its age. Ignores unknown sessions. Whole
        pages stay in the cache for `begin` until other sequences need them."""
        entry = self._entries.get(session_id)
        if entry is not None:
            entry.sequence.truncate(0)
            self._engine.release(session_id)

    def release(self, session_id: str) -> None:
        """Forgets the session and frees its slots. Ignores unknown sessions."""
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
        self._entries.move_to_end(head.session_id)
        self._synced(head.session_id, entry)
        return entry

    def _synced(self, session_id: str, entry: _Entry) -> TokenSequence:
        """The session's tokens, without those that the engine has evicted."""
        sequence = entry.sequence
        slots = self._engine.length(session_id)
        if slots < len(sequence):
            sequence.truncate(slots)
        elif slots > len(sequence):
            # A step failed between `forward` and `record`, so the tokens of its slots are unknown.
            self._engine.keep(session_id, len(sequence))
        return sequence

    def _resync(self, head: RoundHead) -> Resync:
        """Offers the tokens that are known to be committed; the tokens after these may be guesses.
        If they are no fewer than the stated prefix has, replica and coordinator disagree about one
        of them. Then offers nothing, as it is unknown which."""
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
