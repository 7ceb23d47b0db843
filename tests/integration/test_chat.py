"""`outrider chat` as a process of its own, on a pipe and on a terminal, with a coordinator here."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest
from models import byte_level_tokenizer
from stack import Stack, running_stack
from toy_engine import ToyEngine

from outrider.client import ChatMessage, GenerateRequest
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.speculation.sampling_params import SamplingParams
from outrider.tokenizer import TokenizerText

VOCAB = 320
GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 30.0


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    target = ToyEngine(VOCAB, salt=1, max_model_len=256)
    draft = ToyEngine(VOCAB, salt=1, max_model_len=256)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(target, draft, tmp_path, text=text) as running:
        yield running


@pytest.fixture
async def slow_stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Whose answers last longer than a test."""
    spec = EmulatedSpec(vocab_size=VOCAB, max_model_len=8192, verify_ms=20.0)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    engine = EmulatedEngine(spec, "target")
    async with running_stack(engine, None, tmp_path, text=text) as running:
        yield running


def words(stack: Stack, *more: str) -> list[str]:
    server = stack.client.address
    return [sys.executable, "-m", "deploy.cli.main", "chat", "--server", server, *more]


async def answer(stack: Stack, *turns: str, max_tokens: int = 12) -> str:
    """What the model says after turns that begin with the user's."""
    roles = ("user", "assistant")
    prompt = tuple(ChatMessage(roles[i % 2], turn) for i, turn in enumerate(turns))
    request = GenerateRequest(prompt, sampling=GREEDY, max_tokens=max_tokens)
    return (await stack.client.complete(request)).text


async def pipe(stack: Stack, lines: str, *more: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *words(stack, *more), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate(lines.encode())
    return process.returncode, out.decode(), err.decode()


async def test_a_pipe_gets_the_answers_alone(stack: Stack) -> None:
    """Each answer is to all that was said before; a reset forgets it; figures and commands are
    told on standard error; what stands behind /exit is not read."""
    first = await answer(stack, "hello")
    second = await answer(stack, "hello", first, "go on")
    code, out, err = await pipe(
        stack, "hello\n\ngo on\n/stats\n/reset\nhello\n//hello\n/fly\n/exit\nnever\n",
        "--max-tokens", "12",
    )  # fmt: skip
    assert code == 0, err
    escaped = await answer(stack, "hello", first, "/hello")
    assert out == f"{first}\n{second}\n{first}\n{escaped}\n"
    assert first != second
    assert re.search(r"2 answers: 2\d tokens, .* tokens per round", err), err
    assert "the conversation has 4 messages" in err
    assert "/fly: there is no such command" in err
    assert "error" not in err
    assert ">" not in err


async def test_a_pipe_ends_without_a_last_newline(stack: Stack) -> None:
    """The end of input ends the chat; a system message and raw text go into the prompt."""
    code, out, _ = await pipe(stack, "say", "--max-tokens", "5", "--raw", "--system", "So be it.")
    request = GenerateRequest("So be it.\nsay", sampling=GREEDY, max_tokens=5)
    assert (code, out) == (0, (await stack.client.complete(request)).text + "\n")


async def test_a_refusal_ends_a_pipe(stack: Stack) -> None:
    """Exit code 2, one line, and what was answered before it."""
    code, out, err = await pipe(stack, "hello\n" + "x" * 300 + "\nhello\n", "--max-tokens", "5")
    assert code == 2
    assert out == await answer(stack, "hello", max_tokens=5) + "\n"
    assert err.startswith("outrider: error: ")
    assert err.count("\n") == 1


async def test_nobody_answers(stack: Stack) -> None:
    """Shown at once and not after the first message."""
    process = await asyncio.create_subprocess_exec(
        *words(stack)[:-1], "127.0.0.1:1", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(WAIT_S):
        assert process.stderr is not None
        assert (await process.stderr.read()).startswith(b"outrider: error: ")
        assert await process.wait() == 1


class Terminal:
    """A chat on a pseudo-terminal, which reads what is typed and shows."""

    def __init__(self, process: Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._shown = b""
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    @classmethod
    async def start(cls, command: list[str]) -> Self:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        environment.pop("NO_COLOR", None)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        return cls(process, ours)

    def _read(self) -> None:
        try:
            self._shown += os.read(self._descriptor, 65536)
        except OSError:  # The other end is closed.
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._more.set()

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def shows(self, pattern: str) -> str:
        """Waits until a pattern is shown, and takes what came up to its end."""
        async with asyncio.timeout(WAIT_S):
            while (found := re.search(pattern.encode(), self._shown)) is None:
                self._more.clear()
                await self._more.wait()
        before, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return before.decode("utf-8", "replace")

    async def close(self) -> int:
        async with asyncio.timeout(WAIT_S):
            code = await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        return code


async def test_a_terminal_shows_origins_and_asks_on(stack: Stack) -> None:
    """Colours by origin, a prompt for every line, and an error that does not end the chat."""
    terminal = await Terminal.start(words(stack, "--max-tokens", "12"))
    greeting = await terminal.shows("> ")
    assert "model at" in greeting
    assert "accepted" in greeting
    terminal.type("hello\n")
    assert "\x1b[" in await terminal.shows("\n> ")
    terminal.type("x" * 300 + "\n")
    await terminal.shows("error: .*not part of the conversation")
    await terminal.shows("> ")
    terminal.type("/stats\n")
    await terminal.shows("1 answers: 12 tokens")
    await terminal.shows("the conversation has 2 messages")
    await terminal.shows("> ")
    terminal.type("\x04")
    assert await terminal.close() == 0


async def test_a_quiet_terminal_has_the_prompt_alone(stack: Stack) -> None:
    terminal = await Terminal.start(words(stack, "--quiet"))
    assert await terminal.shows("> ") == "> "
    terminal.type("\x04")
    assert await terminal.close() == 0


async def test_an_interrupt_breaks_the_answer_off_and_then_the_chat(slow_stack: Stack) -> None:
    """The session ends at the coordinator too; what had come stays in the conversation."""
    terminal = await Terminal.start(words(slow_stack, "--max-tokens", "4000"))
    await terminal.shows("> ")
    terminal.type("hello\n")
    async with asyncio.timeout(WAIT_S):
        while slow_stack.coordinator.num_running == 0:
            await asyncio.sleep(0.01)
    await terminal.shows(r"\x1b\[[0-9;]+m[^\x1b]+\x1b")
    terminal.process.send_signal(signal.SIGINT)
    await terminal.shows("broken off")
    async with asyncio.timeout(WAIT_S):
        while slow_stack.coordinator.num_running:
            await asyncio.sleep(0.01)
    await terminal.shows("> ")
    terminal.type("/stats\n")
    await terminal.shows("no whole answers and 1 broken off")
    await terminal.shows("the conversation has 2 messages")
    await terminal.shows("> ")
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.close() == 130
