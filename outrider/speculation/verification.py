"""Computes the target's verdict on a proposal of K tokens, from K + 1 rows of probabilities. Row
n = 0..K is p_{n+1}, the target's distribution after n draft tokens.

| rule    | acceptance probability of x_i       | law of correction n < K     | source         |
| ------- | ----------------------------------- | --------------------------- | -------------- |
| token   | min(1, p_i(x_i) / q_i(x_i))         | pos(p_{n+1} - q_{n+1})      | Leviathan 2023 |
| block   | h_i = Z_i / (Z_i + 1 - pi_i), i < K | pos(pi_n p_{n+1} - q_{n+1}) | Sun, ICLR 2025 |
|         | h_K = pi_K                          | with sum Z_n                |                |
| coupled | 1 if x_i is the target's own draw   | the target's own draw       | Daliri 2024    |
| greedy  | 1 if x_i is the likeliest token     | the likeliest token         |                |

Here pos(z) = max(z, 0), pi_0 = 1, and pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)). A law is a
distribution up to a factor. Correction K is a draw from p_{K+1} under every rule.

Row n < K *judges* x_{n+1}, the draft token after it.

The code represents a row by weights, which are p up to a factor, and by their sum. A token beyond
the width of p has p = 0, and a token outside q's support has q = 0. So draft and target may pad
their vocabularies differently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvariantError, check
from outrider.grammar.token_mask import TokenMask
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.cuda_verdicts import RowJudge, give_up, has_kernels
from outrider.speculation.draft_sampling import draw_on_device
from outrider.speculation.gumbel_max import BLOCK, IntArray, RealArray, race
from outrider.speculation.logits_processing import (
    NO_HISTORY,
    DraftVocabulary,
    TokenHistory,
    check_maxima,
    check_weights,
    joined_rows,
    likeliest,
    masked_logits,
    write_weights,
)
from outrider.speculation.proposal import COUNT_TOTAL, Proposal
from outrider.speculation.random_streams import RoundNoise, verdict_keys
from outrider.speculation.sampling_params import Rule, SamplingParams

_log = logging.getLogger(__name__)
_NEARLY_EMPTY = 1e-4
"""A row that keeps more than this share of its mass is certainly not empty."""
_PI_MIN = 1e-290
"""A path with a smaller pi counts as impossible, because a division by pi could overflow."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """B chains of K draft tokens, on the CPU. The q of a token has at most M entries."""

    token_ids: IntArray
    """[B, K]"""
    support: IntArray
    """[B, K, M]: the ids of q's entries. Ids with mass > 0 are distinct."""
    mass: RealArray
    """[B, K, M]: q of each id. 0 marks padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """The data that determine a verdict."""

    logits: Tensor
    """[N + 1, V] of any float type, on any device."""
    params: SamplingParams
    history: TokenHistory
    proposal: Proposal
    noise: RoundNoise
    masks: Sequence[TokenMask | None] = ()
    """The mask of each row, applied before all transforms. Empty = no masks."""

    @property
    def takes_likeliest(self) -> bool:
        """Whether the verdict needs only the likeliest token of each row."""
        return self.params.greedy and self.noise.rule is Rule.GREEDY


def verdicts_from_logits(questions: Sequence[Question]) -> list[Verdict]:
    """Verdicts on the proposals of several sessions. All logits must have the same width, type and
    device. A verdict does not depend on the other questions, not even in its rounding. Raises
    `InvariantError` if the rule needs a missing q, if a draft token is outside its q, and for rows
    that `target_probabilities` refuses."""
    for question in questions:
        check_parts(question.logits, question.proposal, question.noise.rule)
    verdicts: dict[int, Verdict] = {}
    suits = [_suits_kernels(question) for question in questions]
    for way, suited in ((_verdicts_on_device, True), (_verdicts_on_host, False)):
        if indices := [index for index, found in enumerate(suits) if found is suited]:
            verdicts |= zip(indices, way([questions[index] for index in indices]), strict=True)
    return [verdicts[index] for index in range(len(questions))]


def _suits_kernels(question: Question) -> bool:
    return has_kernels(question.logits.device) and question.logits.dtype != torch.float64


def try_kernels(logits: Tensor, token_ids: Sequence[int] = ()) -> None:
    """Compiles and tries the kernels of the device of `logits`. `logits` are [2, V], or [2, N] for
    a drafter with the reduced vocabulary `token_ids` [N]. If the kernels fail, or draw other tokens
    than the CPU, the device uses no kernels from now on."""
    if not has_kernels(logits.device):
        return
    params, noise = SamplingParams(top_k=50, top_p=0.9), RoundNoise(0, Rule.TOKEN, 1)
    plain = Question(logits, params, NO_HISTORY, Proposal((0,), (None,)), noise)
    biased = replace(plain, params=replace(params, logit_bias=((1, 1.0),)))
    try:
        for question in (plain, biased):
            [found] = _verdicts_on_device([question])
            [expected] = _verdicts_on_host([replace(question, logits=logits.double())])
            check(found.correction == expected.correction, f"{found} instead of {expected}")
        coupled = [replace(noise, rule=Rule.COUPLED)] * 2
        vocabulary = DraftVocabulary.of(token_ids)
        draw_on_device(logits, [SamplingParams()] * 2, coupled, [0, 0], vocabulary=vocabulary)
    except Exception:  # noqa: BLE001 (a lasting fault shows again without kernels)
        _log.warning(
            "verdicts and draws on %s use no kernels: a trial failed", logits.device, exc_info=True
        )
        give_up(logits.device)


def _verdicts_on_host(questions: Sequence[Question]) -> list[Verdict]:
    if questions[0].logits.device.type != "cpu":
        rows = joined_rows([each.logits for each in questions]).cpu()
        parts = torch.split(rows, [len(each.logits) for each in questions])
        questions = [
            replace(each, logits=part) for each, part in zip(questions, parts, strict=True)
        ]
    questions = [
        replace(each, logits=masked_logits(each.logits, each.masks)) if each.masks else each
        for each in questions
    ]
    drawn = iter(_drawn_verdicts([each for each in questions if not each.takes_likeliest]))
    return [
        _own_tokens(likeliest(each.logits, each.params, each.history), each.proposal)
        if each.takes_likeliest
        else next(drawn)
        for each in questions
    ]


def _drawn_verdicts(questions: Sequence[Question]) -> list[Verdict]:
    if not questions:
        return []
    weights = _weights(questions)
    sums = check_weights(weights, [question.logits for question in questions]).numpy()
    return verdicts_from_weights(weights, sums, [(each.proposal, each.noise) for each in questions])


def _verdicts_on_device(questions: Sequence[Question]) -> list[Verdict]:
    proposals = [each.proposal for each in questions]
    noises = [each.noise for each in questions]
    rules = [noise.rule for noise in noises]
    sizes = np.array([len(proposal) + 1 for proposal in proposals])
    drafted = np.array([v for proposal in proposals for v in (*proposal.token_ids, -1)])
    transforms = [
        (each.params if rule is not Rule.GREEDY or each.params.greedy
         else replace(each.params, temperature=0.0), each.history, each.masks)
        for each, rule in zip(questions, rules, strict=True)
    ]  # fmt: skip
    rows = joined_rows([each.logits for each in questions])
    judge = RowJudge(rows, transforms, sizes, drafted)
    keys = verdict_keys(noises, sizes.tolist())
    ends = sizes.cumsum()
    starts = ends - sizes
    is_block = np.array([rule is Rule.BLOCK for rule in rules]).repeat(sizes)
    is_judged = np.array([rule.needs_q for rule in rules]).repeat(sizes)
    is_judged[ends - 1] = False
    before = np.where(is_judged, np.arange(len(drafted)) - starts.repeat(sizes), -1)
    asked = [proposal.q for rule, proposal in zip(rules, proposals, strict=True) if rule.needs_q]
    found = judge.settle(keys, before, is_block, [*chain.from_iterable(asked)])
    spans = [*zip(starts.tolist(), ends.tolist(), strict=True)]
    if not np.isfinite(found.maxima).all():
        for start, end in spans:
            check_maxima(found.maxima[start:end].tolist())
    check_drafted(not np.isnan(found.behind).any())
    accept = np.where(is_judged, found.behind, found.drawn == drafted)
    if is_block.any():
        block = _block_acceptance(np.array([[1.0, *found.behind]]), found.left[None])[0]
        is_inner = is_block[:-1] & is_judged[:-1] & is_judged[1:]
        np.copyto(accept[:-1], block[:-1], where=is_inner)
    accepted, drawn = accept.tolist(), found.drawn.tolist()
    return [Verdict(tuple(accepted[a : b - 1]), tuple(drawn[a:b])) for a, b in spans]


def check_parts(rows: Tensor, proposal: Proposal, rule: Rule) -> None:
    """Raises `InvariantError` if rows, proposal and rule do not fit together."""
    num_rows, shape = len(proposal.token_ids) + 1, rows.shape
    if len(shape) != 2 or shape[1] == 0 or shape[0] != num_rows:
        raise InvariantError(
            f"a proposal of {num_rows - 1} tokens needs rows [{num_rows}, vocabulary], got "
            f"{tuple(shape)}"
        )
    if rule.needs_q and len(proposal.q) != len(proposal):
        raise InvariantError(f"rule {rule.value} needs q for each of {len(proposal)} tokens")


def _weights(questions: Sequence[Question]) -> Tensor:
    """The weights of all questions' rows, one after another, padded to whole blocks."""
    first = questions[0].logits
    num_rows = sum(len(question.logits) for question in questions)
    width = -(-first.shape[1] // BLOCK) * BLOCK
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    weights = torch.empty((num_rows, width), dtype=dtype)
    start = 0
    for question in questions:
        end = start + len(question.logits)
        write_weights(question.logits, question.params, question.history, weights[start:end])
        start = end
    return weights


def verdicts_from_weights(
    weights: Tensor, sums: RealArray, entries: Sequence[tuple[Proposal, RoundNoise]]
) -> list[Verdict]:
    """Verdicts on these proposals. `weights` [R, V] are the rows of all proposals, one after
    another, and `sums` [R] their sums. Overwrites `weights`."""
    accept: dict[int, tuple[float, ...]] = {}
    chains: dict[tuple[Rule, int], list[int]] = {}
    ends = [*accumulate(len(proposal) + 1 for proposal, _ in entries)]
    spans = [*pairwise([0, *ends])]
    for index, (proposal, noise) in enumerate(entries):
        if noise.rule.needs_q:
            chains.setdefault((noise.rule, len(proposal)), []).append(index)
    for (rule, num_draft_tokens), indices in chains.items():
        drafts = _drafts([entries[index][0] for index in indices])
        rows = np.array([[spans[index][0]] for index in indices]) + np.arange(num_draft_tokens)
        law = chain_law(rule, weights, sums, rows, drafts).tolist()
        accept |= zip(indices, map(tuple, law), strict=True)
    keys = verdict_keys([noise for _, noise in entries], [b - a for a, b in spans])
    drawn = race(weights, keys).tolist()
    verdicts = []
    for index, ((start, end), (proposal, noise)) in enumerate(zip(spans, entries, strict=True)):
        own = drawn[start:end]
        if noise.rule is Rule.GREEDY:
            own = weights[start:end].argmax(dim=1).tolist()
        if noise.rule.needs_q:
            verdicts.append(Verdict(accept[index], tuple(own)))
        else:
            verdicts.append(_own_tokens(own, proposal))
    return verdicts


def check_drafted(is_in_support: bool) -> None:
    check(is_in_support, "a draft token lies outside the distribution it was drawn from")


def _own_tokens(own: list[int], proposal: Proposal) -> Verdict:
    """A verdict that accepts a draft token iff it is the target's `own` token of its row."""
    pairs = zip(own[:-1], proposal.token_ids, strict=True)
    return Verdict(tuple(float(token_id == drafted) for token_id, drafted in pairs), tuple(own))


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The entries of each q, [B, K, M], and their places in rows of weights. Entries beyond the
    width of a row are 0."""

    flat: Tensor
    """[B * K * M]: the entries' indices into the flattened weights."""
    before: RealArray
    """[B, K, M]: the weights of the entries."""
    mass: RealArray
    """[B, K, M]: q of the entries."""
    p: RealArray
    """[B, K]: the weight of each draft token."""
    q: RealArray
    """[B, K]: q of each draft token."""

    @classmethod
    def of(cls, weights: Tensor, rows: IntArray, drafts: DraftRows) -> _Places:
        """`rows` [B, K] are indices of `weights` [R, V]."""
        width, support, mass = weights.shape[1], drafts.support, drafts.mass
        inside = support < width
        flat = torch.from_numpy((rows[..., None] * width + np.where(inside, support, 0)).ravel())
        found = weights.view(-1).take(flat).double().numpy().reshape(support.shape)
        before = np.where(inside, found, 0.0)
        is_drafted = (support == drafts.token_ids[..., None]) & (mass > 0)
        p, q = (before * is_drafted).sum(axis=2), (mass * is_drafted).sum(axis=2)
        check_drafted(bool((q > 0).all()))
        return cls(flat, before, np.where(inside, mass, 0.0), p, q)

    def subtract(
        self, weights: Tensor, sums: RealArray, rows: IntArray, amounts: RealArray
    ) -> RealArray:
        """Subtracts `amounts` [B, K] times q from the rows. Negative weights become 0. Returns the
        new sums of the rows: [B, K]. If a row would become empty, it stays unchanged and its
        returned sum is 0. Apart from rounding errors, no outcome uses this row, because its draft
        token is always accepted, or because the path to the row is impossible."""
        change = np.maximum(self.before - self.mass * amounts[..., None], 0.0) - self.before
        self._add(weights, change)
        left: RealArray = np.maximum(sums[rows] + change.sum(axis=2), 0.0)
        suspects = np.nonzero(left <= _NEARLY_EMPTY * sums[rows])
        if len(suspects[0]):
            tops = weights[torch.from_numpy(rows[suspects])].amax(dim=1)
            is_empty = np.zeros(left.shape, dtype=bool)
            is_empty[suspects] = (tops <= 0).numpy()
            self._add(weights, np.where(is_empty[..., None], -change, 0.0))
            left[is_empty] = 0.0
        return left

    def _add(self, weights: Tensor, change: RealArray) -> None:
        values = torch.from_numpy(change.ravel()).to(weights.dtype)
        weights.view(-1).index_add_(0, self.flat, values)


def chain_law(
    rule: Rule, weights: Tensor, sums: RealArray, rows: IntArray, drafts: DraftRows
) -> RealArray:
    """The acceptance probabilities [B, K] of B chains. Row `rows[b, i]` of `weights` [R, V] judges
    draft token i of chain b. `sums` [R] are the sums of all rows. The rows that judge draft tokens
    are overwritten with the weights from which corrections are drawn."""
    places = _Places.of(weights, rows, drafts)
    totals = sums[rows]
    p, q = places.p / totals, places.q
    if rule is Rule.TOKEN:
        places.subtract(weights, sums, rows, totals)
        accept: RealArray = np.minimum(p / q, 1.0)
        return accept
    pi = _path_ratios(p, q)
    before = pi[:, :-1]
    # pos(pi p - q) is proportional to pos(p - q / pi). A path with pi = 0 is impossible.
    is_possible = before > _PI_MIN
    amounts = np.where(is_possible, totals / np.where(is_possible, before, 1.0), 0.0)
    left = places.subtract(weights, sums, rows, amounts)
    return _block_acceptance(pi, before * left / totals)


def _path_ratios(p: RealArray, q: RealArray) -> RealArray:
    """pi_0..pi_K, [B, K+1], from p and q of the draft tokens, [B, K]. Adds logarithms, because a
    product of small ratios could underflow before a large ratio follows."""
    with np.errstate(divide="ignore"):
        log_ratio = np.log(p) - np.log(q)
    log_pi = np.zeros((len(p), p.shape[1] + 1))
    for i in range(p.shape[1]):
        np.minimum(log_pi[:, i] + log_ratio[:, i], 0.0, out=log_pi[:, i + 1])
    pi: RealArray = np.exp(log_pi)
    return pi


def _block_acceptance(pi: RealArray, z: RealArray) -> RealArray:
    """h_1..h_K, [B, K], from pi_0..pi_K, [B, K+1], and Z_0..Z_{K-1}, [B, K]."""
    accept = pi[:, 1:].copy()
    inner, after = pi[:, 1:-1], z[:, 1:]
    room = after + (1.0 - inner)
    np.divide(after, room, out=accept[:, :-1], where=room > 0)
    accept[:, :-1][room <= 0] = 1.0
    return accept


def _drafts(proposals: Sequence[Proposal]) -> DraftRows:
    """Turns chains of the same length into arrays."""
    supports, counts, sizes = [], [], []
    for proposal in proposals:
        for token_id, entry in zip(proposal.token_ids, proposal.q, strict=True):
            supports.append((token_id,) if entry is None else entry.token_ids)
            counts.append((COUNT_TOTAL,) if entry is None else entry.counts)
            sizes.append(len(supports[-1]))
    shape = (len(proposals), len(proposals[0]))
    num, width = sum(sizes), max(sizes, default=0)
    filled = np.arange(width) < np.array(sizes, dtype=np.int64)[:, None]
    support = np.zeros(filled.shape, dtype=np.int64)
    support[filled] = np.fromiter(chain.from_iterable(supports), np.int64, num)
    mass = np.zeros(filled.shape)
    mass[filled] = np.fromiter(chain.from_iterable(counts), np.float64, num)
    mass /= COUNT_TOTAL
    token_ids = np.array([proposal.token_ids for proposal in proposals], dtype=np.int64)
    return DraftRows(token_ids, support.reshape(*shape, width), mass.reshape(*shape, width))
