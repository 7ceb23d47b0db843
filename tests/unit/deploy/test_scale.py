"""What `outrider scale` asks of the deployment that runs, what it refuses, and how it waits. A
deployment that is scaled is in `tests/integration`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import scale
from deploy.cli.main import main
from deploy.cli.scale import parsed_counts, redis_of
from deploy.state import DeploymentRecord, process_start, publish, state_directory, withdraw
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.fleet.autoscaling import Policy
from outrider.fleet.registry import Role
from outrider.limits import REPLICAS_MAX
from outrider.sessions.redis_address import RedisAddress

OWN = "unix:///own.sock"


def record(**others: Any) -> DeploymentRecord:
    """Of a deployment of this process, with one replica of each role."""
    known: dict[str, Any] = {
        "pid": os.getpid(), "process_start": process_start(os.getpid()) or 0, "started_at": "",
        "model": "m", "draft_model": "ngram", "served_model_name": "m", "grpc_address": "h:1",
        "target_addresses": ["h:2"], "draft_addresses": ["h:3"], "target_directory": "",
        "tokenizer_directory": "", "deployment": "d", "redis_url": OWN,
        "wanted": {"coordinator": 1, "target": 1, "draft": 1},
        "settings": {"redis_key_prefix": "ours:"},
    }  # fmt: skip
    return DeploymentRecord(**(known | others))


@pytest.fixture
def state() -> Path:
    return state_directory(os.environ)


class Wishes:
    """What `RedisRegistry` does for the command, and what it was asked."""

    known: Mapping[Role, int] = {"coordinator": 1, "target": 1, "draft": 1}

    def __init__(self) -> None:
        self.opened: list[tuple[str, str, str]] = []
        self.wants: list[Mapping[Role, int]] = []
        self.policy = Policy().to_json()
        self.num_closed = 0

    def open(self, redis: RedisAddress, deployment: str) -> Wishes:
        self.opened.append((redis.url, redis.key_prefix, deployment))
        return self

    async def wanted(self) -> Mapping[Role, int]:
        return self.known

    async def want(self, counts: Mapping[Role, int]) -> None:
        self.wants.append(counts)

    async def noted(self, topic: str) -> str:
        return self.policy if topic == "policy" else ""

    async def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def wishes(monkeypatch: pytest.MonkeyPatch) -> Wishes:
    made = Wishes()
    monkeypatch.setattr("outrider.fleet.redis_registry.RedisRegistry", made.open)
    return made


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    scale.add_arguments(parser)
    return parser.parse_args(["draft=1", *words])


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
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes
) -> None:
    publish(state, record())
    for words, said in (
        (["target=0"], "error: target=0: '0' is wrong"),
        (["draft=1", "--wait", "-1"], "error: --wait: -1.0 is wrong; it must be 0 to 86400"),
        (["draft=1", "--wait", "nan"], "error: --wait: nan is wrong"),
        (["draft=1", "--wait", "1e6"], "error: --wait: 1000000.0 is wrong"),
    ):
        assert main(["scale", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert err.count("\n") == 1
    assert wishes.wants == []


def test_where_nothing_runs_there_is_nothing_to_scale(
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes
) -> None:
    """Also where a deployment was killed and has left its record."""
    assert main(["scale", "draft=2"]) == 1
    assert capsys.readouterr().err.startswith("outrider: error: nothing runs; `outrider serve`")
    publish(state, record(process_start=1))
    assert main(["scale", "draft=2"]) == 1
    assert "nothing runs" in capsys.readouterr().err
    assert wishes.opened == []


@pytest.mark.parametrize("drafter", ["medusa:heads", "hybrid:suffix,early-exit:exit"])
def test_a_target_that_drafts_is_given_no_drafts(
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes, drafter: str
) -> None:
    publish(state, record(draft_model=drafter, draft_addresses=[]))
    assert main(["scale", "draft=2"]) == 2
    assert f"draft=2: with {drafter} the target drafts" in capsys.readouterr().err
    assert wishes.wants == []
    assert main(["scale", "target=2", "draft=0"]) == 0
    assert wishes.wants == [{"target": 2, "draft": 0}]


def test_what_is_wanted_is_said_to_the_deployment_and_printed(
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes
) -> None:
    """The roles that are not named stay as they were."""
    publish(state, record())
    assert main(["scale", "draft=3", "target=2"]) == 0
    assert wishes.opened == [(OWN, "ours:", "d")]
    assert wishes.wants == [{"draft": 3, "target": 2}]
    assert wishes.num_closed == 1
    assert capsys.readouterr().out == "wanted: coordinator=1, target=2, draft=3\n"
    assert main(["scale", "coordinator=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "wanted": {"coordinator": 2, "target": 1, "draft": 1}
    }


def test_who_scales_what_is_autoscaled_is_told_so(
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes
) -> None:
    publish(state, record())
    wishes.policy = Policy(bounds={"target": (1, 3)}).to_json()
    assert main(["scale", "draft=3", "target=2"]) == 0
    out, err = capsys.readouterr()
    assert out == "wanted: coordinator=1, target=2, draft=3\n"
    assert err.startswith("note: target is autoscaled, 1 to 3, ")
    assert err.count("\n") == 1


def test_a_redis_that_does_not_know_the_deployment_is_told_nothing(
    capsys: pytest.CaptureFixture[str],
    state: Path,
    wishes: Wishes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would keep what nobody reads."""
    publish(state, record(redis_url=""))
    monkeypatch.setattr(wishes, "known", {})
    assert main(["scale", "draft=2", "--redis-url", "redis://elsewhere"]) == 1
    assert "this Redis knows nothing of the deployment" in capsys.readouterr().err
    assert wishes.wants == []
    assert wishes.num_closed == 1


