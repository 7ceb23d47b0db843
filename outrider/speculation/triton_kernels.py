"""Verdicts on a CUDA device as two Triton kernels; imported only where Triton is. Each program
works on one row, whose numbers do not depend on what runs beside it.

`weigh_rows` turns logits into weights exp((x - max) / T) and applies min-p, top-k and top-p. What a
filter keeps is found without a sort: positive floats are ordered as their bits are, and each pass
over the row makes the range of the last bits that are kept four times shorter.

`settle_rows` tells the acceptance of the draft token that a row judges, subtracts its q
(`verification.py`), and draws the token that follows (`gumbel_max.py`): the first and the heaviest
token of each block race, then all of those blocks alone in which another could beat the best.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from outrider.speculation import cuda_verdicts, gumbel_max, proposal

ROW_WORDS = tl.constexpr(cuda_verdicts.ROW_WORDS)
"""Of each row: temperature, min-p, top-p as float64, top-k; the draft token that it judges, or -1;
then its `RowKeys`."""
JUDGED_WORDS = tl.constexpr(cuda_verdicts.JUDGED_WORDS)
"""Of each row: how many draft tokens come before the one that it judges, -1 = it judges none; the
number of that one's q; whether its chain is judged as a block."""
PLACE_WORDS = tl.constexpr(3)
"""Of each draft token: its id, where its q begins, and how many tokens that has; 0 = certain."""
MAXIMUM, TOTAL, DRAFTED, ACCEPTED, LEFT, DRAWN = [tl.constexpr(i) for i in range(6)]
"""Numbers found of each row: the largest logit, NaN where any is; the sum of its weights; p of the
draft token; its acceptance, or in a block pi behind it; in a block Z; the token that follows."""
BITS_OF_ONE = tl.constexpr(0x3F800000)
COUNT_TOTAL = tl.constexpr(proposal.COUNT_TOTAL)
NEARLY_EMPTY = tl.constexpr(1e-4)
PI_MIN = tl.constexpr(1e-290)
WAIT_TOKENS = tl.constexpr(gumbel_max.BLOCK)
FIRST_WAIT = tl.constexpr(4294967296)


@triton.jit
def _real(words):
    return tl.load(words).to(tl.float64, bitcast=True)


@triton.jit
def _is_reached(parts, goal):
    return (tl.sum(parts.to(tl.float64)) >= goal).to(tl.int32)


