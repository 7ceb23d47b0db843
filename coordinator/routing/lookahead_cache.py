"""Proposals that a draft has pushed for rounds that have not begun, until it is known which one
comes true."""

from __future__ import annotations

from outrider.limits import LOOK_AHEAD_MAX
from outrider.messages import ProposalReply
from outrider.tokens import TokenSequence


class PushedProposals:
    """Of one session, for its next round; those of earlier rounds are forgotten.

    Which one is picked depends on what was committed, and on whether it came in time: on nothing
    that another one holds."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` bounds what is kept for a round."""
        self._bytes_max = bytes_max
        self._round = 0
        self._bytes = 0
        self._kept: dict[tuple[int, tuple[int, ...]], ProposalReply] = {}
        """By length of the committed prefix, and what is assumed behind it."""

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, reply: ProposalReply) -> None:
        """Keeps a proposal for the round behind the current one, while there is room."""
        place = (reply.base_length, reply.assumed)
        if reply.key.round != self._round + 1 or place in self._kept:
            return
        if len(self._kept) < LOOK_AHEAD_MAX and self._bytes + reply.num_bytes <= self._bytes_max:
            self._kept[place] = reply
            self._bytes += reply.num_bytes

    def expects(self, round_index: int) -> bool:
        """Whether proposals for a round that begins were kept: it follows the one before."""
        return round_index == self._round + 1

    def begin(self, round_index: int, tokens: TokenSequence) -> ProposalReply | None:
        """A round begins after these committed tokens: the proposal that assumed them, if it is
        there. All others are forgotten."""
        found = None
        if round_index == self._round + 1:
            for base_length in {length for length, _ in self._kept}:
                found = self._kept.get((base_length, tokens.since(base_length))) or found
        self._round = round_index
        self._bytes = 0
        self._kept = {}
        return found
