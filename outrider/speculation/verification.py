"""Computes the target's verdict on a proposal of K tokens, from K + 1 rows of probabilities. Row
n = 0..K is p_{n+1}, the target's distribution after n draft tokens.

| rule    | acceptance probability of x_i       | law of correction n < K     | source         |
| ------- | ----------------------------------- | --------------------------- | -------------- |
| token   | min(1, p_i(x_i) / q_i(x_i))         | pos(p_{n+1} - q_{n+1})      | Leviathan 2023 |
| block   | h_i = Z_i / (Z_i + 1 - pi_i), i < K | pos(pi_n p_{n+1} - q_{n+1}) | Sun, ICLR 2025 |
|         | h_K = pi_K                          |                             |                |
| coupled | 1 if x_i is the target's own draw   | the target's own draw       | Daliri 2024    |
| greedy  | 1 if x_i is the likeliest token     | the likeliest token         |                |

Here pos(z) = max(z, 0), pi_0 = 1, pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)), and Z_n is the sum
of pos(pi_n p_{n+1} - q_{n+1}). A law is a distribution up to a factor. Correction K is a draw from
p_{K+1} under every rule. Row n < K *judges* the draft token x_{n+1}.

The code represents a row by weights, which are p up to a factor, and by their sum. A token beyond
the width of p has p = 0, so draft and target may pad their vocabularies differently."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvariantError, check
from outrider.foundation.values import value
from outrider.grammar.token_mask import TokenMask
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.cuda_verdicts import give_up, has_kernels, judge_by_kernels
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.gumbel_max import BoolArray, RealArray, race, whole_blocks
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    adjacent_runs,
    adjusted_logits,
    joined_rows,
    largest_of_rows,
    masked_logits,
    row_sums,
    write_weights,
)
from outrider.speculation.proposal import COUNT_TOTAL, Proposal
from outrider.speculation.proposal_rows import JudgedRows, ProposalRows, usable_verdict
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams, TokenHistory

_log = logging.getLogger(__name__)
_NUMBERS_AT_ONCE = 2**17
"""Rows with equal parameters become weights together, up to this many numbers, which fit into a
core's cache. So 32 rows of 256 logits take 0.6 ms instead of 1.05 ms (temperature 0.8). All at
once, 32 rows of 50,000 logits would take 4.8 ms instead of 3.4 ms."""
_NEARLY_EMPTY = 1e-4
"""A row is checked for emptiness if subtracting q leaves at most this share of its mass."""
_PI_MIN = 1e-290
"""The *path* to row n is the draft tokens x_1..x_n. If pi_n is below this number, the path counts
as impossible, because a division by pi_n could overflow."""


@value(frozen=True, slots=True, eq=False)
class VerifyInput:
    """The data that determine a verdict."""

    logits: Tensor
    """[K + 1, V] of any float type, on any device."""
    params: SamplingParams
    history: TokenHistory
    proposal: Proposal
    noise: RoundNoise
    masks: Sequence[TokenMask | None] = ()
    """The mask of each row, applied before all transforms. Empty = no masks."""


def verdicts_from_logits(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    """Verdicts on the proposals of several sessions. All logits must have the same width, type and
    device. A verdict does not depend on the other inputs, not even in its rounding. Raises
    `InvariantError` if rows, proposal and rule do not fit together, if a draft token is outside its
    q, or if the first row of logits is unusable: it has NaN or +inf, or only -inf. If a later row
    is unusable, see `usable_verdict`."""
    by_kernels = bool(inputs) and _use_kernels(inputs[0].logits)
    groups: dict[Callable[[Sequence[VerifyInput]], list[Verdict]], list[int]] = {}
    for index, verify_input in enumerate(inputs):
        rule, num = verify_input.noise.rule, len(verify_input.proposal)
        shape = verify_input.logits.shape
        if len(shape) != 2 or shape[0] != num + 1 or shape[1] == 0:
            raise InvariantError(f"{num} draft tokens do not fit rows of shape {tuple(shape)}")
        if rule.needs_q and len(verify_input.proposal.q) != num:
            raise InvariantError(f"rule {rule.value} needs q for each of {num} tokens")
        by_rule = _by_likeliest if rule is Rule.GREEDY else _by_weights
        groups.setdefault(_by_kernels if by_kernels else by_rule, []).append(index)
    verdicts: dict[int, Verdict] = {}
    for way, indices in groups.items():
        verdicts |= zip(indices, way([inputs[index] for index in indices]), strict=True)
    return [verdicts[index] for index in range(len(inputs))]


def _use_kernels(logits: Tensor) -> bool:
    return has_kernels(logits.device) and logits.dtype != torch.float64


def try_kernels(logits: Tensor, token_ids: Sequence[int] = ()) -> None:
    """Compiles the verdict kernels for the device on which `logits` are, and tries them. `logits`
    are [2, V], or [2, N] for a drafter with the reduced vocabulary `token_ids` [N]. If the kernels
    fail, or draw other tokens than the CPU, the device uses no kernels from now on."""
    if not has_kernels(logits.device):
        return
    params, noise = SamplingParams(top_k=50, top_p=0.9), RoundNoise(0, Rule.TOKEN, 1)
    plain = VerifyInput(logits, params, NO_HISTORY, Proposal((0,), (None,)), noise)
    biased = replace(plain, params=replace(params, logit_bias=((1, 1.0),)))
    try:
        for verify_input in (plain, biased):
            [actual] = _by_kernels([verify_input])
            [expected] = _by_weights([replace(verify_input, logits=logits.double())])
            check(actual.correction == expected.correction, f"{actual} instead of {expected}")
        coupled = [replace(noise, rule=Rule.COUPLED)] * 2
        vocabulary = DraftVocabulary.of(token_ids)
        draw_from_logits(logits, [SamplingParams()] * 2, coupled, [0, 0], vocabulary=vocabulary)
    except Exception:  # noqa: BLE001 (a broken device also fails without kernels)
        _log.warning(
            "verdicts and draws on %s use no Triton kernels, because a test of the kernels failed",
            logits.device,
            exc_info=True,
        )
        give_up(logits.device)


def _by_kernels(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    rows = ProposalRows([(each.proposal, each.noise) for each in inputs])
    transforms = [(each.params, each.history, each.masks) for each in inputs]
    logits = joined_rows([each.logits for each in inputs])
    return rows.verdicts(judge_by_kernels(logits, transforms, rows))


def _by_likeliest(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    parts = [
        adjusted_logits(logits, each.params, each.history)
        for logits, each in zip(_host_logits(inputs), inputs, strict=True)
    ]
    largest = [largest_of_rows(joined_rows(run)) for run in adjacent_runs(parts)]
    token_ids = [token_id for ids, _ in largest for token_id in ids]
    is_usable = [math.isfinite(logit) for _, logits in largest for logit in logits]
    verdicts, end = [], 0
    for each in inputs:
        drafted = each.proposal.token_ids
        start, end = end, end + len(drafted) + 1
        own = tuple(token_ids[start:end])
        accept = tuple([float(mine == its) for mine, its in zip(own[:-1], drafted, strict=True)])
        verdict = Verdict(accept, own)
        verdicts.append(usable_verdict(verdict, is_usable[start:end], drafted, each.noise))
    return verdicts


def _by_weights(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    logits = _host_logits(inputs)
    rows = ProposalRows([(each.proposal, each.noise) for each in inputs])
    dtype = torch.float64 if logits[0].dtype == torch.float64 else torch.float32
    weights = torch.empty((rows.num_rows, whole_blocks(logits[0].shape[1])), dtype=dtype)
    first, at_once = 0, max(1, _NUMBERS_AT_ONCE // weights.shape[1])
    for params, run in groupby(zip(inputs, logits, strict=True), lambda pair: pair[0].params):
        parts = [adjusted_logits(own, params, each.history) for each, own in run]
        for few in chain.from_iterable(
            torch.split(joined_rows(near), at_once) for near in adjacent_runs(parts)
        ):
            write_weights(few, params, weights[first : first + len(few)])
            first += len(few)
    return rows.verdicts(judge(weights, rows))


def _host_logits(inputs: Sequence[VerifyInput]) -> list[Tensor]:
    parts: Sequence[Tensor] = [each.logits for each in inputs]
    if parts[0].device.type != "cpu":  # Waits for the device once.
        parts = torch.split(joined_rows(parts).cpu(), [len(part) for part in parts])
    pairs = zip(parts, inputs, strict=True)
    return [masked_logits(part, each.masks) for part, each in pairs]


def judge(weights: Tensor, rows: ProposalRows) -> JudgedRows:
    """Computes `JudgedRows` from the `weights` [R, V] of `write_weights`. Overwrites `weights`, as
    `subtract_drafts` does. An unusable row becomes a row with weight 1 for token 0."""
    sums = row_sums(weights).numpy()
    is_usable: BoolArray = np.isfinite(sums)
    if not is_usable.all():
        unusable = np.flatnonzero(~is_usable)
        weights[unusable] = 0.0
        weights[unusable, 0] = sums[unusable] = 1.0
    acceptance, left = subtract_drafts(weights, sums, rows)
    return JudgedRows(acceptance, left, race(weights, rows.keys()), is_usable)


def subtract_drafts(
    weights: Tensor, sums: RealArray, rows: ProposalRows
) -> tuple[RealArray, RealArray]:
    """In `weights` [R, V], each row that judges a draft token becomes the weights of the
    correction. Returns `JudgedRows.acceptance` and `left`. `sums` [R] are the sums of the rows.

    If a row would become empty, it stays unchanged, and its `left` is 0. Apart from rounding
    errors, no outcome uses such a row: the draft token that the row judges is always accepted, or
    the path to the row is impossible."""
    acceptance, left = np.zeros((2, rows.num_rows))
    judged = np.flatnonzero(rows.num_before >= 0)
    if not len(judged):
        return acceptance, left
    num, width, flat = len(judged), weights.shape[1], weights.view(-1)
    drafted = rows.drafted[judged]
    pairs = [*zip(drafted.tolist(), rows.q, strict=True)]
    listed = [(token_id,) if q is None else q.token_ids for token_id, q in pairs]
    counts = [(COUNT_TOTAL,) if q is None else q.counts for _, q in pairs]
    # For each entry of all q: its row's index in `judged`, its token, and the token's probability.
    place = np.arange(num).repeat([*map(len, counts)])
    token_ids = np.fromiter(chain.from_iterable(listed), np.int64, len(place))
    mass = np.fromiter(chain.from_iterable(counts), np.float64, len(place)) / COUNT_TOTAL
    is_drafted = token_ids == drafted[place]
    q = np.bincount(place, is_drafted * mass, num)
    inside = token_ids < width
    place, token_ids = place[inside], token_ids[inside]
    mass, is_drafted = mass[inside], is_drafted[inside]
    at = torch.from_numpy(judged[place] * width + token_ids)
    before = flat[at].double()
    own, total = before.numpy(), sums[judged]
    p = np.bincount(place, own * is_drafted, num) / total
    ratio = np.divide(p, q, out=np.full(num, np.nan), where=q > 0)
    pi = 1.0
    reached = np.ones(num)
    for index, row in enumerate(judged.tolist()):
        if rows.num_before[row] == 0 or not rows.is_block[row]:
            pi = 1.0
        reached[index] = pi
        acceptance[row] = pi = min(float(pi * ratio[index]), 1.0)
    # pos(pi p - q) is proportional to pos(p - q / pi). A path with pi = 0 is impossible.
    amount = np.where(reached > _PI_MIN, total / np.maximum(reached, _PI_MIN), 0.0)
    after = np.maximum(own - mass * amount[place], 0.0)
    rest = np.maximum(total + np.bincount(place, after - own, num), 0.0)
    flat[at] = torch.from_numpy(after).to(weights.dtype)
    suspects = np.flatnonzero(rest <= _NEARLY_EMPTY * total)
    if len(suspects):
        tops = weights[torch.from_numpy(judged[suspects])].amax(dim=1).numpy()
        empty = suspects[tops <= 0]
        is_lost = torch.from_numpy(np.isin(place, empty))
        flat[at[is_lost]] = before[is_lost].to(weights.dtype)
        rest[empty] = 0.0
    left[judged] = reached * rest / total
    return acceptance, left
