"""What the target says of a proposal. Rows are p_1..p_{K+1}; row n (from 0) follows n draft tokens.

| rule    | acceptance probability of x_i       | law of correction n < K     | source         |
| ------- | ----------------------------------- | --------------------------- | -------------- |
| token   | min(1, p_i(x_i) / q_i(x_i))         | pos(p_{n+1} - q_{n+1})      | Leviathan 2023 |
| block   | h_i = Z_i / (Z_i + 1 - pi_i), i < K | pos(pi_n p_{n+1} - q_{n+1}) | Sun, ICLR 2025 |
|         | h_K = pi_K                          | with sum Z_n                |                |
| coupled | 1 if x_i is the target's own draw   | the target's own draw       | Daliri 2024    |
| greedy  | 1 if x_i is the likeliest token     | the likeliest token         |                |

Correction K is a draw from p_{K+1} under every rule. pi_0 = 1, and
pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)); pos(z) = max(z, 0).

Of a tree row 0 follows the last committed token and row i + 1 draft token i. Under coupled and
greedy a draft token is accepted that is the row's own token before it. Under token siblings
s_1, s_2, .. behind a row p, drawn from q without replacement, are tried in turn: with p^1 = p and
q^1 = q, s_j is accepted with min(1, p^j(s_j) / q^j(s_j)), and then p^{j+1} = norm(pos(p^j - q^j)),
q^{j+1} = norm(q^j without s_j); what follows if all are refused is drawn from the last p^{j+1}, and
what follows a leaf from p (recursive rejection: SpecInfer, arXiv 2305.09781; without replacement:
Sequoia, arXiv 2402.12374). Block has no tree.

Rows come as weights: p up to a factor, with the sum of each row. A token beyond the width of p has
p = 0, a token outside a q's support q = 0: the vocabularies of draft and target may be padded
differently, and a residual always covers the target's whole one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvariantError, check
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.cuda_verdicts import Place, RowJudge, give_up, has_kernels
from outrider.speculation.gumbel_max import BLOCK, IntArray, RealArray, race
from outrider.speculation.logits_processing import (
    NO_HISTORY,
    TokenHistory,
    adjusted_logits,
    check_maxima,
    check_weights,
    likeliest,
    write_weights,
)
from outrider.speculation.proposal import COUNT_TOTAL, Proposal
from outrider.speculation.random_streams import RoundNoise, chain_keys
from outrider.speculation.sampling_params import Rule, SamplingParams

_log = logging.getLogger(__name__)
_Way = Callable[[Sequence["Question"]], list[Verdict]]
_NEARLY_EMPTY = 1e-4
"""Part of a row's mass; only where less than this is left of it, all of it may be gone."""

_GREEDY = SamplingParams(temperature=0.0)
_UNJUDGED = (-1, 0, 0)
"""A row behind which no draft token is judged by its q."""

_PI_MIN = 1e-290
"""A path whose ratio is less is not taken; its reciprocal times any mass is a finite number."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """B proposals of K tokens each, with sparse q of at most M entries a position; on the CPU."""

    token_ids: IntArray
    """[B, K]"""
    support: IntArray
    """[B, K, M], distinct among those with mass."""
    mass: RealArray
    """[B, K, M]: q of each; 0 pads."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What a verdict is made from."""

    logits: Tensor
    """[N + 1, V] of any float type on any device; unchanged."""
    params: SamplingParams
    history: TokenHistory
    """What penalties count; a tree has none."""
    proposal: Proposal
    noise: RoundNoise

    def check(self) -> None:
        """Raises `InvariantError` for parts that do not fit together."""
        proposal = self.proposal
        check_parts(self.logits, proposal, self.noise.rule)
        is_chain = not (self.params.penalised and proposal.parents)
        check(is_chain, "penalties count the tokens of a chain")


def verdicts_from_logits(questions: Sequence[Question]) -> list[Verdict]:
    """Verdicts on the proposals of several sessions, whose logits are of one width, type and
    device, in one pass over all their rows. Each is what it would be alone, bit for bit. Raises
    `InvariantError` for a q that is missing where the rule needs it, for a draft token outside it,
    and where `target_probabilities` does."""
    for question in questions:
        question.check()
    ways: dict[_Way, list[int]] = {}
    for index, question in enumerate(questions):
        ways.setdefault(_way_of(question), []).append(index)
    verdicts: dict[int, Verdict] = {}
    for way, indices in ways.items():
        verdicts |= zip(indices, way([questions[index] for index in indices]), strict=True)
    return [verdicts[index] for index in range(len(questions))]


