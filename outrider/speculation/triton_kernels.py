"""Three Triton kernels that compute verdicts on a CUDA device. This module is imported only where
Triton is installed. Each program computes one of the R rows, so grids are [R]. `kernel_rows.py` has
the arguments and the results of a row.

- `change_rows` applies masks, biases and penalties to logits, if a row has any of these.
- `weigh_rows` turns logits into weights exp((x - max) / T) and applies min-p, top-k and top-p. To
  find the smallest weight to keep, it searches a range of bit patterns. (A larger weight has a
  larger bit pattern.) Each pass over the row reduces the range to a quarter.
- `settle_rows` computes the acceptance of the draft token that a row judges, subtracts the token's
  q from the weights (`verification.py`), and draws the next token (`gumbel_max.py` defines blocks,
  waits and scores). A draw first scores two tokens of each block: the token with the shortest wait
  and the token with the largest weight. Then it scores all tokens of blocks that could still win.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from outrider.speculation import gumbel_max, kernel_rows, proposal
from outrider.speculation.kernel_rows import JUDGED, RESULTS, ROW

ROW_WORDS = tl.constexpr(kernel_rows.num_words(ROW))
TEMPERATURE = tl.constexpr(kernel_rows.word(ROW, "temperature"))
MIN_P = tl.constexpr(kernel_rows.word(ROW, "min_p"))
TOP_P = tl.constexpr(kernel_rows.word(ROW, "top_p"))
TOP_K = tl.constexpr(kernel_rows.word(ROW, "top_k"))
DRAFTED = tl.constexpr(kernel_rows.word(ROW, "drafted"))
NUM_CHANGED = tl.constexpr(kernel_rows.word(ROW, "num_changed"))
CHANGED_AT = tl.constexpr(kernel_rows.word(ROW, "changed_at"))
MASK_AT = tl.constexpr(kernel_rows.word(ROW, "mask_at"))
ROW_NUM_BEFORE = tl.constexpr(kernel_rows.word(ROW, "num_before"))
REPETITION = tl.constexpr(kernel_rows.word(ROW, "repetition_penalty"))
PRESENCE = tl.constexpr(kernel_rows.word(ROW, "presence_penalty"))
FREQUENCY = tl.constexpr(kernel_rows.word(ROW, "frequency_penalty"))
CHANGED_WORDS = tl.constexpr(kernel_rows.CHANGED_WORDS)
JUDGED_WORDS = tl.constexpr(kernel_rows.num_words(JUDGED))
KEYS = tl.constexpr(kernel_rows.word(JUDGED, "keys"))
NUM_BEFORE = tl.constexpr(kernel_rows.word(JUDGED, "num_before"))
IS_BLOCK = tl.constexpr(kernel_rows.word(JUDGED, "is_block"))
Q_AT = tl.constexpr(kernel_rows.word(JUDGED, "q_at"))
Q_SIZE = tl.constexpr(kernel_rows.word(JUDGED, "q_size"))
MAXIMUM = tl.constexpr(RESULTS.index("maximum"))
TOTAL = tl.constexpr(RESULTS.index("total"))
P_OF_DRAFTED = tl.constexpr(RESULTS.index("drafted"))
ACCEPTED = tl.constexpr(RESULTS.index("accepted"))
LEFT = tl.constexpr(RESULTS.index("left"))
DRAWN = tl.constexpr(RESULTS.index("drawn"))
BITS_OF_ONE = tl.constexpr(0x3F800000)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
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
    """Keeps the largest weights of `row` [width], and sets all others to 0. Keeps `goal` weights,
    or, with `BY_MASS`, the fewest weights whose sum is at least `goal`. Of equal weights, keeps
    those with the lowest ids. `low` is a lower bound for the bits of the smallest kept weight.
    Returns the sum of the kept weights."""
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
def change_rows(
    weights,  # [R, width], float32: the changed logits
    logits,  # [R, width]
    logits_stride,
    sent,  # bytes: words [R, ROW_WORDS], then all entries, then masks with a bit for each token
    width,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    words = sent.to(tl.pointer_type(tl.int64)) + at * ROW_WORDS
    source = logits + at * logits_stride
    row = weights + at * width
    mask_at = tl.load(words + MASK_AT)
    masked_width = tl.where(mask_at >= 0, width, 0)
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        place = start + lane
        logit = tl.load(source + place, mask=place < width, other=0.0).to(tl.float32)
        bits = tl.load(sent + mask_at + place // 8, mask=place < masked_width, other=255)
        bits = bits.to(tl.int32)
        is_allowed = ((bits >> (place % 8)) & 1) > 0
        tl.store(row + place, tl.where(is_allowed, logit, float("-inf")), mask=place < width)
    tl.debug_barrier()
    num_changed = tl.load(words + NUM_CHANGED)
    changed = (sent + tl.load(words + CHANGED_AT)).to(tl.pointer_type(tl.int64))
    repetition = _real(words + REPETITION)
    presence = _real(words + PRESENCE)
    frequency = _real(words + FREQUENCY)
    for start in range(0, num_changed, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        is_here = entry < num_changed
        token = tl.load(changed + entry * CHANGED_WORDS, mask=is_here, other=0)
        bias = tl.load(changed + entry * CHANGED_WORDS + 1, mask=is_here, other=0)
        counted = tl.load(changed + entry * CHANGED_WORDS + 2, mask=is_here, other=0)
        count = counted >> 1
        for back in range(1, tl.load(words + ROW_NUM_BEFORE) + 1):
            count += (tl.load(words - back * ROW_WORDS + DRAFTED) == token).to(tl.int64)
        logit = tl.load(row + token, mask=is_here, other=float("-inf")).to(tl.float64)
        logit += bias.to(tl.float64, bitcast=True)
        most = tl.where(logit == float("inf"), logit, FLOAT_MAX)
        repeated = tl.where(logit > 0.0, logit / repetition, logit * repetition)
        logit = tl.where((count > 0) | ((counted & 1) > 0), repeated, logit)
        lost = frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
        logit -= lost
        logit = tl.where(logit > most, most, logit)  # Keeps NaN, unlike a minimum.
        tl.store(row + token, logit.to(tl.float32), mask=is_here)


@triton.jit
def weigh_rows(
    weights,  # [R, width], float32
    results,  # [6, R], float64
    logits,  # [R, width]; the tensor `weights` itself if `change_rows` has written to it
    logits_stride,
    words,  # [R, ROW_WORDS]
    width,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    words += at * ROW_WORDS
    temperature = _real(words + TEMPERATURE).to(tl.float32)
    min_p = _real(words + MIN_P).to(tl.float32)
    top_p = _real(words + TOP_P)
    top_k = tl.load(words + TOP_K)
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
        # Top-k 1 compares logits, because nearly equal logits may have equal weights.
        weight = tl.where(top_k == 1, (logit == top).to(tl.float32), weight)
        parts += weight.to(tl.float64)
        tl.store(row + place, weight, mask=place < width)
    total = tl.sum(parts)
    tl.debug_barrier()
    if top_k > 0:
        low = tl.where(top_k == 1, BITS_OF_ONE, 1)
        total = _keep_goal(row, width, low, top_k.to(tl.float64), False, BLOCK)
    if top_p < 1.0:
        # All weights below `least` together have less than the share 1 - top-p of the mass.
        least = ((1.0 - top_p) * total / (2.0 * width)).to(tl.float32)
        low = tl.maximum(least.to(tl.int32, bitcast=True), 1)
        total = _keep_goal(row, width, low, top_p * total, True, BLOCK)
    token = tl.load(words + DRAFTED)
    is_known = (token >= 0) & (token < width)
    drafted = tl.load(row + token, mask=is_known, other=0.0).to(tl.float64) / total
    top = tl.where(tl.min(is_number) > 0, top, float("nan"))
    tl.store(results + MAXIMUM * num_rows + at, top.to(tl.float64))
    tl.store(results + TOTAL * num_rows + at, total)
    tl.store(results + P_OF_DRAFTED * num_rows + at, drafted)


@triton.jit
def _draft_q(token, sent, judged, ENTRIES: tl.constexpr):
    """The ids and counts [ENTRIES] of a draft token's q, and the token's own count."""
    size = tl.load(judged + Q_SIZE)
    packed = (sent + tl.load(judged + Q_AT)).to(tl.pointer_type(tl.uint16))
    entry = tl.arange(0, ENTRIES)
    is_here = entry < size
    low = tl.load(packed + 2 * entry, mask=is_here, other=0).to(tl.int64)
    high = tl.load(packed + 2 * entry + 1, mask=is_here, other=0).to(tl.int64)
    count = tl.load(packed + 2 * size + entry, mask=is_here, other=0).to(tl.int32)
    is_certain = (size == 0) & (entry == 0)
    listed = tl.where(is_certain, token, (high << 16) | low)
    count = tl.where(is_certain, COUNT_TOTAL, count)
    return listed, count, tl.sum(tl.where(listed == token, count, 0))


@triton.jit
def _log_ratio(p, drafted):
    """log(p / q) of a draft token. `p` is a pointer. `drafted` is the token's count in q."""
    ratio = tl.load(p) * COUNT_TOTAL / tl.maximum(drafted, 1).to(tl.float64)
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


