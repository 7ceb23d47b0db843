"""An engine whose steps are read from tables and recorded, against the model's own forward pass: on
a CUDA device with its kernel and its graphs, on a CPU with what stands in for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import tiny_config, tiny_module, twin
from paged_engines import VOCAB, EngineMaker, checked_engines, dense, gap, ids, run
from recorded_work import CountingRecorder, attend_by_tables, backend_on

from outrider.engine.cuda import backend, cuda_runner
from outrider.engine.cuda.backend import (
    RECORDED_BYTES_MAX,
    DeviceBackend,
    Recording,
    StepRequest,
)
from outrider.engine.interface import SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import SettingError

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2",
)  # fmt: skip
CLOSE = 2e-3
"""Of logits of about 10 in float32."""
TREE = (-1, 0, 0, 1, 2, -1, 5, 4)
PAGE_BYTES = 2 * 2 * 8 * 16 * 2 * 4
"""Of a tiny Llama in float32: keys and values, heads, width, slots, layers, bytes."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    with checked_engines() as maker:
        yield maker


def tiny(family: str, device: str, max_model_len: int = 128) -> Any:
    return tiny_module(tiny_config(family, VOCAB, max_model_len)).to(device)


def engine_on(device: str, make_engine: EngineMaker, module: Any, **options: Any) -> PagedEngine:
    """An engine whose trial has shown that its steps are accelerated."""
    backend = backend_on(device, torch.float32)
    engine = make_engine(module, backend=backend, **options)
    assert engine._backend is backend
    return engine


def on_cpu(
    make_engine: EngineMaker, module: Any, recorder: Any, **options: Any
) -> tuple[PagedEngine, Any]:
    """An engine with this recorder, and the library's own."""
    library = twin(module)
    backend = DeviceBackend(attend_by_tables, 8, lambda: recorder)
    return make_engine(module, backend=backend, **options), library


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_modules_own_forward(family: str, device: str, make_engine: EngineMaker) -> None:
    """Whatever the steps' sizes, each alone and beside another sequence."""
    module = tiny(family, device)
    library = twin(module)
    engine = engine_on(device, make_engine, module)
    expected = [dense(library, ids(40, seed)) for seed in (1, 2)]
    found: list[list[torch.Tensor]] = [[], []]
    start = 0
    for size in (13, 1, 4, 1, 9, 12):
        steps = [SequenceStep(str(i), ids(40, i + 1)[start : start + size], size) for i in range(2)]
        both = engine.forward(steps) if size != 4 else [engine.forward([s])[0] for s in steps]
        for own, rows in zip(found, both, strict=True):
            own.append(rows)
        start += size
    for own, rows in zip(found, expected, strict=True):
        assert gap(torch.cat(own), rows) <= CLOSE


def test_a_tree_and_a_rollback(device: str, make_engine: EngineMaker) -> None:
    """Beside a chain: rows of its paths, and the path that is kept goes on."""
    module = tiny("mistral", device)
    library = twin(module)
    engine = engine_on(device, make_engine, module)
    prefix, tokens, path = ids(21), ids(8, 2), (0, 2, 4, 7)
    run(engine, "tree", prefix, 1)
    run(engine, "chain", prefix, 1)
    both = engine.forward([SequenceStep("chain", tokens, 8), SequenceStep("tree", tokens, 8, TREE)])
    assert gap(both[0], dense(library, prefix + tokens)[21:]) <= CLOSE
    chosen = tuple(tokens[i] for i in path)
    assert gap(both[1][list(path)], dense(library, prefix + chosen)[21:]) <= CLOSE
    engine.keep("tree", 21, [21 + i for i in path])
    engine.keep("chain", 20)
    rows = engine.forward([SequenceStep(name, ids(3, 5), 3) for name in ("tree", "chain")])
    assert gap(rows[0], dense(library, prefix + chosen + ids(3, 5))[-3:]) <= CLOSE
    assert gap(rows[1], dense(library, prefix[:20] + ids(3, 5))[-3:]) <= CLOSE


def test_like_steps_share_a_recording(make_engine: EngineMaker) -> None:
    """Steps of other sequences, lengths and tokens replay what is there; a tree and a long prefix
    are run as they are."""
    recorder = CountingRecorder()
    engine, _ = on_cpu(make_engine, tiny("llama", "cpu", 600), recorder, max_model_len=600)
    before = recorder.num_recorded
    for num in (5, 6, 8, 7):
        engine.forward([SequenceStep(f"of {num}", ids(num), num)])
    assert recorder.num_recorded - before == 1
    for num in (3, 4):
        engine.forward([SequenceStep(str(i), (i,), 1) for i in range(num)])
    assert recorder.num_recorded - before == 2
    replayed = recorder.num_replayed
    run(engine, "tree", ids(8), 8, TREE)
    run(engine, "long", ids(cuda_runner.RECORDED_ROWS_MAX + 1), 1)
    assert (recorder.num_recorded - before, recorder.num_replayed) == (2, replayed)


