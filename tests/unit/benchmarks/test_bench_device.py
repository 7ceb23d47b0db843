"""`bench device` on a CPU: what it reports, what it refuses, and what it does without."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from recorded_work import CountingRecorder, attend_by_tables

from benchmarks import device
from benchmarks.device import measure, random_llama
from benchmarks.options import DeviceOptions
from outrider.engine.cuda.backend import DeviceBackend

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

OPTIONS = DeviceOptions(context_tokens=20, num_draft_tokens=3, repetitions=2)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "VERDICT_SESSIONS", (1, 2))


def report_of(backend: DeviceBackend | None) -> Any:
    module, info = random_llama(CPU, torch.float32, "tiny", **SIZES)
    return measure(module, info, OPTIONS, backend, lambda _: None).values


def test_without_graphs() -> None:
    """What is not done is null; the ideal is the weights that a step reads, at the copy's speed."""
    values = report_of(None)
    assert values["graphs_on"] is None
    layer = 32 * (32 + 16 + 16 + 32 + 3 * 48) + 2 * 32
    assert values["weight_bytes"] == 4 * (2 * layer + 32 + 64 * 32)
    assert (values["device"], values["dtype"], values["context_tokens"]) == ("cpu", "float32", 20)
    assert all(values["graphs_off"][key] > 0 for key in ("decode_step_ms", "verify_step_ms"))
    for rule in ("token", "block", "coupled", "greedy"):
        assert set(values["verdict_ms"][rule]) == {"1", "2"}


def test_with_recorded_steps() -> None:
    """Replayed for every figure; steps that cannot be recorded are not shown as such."""
    recorder = CountingRecorder()
    values = report_of(DeviceBackend(attend_by_tables, 8, lambda: recorder))
    ratio = values["graphs_on"]["decode_step_ms"] / values["ideal_step_ms"]
    assert values["graphs_on"]["decode_over_ideal"] == pytest.approx(ratio)
    # Of decoding, verifying, all steps of a draft; and of the trial.
    assert recorder.num_replayed >= 7 * (1 + 1 + 1)
    recorder.num_bytes = lambda: 2**40  # type: ignore[method-assign]
    assert report_of(DeviceBackend(attend_by_tables, 8, lambda: recorder))["graphs_on"] is None


def test_it_does_without_services() -> None:
    """A machine with a device may have nothing but the tensor libraries."""
    code = (
        "import sys, benchmarks.device; "
        "print({'ray', 'grpc', 'redis', 'rich', 'gguf', 'google'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
