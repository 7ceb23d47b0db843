"""An engine whose steps are read from tables, compared with the model's own forward pass. On a CUDA
device it has its kernel, on a CPU a substitute."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.engine.cuda.table_steps import DeviceBackend, TableStep
from outrider.interfaces.engine import SequenceStep
from outrider.kv_cache.attention import LayerPages
from tests.support.cuda_substitutes import attend_by_tables, backend_on
from tests.support.models import tiny_config, tiny_module, twin
from tests.support.paged_engines import (
    FAMILIES,
    VOCAB,
    EngineMaker,
    checked_engines,
    dense,
    gap,
    ids,
    run,
)

CLOSE = 2e-3  # allowed difference in float32, for logits of about 10


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    with checked_engines() as maker:
        yield maker


def tiny(family: str, device: str) -> Any:
    return tiny_module(tiny_config(family, VOCAB)).to(device)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_modules_own_forward(family: str, device: str, make_engine: EngineMaker) -> None:
    module = tiny(family, device)
    library = twin(module)
    backend = backend_on(device, torch.float32)
    engine = make_engine(module, backend=backend)
    assert engine._backend is backend, "its self-check has accelerated its steps"
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


@pytest.mark.parametrize(
    "fault", ["all forms", "wrong rows", "64 tokens in a block", "4 splits", "16 splits"]
)
def test_where_the_self_check_fails_steps_are_not_accelerated(
    fault: str, make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that cannot be compiled, or gives wrong rows, only costs speed. This includes forms
    that no step of the self-check has; otherwise a served step would fail. The check calls the
    kernel in every layer, because other ranks may wait for the output of each layer."""
    layers = set()

    def attend(query: torch.Tensor, layer: LayerPages, step: TableStep) -> torch.Tensor:
        layers.add(id(layer))
        forms = {f"{step.form.block_tokens} tokens in a block", f"{step.form.num_splits} splits"}
        if fault in {"all forms", *forms}:
            raise RuntimeError("out of resource: shared memory")
        return attend_by_tables(query, layer, step) * (2 if fault == "wrong rows" else 1)

    module = tiny("gpt2", "cpu")
    library = twin(module)
    engine = make_engine(module, backend=DeviceBackend(attend, 8))
    assert "the fast kernels failed their self-check" in caplog.text
    assert gap(run(engine, "a", ids(9), 9), dense(library, ids(9))) <= CLOSE
    assert len(layers) == 2


def test_a_kernel_that_fails_on_another_rank_is_not_used(make_engine: EngineMaker) -> None:
    backend = DeviceBackend(attend_by_tables, 8)
    for least, is_used in ((int, True), (lambda number: 0 if number == 1 else number, False)):
        engine = make_engine(tiny("llama", "cpu"), backend=backend, least=least)
        assert (engine._backend is backend) == is_used
