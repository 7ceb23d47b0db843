"""The gRPC commands of the documents, run by `buf` as a reader would run them."""

import asyncio
import json
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator.auth.access_control import AccessControl, watch_keys
from outrider.foundation.api_keys import Caller, add_key
from outrider.transport.server import ServerOptions
from outrider.transport.tls import server_credentials
from tests.support.documents import ROOT, lines_of
from tests.support.made_certificates import Made
from tests.support.stack import Stack, coordinator_api, serve

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
RUN_S = 60.0

pytestmark = pytest.mark.skipif(
    shutil.which("buf", path=PATH) is None, reason="buf is not installed"
)


def line_of(document: str) -> str:
    """The only gRPC command of a document, unchanged except for the folder of `buf`."""
    known = [line.removeprefix(".venv/bin/") for line in lines_of(ROOT / document)]
    (found,) = [line for line in known if line.startswith("buf curl ")]
    return found


async def answered(line: str, **environment: str) -> list[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        line,
        cwd=ROOT,
        env=dict(os.environ) | {"PATH": PATH} | environment,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(RUN_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    decoder, text, events = json.JSONDecoder(), out.decode().strip(), []
    while text:
        event, end = decoder.raw_decode(text)
        events.append(event)
        text = text[end:].lstrip()
    return events


def check_answer(events: list[dict[str, Any]], max_tokens: int) -> None:
    assert list(events[0]) == ["started"]
    tokens = [event["tokens"] for event in events if "tokens" in event]
    assert sum(len(part["tokenIds"]) for part in tokens) == max_tokens
    assert "".join(part.get("textDelta", "") for part in tokens)
    assert events[-1]["finished"]["usage"]["completionTokens"] == max_tokens


async def test_the_readmes_line(stack: Stack) -> None:
    """`buf` gets the messages by reflection. Only the port is changed."""
    line = line_of("README.md")
    assert line.count("127.0.0.1:50051") == 1
    check_answer(await answered(line.replace("127.0.0.1:50051", stack.server.address)), 16)


async def test_the_line_for_a_key_and_tls(stack: Stack, tmp_path: Path) -> None:
    """A coordinator with keys serves no reflection, so `buf` reads the messages from `protos`."""
    authority = Made(tmp_path, "authority")
    mine = Made(tmp_path, "mine", "127.0.0.1", by=authority)
    key = add_key(tmp_path / "keys", Caller("a", "a"))
    access = AccessControl(watch_keys(tmp_path / "keys"))
    credentials = server_credentials(mine.file, mine.key_file)
    options = ServerOptions(credentials=credentials, guard=access.check_call, reflection=False)
    async with AsyncExitStack() as exits:
        server = await serve(exits, coordinator_api(stack.coordinator, access), options)
        line = line_of("docs/security.md")
        for name, value in (
            ("HOST:50051", server.address),
            ("ca.pem", str(authority.file)),
            ('France is"', 'France is", "max_tokens": 8'),
        ):
            assert line.count(name) == 1
            line = line.replace(name, value)
        check_answer(await answered(line, OUTRIDER_API_KEY=key), 8)
