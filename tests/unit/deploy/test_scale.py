"""What `outrider scale` asks of a deployment, what it refuses, and how it waits. One that is really
scaled is in `tests/integration`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from asked_here import Connections, answer, deployed_here
from recorded import RAY, record

from deploy.cli.main import main
from deploy.cli.scale import parsed_counts
from deploy.fleet.local_state import publish, state_directory
from deploy.fleet.ray_connection import new_token
from deploy.fleet.status import Overview, ReplicaView
from outrider.config import AutoscalePolicy as Policy
from outrider.errors import ConfigError
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role
from outrider.replica.process_setup import Place


@pytest.fixture
def state() -> Path:
    return state_directory(os.environ)


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
        (["draft=1", "--wait", "-1"], "error: --wait: -1.0 is wrong; it must be 0 to 86400"),
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
    capsys: pytest.CaptureFixture[str], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a deployment was killed and has left its record."""
    ray = answer(monkeypatch, {})
    assert main(["scale", "draft=2"]) == 1
    assert capsys.readouterr().err.startswith("outrider: error: nothing runs here; `outrider serve")
    publish(state, record(process_start=1))
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
    publish(state_directory(os.environ), record(ray_token=str(token)))
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
