"""Targets and drafts answer only coordinators, which they recognise by certificate."""

import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from draft_service.actor import DraftActor
from outrider.config.deployment import DraftConfig, TargetConfig
from outrider.errors import SettingError, Unavailable
from outrider.interfaces.messages import VerifyItem
from outrider.registry.registry import ROLES, Role
from outrider.transport.channel import PLAIN, Trust
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.tls import caller_trust, internal_trust, make_authority, make_role, name_of
from target_service.actor import TargetActor
from tests.support.rounds import Listener, Replica, make_head
from tests.support.rpc_codes import code_of
from tests.support.toy_engine import ToyEngine

NOW = datetime.datetime.now(datetime.UTC)
NO_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""A call whose stream of requests is empty may end with CANCELLED."""


def make_all(directory: Path) -> Path:
    directory.mkdir()
    make_authority(directory, NOW)
    for role in ROLES:
        make_role(directory, role, NOW)
    return directory


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another authority, with the same names."""
    return make_all(tmp_path_factory.mktemp("tls") / "theirs")


@asynccontextmanager
async def hosted(role: Role, directory: Path) -> AsyncIterator[str]:
    """The address of a replica that is served as its actor serves it."""
    host: Any = TargetActor() if role == "target" else DraftActor()
    config = TargetConfig if role == "target" else DraftConfig
    service = Replica(role, ToyEngine()).service
    try:
        yield await host.serve(service, config(internal_tls_dir=str(directory)))
    finally:
        await host.stop(1.0)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_only_a_coordinator_is_answered(role: Role, ours: Path, theirs: Path) -> None:
    codec = VERIFY if role == "target" else DRAFT
    methods = [codec.path(method.name) for method in codec.service.methods]
    methods += [f"/{health.SERVICE_NAME}/{name}" for name in ("Check", "Watch")]
    certified = {peer: internal_trust(ours, peer, role) for peer in ROLES}
    nothing = {
        "no certificate": caller_trust(ours / "ca.pem", server_name=name_of(role)),
        "plain text": PLAIN,
        "another authority's": Trust(
            internal_trust(theirs, "coordinator", role).credentials, name_of(role)
        ),
        "theirs by our authority": caller_trust(
            ours / "ca.pem",
            theirs / "coordinator.pem",
            theirs / "coordinator-key.pem",
            name_of(role),
        ),
    }
    async with hosted(role, ours) as address:
        for path in methods:
            for what, trust in nothing.items():
                assert await code_of(address, trust, path) in NO_CONNECTION, (path, what)
            for peer, trust in certified.items():
                code = await code_of(address, trust, path)
                is_refused = code is grpc.StatusCode.PERMISSION_DENIED
                assert is_refused == (peer != "coordinator"), (path, peer, code)
                assert code not in NO_CONNECTION, (path, peer)
        path = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
        code = await code_of(address, certified["coordinator"], path)
        assert code is grpc.StatusCode.UNIMPLEMENTED


async def answers(address: str, trust: Trust) -> bool:
    link = GrpcLink(VERIFY, address, trust)
    try:
        await link.describe(5.0)
    except Unavailable:
        return False
    finally:
        await link.close()
    return True


async def test_a_coordinator_talks_to_no_one_else(ours: Path, theirs: Path) -> None:
    trust = internal_trust(ours, "coordinator", "target")
    for role, directory in (("draft", ours), ("target", theirs)):
        async with hosted(role, directory) as address:
            assert not await answers(address, trust)
    async with hosted("target", ours) as address:
        link = GrpcLink(VERIFY, address, trust)
        heard = Listener(link)
        assert (await link.describe(5.0)).max_model_len > 0
        link.send(VerifyItem(make_head((1, 2, 3), session=1)))
        await heard.wait(1)
        await link.close()
        assert not await answers(address, PLAIN)


async def test_a_replica_with_wrong_files_does_not_start(ours: Path, tmp_path: Path) -> None:
    wrong = make_all(tmp_path / "wrong")
    (wrong / "target-key.pem").write_bytes((ours / "target-key.pem").read_bytes())
    with pytest.raises(SettingError, match=r"target-key\.pem: is not the key") as caught:
        async with hosted("target", wrong):
            pass
    assert caught.value.key == "internal_tls_dir"


async def test_a_server_shows_a_new_certificate_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.foundation.files.KEY_FILE_CHECK_MS", 0)
    directory, other = make_all(tmp_path / "tls"), make_all(tmp_path / "other")
    before, after = (internal_trust(one, "coordinator", "target") for one in (directory, other))

    async with hosted("target", directory) as address:
        assert await answers(address, before)
        assert not await answers(address, after)
        (directory / "target.pem").write_bytes((other / "target.pem").read_bytes())
        assert await answers(address, before)
        for name in ("ca.pem", "target-key.pem"):
            (directory / name).write_bytes((other / name).read_bytes())
        assert await answers(address, after)
        assert not await answers(address, before)
