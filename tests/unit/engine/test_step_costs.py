"""What a step costs, and how that is measured on an engine."""

from typing import Any

import pytest
import torch

from outrider.config.emulated_spec import EmulatedSpec
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.step_costs import measure_step_costs
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.step_costs import StepCosts

COSTS = StepCosts((1, 4, 8), (1.0, 1.6, 4.0), session_s=0.5, slot_s=0.01, row_slot_s=0.001)


def test_between_and_beyond_what_was_measured() -> None:
    rows = (1, 2, 4, 6, 8, 10)
    assert [COSTS.step_seconds(num) for num in rows] == pytest.approx([1, 1.2, 1.6, 2.8, 4.0, 5.2])
    one = StepCosts((4,), (2.0,))
    assert [one.step_seconds(num) for num in (2, 4, 6)] == [1.0, 2.0, 3.0]


def test_a_mixed_step_costs_what_its_parts_do() -> None:
    """One session reads 900 slots with each of 3 rows, another one reads 100 with one row."""
    attention_s = COSTS.attention_seconds(3, 900) + COSTS.attention_seconds(1, 100)
    assert COSTS.mixed_seconds(4, 2, attention_s) == pytest.approx(1.6 + 0.5 + 10 + 900 * 0.002)


def test_an_emulated_engine_is_believed() -> None:
    spec = EmulatedSpec(vocab_size=50, support=4, verify_ms=6.0, verify_tokens=16)
    engine = EmulatedEngine(spec, "target")
    costs = measure_step_costs(engine, 512, 64, lambda: 0.0)
    assert costs.rows == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert costs.seconds == pytest.approx([0.006] * 5 + [0.012, 0.024, 0.048, 0.096, 0.192])
    assert (costs.session_s, costs.slot_s, costs.row_slot_s) == (0, 0, 0)
    counts = engine.page_counts()
    assert counts.num_free + counts.num_evictable == counts.num_pages
    assert engine.stated_seconds == 0


class Clocked(EmulatedEngine):
    """An engine whose own clock advances by 1 ms a row, by 2 ms a further session, and by 10 us for
    each row and each slot that its session held."""

    now = 0.0

    def forward(self, steps: list[SequenceStep]) -> list[torch.Tensor]:  # type: ignore[override]
        rows = sum(len(step.token_ids) for step in steps)
        reads = sum(len(step.token_ids) * self.length(step.sequence_id) for step in steps)
        self.now += rows * 1e-3 + (len(steps) - 1) * 2e-3 + reads * 1e-5
        return super().forward(steps)


def test_rows_sessions_and_context_are_told_apart() -> None:
    engine = Clocked(EmulatedSpec(vocab_size=50, support=4, verify_ms=0.0), "target")
    costs = measure_step_costs(engine, 200, 64, lambda: engine.now, limit_s=1e9)
    assert costs.rows == (1, 2, 4, 8, 16, 32, 64, 128, 200)
    assert costs.seconds == pytest.approx([num * 1e-3 for num in costs.rows])
    parts = (costs.session_s, costs.slot_s, costs.row_slot_s)
    assert parts == pytest.approx((2e-3, 1e-5, 1e-5))


def test_a_slow_engine_is_not_measured_for_long() -> None:
    """After 0.1 s only the running step is finished."""
    engine = Clocked(EmulatedSpec(vocab_size=50, support=4, verify_ms=0.0), "target")
    costs = measure_step_costs(engine, 512, 64, lambda: engine.now, limit_s=0.1)
    assert costs.rows == (1, 2, 4, 8, 16, 32, 64)
    assert 0.1 < engine.now < 0.2


def test_what_a_device_compiles_and_records_first_is_neither_counted_nor_timed() -> None:
    """The first step of each shape takes 2 s, so two of them would use up the limit."""

    known: set[object] = set()

    class Compiling(Clocked):
        def forward(self, steps: list[SequenceStep]) -> list[Any]:  # type: ignore[override]
            shape = tuple((len(step.token_ids), self.length(step.sequence_id)) for step in steps)
            if shape not in known:
                known.add(shape)
                self.now += 2.0
            return [_OnDevice(logits) for logits in super().forward(steps)]

    engine = Compiling(EmulatedSpec(vocab_size=50, support=4, verify_ms=0.0), "target")
    costs = measure_step_costs(engine, 200, 64, lambda: engine.now)
    assert costs.rows == (1, 2, 4, 8, 16, 32, 64, 128, 200)
    assert costs.seconds == pytest.approx([num * 1e-3 for num in costs.rows])


class _OnDevice:
    """Logits that seem to be on a CUDA device."""

    device = torch.device("cuda", 0)

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._logits[rows]
