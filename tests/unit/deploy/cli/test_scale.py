"""What `outrider scale`, `autoscale` and `upgrade` ask of a deployment, what they refuse, and how
they wait. One that is really changed is in `tests/integration`."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import RAY, record, run_here

from deploy.cli.main import main
from deploy.cli.scale import parsed_bounds, parsed_counts
from deploy.fleet.local_state import publish, state_directory
from deploy.fleet.ray_connection import new_token
from deploy.fleet.status import Overview, ReplicaView
from outrider.config import AutoscalePolicy as Policy
from outrider.config import load_config
from outrider.errors import ConfigError, Unavailable
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role
from outrider.replica.process_setup import Place

Answers = Mapping[str, Callable[..., Awaitable[Any]]]


class Connections:
    """Where commands have connected."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        """Address and namespace of each ..."""
        self.tokens: list[str | None] = []
        """... and the file of the token that was shown."""
        self.num_open = 0
        self.num_lost = 0
        """Calls from now on that a reconciler answers only with its death."""


def answer(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Connections:
    """From now on a reconciler gives these answers, by method, wherever commands look for one."""
    seen = Connections()

    class Connection:
        def __init__(self, address: str, namespace: str) -> None:
            seen.opened.append((address, namespace))

        async def connect(self) -> None:
            seen.num_open += 1
            seen.tokens.append(os.environ.get("RAY_AUTH_TOKEN_PATH"))

        async def disconnect(self) -> None:
            seen.num_open -= 1

    class Reconciler:
        async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
            if seen.num_lost:
                seen.num_lost -= 1
                raise Unavailable("the reconciler actor died")
            return await answers[method](*arguments)

    async def find(namespace: str) -> Any:
        return Reconciler() if answers else None

    monkeypatch.setattr("deploy.fleet.reconciler.RayConnection", Connection)
    monkeypatch.setattr("deploy.fleet.reconciler.find_reconciler", find)
    monkeypatch.setattr("deploy.fleet.reconciler.RETRY_PERIOD_S", 0.01)
    return seen


def deployed_here(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Connections:
    """The same, of the deployment that runs on this machine."""
    run_here(state_directory(os.environ), record())
    return answer(monkeypatch, answers)


class Fleet:
    """What a reconciler does for the command, and what it was asked."""

    def __init__(self) -> None:
        self.wants: list[dict[Role, int]] = []
        self.policy = Policy()
        self.refusal: ConfigError | None = None
        self.seen: list[dict[Role, int]] = [dict.fromkeys(ROLES, 1)]
        """How many serve, one look after the other; the last one stays."""
        self.num_leaving = 0
        """Of each role, beside them."""

    async def want(self, counts: dict[Role, int]) -> Policy:
        if self.refusal is not None:
            raise self.refusal
        self.wants.append(counts)
        return self.policy

    async def overview(self, seen: str) -> Overview:
        counts = self.seen[0] if len(self.seen) == 1 else self.seen.pop(0)
        views = tuple(
            ReplicaView(f"{role}-{index}", role, "h:1", index >= count, False, (Place(1, "h"),))
            for role, count in counts.items() for index in range(count + self.num_leaving)
        )  # fmt: skip
        return Overview("v", dict.fromkeys(ROLES, 1), views, None)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def ray(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Connections:
    """Of a deployment that runs here."""
    return deployed_here(monkeypatch, {"want": fleet.want, "overview": fleet.overview})


def test_counts_are_read() -> None:
    assert parsed_counts(["draft=4", "target=1", "coordinator=2"]) == {
        "draft": 4, "target": 1, "coordinator": 2
    }  # fmt: skip
    assert parsed_counts(["draft=0"]) == {"draft": 0}
    assert parsed_counts([f"target={REPLICAS_MAX}"]) == {"target": REPLICAS_MAX}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("drafts=4",), "drafts=4: is wrong; it must be ROLE=N, and ROLE coordinator, target or"),
        (("=4",), "=4: is wrong"),
        (("draft=1", "draft=2"), "draft=2: draft is given twice"),
        (("draft",), "draft: is wrong; it must be ROLE=N"),
        (("draft=",), "it must be 0 to"),
        (("draft=-1",), "draft=-1: '-1' is wrong"),
        (("draft=1.5",), "'1.5' is wrong"),
        (("draft=²",), "'²' is wrong"),
        (("draft=٣",), "'٣' is wrong"),
        (("draft=1=2",), "'1=2' is wrong"),
        (("target=0",), "target=0: '0' is wrong; it must be 1 to 1024"),
        (("coordinator=0",), "it must be 1 to 1024"),
        (("draft=1025",), "'1025' is wrong"),
    ],
)
def test_wrong_counts_are_named(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed_counts(words)
    assert said in str(caught.value)


def test_a_wrong_count_or_wait_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    for words, said in (
        (["target=0"], "error: target=0: '0' is wrong"),
        (["draft=1", "--wait", "-1"], "error: --wait: -1.0 is wrong; it must be from 0 to 86400"),
        (["draft=1", "--wait", "nan"], "error: --wait: nan is wrong"),
        (["draft=1", "--wait", "1e6"], "error: --wait: 1000000.0 is wrong"),
    ):
        assert main(["scale", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert err.count("\n") == 1
    assert (fleet.wants, ray.opened) == ([], [])


def test_where_nothing_runs_there_is_nothing_to_scale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a deployment was killed and has left its record."""
    ray = answer(monkeypatch, {})
    assert main(["scale", "draft=2"]) == 1
    assert capsys.readouterr().err.startswith("outrider: error: nothing runs here; `outrider serve")
    publish(state_directory(os.environ), record())
    assert main(["scale", "draft=2"]) == 1
    assert "nothing runs" in capsys.readouterr().err
    assert ray.opened == []
    assert main(["scale", "draft=2", "--address", "far:1", "--deployment-name", "there"]) == 1
    assert "no deployment of this name runs on the Ray cluster" in capsys.readouterr().err
    assert (ray.opened, ray.num_open) == ([("far:1", "outrider-there")], 0)


