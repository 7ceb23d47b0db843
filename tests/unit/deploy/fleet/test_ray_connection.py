"""Whether a Ray cluster elsewhere asks for a token; a real one is in `tests/integration`."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from ray._common.utils import try_to_create_directory

from deploy.fleet.ray_connection import (
    MODE,
    PATH,
    TOKEN,
    RayConnection,
    SecretFiles,
    check_asks_for_token,
)
from outrider.errors import SettingError

REFUSED, DOWN = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


class Head(grpc.GenericRpcHandler):
    """Answers every call, or none."""

    def __init__(self, code: grpc.StatusCode | None) -> None:
        self.code = code

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            assert not [key for key, _ in context.invocation_metadata() if key == "authorization"]
            if self.code is not None:
                context.abort(self.code, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a head that ends calls so."""
    server = grpc.server(ThreadPoolExecutor(1), [Head(request.param)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    ("address", "said"),
    [(REFUSED, ""), (None, "runs code for whoever reaches it"), (DOWN, r"not known \(UNAVAILABLE")],
    indirect=["address"],
)
def test_only_a_head_that_refuses_strangers_is_taken(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever proxy this machine's other calls go through. One with TLS asks for certificates."""
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with pytest.raises(SettingError, match=f"address: .*{said}") if said else nullcontext():
        check_asks_for_token(address)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_asks_for_token(address)


def test_the_users_own_token_is_theirs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as a cluster is left; also one that was not reached."""
    own = {MODE: "token", TOKEN: "own"}
    found: list[dict[str, str]] = []

    def variables() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if name.startswith("RAY_AUTH")}

    def init(**_: Any) -> None:
        found.append(variables())
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv(PATH, raising=False)
    for name, text in own.items():
        monkeypatch.setenv(name, text)
    connection = RayConnection("head:1", "outrider-test", token=tmp_path)
    with pytest.raises(SettingError):
        asyncio.run(connection.connect())
    asyncio.run(connection.disconnect())
    assert [*found, variables()] == [{MODE: "token", PATH: str(tmp_path)}, own]


def test_secrets_are_their_owners_alone_and_go_with_the_deployment(tmp_path: Path) -> None:
    place = tmp_path / "state" / "secrets"
    secrets = SecretFiles(place)
    path = secrets.hide("one", "first")
    assert path.read_text() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
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
