"""Engines of vLLM on tiny random models (`make test-vllm`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.replica.vllm_release import vllm_version
from tests.support.vllm_models import MAX_MODEL_LEN, MakeEngine, leave_groups


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.filterwarnings("default"))
        if vllm_version() is None:
            item.add_marker(pytest.mark.skip("vLLM is not installed: make test-vllm"))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    leave_groups()


@pytest.fixture
def make_engine() -> MakeEngine:
    from outrider.engine.vllm_engine import VllmEngine

    def make(path: Path, **changes: Any) -> VllmEngine:
        settings: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 2**24,
            "gpu_memory_utilization": 0.9,
            "num_gpus": None,
            "enforce_eager": True,
        }
        return VllmEngine(path, **settings | changes)

    return make
