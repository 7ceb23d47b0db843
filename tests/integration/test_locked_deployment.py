"""A detached deployment with keys, TLS and certificates, set up on the command line."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.client import Client, GenerateRequest, SamplingParams, caller_trust
from outrider.errors import Unauthenticated, Unavailable
from tests.support.made_certificates import Made
from tests.support.shell import Shell

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("deployment")]

GIVEN = "a-key-that-a-flag-gives"
ENGINE = "emulated:vocab_size=320,support=8,max_model_len=512,verify_ms=1"


class Locked(Shell):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "state")
        self.directory = directory
        self.environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        self.certificate = Made(directory, "server", "127.0.0.1")
        self.key = ""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    one = Locked(tmp_path_factory.mktemp("locked"))
    made = one.run("keys", "--api-key-file", "keys", "new", "alice", "--tenant", "team")
    assert made.returncode == 0, made.stderr
    one.key = made.stdout.strip()
    assert one.run("certs", "tls").returncode == 0
    started = one.run(
        "serve",
        "--detach",
        "--engine",
        ENGINE,
        "--draft-model",
        "ngram",
        "--grpc-port",
        "0",
        "--api-key-file",
        "keys",
        "--api-key",
        GIVEN,
        "--internal-tls-dir",
        "tls",
        "--ssl-certfile",
        str(one.certificate.file),
        "--ssl-keyfile",
        str(one.certificate.key_file),
    )
    assert started.returncode == 0, started.stderr
    assert "access  callers must send an API key and use TLS (cert" in started.stdout
    yield one
    stopped = one.run("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not (one.state / "cli.key").exists()


def test_commands_here_need_nothing_typed(locked: Locked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "directory", Path("/"))
    elsewhere = locked.run("generate", "--token-ids", "1,2,3", "--json")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert len(json.loads(elsewhere.stdout)["token_ids"]) > 0
    status = locked.run("status", "--json")
    assert status.returncode == 0, status.stderr
    found = json.loads(status.stdout)
    assert found["serving"]
    for one in (*found["coordinators"], *found["targets"], *found["drafts"]):
        assert (one["serving"], one["error"]) == (True, None)


async def test_others_need_a_key_and_the_authority(locked: Locked) -> None:
    """Plain text gets no answer. Targets and drafts answer no user."""
    record = locked.record()
    address, key = record["grpc_address"], locked.key
    trust = caller_trust(locked.certificate.file)
    request = GenerateRequest((1, 2, 3), max_tokens=3, sampling=SamplingParams(temperature=0.0))
    for good in (key, GIVEN):
        async with Client(address, api_key=good, trust=trust) as client:
            assert len((await client.complete(request)).token_ids) == 3
    async with Client(address, trust=trust) as client:
        assert await client.healthy()
        with pytest.raises(Unauthenticated):
            await client.describe()
    async with Client(address, api_key=key, resume_timeout_s=0) as client:
        with pytest.raises(Unavailable):
            await client.describe()
    for inner in (*record["target_addresses"], *record["draft_addresses"]):
        async with Client(inner, api_key=key, trust=trust, resume_timeout_s=0) as client:
            assert not await client.healthy(5.0)


def test_no_key_is_left_where_others_may_look(locked: Locked) -> None:
    key = locked.key
    own = (locked.state / "cli.key").read_text()
    for path in locked.state.rglob("*"):
        if path.is_file() and path.name != "cli.key":
            data = path.read_bytes()
            for secret in (key, own, GIVEN):
                assert secret.encode() not in data, path
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            assert GIVEN.encode() not in process.read_bytes(), process
    for command in ("collect-env", "status"):
        shown = locked.run(command, "--json", OUTRIDER_API_KEY=GIVEN)
        for secret in (key, own, GIVEN):
            assert secret not in shown.stdout + shown.stderr, command
