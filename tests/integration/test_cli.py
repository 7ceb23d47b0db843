"""The command line with the real model. Each command runs in a process of its own."""

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import README, lines_of
from tests.support.redis_servers import free_port
from tests.support.shell import Shell

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("deployment"),
]

PROMPT = "The capital of France is"
EMULATED = "emulated:vocab_size=100"


def _sessions_of(state: Path) -> set[int]:
    """Running processes that were started with this state directory."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            dead = (path / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"OUTRIDER_STATE_DIR={state}".encode() in environment.split(b"\0") and dead != "Z":
            found.add(int(path.name))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A detached deployment of the demo model. At the end, `outrider stop` must leave nothing
    behind. Its drafts copy from earlier answers, as those of the README's deployment do."""
    shell = Shell(tmp_path_factory.mktemp("state"))
    started = shell.run(
        "serve", "demo", "--draft-model", "suffix", "--grpc-port", "0", "--port", "0", "--detach"
    )
    assert started.returncode == 0, started.stderr
    assert "outrider: loading demo, and suffix as its draft\n" in started.stderr
    shell.shown = started.stdout
    record = shell.record()
    assert os.getsid(record["pid"]) == record["pid"], "it ends with the shell that started it"
    yield shell
    assert _sessions_of(shell.state)
    [line] = _shown(shell, "stop")
    stopped = shell.paste(line, anywhere=True)
    left = _sessions_of(shell.state)
    again = shell.run("stop")
    assert (stopped.returncode, left) == (0, set()), stopped.stderr
    assert not (shell.state / "deployment.json").exists()
    assert (again.returncode, again.stderr) == (0, "nothing runs\n")


def _shown(shell: Shell, name: str) -> list[str]:
    """The lines of one section of what `serve` has printed."""
    section, found = "", []
    for line in shell.shown.splitlines()[1:]:
        section = line[2:8].strip() or section
        found += [line[10:]] if section == name else []
    return found


def test_generate_prints_one_json_object(served: Shell) -> None:
    completed = served.run("generate", PROMPT, "--json", "--max-tokens", "24")
    assert completed.returncode == 0, completed.stderr
    found = json.loads(completed.stdout)
    assert completed.stdout.count("\n") == 1
    assert "Paris" in found["text"]
    assert found["finish_reason"] in ("length", "stop")
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) <= 24
    assert found["usage"]["prompt_tokens"] > 0
    metrics = found["metrics"]
    assert min(metrics["tokens_per_second"], metrics["num_rounds"]) > 0
    assert 0 <= metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
    assert metrics["mean_acceptance_length"] >= 1
    words = ("--chat", "--server", served.record()["grpc_address"], "--json", "--max-tokens", "1")
    chat = json.loads(served.run("generate", PROMPT, *words).stdout)
    assert chat["usage"]["prompt_tokens"] > found["usage"]["prompt_tokens"]


def test_status_says_what_replicas_say_of_themselves(served: Shell) -> None:
    assert served.run("generate", PROMPT, "--max-tokens", "24").returncode == 0
    watching = served.start("status", "--json", "--watch", "0.2")
    # A replica announces its figures each second.
    shown = map(json.loads, watching.stdout)
    found = next(one for one in shown if one["targets"][0]["figures"]["busy"])
    watching.terminate()
    watching.communicate()
    [coordinator], [target] = found["coordinators"], found["targets"]
    assert re.fullmatch(r"coordinator-\d+", coordinator["name"])
    assert target["name"] == "target-1"
    assert coordinator["figures"]["tokens_per_second"] > 0
    assert 0 <= target["lease_age_s"] <= 3
    assert "% busy" in served.run("status").stdout


def test_nothing_is_refused_while_the_port_changes(served: Shell) -> None:
    """New connections by HTTP and new `generate` commands are answered all the time."""
    url = f"http://{served.record()['http_address']}/health"
    old = served.record()["grpc_address"].rpartition(":")[2]
    refused: list[str] = []
    over = threading.Event()
    num_asked = 0

    def ask() -> None:
        nonlocal num_asked
        while not over.is_set():
            num_asked += 1
            try:
                with urllib.request.urlopen(url, timeout=30):
                    pass
            except OSError as error:
                refused.append(str(error))
            time.sleep(0.05)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for port in (str(free_port()), old):
            upgrading = served.start("upgrade", "--grpc-port", port, "--wait", "120")
            while upgrading.poll() is None:
                completed = served.run("generate", PROMPT, "--max-tokens", "2")
                assert completed.returncode == 0, completed.stderr
            _, said = upgrading.communicate()
            assert upgrading.returncode == 0, said
            assert served.record()["grpc_address"] == f"127.0.0.1:{port}"
    finally:
        over.set()
        asking.join()
    assert num_asked > 20
    assert refused == []


