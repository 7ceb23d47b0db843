"""Which tokens a replica holds of which session, and whether a coordinator's view agrees.

    who       writes tokens                       truth about what is held
    target    after `Engine.forward`              `Engine.length`
    draft     after `Drafter.propose`             `Engine.length`, or the table without an engine

A round in a service: `align(head)`; run `Aligned.new_tokens` and what belongs to the service
(the proposal, its own draws); `record` what was run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.interface import Engine
from outrider.errors import BadRequest, InvariantError, StaleEpoch, check
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.messages import Resync, RoundHead
from outrider.tokens import EMPTY_DIGEST, TokenSequence


@dataclass(frozen=True, slots=True)
class Aligned:
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
    """One session: its tokens, who may write, and how many tokens a coordinator vouched for."""

    __slots__ = ("confirmed_length", "epoch", "sequence")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.sequence = TokenSequence()
        self.confirmed_length = 0
        """Committed tokens at the last `align`; behind them stand guesses."""


class SequenceTable:
    """session id -> tokens and epoch, beside an engine's slots (or alone, without an engine).

    At most `sequences_max` sessions; the one unused for longest makes room, and is asked for
    again by `Resync` when it comes back. So one step may align `sequences_max` sessions at most.
    Not for more than one thread at a time.
    """

    def __init__(
        self, engine: Engine | None = None, sequences_max: int = SEQUENCES_PER_REPLICA_MAX
    ) -> None:
        check(sequences_max > 0, "sequences_max must be positive")
        self._engine = engine
        self._sequences_max = sequences_max
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._entries

    def align(self, head: RoundHead) -> Aligned | Resync:
        """Cuts the session back to the prefix that `head` states.

        Returns `Resync` where that prefix is not held: with the longest prefix <= `base_length`
        that this table knows to be committed. Nothing is cut then. Where `head.append` is empty
        the last token of the prefix is given up and run again, because its logits are gone.
        Raises `StaleEpoch` for an epoch older than one seen, `BadRequest` for an empty prefix.
        """
        if head.base_length + len(head.append) == 0:
            raise BadRequest("append", "the prefix is empty; at least one token is needed")
        entry = self._entry(head)
        sequence = entry.sequence
        if not sequence.holds(head.base_length, head.prefix_digest):
            return self._resync(head, entry)
        entry.confirmed_length = head.committed_length
        if head.append:
            self._cut(head.session_id, sequence, head.base_length)
            return Aligned(sequence, head.append)
        again = sequence.since(head.base_length - 1)[:1]
        self._cut(head.session_id, sequence, head.base_length - 1)
        return Aligned(sequence, again)

    def record(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Notes that these tokens were run after those held: as many of them as the engine has
        taken slots for; all of them without an engine. Returns the length held now."""
        entry = self._entries.get(session_id)
        if entry is None:
            raise InvariantError(f"session {session_id} is not in the table")
        sequence = entry.sequence
        if self._engine is None:
            sequence.extend(token_ids)
            return len(sequence)
        missing = self._engine.length(session_id) - len(sequence)
        check(
            0 <= missing <= len(token_ids),
            f"the engine holds {missing} slots more than the table; {len(token_ids)} were run",
        )
        sequence.extend(token_ids[:missing])
        return len(sequence)

    def length(self, session_id: str) -> int:
        """Tokens held of a session; 0 for an unknown one."""
        entry = self._entries.get(session_id)
        if entry is None:
            return 0
        self._forget_evicted(session_id, entry)
        return len(entry.sequence)

    def epoch(self, session_id: str) -> int:
        """The newest epoch seen of a session; 0 for an unknown one."""
        entry = self._entries.get(session_id)
        return 0 if entry is None else entry.epoch

    def release(self, session_id: str) -> None:
        """Forgets the session and frees its slots; unknown ones are ignored."""
        self._entries.pop(session_id, None)
        if self._engine is not None:
            self._engine.release(session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        check(len(self._entries) <= self._sequences_max, "the table has outgrown its limit")
        for session_id, entry in self._entries.items():
            if self._engine is not None:
                slots, tokens = self._engine.length(session_id), len(entry.sequence)
                check(slots in (0, tokens), f"{session_id}: {slots} slots for {tokens} tokens")

    def _entry(self, head: RoundHead) -> _Entry:
        entry = self._entries.get(head.session_id)
        if entry is None:
            self._make_room()
            entry = self._entries[head.session_id] = _Entry(head.epoch)
            if self._engine is not None:
                self._engine.release(head.session_id)
            return entry
        if head.epoch < entry.epoch:
            raise StaleEpoch(
                f"session {head.session_id}: epoch {head.epoch} is over, {entry.epoch} was seen"
            )
        entry.epoch = head.epoch
        self._entries.move_to_end(head.session_id)
        self._forget_evicted(head.session_id, entry)
        return entry

    def _make_room(self) -> None:
        while len(self._entries) >= self._sequences_max:
            oldest = next(iter(self._entries))
            self.release(oldest)

    def _forget_evicted(self, session_id: str, entry: _Entry) -> None:
        """After the engine has evicted a session, its tokens have no slots."""
        if self._engine is None:
            return
        slots = self._engine.length(session_id)
        if slots < len(entry.sequence):
            entry.sequence.truncate(slots)
            entry.confirmed_length = min(entry.confirmed_length, slots)
        elif slots > len(entry.sequence):
            # A step that failed between `forward` and `record` left slots nobody can name.
            self._engine.keep(session_id, len(entry.sequence))

    def _resync(self, head: RoundHead, entry: _Entry) -> Resync:
        """What was committed once stays committed, so the confirmed prefix is the safe offer.
        It holds no guesses, which the whole sequence would. Where it is not shorter than the
        stated prefix, the two views have parted inside it, at a place nobody knows."""
        held = min(entry.confirmed_length, len(entry.sequence))
        length = held if held < head.base_length else 0
        digest = entry.sequence.digest(length) if length else EMPTY_DIGEST
        return Resync(head.key, length, digest)

    def _cut(self, session_id: str, sequence: TokenSequence, length: int) -> None:
        if length == len(sequence):
            return
        if self._engine is not None:
            self._engine.keep(session_id, length)
        sequence.truncate(length)