def _way_of(question: Question) -> _Way:
    """The kernels of a device know no trees of q, no float64, and no bias that is lost in float32
    where the largest decides."""
    logits, params, rule = question.logits, question.params, question.noise.rule
    is_greedy = params.greedy and rule is Rule.GREEDY
    is_adjusted = params.penalised or bool(params.logit_bias)
    is_known = not (question.proposal.parents and rule.needs_q) and logits.dtype != torch.float64
    if is_known and has_kernels(logits.device) and not (is_greedy and is_adjusted):
        return _verdicts_on_device
    return _greedy_verdicts if is_greedy else _drawn_verdicts


def try_kernels(logits: Tensor) -> None:
    """Compiles a device's kernels for `logits` [2, V] of a model. Where they fail, or draw other
    tokens than the CPU, verdicts do without them from now on."""
    params, noise = SamplingParams(top_k=50, top_p=0.9), RoundNoise(0, Rule.TOKEN, 1)
    question = Question(logits, params, NO_HISTORY, Proposal((0,), (None,)), noise)
    if _way_of(question) is not _verdicts_on_device:
        return
    try:
        [found] = _verdicts_on_device([question])
        [expected] = _drawn_verdicts([replace(question, logits=logits.double().cpu())])
        check(found.correction == expected.correction, f"{found} in the place of {expected}")
    except Exception:  # noqa: BLE001 (whatever it is, verdicts without kernels show it again)
        _log.warning("verdicts are made without kernels on %s", logits.device, exc_info=True)
        give_up(logits.device)


def _greedy_verdicts(questions: Sequence[Question]) -> list[Verdict]:
    return [
        _own_tokens(likeliest(each.logits, each.params, each.history), each.proposal)
        for each in questions
    ]


def _drawn_verdicts(questions: Sequence[Question]) -> list[Verdict]:
    weights = _weights(questions)
    sums = check_weights(weights, [question.logits for question in questions]).cpu().numpy()
    return verdicts_from_weights(weights, sums, [(each.proposal, each.noise) for each in questions])


def _verdicts_on_device(questions: Sequence[Question]) -> list[Verdict]:
    """See `cuda_verdicts.py`."""
    noises = [each.noise for each in questions]
    proposals = [each.proposal for each in questions]
    sizes = [len(proposal) + 1 for proposal in proposals]
    if any(proposal.parents for proposal in proposals):
        keys = np.concatenate(
            [noise.tree_keys(each.tree) for noise, each in zip(noises, proposals, strict=True)]
        )
    else:
        keys = chain_keys(noises, [len(proposal) for proposal in proposals])
    adjusted = [adjusted_logits(each.logits, each.params, each.history) for each in questions]
    rows = [each.float() if each.dtype == torch.float64 else each for each in adjusted]
    judge = RowJudge(
        rows[0] if len(rows) == 1 else torch.cat(rows),
        [_GREEDY if each.noise.rule is Rule.GREEDY else each.params for each in questions],
        sizes,
        [token_id for proposal in proposals for token_id in (*proposal.token_ids, -1)],
        keys,
    )
    judged: list[tuple[int, int, int]] = []
    places: list[Place] = []
    for noise, proposal in zip(noises, proposals, strict=True):
        if noise.rule.needs_q:
            is_block, start = noise.rule is Rule.BLOCK, len(places)
            judged += [(index, start + index, is_block) for index in range(len(proposal))]
            for token_id, q in zip(proposal.token_ids, proposal.q, strict=True):
                check_drafted(q is None or token_id in q.token_ids)
                places.append((token_id, q))
            judged.append(_UNJUDGED)
        else:
            judged += [_UNJUDGED] * (len(proposal) + 1)
    found = judge.settle(judged, places)
    behind, left, drawn = found.behind.tolist(), found.left, found.drawn.tolist()
    is_bad = not np.isfinite(found.maxima).all()
    verdicts = []
    start = 0
    for noise, proposal, size in zip(noises, proposals, sizes, strict=True):
        end = start + size
        if is_bad:
            check_maxima(found.maxima[start:end].tolist())
        own = drawn[start:end]
        if not noise.rule.needs_q:
            verdict = _own_tokens(own, proposal)
        elif noise.rule is Rule.TOKEN:
            verdict = Verdict(tuple(behind[start : end - 1]), tuple(own))
        else:
            pi = np.array([[1.0, *behind[start : end - 1]]])
            accept = _block_acceptance(pi, left[None, start : end - 1])
            verdict = Verdict(tuple(accept[0].tolist()), tuple(own))
        verdicts.append(verdict)
        start = end
    return verdicts


def check_parts(rows: Tensor, proposal: Proposal, rule: Rule) -> None:
    """Raises `InvariantError` for other rows than a proposal needs, for a q that is missing where
    the rule needs it, and for a tree where the rule has none."""
    num_rows = len(proposal) + 1
    if rows.dim() != 2 or rows.shape[1] == 0 or len(rows) != num_rows:
        raise InvariantError(
            f"a proposal of {num_rows - 1} tokens needs rows [{num_rows}, vocabulary], got "
            f"{tuple(rows.shape)}"
        )
    check(rule is not Rule.BLOCK or not proposal.parents, "block verification has no tree")
    if rule.needs_q and len(proposal.q) != len(proposal.tree.groups):
        raise InvariantError(f"rule {rule.value} needs q for each of {len(proposal)} tokens")


