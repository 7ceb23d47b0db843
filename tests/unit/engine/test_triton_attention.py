"""The attention kernel over a step's tables, compared with the attention of gathered slots: on a
CUDA device, or in the interpreter of the kernel's compiler, if installed."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is defined
pytest.importorskip("triton", reason="the compiler of the attention kernel is not installed")

from outrider.engine.batch import HeldSequence, HeldStep, plan_step  # noqa: E402
from outrider.engine.cuda.table_steps import TableStep, attend_tables, kernel_form  # noqa: E402
from outrider.engine.gathered_attention import attend  # noqa: E402
from outrider.interfaces.engine import SequenceStep  # noqa: E402
from outrider.kv_cache.attention import LayerPages  # noqa: E402
from outrider.kv_cache.storage import KeysAndValues  # noqa: E402

DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
PAGE_SIZE = 4
NUM_PAGES = 96
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Rounding of the dtype, for values of about 1."""


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as integers and multiplies these. Here it multiplies the
    values, exactly, as a device does."""
    if ON_CUDA:
        return
    from triton import language
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), language.float32)

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain(builder, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def sequences(*shapes: tuple[int, int]) -> list[HeldSequence]:
    """(slots held, new tokens) of each, on shuffled pages."""
    free = [int(page) for page in np.random.default_rng(1).permutation(NUM_PAGES)]
    held = []
    for index, (length, num) in enumerate(shapes):
        pages = [free.pop() for _ in range(-(-(length + num) // PAGE_SIZE))]
        held.append(HeldSequence(SequenceStep(str(index), (1,) * num, num), length, pages))
    return held


def difference(
    held: list[HeldSequence],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int = 1,
) -> float:
    """The largest difference between the kernel's output and the attention of gathered slots in
    float64. Slots of no sequence hold NaN."""
    num_heads, key_heads = heads
    num_rows = sum(len(each.step.token_ids) for each in held)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((1, num_rows, num_heads, widths[0]), generator=generator).to(dtype)
    query = query.transpose(1, 2).to(DEVICE)  # as modules hand it over
    sizes = ((key_heads, NUM_PAGES * PAGE_SIZE, width) for width in widths)
    cache = KeysAndValues(
        *(torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)
    )
    used = {
        each.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE
        for each in held
        for slot in range(each.length + len(each.step.token_ids))
    }
    unused = [slot for slot in range(NUM_PAGES * PAGE_SIZE) if slot not in used]
    cache.keys[:, unused] = cache.values[:, unused] = math.nan

    form = kernel_form(held, num_heads // key_heads, key_heads, num_programs=1)
    step = HeldStep(held, PAGE_SIZE)
    tables = TableStep.of(step, replace(form, num_splits=num_splits), DEVICE)
    actual = attend_tables(query, LayerPages(cache, window, 0.3, softcap), tables)

    exact = KeysAndValues(cache.keys.double(), cache.values.double())
    plan = plan_step(step, (window,), DEVICE, torch.float64)
    expected = attend(query.double(), LayerPages(exact, window, 0.3, softcap), plan.groups[window])
    assert actual.shape == expected.shape
    assert actual.dtype == dtype
    return (actual.double() - expected).abs().max().item()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (5, 1)])
def test_every_row_sees_its_context(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    held = sequences((0, 21), (70, 5), (33, 1), (0, 1))
    assert difference(held, dtype=dtype, heads=heads) <= TOLERANCES[dtype]


@pytest.mark.parametrize("window", [None, 1, 6, 70])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_windows_caps_and_splits(
    window: int | None, softcap: float | None, num_splits: int
) -> None:
    held = sequences((75, 8), (3, 20), (90, 1))
    found = difference(held, window=window, softcap=softcap, num_splits=num_splits)
    assert found <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("widths", [(5, 3), (64, 64), (80, 80), (160, 32)])
def test_any_width_of_a_head(widths: tuple[int, int]) -> None:
    assert difference(sequences((20, 3), (0, 9)), widths=widths) <= 2e-5


@pytest.mark.parametrize("num_splits", [4, 16])
def test_a_long_context_in_splits(num_splits: int) -> None:
    held = sequences((300, 1))
    assert difference(held, num_splits=num_splits) <= TOLERANCES[torch.float32]


def test_the_trial_compiles_every_form_that_steps_need() -> None:
    """Otherwise a request would wait for the compiler. The test has a process of its own, since
    kernels have no forms under the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).parents[2] / "support" / "triton_forms.py"
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr + ran.stdout
