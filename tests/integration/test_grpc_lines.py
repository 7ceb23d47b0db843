"""What the documents say to type for gRPC, run by `buf` as a reader would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import Stack

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
RUN_S = 60.0

pytestmark = pytest.mark.skipif(
    shutil.which("buf", path=PATH) is None, reason="buf is not installed"
)


def line_of(document: str) -> str:
    """The one command for gRPC in it, as it stands there, without the folder of `buf`."""
    blocks = re.findall(
        r"^```console\n(.*?)^```", (ROOT / document).read_text("utf-8"), re.S | re.M
    )
    known = [block.removeprefix(".venv/bin/") for block in blocks]
    (found,) = [block for block in known if block.startswith("buf curl ")]
    return str(found)


async def answered(line: str, **environment: str) -> list[dict[str, Any]]:
    """The events that it prints, run by a shell where the documents are."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", line,
        cwd=ROOT,
        env=dict(os.environ) | {"PATH": PATH} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(RUN_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    decoder, text, events = json.JSONDecoder(), out.decode().strip(), []
    while text:
        event, end = decoder.raw_decode(text)
        events.append(event)
        text = text[end:].lstrip()
    return events


async def test_the_readmes_line(stack: Stack) -> None:
    """By reflection; nothing of it is changed but the port, which tests have no say in."""
    line = line_of("README.md")
    assert line.count("127.0.0.1:50051") == 1
    events = await answered(line.replace("127.0.0.1:50051", stack.server.address))
    assert list(events[0]) == ["started"]
    tokens = [event["tokens"] for event in events if "tokens" in event]
    assert sum(len(part["tokenIds"]) for part in tokens) == 16
    assert "".join(part.get("textDelta", "") for part in tokens)
    assert events[-1]["finished"]["usage"]["completionTokens"] == 16
