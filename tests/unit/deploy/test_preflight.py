"""Ports that replicas on one machine count up to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from deploy.fleet.preflight import check_before_start, check_ports
from outrider.config import load_config
from outrider.errors import SettingError

EMULATED = {
    "engine": "emulated:vocab_size=100",
    "draft_model": "emulated",
    "grpc_port": 0,
    "port": 0,
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port in use behind two free ones, below those that the system gives to any program."""
    for port in range(20_002, 32_000, 3):
        try:
            for free in (port - 2, port - 1):
                socket.create_server(("127.0.0.1", free)).close()
            server = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with server:
            yield port
        return
    pytest.fail("no three ports in a row are free")


def test_every_port_that_a_role_counts_up_to_must_be_free(taken_port: int) -> None:
    settings = {"target_port": taken_port - 2, "num_targets": 2}
    check_ports(load_config(EMULATED | settings, {}))
    with pytest.raises(SettingError, match=f"cannot listen on 127.0.0.1:{taken_port}") as bad:
        check_ports(load_config(EMULATED | settings | {"num_targets": 3}, {}))
    assert bad.value.key == "target_port"


def test_a_host_of_another_machine_is_blamed_in_the_ports_place() -> None:
    settings = {"host": "192.0.2.1", "insecure": True, "target_port": 47001}
    with pytest.raises(SettingError, match=r"cannot listen on 192\.0\.2\.1:47002: ") as bad:
        check_ports(load_config(EMULATED | settings | {"grpc_port": 47002}, {}))
    assert bad.value.key == "host"
    assert "another port" not in bad.value.reason


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        (
            {"target_port": 47001, "num_targets": 2, "draft_port": 47002},
            "draft_port",
            "target_port",
        ),
        ({"target_port": 47001, "draft_port": 47001}, "draft_port", "a port of target_port, too"),
        ({"grpc_port": 65_535, "num_coordinators": 2}, "grpc_port", "no ports for 2"),
        ({"grpc_port": 47001, "port": 47002, "num_coordinators": 2}, "port", "a port of grpc_port"),
    ],
)
def test_roles_count_up_to_ports_of_their_own(
    settings: dict[str, object], key: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=reason) as bad:
        check_before_start(load_config(EMULATED | settings, {}))
    assert bad.value.key == key


def test_any_free_port_is_everybodys() -> None:
    config = load_config(EMULATED | {"num_targets": 3, "num_drafts": 2}, {})
    check_before_start(config)
    check_ports(config)


def test_what_is_no_emulated_engine_is_refused() -> None:
    with pytest.raises(SettingError, match="emulated: unknown key 'size'") as bad:
        check_before_start(load_config(EMULATED | {"engine": "emulated:size=10"}, {}))
    assert bad.value.key == "engine"