def test_padding_writes_to_a_page_of_nobody(make_engine: EngineMaker) -> None:
    """A step of five rows is run as eight; what stands on pages that no sequence holds stays."""
    recorder = CountingRecorder()
    engine, library = on_cpu(make_engine, tiny("llama", "cpu"), recorder)
    for layer in engine._caches:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    rows = run(engine, "a", ids(5), 5)
    assert recorder.num_replayed > 0
    assert gap(rows, dense(library, ids(5))) <= CLOSE
    (page,) = engine._pool.pages("a")
    size, num_pages = engine._pool._page_size, engine.page_counts().num_pages
    written = ~engine._caches[0].keys.isnan().any(dim=2).any(dim=0)
    slots = set(written.nonzero()[:, 0].tolist())
    assert slots == {*range(page * size, page * size + 5), num_pages * size}


class _Refusing(CountingRecorder):
    """Records nothing while it has a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: Exception | None = None
        self.num_asked = 0

    def record(self, work: StepRequest) -> Recording:
        self.num_asked += 1
        if self.reason is not None:
            work()
            raise self.reason
        return super().record(work)


NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("reason", "num_asked"),
    [(NOT_PERMITTED, 1), (torch.OutOfMemoryError("none left"), 2)],
)
def test_what_cannot_be_recorded_is_run(
    reason: Exception, num_asked: int, make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """A module whose first step cannot be captured answers as it would, and is asked and
    complained of once; where memory is short, once for each shape."""
    recorder = _Refusing()
    engine, library = on_cpu(make_engine, tiny("llama", "cpu"), recorder)
    recorder.reason, recorder.num_asked = reason, 0
    with caplog.at_level(logging.WARNING):
        for num in (6, 10, 7):
            rows = run(engine, f"of {num}", ids(num), num)
            assert gap(rows, dense(library, ids(num))) <= CLOSE
    complaints = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert recorder.num_asked == len(complaints) == num_asked
    assert not engine.records_steps


def test_the_recording_that_is_out_of_use_is_dropped(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = CountingRecorder()
    engine, _ = on_cpu(make_engine, tiny("llama", "cpu"), recorder)
    monkeypatch.setattr(backend, "RECORDINGS_MAX", 2)
    recorded = []
    for index, num in enumerate((2, 4, 2, 8, 2, 4)):
        before = recorder.num_recorded
        run(engine, str(index), ids(num), num)
        recorded.append(recorder.num_recorded - before)
    assert recorded == [1, 1, 0, 1, 0, 1]


def test_recordings_are_bounded_in_memory(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the bound steps of other shapes are run as they come."""
    recorder = CountingRecorder()
    engine, library = on_cpu(make_engine, tiny("llama", "cpu"), recorder)
    run(engine, "a", ids(2), 2)
    before = recorder.num_recorded
    monkeypatch.setattr(recorder, "num_bytes", lambda: RECORDED_BYTES_MAX)
    for num in (2, 5):
        rows = run(engine, f"of {num}", ids(num), num)
        assert gap(rows, dense(library, ids(num))) <= CLOSE
    assert recorder.num_recorded == before


def test_the_page_for_padding_is_part_of_the_memory(make_engine: EngineMaker) -> None:
    module = tiny("llama", "cpu")
    with pytest.raises(SettingError, match=f"1 for padding; one takes {PAGE_BYTES}"):
        on_cpu(make_engine, module, CountingRecorder(), num_bytes=2 * PAGE_BYTES - 1)
    engine, _ = on_cpu(
        make_engine, tiny("llama", "cpu"), CountingRecorder(), num_bytes=4 * PAGE_BYTES
    )
    assert (engine.page_counts().num_pages, engine.info.max_model_len) == (3, 48)


def test_where_the_trial_fails_steps_are_not_accelerated(
    make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that cannot be compiled, or that is wrong, costs speed and nothing else."""

    def broken(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    def wrong(*arguments: Any) -> torch.Tensor:
        return attend_by_tables(*arguments) * 2

    for attention in (broken, wrong):
        caplog.clear()
        module = tiny("llama", "cpu")
        library = twin(module)
        backend = DeviceBackend(attention, 8, CountingRecorder)
        engine = make_engine(module, backend=backend)
        assert "its steps are not accelerated" in caplog.text
        assert gap(run(engine, "a", ids(9), 9), dense(library, ids(9))) <= CLOSE


@pytest.mark.parametrize("form", ["64 tokens in a block", "4 splits", "16 splits", "trees"])
def test_a_form_of_the_kernel_that_does_not_run_is_found_at_start(
    form: str, make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that no step of the trial has: else a step that is served would fail with it."""

    def attend(*arguments: Any) -> torch.Tensor:
        step = arguments[2]
        forms = {
            f"{step.size.block_tokens} tokens in a block",
            f"{step.size.num_splits} splits",
            "trees" if step.ancestors is not None else "",
        }
        if form in forms:
            raise RuntimeError("out of resource: shared memory")
        return attend_by_tables(*arguments)

    module = tiny("gpt2", "cpu")
    library = twin(module)
    engine = make_engine(module, backend=DeviceBackend(attend, 8, CountingRecorder))
    assert "its steps are not accelerated" in caplog.text
    assert gap(run(engine, "a", ids(9), 9), dense(library, ids(9))) <= CLOSE