def _weights(questions: Sequence[Question]) -> Tensor:
    """The rows of all questions, one after another, [R, V] rounded up to whole blocks."""
    first = questions[0].logits
    num_rows = sum(len(question.logits) for question in questions)
    width = -(-first.shape[1] // BLOCK) * BLOCK
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    weights = torch.empty((num_rows, width), dtype=dtype, device=first.device)
    start = 0
    for question in questions:
        end = start + len(question.logits)
        write_weights(question.logits, question.params, question.history, weights[start:end])
        start = end
    return weights


def verdicts_from_weights(
    weights: Tensor, sums: RealArray, entries: Sequence[tuple[Proposal, RoundNoise]]
) -> list[Verdict]:
    """From the rows of all proposals, one after another; `weights` and `sums` change."""
    accept: dict[int, tuple[float, ...]] = {}
    chains: dict[tuple[Rule, int], list[tuple[int, int]]] = {}
    starts: list[int] = []
    start = 0
    for index, (proposal, noise) in enumerate(entries):
        starts.append(start)
        if noise.rule is Rule.TOKEN and proposal.parents:
            end = start + len(proposal) + 1
            accept[index] = tree_law(weights[start:end], sums[start:end], proposal)
        elif noise.rule.needs_q:
            chains.setdefault((noise.rule, len(proposal)), []).append((index, start))
        start += len(proposal) + 1
    for (rule, num_draft_tokens), places in chains.items():
        drafts = _drafts([entries[index][0] for index, _ in places])
        rows = np.array([[at] for _, at in places]) + np.arange(num_draft_tokens)
        law = chain_law(rule, weights, sums, rows, drafts)
        for (index, _), row in zip(places, law.tolist(), strict=True):
            accept[index] = tuple(row)
    keys = [noise.tree_keys(proposal.tree) for proposal, noise in entries]
    drawn = race(weights, np.concatenate(keys)).tolist()
    verdicts = []
    for index, (at, (proposal, noise)) in enumerate(zip(starts, entries, strict=True)):
        end = at + len(proposal) + 1
        own = drawn[at:end]
        if noise.rule is Rule.GREEDY:
            own = weights[at:end].argmax(dim=1).tolist()
        if noise.rule.needs_q:
            verdicts.append(Verdict(accept[index], tuple(own)))
        else:
            verdicts.append(_own_tokens(own, proposal))
    return verdicts


def check_drafted(is_in_support: bool) -> None:
    """Raises `InvariantError` for a draft token without a q."""
    check(is_in_support, "a draft token lies outside the distribution it was drawn from")


def _own_tokens(own: list[int], proposal: Proposal) -> Verdict:
    """Each draft token is accepted iff it is what the target takes itself there: `own` [N + 1]."""
    pairs = zip(proposal.tree.parents, proposal.token_ids, strict=True)
    return Verdict(tuple(float(own[parent + 1] == ids) for parent, ids in pairs), tuple(own))


def tree_law(weights: Tensor, sums: RealArray, proposal: Proposal) -> tuple[float, ...]:
    """Acceptance [N] of a tree under token, by its rows `weights` [N + 1, V] with their `sums`; the
    rows of siblings become the weights of what follows if all of these are refused."""
    tree = proposal.tree
    accept = [0.0] * len(proposal)
    for group, entry in zip(tree.groups, proposal.q, strict=True):
        row = np.array([[tree.parents[group[0]] + 1]])
        left = {} if entry is None else dict(zip(entry.token_ids, entry.counts, strict=True))
        for index in group:
            token_id = proposal.token_ids[index]
            if entry is None:
                left = {token_id: 1}
            support = np.array([[list(left)]], dtype=np.int64)
            mass = np.array([[list(left.values())]], dtype=np.float64) / sum(left.values())
            places = _Places.of(weights, row, np.array([[token_id]]), support, mass)
            accept[index] = min(1.0, float(places.p[0, 0] / sums[row[0, 0]] / places.q[0, 0]))
            left_over = places.subtract(weights, sums, row, sums[row])
            sums[row] = np.where(left_over > 0, left_over, sums[row])
            del left[token_id]
    return tuple(accept)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The places [B, K, M] of q in some rows of weights, on the CPU, where arithmetic on so few
    numbers takes less time than its calls on a device."""

    flat: Tensor
    """[B * K * M], of weights in one dimension."""
    before: RealArray
    """[B, K, M]: the weights there; 0 beyond their width."""
    mass: RealArray
    """[B, K, M]: q; 0 beyond the width of the weights."""
    p: RealArray
    """[B, K]: the weight of each draft token ..."""
    q: RealArray
    """... and its q."""

    @classmethod
    def of(
        cls,
        weights: Tensor,
        rows: IntArray,
        token_ids: IntArray,
        support: IntArray,
        mass: RealArray,
    ) -> _Places:
        """Of draft tokens [B, K] and their q [B, K, M] in `rows` [B, K] of `weights` [R, V]."""
        width = weights.shape[1]
        inside = support < width
        flat = torch.from_numpy((rows[..., None] * width + np.where(inside, support, 0)).ravel())
        flat = flat.to(weights.device)
        found = weights.view(-1).take(flat).double().cpu().numpy().reshape(support.shape)
        before = np.where(inside, found, 0.0)
        is_drafted = (support == token_ids[..., None]) & (mass > 0)
        p, q = (before * is_drafted).sum(axis=2), (mass * is_drafted).sum(axis=2)
        check_drafted(bool((q > 0).all()))
        return cls(flat, before, np.where(inside, mass, 0.0), p, q)

    def subtract(
        self, weights: Tensor, sums: RealArray, rows: IntArray, amounts: RealArray
    ) -> RealArray:
        """Takes `amounts` [B, K] times q from the rows, down to 0, and returns the sums of what is
        left: [B, K]. A row of which nothing is left stays as it was, and its sum is 0: nobody asks
        for its token but through a rounding error, as its draft token is accepted, or none of the
        path up to it is."""
        change = np.maximum(self.before - self.mass * amounts[..., None], 0.0) - self.before
        self._add(weights, change)
        left: RealArray = np.maximum(sums[rows] + change.sum(axis=2), 0.0)
        suspects = np.nonzero(left <= _NEARLY_EMPTY * sums[rows])
        if len(suspects[0]):
            tops = weights[torch.from_numpy(rows[suspects]).to(weights.device)].amax(dim=1)
            is_empty = np.zeros(left.shape, dtype=bool)
            is_empty[suspects] = (tops <= 0).cpu().numpy()
            self._add(weights, np.where(is_empty[..., None], -change, 0.0))
            left[is_empty] = 0.0
        return left

    def _add(self, weights: Tensor, change: RealArray) -> None:
        values = torch.from_numpy(change.ravel()).to(weights.device, weights.dtype)
        weights.view(-1).index_add_(0, self.flat, values)


def chain_law(
    rule: Rule, weights: Tensor, sums: RealArray, rows: IntArray, drafts: DraftRows
) -> RealArray:
    """Acceptance [B, K] of B chains, whose draft token i is judged by row `rows[b, i]` of `weights`
    [R, V] with their `sums` [R]; these rows become the weights of the corrections."""
    places = _Places.of(weights, rows, drafts.token_ids, drafts.support, drafts.mass)
    totals = sums[rows]
    p, q = places.p / totals, places.q
    if rule is Rule.TOKEN:
        places.subtract(weights, sums, rows, totals)
        accept: RealArray = np.minimum(p / q, 1.0)
        return accept
    pi = _path_ratios(p, q)
    before = pi[:, :-1]
    # pos(pi p - q) is in proportion to pos(p - q / pi); a path with pi = 0 is never taken.
    is_possible = before > _PI_MIN
    amounts = np.where(is_possible, totals / np.where(is_possible, before, 1.0), 0.0)
    left = places.subtract(weights, sums, rows, amounts)
    return _block_acceptance(pi, before * left / totals)


def _path_ratios(p: RealArray, q: RealArray) -> RealArray:
    """pi_0..pi_K, [B, K+1], from p and q at the draft tokens, [B, K]; summed as logarithms, so that
    a long path of small ratios does not vanish before a large one comes."""
    with np.errstate(divide="ignore"):
        log_ratio = np.log(p) - np.log(q)
    log_pi = np.zeros((len(p), p.shape[1] + 1))
    for i in range(p.shape[1]):
        np.minimum(log_pi[:, i] + log_ratio[:, i], 0.0, out=log_pi[:, i + 1])
    pi: RealArray = np.exp(log_pi)
    return pi


def _block_acceptance(pi: RealArray, z: RealArray) -> RealArray:
    """h_1..h_K, [B, K], from pi_0..pi_K, [B, K+1], and Z_0..Z_K-1, [B, K]."""
    accept = pi[:, 1:].copy()
    inner, after = pi[:, 1:-1], z[:, 1:]
    room = after + (1.0 - inner)
    np.divide(after, room, out=accept[:, :-1], where=room > 0)
    accept[:, :-1][room <= 0] = 1.0
    return accept


def _drafts(proposals: Sequence[Proposal]) -> DraftRows:
    """Chains of one length as rows; a one-hot position is a support of its own token."""
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
