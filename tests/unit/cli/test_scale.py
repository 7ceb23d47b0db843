"""`outrider scale` and `upgrade` with a fake reconciler."""

import os
import secrets
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.config.deployment import AutoscaleConfig, load_config
from outrider.errors import Unavailable
from outrider.fleet.local_state import publish, state_directory
from outrider.fleet.reconciler import changed
from outrider.fleet.replica_set import Overview, ReplicaView
from outrider.fleet.trial import TrialReport
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role
from tests.support.command_lines import refusal, reported
from tests.support.recorded import RAY, record, run_here

GIVEN = {
    "engine": "emulated:vocab_size=10",
    "draft_model": "emulated",
    "deployment_name": "d",
    "address": "head:1",
    "redis_url": "redis://h",
    "api_key": "sha256:" + "0" * 64,
}


class Fleet:
    """A fake reconciler. It records its calls, and the connections of commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.exists = True
        self.opened: list[tuple[str, str, Path | None]] = []
        """For each connection: address, namespace, and file of the token that was sent."""
        self.num_open = 0
        self.num_lost = 0
        """During this many of the next calls, the reconciler dies."""
        self.wants: list[dict[Role, int]] = []
        self.scaling = AutoscaleConfig()
        self.changes: list[dict[str, Any]] = []
        self.given = load_config(GIVEN, {})
        self.seen: list[dict[Role, int]] = [dict.fromkeys(ROLES, 1)]
        self.stale: list[int] = [0]
        self.reports: list[TrialReport | None] = [None]
        """Numbers of serving replicas, numbers of targets that an upgrade still has to replace, and
        reports of a trial: an entry for each call of `overview`; the last one stays."""
        self.num_leaving = 0
        """Numbers of leaving replicas by role, beside the serving ones."""
        self.failures: tuple[str, ...] = ()
        self.trials: list[tuple[dict[str, Any], float, float]] = []
        self.verdict: Any = "taken"

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        assert main(words) == code
        return self._capsys.readouterr()

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if self.num_lost:
            self.num_lost -= 1
            raise Unavailable("the reconciler actor died")
        return await getattr(self, method)(*arguments)

    async def want(self, counts: dict[Role, int]) -> AutoscaleConfig:
        self.wants.append(counts)
        return self.scaling

    async def spec(self) -> Any:
        return SimpleNamespace(given=self.given)

    async def change(self, values: dict[str, Any]) -> None:
        changed(self.given, values)
        self.changes.append(values)

    async def begin_trial(self, values: dict[str, Any], share: float, seconds: float) -> None:
        self.trials.append((values, share, seconds))
        runs = TrialReport("b", share)
        self.reports = [runs, runs, replace(runs, state=self.verdict, reason="-4 %")]

    async def end_trial(self) -> None:
        self.reports = [TrialReport("b", 0.2, "not taken", "it was ended")]

    async def overview(self) -> Overview:
        turns: tuple[list[Any], ...] = (self.reports, self.seen, self.stale)
        trial, counts, num_stale = (one.pop(0) if one[1:] else one[0] for one in turns)
        views = [
            ReplicaView(f"{role}-{index}", role, f"h:{index}", leaves=index >= count)
            for role, count in counts.items()
            for index in range(count + self.num_leaving)
        ]
        wanted = dict.fromkeys(ROLES, 1)
        if num_stale:
            old = ReplicaView("target-0", "target", "h:1", stale=True)
            wanted, views = {}, [old] * num_stale
        return Overview(wanted, tuple(views), None, bool(num_stale), self.failures, trial)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fleet:
    made = Fleet(capsys)

    class Connection:
        def __init__(self, address: str, namespace: str, token: Path | None) -> None:
            made.opened.append((address, namespace, token))
            self.namespace = namespace

        async def connect(self) -> None:
            made.num_open += 1

        async def disconnect(self) -> None:
            made.num_open -= 1

    async def find(namespace: str) -> Any:
        return made if made.exists else None

    monkeypatch.setattr("outrider.fleet.reconciler.RayConnection", Connection)
    monkeypatch.setattr("outrider.fleet.reconciler.find_reconciler", find)
    monkeypatch.setattr("outrider.fleet.reconciler.RETRY_PERIOD_S", 0.01)
    run_here(state_directory(os.environ), record())
    return made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale", "drafts=4"], "drafts=4: must be ROLE=N, with each of the roles coordinator, "),
        (["scale", "targets=2"], "for example target=2 draft=4; did you mean target=2?"),
        (["scale", "draft"], "error: draft: must be ROLE=N"),
        (["scale", f"draft={'9' * 5000}"], "at most once, and N a whole number up to 1024"),
        (["scale", "draft=1", "--wait", "nan"], "--wait: nan is not a finite number"),
        (["upgrade", "--autoscale-targets", "0:2"], "--autoscale-targets: '0:2' is wrong; it must"),
        (["upgrade", "--trial-share", "1"], "--trial-share: 1.0 is not in the range 0<=x<=0.9"),
        (["upgrade", "--trial-minutes", "3"], "--trial-minutes: needs --trial-share"),
        (
            ["upgrade", "--trial-share", "0", "--draft-model", "b"],
            "--draft-model: cannot go with --trial-share 0, which ends a trial",
        ),
        (["upgrade", "--num-targets", "3"], "--num-targets: cannot change while a deployment"),
        (["upgrade", "--internal-tls-dir", "tls"], "--internal-tls-dir: cannot be turned on or of"),
        (["upgrade", "--api-key", "k" * 20], "--api-key: cannot change while a deployment runs: a"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_and_nothing_is_asked_for(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, words: list[str], said: str
) -> None:
    assert said in refusal(capsys, *words)
    assert (fleet.wants, fleet.changes) == ([], [])


def test_where_nothing_runs_there_is_nothing_to_scale(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet.exists = False
    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path / "other"))
    for _ in range(2):
        _, err = fleet.run("scale", "draft=2", code=1)
        assert err.startswith("outrider: error: nothing runs here; start a ")
        publish(state_directory(os.environ), record())
    assert fleet.opened == []
    far = ("--address", "far:1", "--deployment-name", "there")
    _, err = fleet.run("scale", "draft=2", *far, code=1)
    assert "no deployment of this name runs on the Ray cluster" in err
    assert (fleet.opened, fleet.num_open) == ([("far:1", "outrider-there", None)], 0)


def test_what_is_wanted_is_said_to_the_reconciler_and_printed(fleet: Fleet) -> None:
    fleet.num_lost = 2
    out, _ = fleet.run("scale", "draft=3", "target=2")
    assert (fleet.opened, fleet.num_open) == ([(RAY, "outrider-d", None)], 0)
    assert fleet.wants == [{"draft": 3, "target": 2}]
    assert out == "wanted: coordinator=1, target=2, draft=3\n"
    fleet.scaling = AutoscaleConfig(autoscale_targets="1:3")
    _, err = fleet.run("scale", "draft=0", f"target={REPLICAS_MAX}")
    assert err.startswith("note: autoscaling may change the number of targets (1 to 3);")


def test_flags_and_settings_name_a_deployment_elsewhere(fleet: Fleet, tmp_path: Path) -> None:
    """An address is never ignored. It may be that of the deployment on this machine, or the setting
    that started it. The token of this deployment is sent to no other cluster."""
    token, file = tmp_path / "ray.token", tmp_path / "outrider.yaml"
    token.write_text(secrets.token_hex(32))
    file.write_text("address: far:1\ndeployment_name: there\nengine: 'emulated:vocab_size=7'\n")
    runs = record(ray_token=str(token), settings={"address": "auto"})
    run_here(state_directory(os.environ), runs)
    _, err = fleet.run("scale", "draft=3", "--address", "far:1", code=1)
    assert "no deployment of this machine is on the Ray cluster at far:1; give the name" in err
    assert (fleet.opened, fleet.wants) == ([], [])
    named = ("--deployment-name", "d")
    for words in (("--config", str(file)), ("--address", "far:1", *named)):
        fleet.run("scale", "draft=3", *words)
    assert fleet.opened == [("far:1", "outrider-there", None), ("far:1", "outrider-d", None)]
    for words in (named, ("--address", RAY), ("--address", "auto")):
        fleet.run("scale", "draft=3", *words)
    assert fleet.opened[2:] == 3 * [(RAY, "outrider-d", token)]


def test_a_wait_ends_as_soon_as_there_are_as_many(fleet: Fleet) -> None:
    fleet.num_leaving = 1
    fleet.seen = [{"draft": 1, "target": 1}, {"draft": 2, "target": 2}, {"draft": 3, "target": 2}]
    out, _ = fleet.run("scale", "draft=3", "target=2", "--wait", "60")
    assert (out, fleet.seen) == ("serving: target=2, draft=3\n", [{"draft": 3, "target": 2}])
    out, err = fleet.run("scale", "target=3", "--wait", "0.1", code=1)
    assert out == "wanted: coordinator=1, target=3, draft=1\n"
    assert "not serving after 0.1 s: see `outrider status`" in err


def test_what_is_another_setting_is_asked_for_and_nothing_else(
    capsys: pytest.CaptureFixture[str], fleet: Fleet
) -> None:
    fleet.stale = [2, 1, 0]
    words = ["--max-num-seqs", "7", "--draft-model", "emulated", "--wait", "60"]
    told, _ = reported(capsys, "upgrade", *words)
    assert fleet.changes == [{"max_num_seqs": 7}]
    assert told == {"changes": {"max_num_seqs": 7}, "replicas_to_replace": 0}
    assert fleet.run("upgrade", "--draft-model", "emulated") == ("nothing changes\n", "")
    assert (len(fleet.changes), fleet.num_open) == (1, 0)
    fleet.given = load_config(GIVEN | {"deployment_name": "there"}, {})
    there = ["--address", "far:2", "--deployment-name", "there", "--max-num-seqs", "7"]
    assert main(["upgrade", *there]) == 0
    assert fleet.changes == 2 * [{"max_num_seqs": 7}]
    assert fleet.opened[2:] == [("far:2", "outrider-there", None)]


def test_what_is_left_of_an_upgrade_is_told(fleet: Fleet) -> None:
    fleet.stale = [2]
    words = ("upgrade", "--draft-model", "emulated")
    out, _ = fleet.run("upgrade", "--max-num-seqs", "7")
    assert out == "max_num_seqs: replicas still to be replaced: 2\n"
    fleet.failures = ("target-2 did not start: no memory",)
    _, err = fleet.run(*words, "--wait", "0.1", code=1)
    assert "not done after 0.1 s: target-2 did not start: no memory" in err
    out, _ = fleet.run(*words)
    assert out == "the upgrade that is running: replicas still to be replaced: 2\n"
    fleet.stale = [2, 1, 0]
    assert fleet.run(*words, "--wait", "60")[0] == "nothing changes\n"


@pytest.mark.parametrize("verdict", ["taken", "not taken"])
def test_a_trial_is_waited_for_and_its_end_is_told(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, verdict: str, tmp_path: Path
) -> None:
    fleet.verdict, words = verdict, ["upgrade", "--draft-model", "b", "--trial-share", "0.2"]
    out, _ = fleet.run(*words, "--trial-minutes", "2", "--wait", "60")
    assert out.startswith(f"trial of b on 20% of the sessions: {verdict}: -4 %\n")
    assert ("draft_model: done" in out) == (verdict == "taken")
    assert (fleet.trials, fleet.changes) == ([({"draft_model": "b"}, 0.2, 120.0)], [])
    told, _ = reported(capsys, *words)
    assert (told["trial"]["state"], fleet.trials[1][2]) == ("runs", 900.0)
    settings = tmp_path / "settings.yaml"
    settings.write_text("draft_model: b")
    out, _ = fleet.run("upgrade", "--config", str(settings), "--trial-share", "0")
    assert "not taken: it was ended" in out
    assert fleet.run("upgrade", "--trial-share", "0.5")[0] == "nothing changes\n"
    assert len(fleet.trials) == 2
