"""Draws one token from each row of weights, with random noise for each token.

*Numbers*: a row's seed, place and stream give four Philox words (`random_streams.py`), which form
two 64-bit keys. From the keys and an index i, SplitMix64's finaliser (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014) computes 64 random bits: number i of the
row. The second key is applied by XOR between the finaliser's two multiplications.

*Races*: token v has a weight w_v and a random wait t_v. The token with the highest score w_v / t_v
is drawn. The waits are independent Exp(1), so v is drawn with probability w_v / sum w. This is the
Gumbel-max trick over log w. A draft and a target with the same keys usually draw the same token.

*Waits* have two levels, so that a race over a large vocabulary computes only a few waits. Tokens
128 b .. 128 b + 127 form block b. The shortest of a block's 128 waits is Exp(128), and every token
of the block is equally likely to have it. Exp(1) is memoryless, so every other wait is the shortest
wait plus an independent Exp(1). The upper 52 bits of number i are a uniform u, and E_i = -log u is
Exp(1).

- The shortest wait of block b is m_b = E_i / 128 with i = 2^32 + b. The lower 7 bits of number i
  say which token of the block has this wait.
- Every other token v of the block waits m_b + E_v. So v can win only if w_v / m_b exceeds the best
  score found so far."""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.speculation.random_streams import RowKeys, row_words

BLOCK = 128
_BLOCK_BITS = 7
_BLOCK_NUMBERS = 2**32
"""The shortest wait of block b comes from number 2^32 + b. Lower indices are token ids."""
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_FRACTION_BITS = 52
"""A uniform is (n + 0.5) * 2^-52, where n has 52 bits. So no uniform is 0 or 1."""
IntArray: TypeAlias = npt.NDArray[np.int64]
RealArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def whole_blocks(width: int) -> int:
    """`width` rounded up to a multiple of `BLOCK`. `race` need not copy rows of this width."""
    return -(-width // BLOCK) * BLOCK


def token_keys(keys: RowKeys) -> tuple[IntArray, IntArray]:
    """The two 64-bit keys of each row, as columns [R, 1]."""
    first, second, third, fourth = row_words(keys)
    return _column(first, second), _column(third, fourth)


def numbers(keys: tuple[IntArray, IntArray], indices: IntArray) -> IntArray:
    """Computes number i of each row for each i in `indices` ([R, M] or [1, M]). Returns int64
    [R, M]. `keys` are columns [R, 1]."""
    first, second = keys
    bits = indices * _GAMMA + first
    bits ^= (bits >> 30) & (2**34 - 1)  # The mask clears the copies of the sign bit.
    bits *= _FIRST
    bits ^= second
    bits ^= (bits >> 27) & (2**37 - 1)
    bits *= _SECOND
    bits ^= (bits >> 31) & (2**33 - 1)
    return bits


def uniforms(bits: IntArray) -> RealArray:
    """`numbers` as float64 in (0, 1)."""
    fraction = (bits >> (64 - _FRACTION_BITS)) & (2**_FRACTION_BITS - 1)
    drawn: RealArray = fraction.astype(np.float64)
    drawn += 0.5
    drawn *= 2.0**-_FRACTION_BITS
    return drawn


def race(weights: Tensor, keys: RowKeys) -> IntArray:
    """The winner of each row's race: [R]. `weights` [R, V] are on the CPU, and >= 0. If a row has
    no positive weight, token 0 wins. Of equal scores, the lowest id wins."""
    num_rows, width = weights.shape
    if width % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -width % BLOCK))
    tops = weights.view(-1, BLOCK).amax(dim=1).view(num_rows, -1)
    return _pruned_race(weights.numpy(), tops.numpy(), token_keys(keys))


def scores(weights: RealArray, token_ids: IntArray, keys: RowKeys) -> RealArray:
    """The scores w / t of the tokens `token_ids` ([R, M] or [1, M]) with the `weights` [R, M]."""
    row_keys = token_keys(keys)
    blocks = numbers(row_keys, (token_ids >> _BLOCK_BITS) + _BLOCK_NUMBERS)
    later = _exponentials(numbers(row_keys, token_ids))
    later[(blocks & (BLOCK - 1)) == (token_ids & (BLOCK - 1))] = 0.0
    race_scores: RealArray = weights / (_exponentials(blocks) / BLOCK + later)
    return race_scores


def _pruned_race(
    weights: npt.NDArray[Any], tops: npt.NDArray[Any], keys: tuple[IntArray, IntArray]
) -> IntArray:
    """`race` for rows of whole blocks. `tops` [R, V / 128] has the largest weight of each block.
    First computes, for each block, the score of the token with the shortest wait. Then computes
    only the scores that could exceed the best of these first scores."""
    num_rows, num_blocks = tops.shape
    blocks = weights.reshape(-1, BLOCK)
    bits = numbers(keys, _block_numbers(num_blocks))
    least: RealArray = _exponentials(bits).ravel() / BLOCK
    inner = (bits & (BLOCK - 1)).ravel()
    scores = (blocks[np.arange(len(blocks)), inner] / least).reshape(num_rows, num_blocks)
    winners: IntArray = scores.argmax(axis=1)
    rows = np.arange(num_rows)
    best = scores[rows, winners]
    winners = winners * BLOCK + inner[rows * num_blocks + winners]
    winners[best <= 0.0] = 0
    needed = best.repeat(num_blocks) * least
    open_blocks = np.flatnonzero(tops.ravel() > needed)
    if not len(open_blocks):
        return winners
    places = np.flatnonzero(blocks[open_blocks] > needed[open_blocks, None])
    block, offset = open_blocks[places >> _BLOCK_BITS], places & (BLOCK - 1)
    row, token_ids = block // num_blocks, block % num_blocks * BLOCK + offset
    low, high = keys
    later = _exponentials(numbers((low[row, 0], high[row, 0]), token_ids))
    later[offset == inner[block]] = 0.0
    score = blocks[block, offset] / (least[block] + later)
    for place in np.flatnonzero(score > best[row]).tolist():  # A row has few such places.
        if score[place] > best[row[place]]:
            best[row[place]], winners[row[place]] = score[place], token_ids[place]
    return winners


@lru_cache(maxsize=8)
def _block_numbers(num_blocks: int) -> IntArray:
    indices: IntArray = (_BLOCK_NUMBERS + np.arange(num_blocks, dtype=np.int64))[None]
    indices.flags.writeable = False
    return indices


def _column(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> IntArray:
    key: IntArray = ((high << np.uint64(32)) | low).view(np.int64)[:, None]
    return key


def _exponentials(bits: IntArray) -> RealArray:
    exponentials: RealArray = -np.log(uniforms(bits))
    return exponentials
