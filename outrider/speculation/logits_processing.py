"""Turns logits into the distribution that is sampled, on the CPU.

The order is logit bias, penalties, temperature, min-p, top-k, top-p, renormalisation. Top-p is a
share of the mass that min-p and top-k kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import Incompatible, OutriderError, check
from outrider.grammar.token_mask import AllowedTokens, Flags, TokenMask
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import NO_HISTORY, SamplingParams, TokenHistory

_HEAD_ENTRIES = 64  # top-p first searches only this many of the largest weights
_BUCKETS = {
    np.dtype(np.float32): (np.int32, 0x3F800000, 17),
    np.dtype(np.float64): (np.int64, 0x3FF0000000000000, 46),
}
"""For each type of float: the integer type of the same size, the bits of 1.0, and a right shift
that keeps the exponent and six bits of the fraction."""
_NUM_BUCKETS = 64 * 64
"""64 buckets for each power of 2 from 1 to 2^-64. Smaller weights share the last bucket."""
_BLOCK = 64  # `largest` first compares the maxima of blocks of this size


def target_probabilities(
    logits: Tensor, params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> Tensor:
    """The sampled distribution of every row: [R, V], float64, rows sum to 1. If `params` are
    greedy, a row is one-hot at its largest logit (of equal logits, at the lowest id). Ignores ids
    of V or more in the bias or the history. Raises `InvariantError` for a row of `logits` with NaN
    or +inf, or only -inf."""
    shape = tuple(logits.shape)
    check(len(shape) == 2 and shape[1] > 0, f"logits have shape {shape}, not [R, V] with V > 0")
    logits = logits.cpu()
    weights = torch.empty(logits.shape, dtype=torch.float64)
    write_weights(adjusted_logits(logits, params, history), params, weights)
    return weights.div_(check_weights(weights, [logits])[:, None])


def write_weights(logits: Tensor, params: SamplingParams, weights: Tensor) -> None:
    """Writes the sampled distribution of each row of `logits` [R, V], not normalised, to `weights`
    [R, W], float32 or float64. Biases and penalties must already be applied to `logits`. Columns
    beyond V become 0. A row with NaN or +inf, or only -inf, becomes NaN (see `check_weights`)."""
    width = logits.shape[1]
    weights[:, width:] = float("-inf")
    weights[:, :width] = logits
    if params.greedy:
        likeliest = logits.argmax(dim=1, keepdim=True)
        largest = weights.gather(1, likeliest)
        weights.zero_().scatter_(1, likeliest, largest - largest + 1.0)  # NaN for NaN or infinity.
        return
    if params.temperature != 1.0:
        weights -= weights.amax(dim=1, keepdim=True)
        weights /= params.temperature
    torch.softmax(weights, dim=1, out=weights)
    if params.filtered:
        for row in weights:
            _keep_likely(row, params.min_p, params.top_k, params.top_p)


def row_sums(weights: Tensor) -> Tensor:
    """The sum of each row of `weights` [R, V], as float64 [R]. No sum depends on another row."""
    num_rows, width = weights.shape
    if weights.dtype == torch.float64 or width % _BLOCK:
        return weights.cumsum(dim=1, dtype=torch.float64)[:, -1]
    size = 4 * _BLOCK if width % (4 * _BLOCK) == 0 else _BLOCK
    sums = weights.view(-1, size).sum(dim=1).view(num_rows, -1)
    return sums.sum(dim=1, dtype=torch.float64)


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Joins parts [n, V] to one tensor [R, V]. Copies nothing if they are adjacent in memory."""
    first = parts[0]
    begin = end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return torch.cat(list(parts))
    width = first.shape[1]
    return first.as_strided(((end - begin) // (width * first.itemsize), width), (width, 1))


def adjacent_runs(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divides parts [n, V] into runs of parts that are adjacent in memory."""
    runs: list[list[Tensor]] = []
    end = None
    for part in parts:
        begin = part.data_ptr()
        if begin == end:
            runs[-1].append(part)
        else:
            runs.append([part])
        end = begin + part.nbytes
    return runs


def largest_of_rows(logits: Tensor) -> tuple[list[int], list[float]]:
    """The lowest index of each row's largest value, and this value. NaN counts as the largest."""
    # For rows as long as a vocabulary, NumPy's argmax is about 20 times as fast as torch's.
    floats = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    argmax = torch.from_numpy(floats.detach().numpy().argmax(axis=1))[:, None]
    return argmax[:, 0].tolist(), logits.gather(1, argmax)[:, 0].tolist()


def adjusted_logits(
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory = NO_HISTORY,
    vocabulary: DraftVocabulary | None = None,
) -> Tensor:
    """Applies bias and penalties to `logits`, which are [R, V], or [1, N] with a `vocabulary` of N
    tokens. Returns a copy on the CPU, in float64 if `logits` are float64, else in float32. Without
    bias and penalties, returns `logits` itself.

    The repetition penalty divides positive logits of tokens in the prompt or output, and multiplies
    their negative logits (Keskar et al. 2019). Presence and frequency penalties are subtracted from
    the logits of tokens in the output."""
    if not (params.logit_bias or params.penalised):
        return logits
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    adjusted = logits.to("cpu", dtype, copy=True)
    if not params.penalised:
        _add_biases(adjusted.numpy(), params.logit_bias, vocabulary)
        return adjusted
    table = changed_tokens(params, history, logits.shape[1], vocabulary)
    ids, biases = torch.from_numpy(table[:, 0]), torch.from_numpy(table[:, 1].view(np.float64))
    counted = np.repeat(table[None, :, 2] >> 1, len(logits), axis=0)
    for row, token_id in enumerate(history.drafted_ids[: len(logits) - 1], start=1):
        counted[row:, table[:, 0] == token_id] += 1
    seen = torch.from_numpy((counted > 0) | (table[:, 2] & 1 > 0))
    counts = torch.from_numpy(counted).double()
    before = adjusted[:, ids].double() + biases
    repetition = params.repetition_penalty
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(seen, repeated, before)
    after -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    after.clamp_(max=torch.finfo(dtype).max)
    adjusted[:, ids] = torch.where(before == torch.inf, before, after).to(dtype)
    return adjusted


def _add_biases(
    values: npt.NDArray[Any],
    logit_bias: tuple[tuple[int, float], ...],
    vocabulary: DraftVocabulary | None,
) -> None:
    """Adds biases to the logits `values` [R, V] or [1, N]. Uses NumPy, which is faster than torch
    for few tokens, and does not give up the interpreter to other threads."""
    columns, biases = _bias_arrays(logit_bias)
    if vocabulary is None:
        num_known = int(columns.searchsorted(values.shape[1]))
        columns, biases = columns[:num_known], biases[:num_known]
    else:
        known, own = vocabulary.columns(columns)
        columns, biases = own, biases[columns.searchsorted(known)]
    before = values[:, columns].astype(np.float64) + biases
    after = np.minimum(before, np.finfo(values.dtype).max)
    with np.errstate(over="ignore"):  # A value below the range becomes -inf.
        values[:, columns] = np.where(before == np.inf, before, after)


@lru_cache(256)
def _bias_arrays(
    logit_bias: tuple[tuple[int, float], ...],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    ids, biases = zip(*sorted(logit_bias), strict=True)
    return np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float64)


def changed_tokens(
    params: SamplingParams,
    history: TokenHistory,
    width: int,
    vocabulary: DraftVocabulary | None = None,
) -> npt.NDArray[np.int64]:
    """A table [E, 3] of the tokens that have a bias or occur in the prompt, the output or the draft
    tokens. Leaves out tokens without a column in the logits, which have `width` columns. A row of
    the table has the token's column, the bits of its bias as a float64, and 2 n + m. Here n is the
    token's count in the output, and m is 1 if the prompt has the token. n does not count draft
    tokens, because the draft tokens before a row of logits differ from row to row."""
    biases, prompt = dict(params.logit_bias), set(history.prompt_ids)
    output = Counter(history.output_ids)
    ids = np.array(sorted(prompt.union(biases, output, history.drafted_ids)), dtype=np.int64)
    ids, columns = (ids[ids < width],) * 2 if vocabulary is None else vocabulary.columns(ids)
    table = np.empty((len(ids), 3), dtype=np.int64)
    table[:, 0] = columns
    table.view(np.float64)[:, 1] = [biases.get(token_id, 0.0) for token_id in ids.tolist()]
    table[:, 2] = [2 * output[token_id] + (token_id in prompt) for token_id in ids.tolist()]
    return table


def raw_logprobs(
    logits: Tensor, chosen: Sequence[int], num_top: int, rows: Sequence[int]
) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
    """For each i, returns the log-probability of token `chosen[i]` in row `rows[i]` of the raw
    `logits` [R, V], and the row's `num_top` likeliest tokens as pairs (id, log-probability). These
    are sorted, likeliest first, then by id. A token id of V or more has log-probability -inf. So
    has every token in a row with NaN or +inf, or only -inf, and such a row has no pairs."""
    exact = logits.double()
    normalisers = exact.logsumexp(dim=1).tolist()
    usable = {row for row in rows if math.isfinite(normalisers[row])}
    tops: dict[int, tuple[tuple[int, float], ...]] = dict.fromkeys(rows, ())
    for row in usable if num_top else ():
        least = exact[row].topk(min(num_top, logits.shape[1])).values[-1]
        ids = (exact[row] >= least).nonzero()[:, 0].tolist()
        ranked = zip(ids, (exact[row, ids] - normalisers[row]).tolist(), strict=True)
        tops[row] = tuple(sorted(ranked, key=lambda entry: (-entry[1], entry[0]))[:num_top])
    logprobs = []
    for row, token_id in zip(rows, chosen, strict=True):
        is_known = row in usable and token_id < logits.shape[1]
        logprob = float(exact[row, token_id]) - normalisers[row] if is_known else float("-inf")
        logprobs.append((logprob, tops[row]))
    return tuple(logprobs)


def check_maxima(maxima: Sequence[float]) -> None:
    """Raises `InvariantError` if the largest logit of a row is NaN or infinite."""
    for row, largest in enumerate(maxima):
        reason = f"logits of row {row} cannot be sampled from: their maximum is {largest}"
        check(math.isfinite(largest), reason)


def check_weights(weights: Tensor, logits: Sequence[Tensor]) -> Tensor:
    """The `row_sums` of the weights that `write_weights` has computed from `logits`. Raises
    `InvariantError` for rows without a distribution."""
    sums = row_sums(weights)
    if not bool(sums.isfinite().all()):
        for part in logits:
            check_maxima(part.amax(dim=1).tolist())
    return sums


def _keep_likely(row: Tensor, min_p: float, top_k: int, top_p: float) -> None:
    """Applies min-p, top-k and top-p to `row` [V], whose weights are at most 1. Dropped weights
    become 0. Of equal weights at the boundary, keeps those with the lowest ids."""
    if min_p > 0.0:
        _keep_from(row, float(row.amax() * min_p))
    is_cut = 0 < top_k < len(row)
    if not is_cut and top_p >= 1.0:
        return
    ranked = largest(row[None], max(_HEAD_ENTRIES, top_k if is_cut else 0))[0][0].numpy()
    if math.isnan(ranked[0]):
        return
    ranked = ranked[: top_k if is_cut else None]
    num_kept = int(np.count_nonzero(ranked))
    last = float(ranked[num_kept - 1]) if num_kept else 0.0
    if top_p < 1.0:
        mass = ranked.cumsum(dtype=np.float64)
        goal = top_p * (float(mass[-1]) if is_cut else float(row_sums(row[None])))
        place = int(mass.searchsorted(goal))
        if place < num_kept:
            last, num_kept = float(ranked[place]), place + 1
        elif place == len(ranked) < len(row) and not is_cut:
            last, num_kept = _long_head_end(row.numpy(), goal)
    _keep_from(row, last)
    excess = int(np.count_nonzero(row.numpy())) - num_kept
    if excess > 0:
        ties = (row == row[row > 0].amin()).nonzero()[:, 0]
        row[ties[-excess:]] = 0.0


def _keep_from(row: Tensor, least: float) -> None:
    kind = row.numpy().dtype
    below = np.nextafter(np.asarray(least, dtype=kind), np.asarray(0.0, dtype=kind))
    torch.nn.functional.threshold(row, float(below), 0.0, inplace=True)


def largest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights of each row of `weights` [R, V], largest first, and their
    indices: [R, count] each. Of equal weights at the boundary, any may be included."""
    num_rows, width = weights.shape
    count = min(count, width)
    if weights.device.type != "cpu" or width < 4 * _BLOCK * count:
        top = weights.topk(count, dim=1)
        return top.values, top.indices
    if width % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -width % _BLOCK), value=float("-inf"))
    blocks = weights.view(num_rows, -1, _BLOCK)
    # The `count` blocks with the largest maxima contain the `count` largest weights.
    chosen = blocks.amax(dim=2).topk(count, dim=1, sorted=False).indices
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).view(num_rows, -1)
    top = inside.topk(count, dim=1)
    block = chosen.gather(1, top.indices // _BLOCK)
    return top.values, block * _BLOCK + top.indices % _BLOCK


def _long_head_end(row: npt.NDArray[Any], goal: float) -> tuple[float, int]:
    """Adds the weights of `row` [V], largest first, until their sum reaches `goal`. Returns the
    last weight added, and how many were added. Divides the weights into buckets by their leading
    bits, and sorts only the bucket in which the sum reaches the goal."""
    integers, bits_of_one, shift = _BUCKETS[row.dtype]
    buckets = (bits_of_one - row.view(integers)) >> shift
    np.minimum(buckets, _NUM_BUCKETS - 1, out=buckets)
    mass = np.bincount(buckets, weights=row, minlength=_NUM_BUCKETS).cumsum()
    end = min(int(mass.searchsorted(goal)), int(buckets.max()))
    values = np.sort(row[buckets == end])[::-1]
    before = float(mass[end - 1]) if end > 0 else 0.0
    reached = values.cumsum(dtype=np.float64) + before
    last = min(int(reached.searchsorted(goal)), len(values) - 1)
    return float(values[last]), int(np.count_nonzero(buckets < end)) + last + 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The tokens of a reduced draft vocabulary, one for each column of the draft's logits."""

    token_ids: npt.NDArray[np.int64]  # [N], ascending
    _tables: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        ascends = bool((np.diff(self.token_ids) > 0).all())
        check(len(self.token_ids) > 0 and ascends, "a draft vocabulary is empty or not ascending")

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> DraftVocabulary | None:
        """The vocabulary of these tokens, or None for an empty list, which means all tokens."""
        return cls(np.array(token_ids, dtype=np.int64)) if token_ids else None

    def table(self, device: torch.device) -> Tensor:
        """`token_ids` on the device."""
        if device not in self._tables:
            self._tables[device] = torch.from_numpy(self.token_ids).to(device)
        return self._tables[device]

    def columns(
        self, token_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The members of `token_ids` that have a column, and their columns."""
        places = self.token_ids.searchsorted(token_ids)
        places[places == len(self.token_ids)] = 0
        is_known = self.token_ids[places] == token_ids
        return token_ids[is_known], places[is_known]


def masked_logits(
    logits: Tensor, masks: Sequence[TokenMask | None], vocabulary: DraftVocabulary | None = None
) -> Tensor:
    """A copy of `logits` ([R, V], or [R, N] with a `vocabulary` of N tokens) with -inf for
    forbidden tokens. `masks` has each row's mask, or None. If all are None, returns `logits`."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return logits
    wanted, width = [row for row, mask in enumerate(masks) if mask is not None], logits.shape[1]
    flags = np.stack([~_flags(mask, width, vocabulary) for mask in given])
    masked, forbidden = logits.clone(), torch.from_numpy(flags).to(logits.device)
    if len(wanted) == len(masked):
        return masked.masked_fill_(forbidden, float("-inf"))
    masked[wanted] = masked[wanted].masked_fill_(forbidden, float("-inf"))
    return masked


class RowMasks(NamedTuple):
    """The masks of the K + 1 rows of logits that verify a proposal."""

    masks: list[TokenMask | None]
    """[K + 1]: element n has the tokens that may follow n draft tokens. All elements after
    a forbidden draft token are None. The target rejects that token, so no outcome uses them."""
    first_without_mask: int | None
    """The first row whose mask cannot be computed; None if no outcome can reach such a row. An
    outcome that reaches this row ends with the draft token before the row (`ending_at`)."""


def row_masks(allowed: AllowedTokens, proposal: Proposal) -> RowMasks:
    """The masks for a proposal. Raises `Incompatible` if the first mask cannot be computed. A later
    mask that cannot be computed is None, so a draft cannot make a session fail."""
    masks = [allowed.mask_after(())]
    first_without_mask: int | None = None
    for num, token_id in enumerate(proposal.token_ids, start=1):
        before, mask = masks[-1], None
        if before is not None and before.has(token_id):
            with suppress(Incompatible):
                mask = allowed.mask_after(proposal.token_ids[:num])
            if mask is None:
                first_without_mask = num
        masks.append(mask)
    return RowMasks(masks, first_without_mask)


@dataclass(frozen=True, slots=True)
class AllowedByMinTokens:
    """Forbids the tokens `ends` at the next `num_left` positions. Implements `AllowedTokens`."""

    ends: frozenset[int]
    num_left: int
    vocab_size: int

    def mask_after(self, drafted: Sequence[int]) -> TokenMask | None:
        if not self.ends.isdisjoint(drafted[: self.num_left]):
            return None
        is_early = len(drafted) < self.num_left
        return _mask_without(self.ends if is_early else frozenset(), self.vocab_size)

    def advanced(self, committed: Sequence[int]) -> AllowedByMinTokens:
        return replace(self, num_left=max(0, self.num_left - len(committed)))


@lru_cache(maxsize=256)
def _mask_without(token_ids: frozenset[int], vocab_size: int) -> TokenMask:
    flags = np.ones(vocab_size, dtype=np.bool_)
    flags[[token_id for token_id in token_ids if token_id < vocab_size]] = False
    return TokenMask(np.packbits(flags, bitorder="little"))


def allowed_by_min_tokens(
    sampling: SamplingParams, num_tokens: int, eos_token_ids: Sequence[int], vocab_size: int
) -> AllowedByMinTokens | None:
    """What `min_tokens` allows after `num_tokens` tokens of a completion. None = all tokens."""
    num_left = sampling.min_tokens - num_tokens
    if num_left <= 0:
        return None
    ends = frozenset((*eos_token_ids, *sampling.stop_token_ids))
    return AllowedByMinTokens(ends, num_left, vocab_size)


def draft_mask(
    allowed: AllowedTokens, drafted: Sequence[int], vocabulary: DraftVocabulary | None = None
) -> TokenMask | None:
    """The tokens that a draft may draw after `drafted`. None if the draft must stop, because
    the completion has ended, no token of the `vocabulary` may follow, or the mask is unknown."""
    try:
        mask = allowed.mask_after(drafted)
    except OutriderError:
        return None  # The target reports the error.
    if mask is None or mask.is_over:
        return None
    if vocabulary is not None and not _flags(mask, 0, vocabulary).any():
        return None
    return mask


def _flags(mask: TokenMask, width: int, vocabulary: DraftVocabulary | None) -> Flags:
    if vocabulary is None:
        return mask.flags(width)
    return mask.flags(int(vocabulary.token_ids[-1]) + 1)[vocabulary.token_ids]
