"""What docs/operations.md names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from deploy.cli.main import COMMANDS
from outrider.config import deployment_settings
from tests.manifests.settings_schema import CHART

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text("utf-8")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


def test_values_of_the_chart_are_real() -> None:
    """Each `a.b` in the text that begins like a value is one."""
    named = {
        name
        for name in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)`", TEXT)
        if name.split(".")[0] in VALUES
    }
    assert len(named) > 15
    for name in named:
        found: Any = VALUES
        for part in name.split("."):
            assert part in found, name
            found = found[part]


def test_settings_and_commands_are_real() -> None:
    """What looks like a setting of a deployment is one, and so are commands."""
    ours = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", TEXT) if "outrider" not in name}
    ours = {name for name in ours if not name.startswith("http_")}  # Labels of metrics.
    not_settings = {"error_type", "_wire_", "_queue_", "_verify_", "_commit_"}
    assert "max_sessions" in ours
    for name in ours - not_settings:
        assert name in deployment_settings(), name
    for name in re.findall(r"outrider ([a-z]+) ", TEXT):
        assert name in COMMANDS, name
