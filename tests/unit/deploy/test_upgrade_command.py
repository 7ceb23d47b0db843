"""What `outrider upgrade` asks of a deployment, what it refuses by itself, and how it waits. One
that is really upgraded is in `tests/integration`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from asked_here import Connections, deployed_here

from deploy.cli.main import main
from deploy.fleet.status import Overview
from outrider.config import load_config
from outrider.errors import ConfigError, Unavailable

GIVEN = {
    "engine": "emulated:vocab_size=10", "draft_model": "emulated", "deployment_name": "d",
    "address": "head:1", "redis_url": "redis://h", "api_key": "sha256:" + "0" * 64,
}  # fmt: skip


class Fleet:
    """What a reconciler does for the command, and what it was asked."""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []
        self.names: set[str] = set()
        self.num_stale = [2, 1, 0]
        """How many replicas are still to be replaced, one look after the other."""
        self.refusal: ConfigError | None = None
        self.given = load_config(GIVEN, {})
        self.failures: tuple[str, ...] = ()
        self.num_unanswered = 0
        """Changes that are heard, and then it dies."""

    async def spec(self) -> Any:
        return SimpleNamespace(given=self.given)

    async def change(self, name: str, values: dict[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.names.add(name)
        self.changes.append(values)
        if self.num_unanswered:
            self.num_unanswered -= 1
            raise Unavailable("the reconciler actor died")

    async def overview(self, seen: str) -> Any:
        now = self.num_stale[0] if len(self.num_stale) == 1 else self.num_stale.pop(0)
        return Overview("v", {"target": now}, (), None, upgrades=True, failures=self.failures)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def ray(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Connections:
    answers = {one: getattr(fleet, one) for one in ("spec", "change", "overview")}
    return deployed_here(monkeypatch, answers)


def test_what_is_another_setting_is_asked_for_and_nothing_else(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    words = ["--max-num-seqs", "7", "--draft-model", "emulated", "--wait", "60"]
    assert main(["upgrade", *words, "--json"]) == 0
    assert fleet.changes == [{"max_num_seqs": 7}]
    assert json.loads(capsys.readouterr().out) == {
        "changes": {"max_num_seqs": 7}, "replicas_to_replace": 0
    }  # fmt: skip
    assert main(["upgrade", "--draft-model", "emulated"]) == 0
    assert capsys.readouterr().out == "nothing changes\n"
    assert (len(fleet.changes), ray.num_open) == (1, 0)


def test_without_a_wait_what_is_left_is_told(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    assert main(["upgrade", "--max-num-seqs", "7"]) == 0
    assert capsys.readouterr().out == "max_num_seqs: replicas still to be replaced: 2\n"
    fleet.num_stale = [1]
    assert main(["upgrade", "--max-num-seqs", "7", "--wait", "0.1"]) == 1
    assert "not done after 0.1 s: see `outrider status`" in capsys.readouterr().err
    fleet.failures = ("target-2 did not start: no memory",)
    assert main(["upgrade", "--max-num-seqs", "7", "--wait", "0.1"]) == 1
    assert "not done after 0.1 s: target-2 did not start: no memory" in capsys.readouterr().err


def test_ports_of_two_roles_stay_apart(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    """On one machine. In a cluster replicas are on several, and each has all ports."""
    same = ["--target-port", "47001", "--draft-port", "47001"]
    assert main(["upgrade", *same]) == 0
    fleet.given = load_config({k: v for k, v in GIVEN.items() if k != "address"}, {})
    fleet.changes.clear()
    assert main(["upgrade", *same]) == 2
    assert "--draft-port: 47001 is a port of target_port, too" in capsys.readouterr().err
    assert not fleet.changes


def test_an_upgrade_that_runs_already_is_waited_for(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    """The same command again changes nothing, and tells of the upgrade that the first began."""
    again = ["upgrade", "--draft-model", "emulated"]
    assert main([*again, "--wait", "60"]) == 0
    assert capsys.readouterr().out == "the upgrade that runs already: done\n"
    fleet.num_stale = [1]
    assert main(again) == 0
    told = "the upgrade that runs already: replicas still to be replaced: 1\n"
    assert capsys.readouterr().out == told
    assert main([*again, "--wait", "0.1"]) == 1
    assert fleet.changes == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-targets", "3"), "--num-targets: cannot be another one while a deployment runs"),
        (("--address", "other:1"), "--address: cannot be another one while a deployment runs"),
        (("--internal-tls-dir", "tls"), "--internal-tls-dir: cannot be turned on or off"),
        (
            ("--api-key", "k" * 20),
            "--api-key: cannot change while a deployment runs: a deployment k",
        ),
        (("--redis-url", "redis://other"), "--redis-url: cannot change while a deployment runs"),
        (("--redis-password", "p"), "--redis-password: cannot change while a deployment runs"),
        (("--redis-sentinel-password", "p"), "--redis-sentinel-password: cannot change while"),
        (("--ngram-min", "5", "--ngram-max", "4"), "--ngram-min: "),
        (("--wait", "-1"), "--wait: -1.0 is wrong"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked_for(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections,
    words: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    assert main(["upgrade", *words]) == 2
    assert said in capsys.readouterr().err
    assert fleet.changes == []


def test_what_the_reconciler_refuses_is_told(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    fleet.refusal = ConfigError("engine: has another vocabulary")
    assert main(["upgrade", "--engine", "emulated:vocab_size=9"]) == 2
    assert "engine: has another vocabulary" in capsys.readouterr().err


def test_where_a_deployment_is_elsewhere_its_address_is_no_change(
    fleet: Fleet, ray: Connections
) -> None:
    """It may have another one from here."""
    words = ["--address", "far:2", "--deployment-name", "there", "--max-num-seqs", "7"]
    fleet_of = load_config(GIVEN | {"deployment_name": "there"}, {})
    fleet.given = fleet_of
    assert main(["upgrade", *words]) == 0
    assert ray.opened == [("far:2", "outrider-there")]
    assert fleet.changes == [{"max_num_seqs": 7}]


def test_the_name_that_a_deployment_made_for_itself_is_no_change(
    fleet: Fleet, ray: Connections
) -> None:
    """Its settings have none."""
    fleet.given = load_config({**GIVEN, "deployment_name": ""}, {})
    assert main(["upgrade", "--deployment-name", "d", "--max-num-seqs", "7"]) == 0
    assert fleet.changes == [{"max_num_seqs": 7}]


def test_a_change_that_is_asked_for_again_has_its_name(fleet: Fleet, ray: Connections) -> None:
    """So that a reconciler that had heard it does not make it twice."""
    fleet.num_unanswered = 2
    assert main(["upgrade", "--max-num-seqs", "7"]) == 0
    assert (len(fleet.changes), len(fleet.names)) == (3, 1)
