"""Where a deployment of this machine keeps secrets, and what its processes are not told."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._common.utils import try_to_create_directory

from deploy.fleet.ray_connection import RayConnection, _without_secrets
from deploy.fleet.security_setup import SecretFiles
from outrider.errors import SettingError


def test_secrets_are_their_owners_alone_and_go_with_the_deployment(tmp_path: Path) -> None:
    place = tmp_path / "state" / "secrets"
    secrets = SecretFiles(place)
    path = secrets.hide("one", "first")
    assert secrets.hide("two", "second").read_text() == "second"
    assert path.read_text() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert SecretFiles(place).hide("two", "of another start").read_text() == "of another start"
    assert not path.exists()
    secrets.forget()
    assert not place.exists()


def test_other_users_do_not_enter_the_directory_of_a_local_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself opens the one that it is told to use to all users."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    told: list[Path] = []

    def init(_temp_dir: str, **_: Any) -> None:
        try_to_create_directory(_temp_dir)
        told.append(Path(_temp_dir))
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    connection = RayConnection("", "outrider-test", SecretFiles(tmp_path / "secrets"))
    with pytest.raises(SettingError):
        asyncio.run(connection.connect())
    [ours] = told[0].relative_to("/tmp").parts[:1]
    assert stat.S_IMODE(Path("/tmp", ours).stat().st_mode) == 0o700
    asyncio.run(connection.disconnect())
    assert not Path("/tmp", ours).exists()


def test_what_is_started_has_no_variables_with_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_REDIS_PASSWORD", "planted")
    monkeypatch.setenv("OUTRIDER_API_KEY", "planted")
    monkeypatch.setenv("OUTRIDER_REDIS_USERNAME", "me")
    with _without_secrets():
        assert "planted" not in os.environ.values()
        assert os.environ["OUTRIDER_REDIS_USERNAME"] == "me"
    names = ("OUTRIDER_REDIS_PASSWORD", "OUTRIDER_API_KEY")
    assert {os.environ[name] for name in names} == {"planted"}