def test_the_deployments_own_redis_wins_over_settings() -> None:
    """Which may be those of another deployment; who one is there is no matter of its own one."""
    words = ("--redis-url", "redis://other", "--redis-username", "me", "--redis-password", "x")
    assert redis_of(arguments(*words), record()) == RedisAddress(url=OWN, key_prefix="ours:")


def test_another_redis_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record keeps no URL that may hold a password; the prefix of keys it does."""
    elsewhere = record(redis_url="")
    with pytest.raises(SettingError, match="another Redis than its own") as caught:
        redis_of(arguments(), elsewhere)
    assert caught.value.key == "redis_url"
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("OUTRIDER_REDIS_KEY_PREFIX", "theirs:")
    found = redis_of(arguments("--redis-username", "me", "--redis-ca-file", "ca"), elsewhere)
    assert found == RedisAddress(
        url="redis://elsewhere", username="me", ca_file="ca", key_prefix="ours:"
    )


def test_the_wait_ends_as_soon_as_there_are_as_many(
    state: Path, wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(state, record())
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        found = ["h:3", "h:4", "h:5"][: len(waits)]
        publish(state, record(draft_addresses=found, grpc_address=",".join(found)))

    monkeypatch.setattr("time.sleep", sleep)
    assert main(["scale", "draft=3", "coordinator=3", "--wait", "60"]) == 0
    assert len(waits) == 3
    assert main(["scale", "draft=3", "--wait", "60"]) == 0
    assert len(waits) == 3


def test_a_wait_that_was_too_short_is_told(
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes
) -> None:
    """After what was wanted, which still is."""
    publish(state, record())
    assert main(["scale", "target=2", "--wait", "0.2"]) == 1
    out, err = capsys.readouterr()
    assert out == "wanted: coordinator=1, target=2, draft=1\n"
    assert "not there after 0.2 s; see `outrider status`" in err


def test_a_deployment_without_a_coordinator_does_not_have_one(
    capsys: pytest.CaptureFixture[str], state: Path, wishes: Wishes
) -> None:
    """As while one that died is replaced."""
    publish(state, record(grpc_address=""))
    assert main(["scale", "coordinator=1", "--wait", "0.2"]) == 1
    assert "not there after 0.2 s" in capsys.readouterr().err


def test_a_deployment_that_ends_is_waited_for_no_longer(
    state: Path, wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(state, record())
    monkeypatch.setattr("time.sleep", lambda seconds: withdraw(state))
    with pytest.raises(Unavailable, match="the deployment has ended"):
        scale.run(arguments("target=2", "--wait", "60"))
