"""`bench device` on a CPU."""

from typing import Any

import pytest
import torch

from outrider.bench import device
from outrider.bench.device import measure, random_llama
from outrider.bench.options import DeviceOptions
from outrider.engine.cuda.table_steps import DeviceBackend
from tests.support.cuda_substitutes import attend_by_tables

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "VERDICT_SESSIONS", (1, 2))
    monkeypatch.setattr(device, "REPETITIONS", 2)
    monkeypatch.setattr(device, "COPY_S", 0.01)


@pytest.mark.parametrize("backend", [None, DeviceBackend(attend_by_tables, 8)])
def test_what_is_reported(backend: DeviceBackend | None) -> None:
    """An ideal step reads the weights at the speed of a copy."""
    options = DeviceOptions(context_tokens=20, num_draft_tokens=3)
    module, info = random_llama(torch.device("cpu"), torch.float32, "tiny", **SIZES)
    values: Any = measure(module, info, options, backend, lambda _: None).values
    layer = 32 * (32 + 16 + 16 + 32 + 3 * 48) + 2 * 32
    assert values["weight_bytes"] == 4 * (2 * layer + 32 + 64 * 32)
    assert (values["device"], values["dtype"], values["context_tokens"]) == ("cpu", "float32", 20)
    assert all(values[key] > 0 for key in ("verify_step_ms", "draft_steps_ms"))
    ratio = values["decode_step_ms"] / values["ideal_step_ms"]
    assert values["decode_over_ideal"] == pytest.approx(ratio)
    assert ratio > 0
    for rule in ("token", "block", "coupled", "greedy"):
        assert set(values["verdict_ms"][rule]) == {"1", "2"}
