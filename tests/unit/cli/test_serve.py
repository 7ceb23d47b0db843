"""What `outrider serve` prints and records, and what `outrider stop` reports."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from outrider.cli.main import main, parse
from outrider.cli.options import connected, deployment_config, refuse_other_settings
from outrider.cli.output import program
from outrider.cli.serve import FIGURES, _serve, _until_it_fails, endpoints_text, status_table
from outrider.config.deployment import load_config
from outrider.errors import ConfigError, Unavailable
from outrider.fleet import local_state
from outrider.fleet.launcher import Deployment
from outrider.fleet.replica_set import Overview, ReplicaView
from outrider.interfaces.messages import ReplicaDescription
from outrider.registry.registry import ROLES, ReplicaRecord, Role, Starts
from tests.support.command_lines import printed
from tests.support.recorded import record, run_here

DESCRIBED = asdict(ReplicaDescription("b", "", "", 99, "", 64, (), 8))


@pytest.fixture
def state() -> Path:
    return local_state.state_directory(os.environ)


def test_a_trial_is_told_by_status_and_its_replica_is_none_that_is_wanted() -> None:
    trial = asdict(ReplicaRecord("draft", "draft-3", "h:5", "h", 1, trial_share=0.2))
    known = {"serving": True, "error": None} | DESCRIBED
    found = {f"{role}s": [trial | known | {"lease_age_s": 0.5}] for role in ROLES}
    found |= {"running": True, "deployment": asdict(record(trial="trial of b: runs")) | {"log": ""}}
    shown = printed(status_table(found))
    assert "trial of b: runs\n" in shown.replace(" \n", "\n")
    assert "last seen 0.5 s ago, trial share 20%" in shown
    assert shown.count("0 of 1 running") == 3


def test_status_says_what_is_starting() -> None:
    names = "target-3", "target-4"
    starts = [Starts("coordinator", (), True, 2), Starts("target", names, True, 1, 31.2)]
    found = {f"{role}s": [] for role in ROLES} | {"starts": [asdict(one) for one in starts]}
    found |= {"running": True, "deployment": asdict(record()) | {"log": ""}}
    rows = [" ".join(line.split()) for line in printed(status_table(found)).splitlines()]
    assert "coordinator starting after 2 failures in a row" in rows
    assert {f"{name} starting last start took 31 s" for name in names} <= {*rows}


def test_status_says_what_runs_the_steps() -> None:
    known = {"address": "h:1", "serving": True, "error": None} | DESCRIBED
    found = {"running": True, "deployment": None, "coordinators": [], "drafts": []}
    why = "torch (openvino: openvino is not installed)"
    for kernels in ("openvino 2026.4.1", why, ""):
        shown = printed(status_table(found | {"targets": [known | {"kernels": kernels}]}))
        assert (f"steps run on {kernels}" in shown) == bool(kernels)
        assert ("steps run on" in shown) == bool(kernels)


def test_status_says_what_a_target_does_not_promise_and_why_its_dtype_is_another() -> None:
    note = "float32 in place of bfloat16"
    known = {"address": "h:1", "serving": True, "error": None} | DESCRIBED
    coupled = known | {"dtype": "float32", "dtype_note": note, "row_coupling": 0.0123}
    found = {"running": True, "deployment": None, "coordinators": [], "drafts": []}
    shown = printed(status_table(found | {"targets": [coupled]}))
    for text in ("b, float32", note, "changed by 1.2e-02 of their norm", "law of the target as"):
        assert text in shown
    assert "law of the target" not in printed(status_table(found | {"targets": [known]}))


def test_status_cuts_nothing_on_a_terminal_of_80_columns() -> None:
    log, host = f"/var/{'long/' * 20}serve.log", f"{'machine' * 6}.example"
    known = asdict(ReplicaRecord("target", "target-1", "h:5", host, 1, device="cuda:0"))
    known |= {"serving": True, "error": None, "lease_age_s": 0.5} | DESCRIBED
    known["figures"] = dict.fromkeys(FIGURES, 0.125)
    found = {f"{role}s": [known] for role in ROLES}
    found |= {"running": True, "deployment": asdict(record()) | {"log": log}}
    shown = printed(status_table(found), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    said = "".join(shown.split())
    assert f"log{log}" in said
    assert "…" not in said
    for part in (figure.format(0.125) for figure in FIGURES.values()):
        assert all(word in said for word in part.split())


def test_what_serve_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_STATE_DIR", "a place")
    ours = f"OUTRIDER_STATE_DIR='{tmp_path}/a place' {shlex.quote(program())}"
    deployed = record(grpc_address="h:1,h:2", http_address="h:3,h:4")
    assert endpoints_text(deployed).splitlines()[1:] == [
        "  gRPC    h:1",
        "          h:2",
        "  OpenAI  http://h:3/v1",
        "          http://h:4/v1",
        "  window  http://h:3/",
        "          http://h:4/",
        f"  try     {ours} generate --token-ids 1,2,3",
        f"  stop    {ours} stop",
    ]
    monkeypatch.delenv("OUTRIDER_STATE_DIR")
    with_tls = {"ssl_certfile": "c.pem"}
    locked = record(tokenizer_directory="/x", asks_for_keys=True, settings=with_tls)
    access, spoken, _ = endpoints_text(locked).splitlines()[-3:]
    must = "callers must send an API key and use TLS (certificate c.pem)"
    assert access == f"  access  {must}; local commands do so"
    assert spoken == f'  try     {shlex.quote(program())} generate "The capital of France is"'


async def test_the_record_is_true_while_replicas_come_and_go(tmp_path: Path, state: Path) -> None:
    run_here(state, record())
    redis = {"redis_url": "unix:///x", "redis_password": "p", "deployment_name": "d"}
    deployment = Deployment(load_config({"draft_model": "ngram", **redis}, {}), tmp_path)
    deployment.start = AsyncMock()

    async def tell(
        *replicas: tuple[Role, str, str], failed_role: Role | None = None
    ) -> local_state.DeploymentRecord:
        views = [
            ReplicaView(f"{role}-{age}", role, address, http_address=http)
            for age, (role, address, http) in enumerate(replicas)
        ]
        deployment.overview = Overview({"draft": 1}, tuple(views), failed_role)
        deployment._changed.set()
        await asyncio.sleep(0.01)
        return local_state.running_deployment(state)

    await tell(("coordinator", "h:0", ""))
    serving = asyncio.create_task(_until_it_fails(deployment, state, parse(["serve"])))
    found = await tell(
        ("coordinator", "h:1", "h:8"), ("coordinator", "h:4", "h:9"), ("target", "h:5", "")
    )
    assert found.http_address == "h:8,h:9"
    assert (found.grpc_address, found.target_addresses) == ("h:1,h:4", ["h:5"])
    assert (found.draft_addresses, found.wanted) == ([], {"draft": 1})
    assert (found.redis["url"], found.redis["password"]) == ("unix:///x", "")
    deployment.config = load_config({"max_num_seqs": 7}, {})
    found = await tell(("coordinator", "h:1", ""))
    assert (found.grpc_address, found.settings["max_num_seqs"]) == ("h:1", 7)
    await tell(failed_role="target")
    with pytest.raises(Unavailable, match="there is no target, and none can be started"):
        await serving


async def test_commands_ask_the_record_where_coordinators_are_by_now(state: Path) -> None:
    run_here(state, record())
    async with connected(parse(["chat"])) as known:
        local_state.publish(state, record(grpc_address="h:9"))
        async with known.client() as client:
            assert client.address == known.find() == "h:9"
        local_state.withdraw(state)
        assert known.find() == ""


@pytest.mark.parametrize("is_ignored", [False, True])
async def test_a_terminal_that_closes_ends_a_deployment(state: Path, is_ignored: bool) -> None:
    """Unless SIGHUP is ignored, as under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    deployment: Any = AsyncMock()
    deployment.start = asyncio.Event().wait
    serving = asyncio.create_task(_serve(deployment, state, parse(["serve"])))
    try:
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        assert serving.done() is not is_ignored
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0
        deployment.stop.assert_awaited_once()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


