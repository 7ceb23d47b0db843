"""Where a deployment of this machine keeps secrets, and what its processes are not told."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deploy.ray_connection import _without_secrets
from deploy.secrets import Secrets


def test_secrets_are_their_owners_alone_and_go_with_the_deployment(tmp_path: Path) -> None:
    place = tmp_path / "state" / "secrets"
    secrets = Secrets(place)
    path = secrets.hide("one", "first")
    assert secrets.hide("two", "second").read_text() == "second"
    assert path.read_text() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert Secrets(place).hide("two", "of another start").read_text() == "of another start"
    assert not path.exists()
    secrets.forget()
    assert not place.exists()


def test_what_is_started_has_no_variables_with_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_REDIS_PASSWORD", "planted")
    monkeypatch.setenv("OUTRIDER_API_KEY", "planted")
    monkeypatch.setenv("OUTRIDER_REDIS_USERNAME", "me")
    with _without_secrets():
        assert "planted" not in os.environ.values()
        assert os.environ["OUTRIDER_REDIS_USERNAME"] == "me"
    names = ("OUTRIDER_REDIS_PASSWORD", "OUTRIDER_API_KEY")
    assert {os.environ[name] for name in names} == {"planted"}