@triton.jit
def _keep_goal(row, width, low, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Keeps the largest weights [width] at `row` until their mass, or their number, reaches `goal`,
    of equal ones those of lowest id, and sets the others to 0. The last one kept has bits >= `low`.
    Returns the mass of what is kept."""
    lane = tl.arange(0, BLOCK)
    high = tl.full((), BITS_OF_ONE + 1, tl.int32)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        p1 = tl.zeros([BLOCK], tl.float32)
        p2 = tl.zeros([BLOCK], tl.float32)
        p3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            weight = tl.load(row + start + lane, mask=start + lane < width, other=0.0)
            bits = weight.to(tl.int32, bitcast=True)
            amount = weight if BY_MASS else (weight > 0.0).to(tl.float32)
            p1 += tl.where(bits >= low + step, amount, 0.0)
            p2 += tl.where(bits >= low + 2 * step, amount, 0.0)
            p3 += tl.where(bits >= low + 3 * step, amount, 0.0)
        num = _is_reached(p1, goal) + _is_reached(p2, goal) + _is_reached(p3, goal)
        low = tl.minimum(low + num * step, high - 1)
        high = tl.where(num < 3, tl.minimum(high, low + step), high)
    above = tl.zeros([BLOCK], tl.float64)
    heavier = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        weight = tl.load(row + start + lane, mask=start + lane < width, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        above += tl.where(bits > low, weight, 0.0).to(tl.float64)
        heavier += (bits > low).to(tl.int32)
        equal += (bits == low).to(tl.int32)
    last = low.to(tl.float32, bitcast=True).to(tl.float64)
    mass, num_equal = tl.sum(above), tl.sum(equal)
    missing = (goal - mass) / last if BY_MASS else goal - tl.sum(heavier).to(tl.float64)
    # Rounding must not add a token.
    missing = tl.maximum(tl.ceil(missing * (1.0 - 1e-12)), 1.0)
    num_kept = tl.minimum(missing, num_equal.to(tl.float64)).to(tl.int32)
    tl.debug_barrier()
    seen = 0
    for start in range(0, width, BLOCK):
        weight = tl.load(row + start + lane, mask=start + lane < width, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        is_kept = bits >= low
        if num_kept < num_equal:
            is_equal = (bits == low).to(tl.int32)
            is_kept = is_kept & ((bits > low) | (seen + tl.cumsum(is_equal, 0) <= num_kept))
            seen += tl.sum(is_equal)
        tl.store(row + start + lane, tl.where(is_kept, weight, 0.0), mask=start + lane < width)
    tl.debug_barrier()
    return mass + num_kept.to(tl.float64) * last


@triton.jit
def weigh_rows(
    weights,  # [R, width], float32
    found,  # [6, R], float64
    logits,  # [R, width]
    logits_stride,
    words,  # [R, ROW_WORDS]
    width,
    BLOCK: tl.constexpr,
):
    """See above; the grid is [R]."""
    at = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    words += at * ROW_WORDS
    temperature = _real(words).to(tl.float32)
    min_p = _real(words + 1).to(tl.float32)
    top_p = _real(words + 2)
    top_k = tl.load(words + 3)
    source = logits + at * logits_stride
    row = weights + at * width
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    is_number = tl.full([BLOCK], 1, tl.int32)
    for start in range(0, width, BLOCK):
        place = start + lane
        logit = tl.load(source + place, mask=place < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, logit)
        is_number &= (logit == logit).to(tl.int32)
    top = tl.max(largest, axis=0)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    parts = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        place = start + lane
        logit = tl.load(source + place, mask=place < width, other=float("-inf")).to(tl.float32)
        weight = tl.exp(tl.minimum(logit - base, 0.0) / temperature)
        weight = tl.where(weight >= min_p, weight, 0.0)
        # Of logits that are nearly equal one is the largest.
        weight = tl.where(top_k == 1, (logit == top).to(tl.float32), weight)
        parts += weight.to(tl.float64)
        tl.store(row + place, weight, mask=place < width)
    total = tl.sum(parts)
    tl.debug_barrier()
    if top_k > 0:
        low = tl.where(top_k == 1, BITS_OF_ONE, 1)
        total = _keep_goal(row, width, low, top_k.to(tl.float64), False, BLOCK)
    if top_p < 1.0:
        # Lighter tokens have no more than 1 - top-p of the mass together.
        least = ((1.0 - top_p) * total / (2.0 * width)).to(tl.float32)
        low = tl.maximum(least.to(tl.int32, bitcast=True), 1)
        total = _keep_goal(row, width, low, top_p * total, True, BLOCK)
    token = tl.load(words + 4)
    is_known = (token >= 0) & (token < width)
    drafted = tl.load(row + token, mask=is_known, other=0.0).to(tl.float64) / total
    top = tl.where(tl.min(is_number) > 0, top, float("nan"))
    tl.store(found + MAXIMUM * num_rows + at, top.to(tl.float64))
    tl.store(found + TOTAL * num_rows + at, total)
    tl.store(found + DRAFTED * num_rows + at, drafted)


@triton.jit
def _draft_q(place, ids, counts, ENTRIES: tl.constexpr):
    """Ids and counts [ENTRIES] of what a draft token was drawn from."""
    token, start, size = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    entry = tl.arange(0, ENTRIES)
    listed = tl.load(ids + start + entry, mask=entry < size, other=0).to(tl.int64)
    count = tl.load(counts + start + entry, mask=entry < size, other=0).to(tl.int32)
    is_certain = (size == 0) & (entry == 0)
    return tl.where(is_certain, token, listed), tl.where(is_certain, COUNT_TOTAL, count)


@triton.jit
def _log_ratio(found, place, ids, counts, ENTRIES: tl.constexpr):
    """log p / q of a draft token, whose p was found before."""
    listed, count = _draft_q(place, ids, counts, ENTRIES)
    drafted = tl.sum(tl.where(listed == tl.load(place), count, 0))
    ratio = tl.load(found) * COUNT_TOTAL / drafted.to(tl.float64)
    return tl.where(ratio > 0.0, tl.log(tl.maximum(ratio, 1e-300)), float("-inf"))


@triton.jit
def _number(first, second, index):
    """See `gumbel_max.numbers`."""
    bits = index * -7046029254386353131 + first
    bits ^= (bits >> 30) & 17179869183
    bits *= -4658895280553007687
    bits ^= second
    bits ^= (bits >> 27) & 137438953471
    bits *= -7723592293110705685
    return bits ^ ((bits >> 31) & 8589934591)


@triton.jit
def _exponential(bits):
    fraction = (bits >> 12) & 4503599627370495
    return -tl.log((fraction.to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit(do_not_specialize=["places_at", "ids_at", "counts_at"])
def settle_rows(
    weights,  # [R, width]; the rows of draft tokens become the weights of corrections
    found,  # as above
    words,  # as above
    sent,  # bytes: [R, JUDGED_WORDS], int64, and from these places on ...
    places_at,  # ... [C, PLACE_WORDS], int64; then all ids, uint32, and all counts, uint16
    ids_at,
    counts_at,
    races,  # [2, R, ROW_WAITS], float64
    width,
    ENTRIES: tl.constexpr,
    WAITS: tl.constexpr,
    ROW_WAITS: tl.constexpr,
):
    """See above; the grid is [R]. `ROW_WAITS` are the blocks of a row, or more."""
    at = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    row = weights + at * width
    wait = tl.arange(0, WAITS).to(tl.int64)
    token = tl.arange(0, WAIT_TOKENS).to(tl.int64)
    total = tl.load(found + TOTAL * num_rows + at)
    judged = sent.to(tl.pointer_type(tl.int64)) + at * JUDGED_WORDS
    num_before = tl.load(judged)
    if num_before >= 0:
        ids = (sent + ids_at).to(tl.pointer_type(tl.uint32))
        counts = (sent + counts_at).to(tl.pointer_type(tl.uint16))
        place = (sent + places_at).to(tl.pointer_type(tl.int64)) + tl.load(judged + 1) * PLACE_WORDS
        is_block = tl.load(judged + 2) > 0
        p = found + DRAFTED * num_rows + at
        log_pi = tl.full((), 0.0, tl.float64)
        if is_block:
            for back in range(num_before, 0, -1):
                ratio = _log_ratio(p - back, place - back * PLACE_WORDS, ids, counts, ENTRIES)
                log_pi = tl.minimum(log_pi + ratio, 0.0)
        pi = tl.exp(log_pi)
        ratio = _log_ratio(p, place, ids, counts, ENTRIES)
        behind = tl.exp(tl.minimum(log_pi + ratio, 0.0))
        listed, count = _draft_q(place, ids, counts, ENTRIES)
        share = count.to(tl.float64) / COUNT_TOTAL
        is_inside = (count > 0) & (listed < width)
        before = tl.load(row + listed, mask=is_inside, other=0.0).to(tl.float64)
        amount = tl.where(pi > PI_MIN, total / tl.maximum(pi, PI_MIN), 0.0)
        after = tl.maximum(before - tl.where(is_inside, share * amount, 0.0), 0.0)
        left = tl.maximum(total + tl.sum(after - before), 0.0)
        tl.debug_barrier()
        tl.store(row + listed, after.to(tl.float32), mask=is_inside)
        tl.debug_barrier()
        if left <= NEARLY_EMPTY * total:
            largest = tl.zeros([WAITS, WAIT_TOKENS], tl.float32)
            for start in range(0, width, WAITS * WAIT_TOKENS):
                every = start + wait[:, None] * WAIT_TOKENS + token[None, :]
                weight = tl.load(row + every, mask=every < width, other=0.0)
                largest = tl.maximum(largest, weight)
            if tl.max(largest) <= 0.0:
                tl.store(row + listed, before.to(tl.float32), mask=is_inside)
                left = tl.zeros_like(left)
            tl.debug_barrier()
        tl.store(found + ACCEPTED * num_rows + at, behind)
        tl.store(found + LEFT * num_rows + at, pi * left / total)
    words += at * ROW_WORDS
    zero = tl.full((), 0, tl.uint32)
    a = tl.load(words + 5).to(tl.uint32)
    b = tl.load(words + 6).to(tl.uint32)
    stream = tl.load(words + 7).to(tl.uint32)
    seed = tl.load(words + 8).to(tl.uint64) | (tl.load(words + 9).to(tl.uint64) << 32)
    w0, w1, w2, w3 = tl.philox(seed, zero, a, b, stream)
    first = ((w1.to(tl.uint64) << 32) | w0.to(tl.uint64)).to(tl.int64, bitcast=True)
    second = ((w3.to(tl.uint64) << 32) | w2.to(tl.uint64)).to(tl.int64, bitcast=True)
    heaviest_of = races + at * ROW_WAITS
    weight_of = heaviest_of + num_rows * ROW_WAITS
    for start in range(0, ROW_WAITS, WAITS):
        every = (start + wait)[:, None] * WAIT_TOKENS + token[None, :]
        weight = tl.load(row + every, mask=every < width, other=0.0)
        tl.store(heaviest_of + start + wait, tl.argmax(weight, axis=1).to(tl.float64))
        tl.store(weight_of + start + wait, tl.max(weight, axis=1).to(tl.float64))
    tl.debug_barrier()
    waits = tl.arange(0, ROW_WAITS).to(tl.int64)
    heaviest = tl.load(heaviest_of + waits).to(tl.int64)
    weight = tl.load(weight_of + waits)
    least = _number(first, second, waits + FIRST_WAIT)
    arrival = _exponential(least) / WAIT_TOKENS
    soonest = least & (WAIT_TOKENS - 1)
    begin = waits * WAIT_TOKENS
    soon_weight = tl.load(row + begin + soonest, mask=begin + soonest < width, other=0.0)
    soon_score = soon_weight.to(tl.float64) / arrival
    later = _exponential(_number(first, second, begin + heaviest))
    score = weight / (arrival + tl.where(heaviest == soonest, 0.0, later))
    best = tl.maximum(score, soon_score)
    ids_of_best = begin + tl.where(score > soon_score, heaviest, soonest)
    top = tl.max(best)
    drawn = tl.min(tl.where(best == top, ids_of_best, width))
    drawn = tl.where(top > 0.0, drawn, 0)
    bound = tl.where(weight > 0.0, weight / arrival, 0.0)
    while tl.max(bound) > top:
        block = tl.argmax(bound, axis=0).to(tl.int64)
        is_here = waits == block
        bound = tl.where(is_here, 0.0, bound)
        first_here = tl.sum(tl.where(is_here, soonest, 0))
        arrival_here = tl.sum(tl.where(is_here, arrival, 0.0))
        every = block * WAIT_TOKENS + token
        own = tl.load(row + every, mask=every < width, other=0.0).to(tl.float64)
        since = _exponential(_number(first, second, every))
        reached = own / (arrival_here + tl.where(first_here == token, 0.0, since))
        if tl.max(reached) > top:
            top = tl.max(reached)
            drawn = tl.min(tl.where(reached == top, every, width))
    tl.store(found + DRAWN * num_rows + at, drawn.to(tl.float64))
