"""The waits of `bench engine`, on a virtual clock whose steps take what their rows cost."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
from toy_engine import ToyEngine

from benchmarks.engine_load import Load, Prompts
from benchmarks.engine_waits import (
    LONG_TOKENS,
    OWN_TOKENS,
    PREFIX_TOKENS,
    RUNNING_SESSIONS,
    Waits,
    figure_rows,
    measure_waits,
)
from outrider.clock import run_virtually
from outrider.engine.step_costs import StepCosts
from outrider.messages import VerifyAnswer, VerifyItem
from outrider.replica.scheduler import InlineExecutor
from outrider.replica.token_budget import STEP_GROWTH_MAX
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

VOCAB_SIZE = 64
STEP_S, ROW_S = 0.010, 0.0002
COSTS = StepCosts((1, 512), (STEP_S + ROW_S, STEP_S + 512 * ROW_S))


def waits(max_model_len: int, costs: StepCosts | None) -> Waits:
    """Of a target whose steps last as `COSTS` says, and which knows `costs`."""
    engine = ToyEngine(VOCAB_SIZE, max_model_len=max_model_len, num_pages=8192)

    def step_seconds() -> float:
        """Of the last step; of one that ran nothing 0."""
        return COSTS.step_seconds(sum(engine.counts.pop())) if engine.counts else 0.0

    async def measure() -> Waits:
        executor = InlineExecutor(step_seconds)
        service = TargetService(engine, executor, max_num_seqs=16, costs=costs)
        link: MemoryLink[VerifyItem, VerifyAnswer] = MemoryLink(service)
        token_ids = random.Random(1).choices(range(VOCAB_SIZE), k=10_000)
        described = await link.describe(1.0)
        return await measure_waits(Load(link), Prompts(token_ids), described.max_model_len, 1)

    return run_virtually(measure())


def test_every_figure_is_what_the_steps_add_up_to() -> None:
    found = waits(max_model_len=8192, costs=COSTS)
    first_s = 2 * STEP_S + (PREFIX_TOKENS + OWN_TOKENS) * ROW_S
    second_s = STEP_S + OWN_TOKENS * ROW_S
    assert found.prefix_first_token_ms == pytest.approx(1e3 * first_s)
    assert found.prefix_second_first_token_ms == pytest.approx(1e3 * second_s)
    assert found.prefix_ratio == pytest.approx(second_s / first_s)
    assert found.gap_median_ms == pytest.approx(1e3 * (STEP_S + RUNNING_SESSIONS * ROW_S))


def test_a_target_that_knows_its_costs_keeps_gaps_short_and_reads_the_prompt() -> None:
    found = waits(max_model_len=8192, costs=COSTS)
    assert found.gap_ratio is not None
    assert found.long_first_token_ms is not None
    assert found.long_alone_first_token_ms is not None
    assert found.gap_p99_beside_ms == pytest.approx(found.gap_ratio * (found.gap_median_ms or 0))
    assert 0.9 * STEP_GROWTH_MAX < found.gap_ratio <= STEP_GROWTH_MAX * 1.01
    assert found.long_alone_first_token_ms >= 1e3 * (8 * STEP_S + LONG_TOKENS * ROW_S)
    assert found.long_first_token_ms < 2.2 * found.long_alone_first_token_ms


def test_a_target_that_does_not_is_found_out() -> None:
    """Without costs a step is full: 512 tokens of the prompt beside the running sessions."""
    found = waits(max_model_len=8192, costs=None)
    assert found.gap_ratio == pytest.approx((STEP_S + 512 * ROW_S) / (STEP_S + 8 * ROW_S))


def test_a_target_whose_costs_were_measured_wrong_learns_from_its_steps() -> None:
    """It thinks that rounds over a context last twice as long as they do."""
    wrong = replace(COSTS, slot_s=5e-6)
    found = waits(max_model_len=8192, costs=wrong)
    assert found.gap_ratio is not None
    assert found.gap_ratio < 1.2 * STEP_GROWTH_MAX


@pytest.mark.parametrize(
    ("max_model_len", "num_known"),
    [(PREFIX_TOKENS + OWN_TOKENS, 0), (LONG_TOKENS, 3), (LONG_TOKENS + 1, 8)],
)
def test_what_a_model_is_too_short_for_is_left_out(max_model_len: int, num_known: int) -> None:
    found = waits(max_model_len, COSTS)
    known = [field for field in fields(found) if getattr(found, field.name) is not None]
    assert len(known) == num_known
    rows = figure_rows(found)
    assert [figure for _, figure in rows].count("the model is too short") == 8 - num_known
