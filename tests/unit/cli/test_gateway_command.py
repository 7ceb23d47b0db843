"""`outrider gateway` with scripted coordinators."""

import asyncio
import json
import os
import resource
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.http_api.app import build_app
from coordinator.http_api.server import HttpOptions, HttpServer, TlsFiles
from outrider import limits
from outrider.cli.main import main, parse
from outrider.foundation import refusals
from outrider.foundation.api_keys import Caller, add_key
from tests.support.command_lines import refusal
from tests.support.made_certificates import Made
from tests.support.recorded import record
from tests.support.told_coordinator import FINISHED, STARTED, TOKENS, ToldCoordinator

WAIT_S = 20.0


@asynccontextmanager
async def gateway(words: list[str], capsys: pytest.CaptureFixture[str]) -> AsyncIterator[str]:
    """Runs the command until it is told to stop, and yields its URL."""
    from outrider.cli.gateway import _serve

    running = asyncio.create_task(_serve(parse(["gateway", "--port", "0", "--json", *words])))
    async with asyncio.timeout(WAIT_S):
        shown = ""
        while not shown:
            await asyncio.sleep(0.01)
            shown = capsys.readouterr().out
        yield json.loads(shown)["url"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("named", [False, True], ids=["deployment", "coordinators"])
async def test_it_answers_until_it_is_told_to_stop(
    tls: bool,
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The certificate of the deployment may name another host."""
    told: Any = ToldCoordinator(STARTED, TOKENS, FINISHED)
    files, words, settings = None, list[str](), {}
    context: Any = True
    if tls:
        own = Made(tmp_path, "own", "127.0.0.1" if named else "coordinators.example")
        mine = Made(tmp_path, "gateway", "127.0.0.1")
        files, settings = TlsFiles(own.file, own.key_file), {"ssl_certfile": str(own.file)}
        words += ["--ssl-certfile", str(mine.file), "--ssl-keyfile", str(mine.key_file)]
        context = ssl.create_default_context(cafile=mine.file)
    options = HttpOptions(tls=files)
    server = HttpServer(options, build_app(told, options))
    await server.start()
    if named:
        words += ["--coordinators", f"http{'s' * tls}://{server.address}"]
        words += ["--ca-cert", str(own.file)] if tls else []
    else:
        runs = record(http_address=server.address, settings=settings)
        monkeypatch.setattr("outrider.cli.gateway.running_deployment", lambda _: runs)
    async with (
        gateway(words, capsys) as url,
        httpx.AsyncClient(base_url=url, verify=context) as http,
    ):
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        body = {"prompt": [1], "stream": True}
        assert "data: [DONE]" in (await http.post("/v1/completions", json=body)).text
    await server.stop()


async def test_its_metrics_have_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refusals, "REFUSALS", Counter[str]())
    monkeypatch.setattr("outrider.cli.gateway.REFUSALS", refusals.REFUSALS)
    async with (
        gateway(["--coordinators", "http://127.0.0.1:1"], capsys) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        body = b"x" * (limits.HTTP_BODY_BYTES_MAX + 1)
        assert (await http.post("/v1/completions", content=body)).status_code == 413
        metrics = (await http.get("/metrics")).text
    assert 'outrider_refusals_total{limit="http_body"} 1.0' in metrics
    [measured] = [
        line
        for line in metrics.splitlines()
        if line.startswith("http_server_request_duration_seconds_count")
    ]
    assert 'http_response_status_code="413"' in measured


async def test_it_may_open_as_many_files_as_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request may need three. So it asks for all that it may have, and takes no more
    connections than one for four of them."""
    allowed = [64, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (*allowed,))
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: allowed.__setitem__(slice(2), [*to]))
    servers = list[HttpServer]()

    class Server(HttpServer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            servers.append(self)

    monkeypatch.setattr("coordinator.http_api.server.HttpServer", Server)
    async with gateway(["--coordinators", "http://127.0.0.1:1"], capsys):
        assert allowed == [1024, 1024]
        assert [one._open.num_max for one in servers] == [256]


async def test_it_asks_for_the_coordinators_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may then listen on all addresses, and has any name."""
    told: Any = ToldCoordinator(STARTED, TOKENS, FINISHED)
    server = HttpServer(HttpOptions(), build_app(told, HttpOptions()))
    await server.start()
    key = add_key(tmp_path / "keys", Caller("alice"))
    words = ["--coordinators", f"http://{server.address}", "--host", "0.0.0.0"]  # noqa: S104
    async with (
        gateway([*words, "--api-key-file", str(tmp_path / "keys")], capsys) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        headers = {"host": "gateway.example"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 401
        headers["authorization"] = f"Bearer {key}"
        assert (await http.get("/v1/models", headers=headers)).json()["data"][0]["id"] == "m"
    await server.stop()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--coordinators", "http://a:1,http://a:1/v1"], "--coordinators: 'http://a:1/v1' is wro"),
        (["--coordinators", "http://a:65536"], "--coordinators: 'http://a:65536' is wrong"),
        (["--host", "10.0.0.1"], "--host: '10.0.0.1' is reachable"),
        (["--port", "70000"], "--port: 70000 is not in the range"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile: needs ssl_certfile, too"),
        (["--ssl-certfile", "c", "--ssl-keyfile", "k"], "--ssl-certfile: cannot read "),
        (["--api-key-file", "no"], "--api-key-file: cannot read "),
        (["--client-cert", "c"], "a certificate goes with its key; give both"),
        (["--ca-cert", "no"], "cannot read no"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [] if "--coordinators" in words else ["--coordinators", "http://a:1"]
    assert reason in refusal(capsys, "gateway", *words, *known)


def test_without_a_deployment_it_must_be_told_of_coordinators(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gateway"]) == 1
    assert "nothing runs here; start a deployment with `outrider serve`" in capsys.readouterr().err
