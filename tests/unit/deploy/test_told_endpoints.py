"""What `outrider serve` tells others of a deployment whose replicas come and go."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import recorded

from deploy.cli import connection
from deploy.cli.connection import Connection, connected
from deploy.cli.main import parse
from deploy.cli.serve import _keep_told
from deploy.cli.status import ask_registry
from deploy.fleet.local_state import (
    DeploymentRecord,
    publish,
    running_deployment,
    state_directory,
    withdraw,
)
from deploy.fleet.status import Endpoints
from outrider.client.grpc_transport import key_metadata
from outrider.config import load_config
from outrider.errors import Unavailable


async def test_the_record_is_true_while_replicas_come_and_go() -> None:
    """Each time that it is told that something has changed, and not before."""
    state = state_directory(os.environ)
    record = recorded.record()
    publish(state, record)
    changed = asyncio.Event()
    config = load_config({"draft_model": "ngram", "redis_url": "unix:///x"}, {})
    deployment: Any = SimpleNamespace(
        config=config, name="d", ray=SimpleNamespace(found="h:6379", token=None)
    )
    telling = asyncio.create_task(_keep_told(deployment, state, record, changed))

    async def tell(endpoints: Endpoints, wanted: dict[str, int]) -> DeploymentRecord | None:
        deployment.endpoints, deployment.overview = (
            endpoints,
            SimpleNamespace(wanted=wanted),
        )
        await asyncio.sleep(0.01)
        assert running_deployment(state) == before
        changed.set()
        await asyncio.sleep(0.01)
        return running_deployment(state)

    before: DeploymentRecord | None = record
    wanted = {"coordinator": 2, "target": 3, "draft": 0}
    endpoints = Endpoints(("h:1", "h:4"), ("h:5", "h:6"), (), ("h:8", "h:9"))
    found = before = await tell(endpoints, wanted)
    assert found is not None
    assert found.http_address == "h:8,h:9"
    assert (found.grpc_address, found.target_addresses) == ("h:1,h:4", ["h:5", "h:6"])
    assert (found.draft_addresses, found.wanted) == ([], wanted)
    assert (found.started_at, found.redis["url"]) == (record.started_at, "unix:///x")
    deployment.config = load_config({"draft_model": "suffix", "max_num_seqs": 7}, {})
    found = await tell(Endpoints(("h:1",), ("h:6",), ("h:7",)), {"draft": 1})
    assert found is not None
    assert (found.grpc_address, found.target_addresses) == ("h:1", ["h:6"])
    assert (found.draft_addresses, found.wanted) == (["h:7"], {"draft": 1})
    assert found.http_address == ""
    assert (found.draft_model, found.settings["max_num_seqs"]) == ("suffix", 7)
    telling.cancel()


async def test_status_asks_for_a_variable_of_its_own_where_no_file_has_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no process of Ray's, and has no flag for a password."""
    monkeypatch.delenv("OUTRIDER_REDIS_PASSWORD", raising=False)
    way = {"url": "redis://h:1", "key_prefix": "ours:", "asks_for_password": True}
    known, error = await ask_registry(recorded.record(redis=way), 5.0)
    host = socket.gethostname()
    assert (known, error) == (
        {},
        f"redis_password: is not known on {host}; set OUTRIDER_REDIS_PASSWORD for this command",
    )


async def test_commands_wait_while_no_coordinator_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As while the only one is replaced; no flag is blamed where none comes."""
    state, record = state_directory(os.environ), recorded.record()
    publish(state, replace(record, grpc_address=""))
    arguments = parse(["chat"])
    monkeypatch.setattr(connection, "COORDINATOR_WAIT_S", 0.5)
    with pytest.raises(
        Unavailable, match=r"^no coordinator has served for 0.5 s; see `outrider st"
    ):
        async with connected(arguments):
            pass
    monkeypatch.setattr(connection, "COORDINATOR_WAIT_S", 30.0)

    async def come() -> None:
        await asyncio.sleep(0.3)
        publish(state, record)

    coming = asyncio.create_task(come())
    async with connected(arguments) as found, found.client() as client:
        assert (found.address, client.address) == ("h:1", "h:1")
    await coming
    assert "no coordinator serves at the moment: waiting for one\n" in capsys.readouterr().err


async def test_commands_ask_the_record_where_coordinators_are_by_now() -> None:
    """As of one that takes another's place on another port."""
    state, record = state_directory(os.environ), recorded.record()
    publish(state, record)
    async with connected(parse(["chat"])) as known:
        assert known.find is not None
        publish(state, replace(record, grpc_address="h:9"))
        async with known.client() as client:
            assert client.address == known.find() == "h:9"
        withdraw(state)
        assert known.find() == ""
    async with Connection("h:1", api_key="a-key").client(tries_again=False) as client:
        transport: Any = client._transport
        assert client.address == "h:1"
        assert transport._resume_timeout_s == 0
        assert transport._pool.begin()._metadata == key_metadata("a-key")