def test_the_readmes_short_lines_run_as_they_stand(served: Shell) -> None:
    """They run in the documents' order beside such a deployment, and no line warns. Only ports, the
    programs' folder and the length of the answers of `bench speedup` are changed."""
    record = served.record()
    ports = {"50051": record["grpc_address"], "8000": record["http_address"]}
    short = re.compile(r"outrider (generate|chat|status|bench speedup)\b|curl ")
    pages = (README, README.parent / "docs" / "get-started.md")
    known = (line.partition("    #")[0] for page in pages for line in lines_of(page))
    lines = [line for line in dict.fromkeys(known) if short.search(line)]
    assert len(lines) == 7
    for line in lines:
        typed = f"PATH={Path(sys.executable).parent}:$PATH; {line}"
        typed = typed.replace("--max-tokens 64", "--max-tokens 4")
        for port, address in ports.items():
            typed = typed.replace(f"127.0.0.1:{port}", address)
        found = served.paste(typed)
        assert found.returncode == 0, (line, found.stderr)
        assert found.stdout or "chat" in line, line
        assert "warning" not in found.stderr, line
        if "bench speedup" in line:
            assert "prompt 8 of 8: " in found.stderr


def test_what_serve_prints_can_be_pasted(served: Shell) -> None:
    [line] = _shown(served, "try")
    found = served.paste(line, anywhere=True)
    assert found.returncode == 0, found.stderr
    assert "Paris" in found.stdout
    assert "loading" not in found.stderr, "it has started a deployment of its own"
    for name, path in (("OpenAI", "/models"), ("window", "")):
        [url] = _shown(served, name)
        with urllib.request.urlopen(url + path, timeout=30) as answer:  # noqa: S310
            assert answer.status == 200


@pytest.mark.parametrize(
    ("serves", "number", "code"),
    [
        (True, signal.SIGINT, 0),
        (False, signal.SIGINT, 128 + signal.SIGINT),
        (True, signal.SIGTERM, 0),
    ],
)
def test_serve_in_the_foreground_ends_with_its_process_group(
    tmp_path: Path, serves: bool, number: int, code: int
) -> None:
    """A terminal sends SIGINT to the whole process group, and `timeout` or a shell's `kill %1`
    sends SIGTERM."""
    shell = Shell(tmp_path / "state")
    words = ("--engine", EMULATED, "--grpc-port", "0", "--no-http", *["--json"] * serves)
    process = shell.start("serve", *words)
    if serves:
        assert json.loads(process.stdout.readline())["pid"] == process.pid
    else:
        line = "outrider: starting Ray and Redis; finding, downloading or converting models\n"
        assert process.stderr.readline() == line
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=40)  # Without a Ray to ask, the end takes 60 s.
    assert (process.returncode, out) == (code, ""), err
    assert not re.search("Traceback|cannot stop the replicas|not end in time", err)
    assert err.count("the target has no tokenizer, so text, chats and stop strings") == serves
    assert _sessions_of(shell.state) == set()


def test_generate_starts_and_stops_its_own_deployment(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state")
    words = ("generate", "--token-ids", "1,2,3", "--json", "--max-tokens", "4")
    completed = shell.run(*words, OUTRIDER_ENGINE=EMULATED)
    assert completed.returncode == 0, completed.stderr
    assert len(json.loads(completed.stdout)["token_ids"]) == 4
    assert not (shell.state / "deployment.json").exists()
    assert _sessions_of(shell.state) == set()


def test_redis_that_does_not_answer_ends_serve(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state")
    words = ("--grpc-port", "0", "--port", "0", "--redis-url", "redis://:hush@127.0.0.1:1/0")
    refused = shell.run("serve", *words, "--detach")
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    told = r"outrider: error: --redis-url: Redis at redis://127\.0\.0\.1:1/0 cannot be reached"
    assert re.match(told, refused.stderr.splitlines()[-1]), refused.stderr
    assert not re.search("hush|Traceback", refused.stderr)
    assert _sessions_of(shell.state) == set()
