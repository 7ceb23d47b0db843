"""Aligns an engine's sequences with the committed tokens of sessions.

In each round, a replica calls `align`, and runs `Aligned.new_tokens` in one or several steps. Then
a target runs the proposal's tokens, or a draft runs the tokens that it draws."""

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from outrider.errors import BadRequest
from outrider.foundation.fair_turns import round_robin
from outrider.foundation.tokens import TokenSequence, digest_after
from outrider.interfaces.engine import Engine
from outrider.interfaces.messages import Resync, RoundHead
from outrider.limits import SEQUENCES_PER_REPLICA_MAX


class Aligned(NamedTuple):
    """A session that holds only committed tokens, and the tokens to run next."""

    sequence: TokenSequence  # the tokens that the engine holds (`Engine.tokens`)
    new_tokens: tuple[int, ...]
    """The committed tokens that are not held. Contains at least the last committed token."""

    @property
    def committed(self) -> tuple[int, ...]:
        return (*self.sequence.ids, *self.new_tokens)

    @property
    def digest(self) -> int:
        """The digest of `committed`."""
        return digest_after(self.sequence.digest(), self.new_tokens)


class _Entry:
    confirmed_length = 0
    """The number of committed tokens at the last `align`. Later tokens may be draft tokens."""

    def __init__(self, age_rank: int, tenant: str) -> None:
        self.age_rank, self.tenant = age_rank, tenant


class SessionTable:
    """The sessions that an engine knows. A session and its sequence in the engine have the same id.
    If there are `sequences_max` sessions, a new session replaces the least recently used one. So a
    step must not align more than `sequences_max` sessions. Not thread-safe."""

    sequences_max = SEQUENCES_PER_REPLICA_MAX

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._entries)

    def align(self, head: RoundHead) -> Aligned | Resync:
        """Cuts the session to the committed tokens that it holds: the prefix that `head` states,
        and as much of `head.append` as it holds. Never keeps the last committed token, which must
        run again for its logits. If no token is left, takes cached pages that the same tenant has
        written for the same tokens (`Engine.attach`).

        If the stated prefix is not held, cuts nothing, and returns a `Resync` with the longest
        held prefix that is known to be committed. Raises `BadRequest` if `head` has no tokens."""
        if head.committed_length == 0:
            raise BadRequest("head.append", "the prefix is empty; at least one token is needed")
        entry, engine, session_id = self._entry(head), self._engine, head.session_id
        sequence = engine.tokens(session_id)
        if not sequence.holds(head.base_length, head.prefix_digest):
            held = min(entry.confirmed_length, len(sequence))
            # If `base_length` confirmed tokens are held, it is unknown which of them are wrong.
            length = held if held < head.base_length else 0
            return Resync(head.key, length, sequence.digest(length))
        entry.confirmed_length = head.committed_length
        if head.append and 0 < len(sequence) == head.base_length:
            return Aligned(sequence, head.append)
        if not head.append:
            again = sequence.since(head.base_length - 1)[:1]
            engine.keep(session_id, head.base_length - 1)
            return Aligned(sequence, again)
        ids = sequence.since(head.base_length, head.committed_length - 1)
        pairs = enumerate(zip(head.append, ids, strict=False))
        num_held = next((i for i, (given, known) in pairs if given != known), len(ids))
        if not engine.keep(session_id, head.base_length + num_held):
            num_held = engine.attach(session_id, head.append, head.tenant)
            sequence = engine.tokens(session_id)
        return Aligned(sequence, head.append[num_held:])

    def ranks(self, stepping: Collection[str]) -> dict[str, int]:
        """Ranks the known sessions that hold slots or are in `stepping`. The first session keeps
        its slots longest. Tenants take turns, each with its oldest session. A session is as old as
        its first `align`."""
        held = filter(self._engine.length, self._entries)
        known = filter(self._entries.__contains__, stepping)
        by_age = sorted({*held, *known}, key=lambda name: self._entries[name].age_rank)
        turns = round_robin(by_age, lambda name: self._entries[name].tenant)
        return {name: rank for rank, name in enumerate(turns)}

    def release(self, session_id: str) -> None:
        """Frees the slots of a session. Ignores unknown sessions."""
        self._entries.pop(session_id, None)
        self._engine.release(session_id)

    def _entry(self, head: RoundHead) -> _Entry:
        entry = self._entries.pop(head.session_id, None)
        if entry is None:
            while len(self._entries) >= self.sequences_max:
                self.release(next(iter(self._entries)))
            self._num_seen += 1
            entry = _Entry(self._num_seen, head.tenant)
        self._entries[head.session_id] = entry
        return entry
