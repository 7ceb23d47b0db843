"""What is left of a device for pages, where steps are recorded and where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import save_tiny_model
from recorded_work import CountingRecorder, attend_by_tables

from outrider.config import TargetConfig
from outrider.engine.cuda import backend as acceleration
from outrider.engine.cuda.backend import RECORDED_BYTES_MAX, DeviceBackend
from outrider.kv_cache import storage as kv_cache
from outrider.replica.process_setup import build_engine


@pytest.mark.parametrize(
    ("deterministic", "expected"), [(False, RECORDED_BYTES_MAX), (True, 0)], ids=["recorded", "not"]
)
def test_memory_for_recordings_is_left_where_steps_are_recorded(
    deterministic: bool, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def budget(*arguments: Any) -> int:
        left.append(arguments[3])
        return 2**22

    found = DeviceBackend(attend_by_tables, 8, CountingRecorder)
    monkeypatch.setattr(acceleration, "find_acceleration", lambda *_, **__: found)
    monkeypatch.setattr(kv_cache, "memory_budget", budget)
    directory = str(save_tiny_model(tmp_path))
    config = TargetConfig(
        directory=directory, device="cpu", num_threads=1, deterministic=deterministic
    )
    build_engine(config, "target", 1)
    assert left == [expected]
