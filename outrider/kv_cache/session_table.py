"""The tokens that a replica holds of each session.

In each round, a worker calls `align`. The worker runs `Aligned.new_tokens`, in one or several
steps. Then a target runs the proposal, and a draft runs the tokens that it draws. After a step, the
worker calls `record`. The table holds as many tokens as the engine has slots for
(`Engine.length`)."""

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
    """A session that holds only committed tokens, and the tokens to run next."""

    sequence: TokenSequence
    """The tokens held, each in one slot. The table owns this object, and may change it in the next
    call."""
    new_tokens: tuple[int, ...]
    """The committed tokens that are not held. There is at least one such token, because the last
    committed token must run for its logits."""

    @property
    def committed(self) -> tuple[int, ...]:
        return (*self.sequence.ids, *self.new_tokens)


class _Entry:
    def __init__(self, age_rank: int) -> None:
        self.age_rank = age_rank
        self.sequence = TokenSequence()
        self.confirmed_length = 0
        """The number of committed tokens at the last `align`. Later tokens may be draft tokens."""


class SessionTable:
    """The tokens of each session whose slots an engine holds.

    Holds at most `sequences_max` sessions. If a further session comes, forgets the session that was
    used least recently. So a step must align at most `sequences_max` sessions. Not thread-safe."""

    sequences_max = SEQUENCES_PER_REPLICA_MAX

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._entries)

    def align(self, head: RoundHead) -> Aligned | Resync:
        """Cuts the session to the committed tokens that it holds: the prefix that `head` states,
        and the first tokens of `head.append` if the session holds them already. Never keeps the
        last committed token, because this token must run again for its logits. If no token is held,
        the session begins with the cached pages of its tenant that have the same tokens
        (`Engine.attach`).

        If the session does not hold the stated prefix, cuts nothing, and returns a `Resync` with
        the longest shorter prefix that is known to be committed. Raises `BadRequest` if `head` has
        no tokens."""
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
        if not len(sequence):
            num_held = self._engine.attach(session_id, head.append, head.tenant)
            sequence.extend(head.append[:num_held])
        return Aligned(sequence, head.append[num_held:])

    def record(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Appends tokens that were run. If the engine has slots for only the first of these tokens,
        appends only those. Returns the number of tokens held now."""
        sequence = self._known(session_id).sequence
        missing = self._engine.length(session_id) - len(sequence)
        check(
            0 <= missing <= len(token_ids),
            f"the engine holds {missing} slots more than the table; {len(token_ids)} tokens ran",
        )
        sequence.extend(token_ids[:missing])
        return len(sequence)

    def keep(self, session_id: str, length: int) -> int:
        """Cuts a session to its first `length` tokens. Returns the number of tokens held now, which
        is smaller than `length` if the engine has evicted the session."""
        sequence = self._synced(session_id, self._known(session_id))
        self._cut(session_id, sequence, min(length, len(sequence)))
        return len(sequence)

    def rewind(self, session_id: str) -> Aligned | None:
        """Cuts an aligned session to its committed tokens except the last token, which can then run
        again for its logits. Returns None if the committed tokens are no longer held."""
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
        """Returns the number of tokens held of a session, 0 for an unknown session."""
        entry = self._entries.get(session_id)
        return 0 if entry is None else len(self._synced(session_id, entry))

    def age_rank(self, session_id: str) -> float:
        """A sort key, by which older sessions come first. A session's age counts from its first
        `align`. Unknown sessions come last."""
        entry = self._entries.get(session_id)
        return math.inf if entry is None else entry.age_rank

    def holders(self) -> list[str]:
        """Returns the sessions that hold slots, the oldest session first."""
        held = [(entry.age_rank, name) for name, entry in self._entries.items() if entry.sequence]
        return [name for _, name in sorted(held)]

    def free(self, session_id: str) -> None:
        """Frees the slots of a session, but remembers its age. Ignores unknown sessions. Full pages
        stay cached for `align` until other sequences need them."""
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
        """Makes tokens and slots agree, for example after an eviction. Returns the tokens."""
        sequence = entry.sequence
        slots = self._engine.length(session_id)
        if slots < len(sequence):
            sequence.truncate(slots)
        elif slots > len(sequence):
            # A step failed between `forward` and `record`, so the tokens of its slots are unknown.
            self._engine.keep(session_id, len(sequence))
        return sequence

    def _resync(self, head: RoundHead) -> Resync:
        """Offers the held tokens that are known to be committed. If there are at least as many as
        in the stated prefix, replica and coordinator disagree about one of these tokens. Then
        offers no tokens, because nothing shows which token differs."""
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
