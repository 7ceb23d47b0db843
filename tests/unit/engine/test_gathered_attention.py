"""A step's plan and the attention that reads it, compared with the definition, token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine import batch, gathered_attention
from outrider.engine.batch import HeldSequence, HeldStep, StepPlan, padded_rows, plan_step
from outrider.engine.gathered_attention import attend
from outrider.interfaces.engine import SequenceStep
from outrider.kv_cache.attention import LayerPages
from outrider.kv_cache.storage import KeysAndValues

CPU = torch.device("cpu")
NUM_PAGES = 64


@st.composite
def steps(draw: st.DrawFn) -> HeldStep:
    """Sequences on shuffled pages of one pool."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    free = list(np.random.default_rng(draw(st.integers(0, 2**32))).permutation(NUM_PAGES))
    held: list[HeldSequence] = []
    for index in range(draw(st.integers(1, 5))):
        num, length = draw(st.integers(1, 7)), draw(st.integers(0, 20))
        num_pages = -(-(length + num) // page_size)
        if num_pages > len(free):
            continue
        pages = [int(free.pop()) for _ in range(num_pages)]
        step = SequenceStep(str(index), tuple(range(num)), draw(st.integers(0, num)))
        held.append(HeldSequence(step, length, pages))
    return HeldStep(held, page_size)


def by_definition(
    query: torch.Tensor,
    cache: KeysAndValues,
    step: HeldStep,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """[1, T, query heads, value width]; query [1, query heads, T, key width]."""
    outputs = []
    row = 0
    shared = query.shape[1] // cache.keys.shape[0]
    for held in step.sequences:
        own = all_slots(held, step.page_size)
        for index in range(len(held.step.token_ids)):
            end = held.length + index + 1
            places = own[0 if window is None else max(0, end - window) : end]
            keys = cache.keys[:, places].repeat_interleave(shared, 0)
            values = cache.values[:, places].repeat_interleave(shared, 0)
            scores = (keys @ query[0, :, row, :, None])[..., 0] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            outputs.append((scores.softmax(-1)[:, None] @ values)[:, 0])
            row += 1
    return torch.stack(outputs)[None]


def compare(
    step: HeldStep, window: int | None, softcap: float | None, fixed_shapes: bool = False
) -> StepPlan:
    plan = plan_step(step, (window,), CPU, torch.float64, fixed_shapes)
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, NUM_PAGES * step.page_size, width) for width in (5, 3))
    cache = KeysAndValues(
        *(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    )
    used = {s for held in step.sequences for s in all_slots(held, step.page_size)}
    unused = [slot for slot in range(NUM_PAGES * step.page_size) if slot not in used]
    # What is in slots that no sequence holds must not matter, not even NaN.
    cache.keys[:, unused] = cache.values[:, unused] = math.nan
    num_tokens = plan.token_ids.shape[1]
    query = torch.randn((1, 4, num_tokens, 5), dtype=torch.float64, generator=generator)
    actual = attend(query, LayerPages(cache, window, 0.7, softcap), plan.groups[window])
    expected = by_definition(query, cache, step, window, 0.7, softcap)
    assert actual.shape[1] == num_tokens
    actual, padding = actual.tensor_split((expected.shape[1],), dim=1)
    assert not padding.any()
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < 1e-12
    return plan


def all_slots(held: HeldSequence, page_size: int) -> list[int]:
    num = held.length + len(held.step.token_ids)
    return [held.pages[s // page_size] * page_size + s % page_size for s in range(num)]


@given(
    steps(),
    st.sampled_from([None, 1, 2, 6, 40]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.sampled_from([8, batch._SCORES_MAX]),
)
@settings(max_examples=250)
def test_every_token_sees_what_it_should(
    step: HeldStep, window: int | None, softcap: float | None, fixed_shapes: bool, scores_max: int
) -> None:
    """Sequences lie on any pages, under any window. Attention equals the definition, and slots and
    positions are those of each token. Splits have 4 slots, and with few scores, segments have 2
    tokens."""
    if not step.sequences:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT_SLOTS", 4)
        patch.setattr(batch, "_SCORES_MAX", scores_max)
        patch.setattr(batch, "_SEGMENT_TOKENS_MIN", 2)
        patch.setattr(gathered_attention, "SPLIT_SLOTS", 4)
        plan = compare(step, window, softcap, fixed_shapes)
    slots, positions, num_rows = [], [], 0
    for held in step.sequences:
        num = len(held.step.token_ids)
        slots += all_slots(held, step.page_size)[held.length :]
        positions += range(held.length, held.length + num)
        num_rows += held.step.num_logits
    assert plan.slots.tolist() == slots
    assert plan.position_ids[0, : len(slots)].tolist() == positions
    if fixed_shapes:
        assert plan.token_ids.shape[1] == padded_rows(len(slots))
        assert len(plan.logit_rows) == padded_rows(num_rows)
        for group in plan.groups[window]:
            assert group.num_tokens in (4, 8)
            assert group.slots.numel() % (4 * group.num_segments) == 0


@pytest.mark.parametrize("window", [None, 10])
def test_a_long_prompt_is_cut(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_SEGMENT_TOKENS_MIN", 4)
    monkeypatch.setattr(batch, "_SCORES_MAX", 400)
    prompt, other = SequenceStep("a", tuple(range(50)), 1), SequenceStep("b", (1, 2), 1)
    sequences = [HeldSequence(prompt, 13, list(range(4, 8))), HeldSequence(other, 0, [20])]
    groups = compare(HeldStep(sequences, 16), window, None).groups[window]
    assert len(groups) > 2
    for group in groups:
        assert group.slots.shape[0] * group.num_tokens <= 400
