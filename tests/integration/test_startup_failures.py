"""Start-ups that cannot succeed: they end in time, say why, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.fleet.launcher import Deployment
from outrider.config import load_config
from outrider.errors import ConfigError

pytestmark = pytest.mark.xdist_group("deployment")


def _children(pid: int) -> set[int]:
    """All living descendants of a process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(path.parent.name)
            found |= {child} | _children(child)
    return found


async def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A directory without a model ends the start-up, with nothing left running."""
    before = _children(os.getpid())
    config = load_config({"model": str(tmp_path), "grpc_port": 0, "port": 0}, {})
    with pytest.raises(ConfigError, match=r"config\.json"):
        await Deployment(config, tmp_path / "state").start()
    assert _children(os.getpid()) <= before
