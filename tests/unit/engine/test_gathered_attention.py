"""A step's plan and the attention that reads it, against one token after another by definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine import batch, gathered_attention
from outrider.engine.attention import LayerPages
from outrider.engine.batch import HeldSequence, StepPlan, padded_rows, plan_step
from outrider.engine.gathered_attention import attend
from outrider.engine.interface import SequenceStep
from outrider.kv_cache.storage import KeysAndValues, LayerShape

CPU = torch.device("cpu")
NUM_PAGES = 64


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[HeldSequence], int]:
    """Sequences on shuffled pages of one pool, some with trees, and the size of a page."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    free = list(np.random.default_rng(draw(st.integers(0, 2**32))).permutation(NUM_PAGES))
    held: list[HeldSequence] = []
    for index in range(draw(st.integers(1, 5))):
        num, length = draw(st.integers(1, 7)), draw(st.integers(0, 20))
        num_pages = -(-(length + num) // page_size)
        if num_pages > len(free):
            continue
        pages = [int(free.pop()) for _ in range(num_pages)]
        tree = draw(st.booleans())
        parents = tuple(draw(st.integers(-1, i - 1)) for i in range(num)) if tree else ()
        tokens = tuple(range(num))
        step = SequenceStep(str(index), tokens, draw(st.integers(0, num)), parents)
        held.append(HeldSequence(step, length, pages))
    return held, page_size


def seen(held: HeldSequence, index: int) -> tuple[list[int], int]:
    """The slots of its sequence that a new token looks at if there is no window, itself last, and
    its depth."""
    path = [index]
    parents = held.step.parents or tuple(range(-1, len(held.step.token_ids) - 1))
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return [*range(held.length), *(held.length + i for i in path)], len(path) - 1


def by_definition(
    query: torch.Tensor, cache: KeysAndValues, sequences: list[HeldSequence], page_size: int,
    window: int | None, scaling: float, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """[1, T, query heads, value width]; query [1, query heads, T, key width]."""
    outputs = []
    row = 0
    shared = query.shape[1] // cache.keys.shape[0]
    for held in sequences:
        for index in range(len(held.step.token_ids)):
            slots = seen(held, index)[0]
            slots = slots if window is None else slots[-window:]
            places = [held.pages[s // page_size] * page_size + s % page_size for s in slots]
            keys = cache.keys[:, places].repeat_interleave(shared, 0)
            values = cache.values[:, places].repeat_interleave(shared, 0)
            scores = (keys @ query[0, :, row, :, None])[..., 0] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            outputs.append((scores.softmax(-1)[:, None] @ values)[:, 0])
            row += 1
    return torch.stack(outputs)[None]


def filled_cache(num_slots: int, generator: torch.Generator) -> KeysAndValues:
    cache = KeysAndValues(LayerShape(2, 5, 3, torch.float64, CPU), num_slots)
    for tensor in (cache.keys, cache.values):
        tensor.normal_(generator=generator)
    return cache


def compare(
    sequences: list[HeldSequence],
    page_size: int,
    window: int | None,
    softcap: float | None,
    fixed_shapes: bool = False,
) -> StepPlan:
    plan = plan_step(sequences, (window,), page_size, CPU, torch.float64, fixed_shapes)
    generator = torch.Generator().manual_seed(0)
    cache = filled_cache(NUM_PAGES * page_size, generator)
    used = {s for held in sequences for s in all_slots(held, page_size)}
    unused = [slot for slot in range(NUM_PAGES * page_size) if slot not in used]
    # What stands in slots of nobody must not matter, even if it is no number.
    cache.keys[:, unused] = cache.values[:, unused] = math.nan
    num_tokens = plan.token_ids.shape[1]
    query = torch.randn((1, 4, num_tokens, 5), dtype=torch.float64, generator=generator)
    actual = attend(query, LayerPages(cache, window, 0.7, softcap), plan.groups[window])
    expected = by_definition(query, cache, sequences, page_size, window, 0.7, softcap)
    assert actual.shape[1] == num_tokens
    actual, padding = actual.split_with_sizes(
        (expected.shape[1], num_tokens - expected.shape[1]), dim=1
    )
    assert not padding.any()
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < 1e-12
    return plan


def all_slots(held: HeldSequence, page_size: int) -> list[int]:
    num = held.length + len(held.step.token_ids)
    return [held.pages[s // page_size] * page_size + s % page_size for s in range(num)]


@given(steps(), st.sampled_from([None, 1, 2, 6, 40]), st.sampled_from([None, 1.5]))
@settings(max_examples=150)
def test_every_token_sees_what_it_should(
    drawn: tuple[list[HeldSequence], int], window: int | None, softcap: float | None
) -> None:
    """Chains and trees, on any pages, under any window, alone and together: attention is the
    definition's, and slots, positions and wanted rows are those of each token."""
    sequences, page_size = drawn
    if not sequences:
        return
    plan = compare(sequences, page_size, window, softcap)
    slots, positions, rows, row = [], [], [], 0
    for held in sequences:
        num = len(held.step.token_ids)
        slots += all_slots(held, page_size)[held.length :]
        positions += [held.length + seen(held, index)[1] for index in range(num)]
        rows += range(row + num - held.step.num_logits, row + num)
        row += num
    assert plan.slots.tolist() == slots
    assert plan.position_ids.tolist() == [positions]
    assert plan.logit_rows.tolist() == rows


@given(steps(), st.sampled_from([None, 1, 2, 6, 40]), st.sampled_from([None, 1.5]))
@settings(max_examples=150)
def test_so_it_does_in_fixed_shapes(
    drawn: tuple[list[HeldSequence], int], window: int | None, softcap: float | None
) -> None:
    """The same in splits of 4 slots; every size is one of few."""
    sequences, page_size = drawn
    if not sequences:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT_SLOTS", 4)
        patch.setattr(gathered_attention, "SPLIT_SLOTS", 4)
        plan = compare(sequences, page_size, window, softcap, fixed_shapes=True)
    num_tokens = sum(len(held.step.token_ids) for held in sequences)
    num_rows = sum(held.step.num_logits for held in sequences)
    sizes = (plan.token_ids, plan.position_ids, plan.logit_rows[None], plan.slots[None])
    assert [len(size[0]) for size in sizes] == [
        padded_rows(num_tokens), padded_rows(num_tokens), padded_rows(num_rows), num_tokens,
    ]  # fmt: skip
    for group in plan.groups[window]:
        assert group.num_tokens in (4, 8)
        assert group.slots.numel() % (4 * group.num_segments) == 0


@pytest.mark.parametrize("window", [None, 10])
def test_a_long_prompt_is_cut(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments see what they should, and none has more scores than allowed."""
    monkeypatch.setattr(batch, "_SEGMENT_TOKENS_MIN", 4)
    monkeypatch.setattr(batch, "_SCORES_MAX", 400)
    step = SequenceStep("a", tuple(range(50)), 1)
    other = SequenceStep("b", (1, 2), 1)
    sequences = [HeldSequence(step, 13, list(range(4, 8))), HeldSequence(other, 0, [20])]
    plan = compare(sequences, 16, window, None)
    groups = plan.groups[window]
    assert len(groups) > 2
    for group in groups:
        assert group.slots.shape[0] * group.num_tokens <= 400


def test_like_sequences_share_a_group() -> None:
    """16 sequences of like length are one batch; one twice as long is not padded to."""
    sequences = [HeldSequence(SequenceStep(str(i), (1,), 1), 10 + i % 3, [i]) for i in range(16)]
    (group,) = plan_step(sequences, (None,), 16, CPU, torch.float64).groups[None]
    assert (group.num_segments, group.rows) == (16, slice(0, 16))
    sequences.append(HeldSequence(SequenceStep("long", (1,), 1), 40, [20, 21, 22]))
    groups = plan_step(sequences, (None,), 16, CPU, torch.float64).groups[None]
    assert [group.num_segments for group in groups] == [1, 16]


@pytest.mark.parametrize("window", [None, 37])
def test_what_comes_later_does_not_change_a_tokens_sums(window: int | None) -> None:
    """A token before four others has bit for bit what it has behind them, wherever the sequence
    ends. Both are in products of as many rows, of which a kernel may make what it likes."""
    generator = torch.Generator().manual_seed(0)
    cache = KeysAndValues(LayerShape(2, 16, 16, torch.bfloat16, CPU), 256)
    for tensor in (cache.keys, cache.values):
        tensor.normal_(generator=generator)
    for length in range(60, 120):
        query = torch.randn((1, 4, 5, 16), generator=generator).bfloat16()
        outputs = []
        for place in (0, 4):
            held = length - place
            pages = list(range(-(-(held + 5) // 16)))
            sequence = HeldSequence(SequenceStep("a", tuple(range(5)), 1), held, pages)
            (group,) = plan_step([sequence], (window,), 16, CPU, torch.bfloat16).groups[window]
            moved = query.roll(place, 2)  # The first of them stands there.
            outputs.append(attend(moved, LayerPages(cache, window, 0.25), [group])[:, place])
        assert torch.equal(*outputs), length


def test_siblings_stand_whole_units_behind() -> None:
    """So each token of a path is in the lane of a vector in which a chain would have it, and sums
    of a path are those of a chain bit for bit."""
    held = HeldSequence(SequenceStep("a", tuple(range(5)), 5, (-1, -1, 0, 0, 1)), 20, [0, 1])
    (group,) = plan_step([held], (None,), 16, CPU, torch.float64).groups[None]
    places = {20: 20, 21: 20 + 16, 22: 21, 23: 21 + 16, 24: 21 + 32}
    slots = group.slots.tolist()
    assert slots == [*range(21), 22, *[0] * 14, 21, 23, *[0] * 15, 24, *[0] * 10]
    assert group.bias is not None
    seen = [[i for i, b in enumerate(row) if b == 0] for row in group.bias[0, 0]]
    paths = ((20,), (21,), (20, 22), (20, 23), (21, 24))
    assert seen == [[*range(20), *(places[slot] for slot in path)] for path in paths]