def test_what_is_wanted_is_said_to_the_reconciler_and_printed(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    """The roles that are not named stay as they were."""
    assert main(["scale", "draft=3", "target=2"]) == 0
    assert (ray.opened, ray.num_open) == ([(RAY, "outrider-d")], 0)
    assert fleet.wants == [{"draft": 3, "target": 2}]
    assert capsys.readouterr().out == "wanted: coordinator=1, target=2, draft=3\n"
    assert main(["scale", "coordinator=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "wanted": {"coordinator": 2, "target": 1, "draft": 1}
    }


def test_settings_name_a_deployment_elsewhere(
    fleet: Fleet, ray: Connections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one runs here, unless they name that. The token of the one here is not shown to
    another cluster."""
    theirs = "theirs"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", theirs)
    token = tmp_path / "ray.token"
    token.write_text(new_token())
    run_here(state_directory(os.environ), record(ray_token=str(token)))
    file = tmp_path / "outrider.yaml"
    file.write_text("address: far:1\ndeployment_name: there\nengine: 'emulated:vocab_size=7'\n")
    assert main(["scale", "draft=3", "--config", str(file)]) == 0
    assert main(["scale", "draft=3", "--deployment-name", "d"]) == 0
    assert ray.tokens == [theirs, str(token)]
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == theirs
    assert ray.opened == [("far:1", "outrider-there"), (RAY, "outrider-d")]


def test_a_reconciler_that_has_died_is_asked_again(fleet: Fleet, ray: Connections) -> None:
    ray.num_lost = 2
    assert main(["scale", "draft=3"]) == 0
    assert fleet.wants == [{"draft": 3}]


def test_what_the_reconciler_refuses_is_told(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    fleet.refusal = ConfigError("draft=2: with draft_model medusa:heads the target drafts")
    assert main(["scale", "draft=2"]) == 2
    assert "draft=2: with draft_model medusa:heads the target drafts" in capsys.readouterr().err


def test_who_scales_what_is_autoscaled_is_told_so(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    fleet.policy = Policy(bounds={"target": (1, 3)})
    assert main(["scale", "draft=3", "target=2"]) == 0
    out, err = capsys.readouterr()
    assert out == "wanted: coordinator=1, target=2, draft=3\n"
    assert err.startswith("note: target is autoscaled, 1 to 3, ")
    assert err.count("\n") == 1


def test_the_wait_ends_as_soon_as_there_are_as_many(fleet: Fleet, ray: Connections) -> None:
    """Those that are to be left are not counted."""
    fleet.num_leaving = 1
    fleet.seen = [{"draft": 1, "target": 1}, {"draft": 2, "target": 2}, {"draft": 3, "target": 2}]
    assert main(["scale", "draft=3", "target=2", "--wait", "60"]) == 0
    assert fleet.seen == [{"draft": 3, "target": 2}]


def test_a_wait_that_was_too_short_is_told(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, ray: Connections
) -> None:
    """After what was wanted, which still is."""
    assert main(["scale", "target=2", "--wait", "0.1"]) == 1
    out, err = capsys.readouterr()
    assert out == "wanted: coordinator=1, target=2, draft=1\n"
    assert "not there after 0.1 s: see `outrider status`" in err


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """Of a deployment that runs, the last of which holds."""
    held = [Policy(calm_s=7.0)]

    async def bound(changes: dict[Role, tuple[int, int] | None]) -> Policy:
        bounds = {**held[-1].bounds, **changes}
        bounds = {role: pair for role, pair in bounds.items() if pair is not None}
        held.append(replace(held[-1], bounds=bounds))
        return held[-1]

    deployed_here(monkeypatch, {"bound": bound})
    return held


def test_bounds_are_told_role_by_role(
    policies: list[Policy], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autoscale", "target=1:4", "draft=0:2"]) == 0
    assert capsys.readouterr().out == "coordinator: off\ntarget: 1 to 4\ndraft: 0 to 2\n"
    assert main(["autoscale", "draft=off", "--json"]) == 0
    assert policies[-1] == Policy(bounds={"target": (1, 4)}, calm_s=7.0)
    assert Policy.from_json(capsys.readouterr().out) == policies[-1]
    assert main(["autoscale"]) == 0
    assert capsys.readouterr().out == "coordinator: off\ntarget: 1 to 4\ndraft: off\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target=0:2"], "target=0:2: it must be within 1:1024, or off"),
        (["draft=2"], "draft=2: it must be LEAST:MOST, the lesser first, or off"),
        (["draft=3:2"], "it must be LEAST:MOST"),
        (["nobody=1:2"], "it must be ROLE=LEAST:MOST, and ROLE coordinator, target or draft"),
        (["draft=1:2", "draft=off"], "draft is given twice"),
    ],
)
def test_wrong_bounds_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed_bounds(words)
    assert said in str(caught.value)


def test_settings_are_the_policy_at_first() -> None:
    config = load_config({"autoscale_targets": "2:5", "autoscale_calm_s": 9}, {})
    assert config.autoscale.policy == Policy(bounds={"target": (2, 5)}, calm_s=9.0)
    with pytest.raises(ConfigError, match=r"autoscale_drafts.*it must be LEAST:MOST"):
        load_config({"autoscale_drafts": "many"}, {})


GIVEN = {
    "engine": "emulated:vocab_size=10", "draft_model": "emulated", "deployment_name": "d",
    "address": "head:1", "redis_url": "redis://h", "api_key": "sha256:" + "0" * 64,
}  # fmt: skip


class Upgrades:
    """What a reconciler does for the command, and what it was asked."""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []
        self.num_stale = [2, 1, 0]
        """How many replicas are still to be replaced, one look after the other."""
        self.refusal: ConfigError | None = None
        self.given = load_config(GIVEN, {})
        self.failures: tuple[str, ...] = ()

    async def spec(self) -> Any:
        return SimpleNamespace(given=self.given)

    async def change(self, values: dict[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.changes.append(values)

    async def overview(self, seen: str) -> Any:
        now = self.num_stale[0] if len(self.num_stale) == 1 else self.num_stale.pop(0)
        return Overview("v", {"target": now}, (), None, upgrades=True, failures=self.failures)


@pytest.fixture
def upgrades() -> Upgrades:
    return Upgrades()


@pytest.fixture
def asked(upgrades: Upgrades, monkeypatch: pytest.MonkeyPatch) -> Connections:
    answers = {one: getattr(upgrades, one) for one in ("spec", "change", "overview")}
    return deployed_here(monkeypatch, answers)


def test_what_is_another_setting_is_asked_for_and_nothing_else(
    capsys: pytest.CaptureFixture[str], upgrades: Upgrades, asked: Connections
) -> None:
    words = ["--max-num-seqs", "7", "--draft-model", "emulated", "--wait", "60"]
    assert main(["upgrade", *words, "--json"]) == 0
    assert upgrades.changes == [{"max_num_seqs": 7}]
    assert json.loads(capsys.readouterr().out) == {
        "changes": {"max_num_seqs": 7}, "replicas_to_replace": 0
    }  # fmt: skip
    assert main(["upgrade", "--draft-model", "emulated"]) == 0
    assert capsys.readouterr().out == "nothing changes\n"
    assert (len(upgrades.changes), asked.num_open) == (1, 0)


def test_without_a_wait_what_is_left_is_told(
    capsys: pytest.CaptureFixture[str], upgrades: Upgrades, asked: Connections
) -> None:
    assert main(["upgrade", "--max-num-seqs", "7"]) == 0
    assert capsys.readouterr().out == "max_num_seqs: replicas still to be replaced: 2\n"
    upgrades.num_stale = [1]
    assert main(["upgrade", "--max-num-seqs", "7", "--wait", "0.1"]) == 1
    assert "not done after 0.1 s: see `outrider status`" in capsys.readouterr().err
    upgrades.failures = ("target-2 did not start: no memory",)
    assert main(["upgrade", "--max-num-seqs", "7", "--wait", "0.1"]) == 1
    assert "not done after 0.1 s: target-2 did not start: no memory" in capsys.readouterr().err


def test_ports_of_two_roles_stay_apart(
    capsys: pytest.CaptureFixture[str], upgrades: Upgrades, asked: Connections
) -> None:
    """On one machine. In a cluster replicas are on several, and each has all ports."""
    same = ["--target-port", "47001", "--draft-port", "47001"]
    assert main(["upgrade", *same]) == 0
    upgrades.given = load_config({k: v for k, v in GIVEN.items() if k != "address"}, {})
    upgrades.changes.clear()
    assert main(["upgrade", *same]) == 2
    assert "--draft-port: 47001 is a port of target_port, too" in capsys.readouterr().err
    assert not upgrades.changes


def test_an_upgrade_that_runs_already_is_waited_for(
    capsys: pytest.CaptureFixture[str], upgrades: Upgrades, asked: Connections
) -> None:
    """The same command again changes nothing, and tells of the upgrade that the first began."""
    again = ["upgrade", "--draft-model", "emulated"]
    assert main([*again, "--wait", "60"]) == 0
    assert capsys.readouterr().out == "the upgrade that runs already: done\n"
    upgrades.num_stale = [1]
    assert main(again) == 0
    told = "the upgrade that runs already: replicas still to be replaced: 1\n"
    assert capsys.readouterr().out == told
    assert main([*again, "--wait", "0.1"]) == 1
    assert upgrades.changes == []


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
    capsys: pytest.CaptureFixture[str], upgrades: Upgrades, asked: Connections,
    words: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    assert main(["upgrade", *words]) == 2
    assert said in capsys.readouterr().err
    assert upgrades.changes == []


def test_an_upgrade_that_the_reconciler_refuses_is_told(
    capsys: pytest.CaptureFixture[str], upgrades: Upgrades, asked: Connections
) -> None:
    upgrades.refusal = ConfigError("engine: has another vocabulary")
    assert main(["upgrade", "--engine", "emulated:vocab_size=9"]) == 2
    assert "engine: has another vocabulary" in capsys.readouterr().err


def test_where_a_deployment_is_elsewhere_its_address_is_no_change(
    upgrades: Upgrades, asked: Connections
) -> None:
    """It may have another one from here."""
    words = ["--address", "far:2", "--deployment-name", "there", "--max-num-seqs", "7"]
    given = load_config(GIVEN | {"deployment_name": "there"}, {})
    upgrades.given = given
    assert main(["upgrade", *words]) == 0
    assert asked.opened == [("far:2", "outrider-there")]
    assert upgrades.changes == [{"max_num_seqs": 7}]


def test_the_name_that_a_deployment_made_for_itself_is_no_change(
    upgrades: Upgrades, asked: Connections
) -> None:
    """Its settings have none."""
    upgrades.given = load_config({**GIVEN, "deployment_name": ""}, {})
    assert main(["upgrade", "--deployment-name", "d", "--max-num-seqs", "7"]) == 0
    assert upgrades.changes == [{"max_num_seqs": 7}]
