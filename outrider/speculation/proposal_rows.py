"""The rows of several proposals, and what a device computes from each row.

The rows of a proposal of K draft tokens are p_1..p_{K+1} (`verification.py`). If the rule uses q,
row p_i with i <= K *judges* draft token x_i."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.errors import check
from outrider.speculation.accept_reject import Verdict, ending_before
from outrider.speculation.gumbel_max import BoolArray, IntArray, RealArray
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise, RowKeys, verdict_keys
from outrider.speculation.sampling_params import Rule


@dataclass(frozen=True, slots=True, eq=False)
class JudgedRows:
    """What a device has computed from R rows. Each field has the shape [R] and is on the CPU."""

    acceptance: RealArray
    """For a row that judges draft token x_i: min(1, p_i(x_i) / q_i(x_i)) under token, pi_i under
    block, and NaN if x_i is outside q_i. For all other rows: 0."""
    left: RealArray
    """For a row p_{n+1} that judges a draft token under block: Z_n. Unused for other rows."""
    drawn: IntArray
    """For a row that judges a draft token: the drawn correction. For other rows: the row's draw."""
    is_usable: BoolArray
    """Whether a row has a distribution: no NaN, no +inf, and not only -inf. The other fields are
    undefined from a proposal's first unusable row on."""


class ProposalRows:
    """R rows: the rows of the first proposal, then the rows of the second, and so on."""

    def __init__(self, proposals: Sequence[tuple[Proposal, RoundNoise]]) -> None:
        self._noises = [noise for _, noise in proposals]
        rules = [noise.rule for noise in self._noises]
        self.sizes: IntArray = np.array([len(proposal) + 1 for proposal, _ in proposals])
        """[B]: the number of rows of each proposal."""
        self.ends = self.sizes.cumsum()
        drafted = [v for proposal, _ in proposals for v in (*proposal.token_ids, -1)]
        self.drafted: IntArray = np.array(drafted)
        """[R]: the draft token after each row, or -1 in a proposal's last row."""
        self.num_rows = len(drafted)
        index = np.arange(self.num_rows) - (self.ends - self.sizes).repeat(self.sizes)
        is_judged = np.array([rule.needs_q for rule in rules]).repeat(self.sizes)
        is_judged[self.ends - 1] = False
        self.num_before: IntArray = np.where(is_judged, index, -1)
        """[R]: the number of draft tokens before each row that judges a draft token. -1 for all
        other rows (a proposal's last row, and all rows under coupled and greedy)."""
        self.is_block = np.array([rule is Rule.BLOCK for rule in rules]).repeat(self.sizes)
        self.q = [
            entry for proposal, each in proposals if each.rule.needs_q for entry in proposal.q
        ]
        """The distribution of each judged draft token, or None if q has only this token."""

    def keys(self) -> RowKeys:
        return verdict_keys(self._noises, self.sizes.tolist())

    def verdicts(self, judged: JudgedRows) -> list[Verdict]:
        """The verdicts on the proposals. An outcome that reaches an unusable row ends with the
        draft token before the row. Raises `InvariantError` for a draft token outside q, and if the
        first row of a proposal is unusable."""
        accepted, drawn = self.accept_probability(judged).tolist(), judged.drawn.tolist()
        starts = (self.ends - self.sizes).tolist()
        verdicts = [
            Verdict(tuple(accepted[start : end - 1]), tuple(drawn[start:end]))
            for start, end in zip(starts, self.ends.tolist(), strict=True)
        ]
        if judged.is_usable.all():
            return verdicts
        parts = [np.split(each, self.ends[:-1]) for each in (self.drafted, judged.is_usable)]
        return [
            usable_verdict(verdict, is_usable.tolist(), drafted[:-1].tolist(), noise)
            for verdict, drafted, is_usable, noise in zip(
                verdicts, *parts, self._noises, strict=True
            )
        ]

    def accept_probability(self, judged: JudgedRows) -> RealArray:
        """[R]: `Verdict.accept_probability` of the draft token after each row."""
        is_known = not np.isnan(judged.acceptance).any()
        check(is_known, "a draft token lies outside the distribution it was drawn from")
        is_judged = (self.num_before >= 0) & judged.is_usable
        accept: RealArray = np.where(is_judged, judged.acceptance, judged.drawn == self.drafted)
        # Under block, h_i = Z_i / (Z_i + 1 - pi_i) if a usable row judges the next draft token.
        is_inner = self.is_block[:-1] & is_judged[:-1] & is_judged[1:]
        z, pi = judged.left[1:][is_inner], judged.acceptance[:-1][is_inner]
        room = z + (1.0 - pi)
        accept[:-1][is_inner] = np.divide(z, room, out=np.ones(len(z)), where=room > 0)
        return accept


def usable_verdict(
    verdict: Verdict, is_usable: Sequence[bool], drafted: Sequence[int], noise: RoundNoise
) -> Verdict:
    """The verdict on the draft tokens `drafted`, from a `verdict` that is undefined from the first
    unusable row on (`JudgedRows.is_usable`). If the outcome reaches this row, it ends with the
    draft token before the row. Then the next round begins at this row, and the session fails, as in
    plain decoding. Raises `InvariantError` if the first row is unusable."""
    if all(is_usable):
        return verdict
    num = is_usable.index(False)
    check(num > 0, "logits of row 0 cannot be sampled from: NaN, +inf, or only -inf")
    num_lost = len(drafted) - num
    accept = (*verdict.accept_probability[:num], *[0.0] * num_lost)
    cut = Verdict(accept, (*verdict.correction[:num], *[0] * (num_lost + 1)))
    return ending_before(cut, num, drafted, noise.rule, noise.accept_uniforms(len(drafted)))