@triton.jit
def settle_rows(
    weights,  # [R, width]; rows that judge a draft token become the weights of corrections
    results,  # as in `weigh_rows`
    words,  # as in `weigh_rows`
    sent,  # bytes: words [R, JUDGED_WORDS], then each q
    races,  # [2, R, ROW_WAITS], float64, for intermediate results
    width,
    ENTRIES: tl.constexpr,
    WAITS: tl.constexpr,
    ROW_WAITS: tl.constexpr,
):
    """`ROW_WAITS` is at least the number of blocks of a row."""
    at = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    row = weights + at * width
    wait = tl.arange(0, WAITS).to(tl.int64)
    token = tl.arange(0, WAIT_TOKENS).to(tl.int64)
    total = tl.load(results + TOTAL * num_rows + at)
    judged = sent.to(tl.pointer_type(tl.int64)) + at * JUDGED_WORDS
    num_before = tl.load(judged + NUM_BEFORE)
    acceptance = tl.full((), 0.0, tl.float64)
    remains = tl.full((), 0.0, tl.float64)
    if num_before >= 0:
        own = words + at * ROW_WORDS + DRAFTED
        p = results + P_OF_DRAFTED * num_rows + at
        log_pi = tl.full((), 0.0, tl.float64)
        if tl.load(judged + IS_BLOCK) > 0:
            for back in range(num_before, 0, -1):
                earlier = tl.load(own - back * ROW_WORDS)
                _, _, drafted = _draft_q(earlier, sent, judged - back * JUDGED_WORDS, ENTRIES)
                log_pi = tl.minimum(log_pi + _log_ratio(p - back, drafted), 0.0)
        pi = tl.exp(log_pi)
        listed, count, drafted = _draft_q(tl.load(own), sent, judged, ENTRIES)
        acceptance = tl.exp(tl.minimum(log_pi + _log_ratio(p, drafted), 0.0))
        acceptance = tl.where(drafted > 0, acceptance, float("nan"))
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
        remains = pi * left / total
    tl.store(results + ACCEPTED * num_rows + at, acceptance)
    tl.store(results + LEFT * num_rows + at, remains)
    zero = tl.full((), 0, tl.uint32)
    keys = judged + KEYS
    a = tl.load(keys).to(tl.uint32)
    b = tl.load(keys + 1).to(tl.uint32)
    stream = tl.load(keys + 2).to(tl.uint32)
    seed = tl.load(keys + 3).to(tl.uint64) | (tl.load(keys + 4).to(tl.uint64) << 32)
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
    tl.store(results + DRAWN * num_rows + at, drawn.to(tl.float64))