def test_a_deployment_that_ended_by_itself_is_told_with_its_reason(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    log = state / local_state.LOG_NAME
    log.write_text("outrider: stopping\n", "utf-8")
    assert main(["stop"]) == 0
    assert capsys.readouterr().err == "nothing runs\n"
    log.write_text("outrider: error: the coordinator actor died\n", "utf-8")
    assert main(["stop"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("nothing runs: ")
    assert "ended by itself: the coordinator actor died" in said
    assert str(log) in said


def test_a_record_without_a_process_is_told_and_removed(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    local_state.publish(state, record(pid=7, grpc_address="127.0.0.1:50051"))
    assert main(["stop"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("nothing runs: the deployment at 127.0.0.1:50051 (pid 7)")
    assert str(state / local_state.FILE_NAME) in said
    assert not (state / local_state.FILE_NAME).exists()


def test_a_deployment_that_is_starting_is_stopped(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    """Such a deployment has no record yet. The lock file has its process number."""
    program = (
        "import pathlib, sys\n"
        "from outrider.fleet.local_state import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])):\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command, pipe = [sys.executable, "-c", program, str(state)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        assert main(["stop"]) == 0
        assert child.wait(10) == -signal.SIGTERM
    said = capsys.readouterr().err
    assert said == f"stopped a deployment that was starting or stopping (pid {child.pid})\n"


@pytest.mark.parametrize("name", ["a/head", "suffix", "hybrid:ngram,a/head"])
def test_the_flags_of_a_deployment_that_runs_may_be_given_again(name: str) -> None:
    """Also if the kind of a draft was found in its files."""
    config = deployment_config(parse(["chat", "--draft-model", name]))
    named = config.draft.model.replace("a/head", "eagle3:a/head")
    runs = record(settings=config.values(secrets=False) | {"draft_model": named})
    for again in (name, named):
        refuse_other_settings(parse(["chat", "--draft-model", again]), runs)
    for other in (("--draft-model", "a/other"), ("--dtype", "float32"), ("--redis-password", "p")):
        with pytest.raises(ConfigError, match="differs from the running deployment"):
            refuse_other_settings(parse(["chat", *other]), runs)
