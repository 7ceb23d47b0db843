"""`generate`, `chat` and `status`, each in a process of its own, with services in this process."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any, Self

from outrider.client import ChatMessage, GenerateRequest
from outrider.fleet.local_state import exclusive, mark_stopping, state_directory
from outrider.speculation.sampling_params import SamplingParams
from tests.support import recorded
from tests.support.stack import VOCAB, Stack, running_stack, until
from tests.support.toy_engine import ToyEngine

GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 30.0


async def start(*words: str, **variables: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "outrider.cli.main",
        *words,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **variables},
    )


async def run(*words: str, given: bytes = b"", **variables: str) -> tuple[int | None, str, str]:
    process = await start(*words, **variables)
    async with asyncio.timeout(60):
        out, err = await process.communicate(given)
    return process.returncode, out.decode(), err.decode()


async def generate(stack: Stack, *words: str, given: bytes = b"") -> tuple[int | None, str, str]:
    return await run("generate", "--server", stack.client.address, *words, given=given)


async def test_a_prompt_may_come_from_standard_input(stack: Stack) -> None:
    request = GenerateRequest("a\nb", sampling=GREEDY, max_tokens=5)
    expected = (await stack.client.complete(request)).text
    code, out, err = await generate(stack, "--max-tokens", "5", "-", given=b"a\nb\n")
    assert (code, out) == (0, expected + "\n"), err
    assert "tokens/s" in err
    assert "tokens per round" in err
    assert await generate(stack, "--max-tokens", "5", "a\nb", "--quiet") == (0, out, "")
    code, out, err = await generate(stack, "-", given=b"\xff")
    assert (code, out) == (2, "")
    assert err.startswith("outrider: error: PROMPT: standard input is not UTF-8")


async def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    engine = ToyEngine(VOCAB, salt=1, max_model_len=256)
    async with running_stack(engine, None, tmp_path) as stack:
        request = GenerateRequest((5, 6, 7), sampling=GREEDY, max_tokens=4)
        expected = (await stack.client.complete(request)).token_ids
        words = ("--token-ids", "5, 6,7", "--max-tokens", "4")
        code, out, err = await generate(stack, *words)
        assert (code, out) == (0, ",".join(map(str, expected)) + "\n"), err
        code, out, err = await generate(stack, *words, "--json", "--logprobs", "2")
        found = json.loads(out)
        assert found["token_ids"] == list(expected)
        code, out, err = await generate(stack, *words, "--logprobs", "2")
        lines = out.splitlines()[2:]
        for line, token_id, at in zip(lines, expected, found["logprobs"], strict=True):
            top = ", ".join(f"{other} {logprob:.4f}" for other, logprob in at["top"])
            assert line.rstrip().split(maxsplit=2) == [str(token_id), f"{at['logprob']:.4f}", top]
        code, out, err = await generate(stack, "--token-ids", f"5,{VOCAB}")
        assert code == 2
        assert err.startswith(f"outrider: error: --token-ids (number 2): {VOCAB} is not a token")
        told = "outrider: error: PROMPT: the model has no tokenizer; give token ids\n"
        assert await generate(stack, "text") == (2, "", told)


async def answer(stack: Stack, *turns: str, max_tokens: int = 12) -> str:
    roles = ("user", "assistant")
    prompt = tuple(ChatMessage(roles[i % 2], turn) for i, turn in enumerate(turns))
    request = GenerateRequest(prompt, sampling=GREEDY, max_tokens=max_tokens)
    return (await stack.client.complete(request)).text


async def pipe(stack: Stack, lines: str, *more: str) -> tuple[int | None, str, str]:
    return await run("chat", "--server", stack.client.address, *more, given=lines.encode())


async def test_a_pipe_gets_the_answers_alone(stack: Stack) -> None:
    first = await answer(stack, "hello")
    second = await answer(stack, "hello", first, "go on")
    code, out, err = await pipe(
        stack, "hello\n\ngo on\n/stats\n/reset\nhello\n/fly\n/exit\nnever\n", "--max-tokens", "12"
    )
    assert code == 0, err
    assert out == f"{first}\n{second}\n{first}\n"
    assert first != second
    assert err.count("12 tokens, ") == 2
    assert "2 complete answers, 4 messages" in err
    assert "/fly: no such command" in err
    assert "error" not in err
    assert ">" not in err


async def test_a_pipe_ends_with_its_input_or_a_refusal(stack: Stack) -> None:
    chat = (ChatMessage("system", "So be it."), ChatMessage("user", "say"))
    for raw, prompt in (((), chat), (("--raw",), "So be it.\nsay")):
        words = ("--max-tokens", "5", *raw, "--system", "So be it.")
        code, out, _ = await pipe(stack, "say", *words)
        request = GenerateRequest(prompt, sampling=GREEDY, max_tokens=5)
        assert (code, out) == (0, (await stack.client.complete(request)).text + "\n")
    code, out, err = await pipe(stack, "hello\n" + "x" * 300 + "\nhello\n", "--max-tokens", "5")
    assert code == 2
    assert out == await answer(stack, "hello", max_tokens=5) + "\n"
    assert err.startswith("outrider: error: ")
    assert err.count("\n") == 1


class Terminal:
    """A chat on a pseudo-terminal. Types what the test sends, and reads what is shown."""

    def __init__(self, process: Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._shown = b""
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    @classmethod
    async def start(cls, stack: Stack, *words: str) -> Self:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        environment.pop("NO_COLOR", None)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "outrider.cli.main",
            "chat",
            "--server",
            stack.client.address,
            *words,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        return cls(process, ours)

    def _read(self) -> None:
        try:
            self._shown += os.read(self._descriptor, 65536)
        except OSError:  # The other end of the terminal is closed.
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._more.set()

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def shows(self, pattern: str) -> str:
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
    terminal = await Terminal.start(stack, "--max-tokens", "12")
    greeting = await terminal.shows("> ")
    assert "model at" in greeting
    assert "accepted" in greeting
    terminal.type("hello\n")
    assert "\x1b[" in await terminal.shows("\n> ")
    terminal.type("x" * 300 + "\n")
    await terminal.shows("error: .*not part of the conversation")
    await terminal.shows("> ")
    terminal.type("\x04")
    assert await terminal.close() == 0


async def test_an_interrupt_breaks_the_answer_off_and_then_the_chat(slow: Stack) -> None:
    terminal = await Terminal.start(slow, "--max-tokens", "4000")
    await terminal.shows("> ")
    terminal.type("hello\n")
    await until(lambda: slow.coordinator.num_running)
    await terminal.shows(r"\x1b\[[0-9;]+m[^\x1b]+\x1b")
    terminal.process.send_signal(signal.SIGINT)
    await terminal.shows("interrupted")
    await until(lambda: not slow.coordinator.num_running)
    await terminal.shows("> ")
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.close() == 130


async def facts(code: int, *words: str) -> Any:
    found, out, err = await run("status", "--json", *words)
    assert (found, out.count("\n")) == (code, 1), err
    return json.loads(out)


async def test_a_deployment_is_described(slow: Stack) -> None:
    known = recorded.record(
        grpc_address=slow.client.address,
        target_addresses=[slow.target_server.address],
        draft_addresses=[slow.draft_server.address],
        redis={"url": slow.redis.url, "key_prefix": "outrider:"},
        ray_address="",
        settings={"max_num_seqs": 64},
    )
    recorded.run_here(state_directory(os.environ), known)
    events = slow.client.generate(GenerateRequest((1, 2, 3), max_tokens=2000))
    await anext(events)
    found = await facts(0)
    await events.aclose()
    assert (found["running"], found["serving"]) == (True, True)
    assert found["deployment"]["pid"] == os.getpid()
    assert found["deployment"]["name"] == "d"
    assert found["deployment"]["settings"] == {"max_num_seqs": 64}
    [coordinator] = found["coordinators"]
    assert (coordinator["address"], coordinator["model"]) == (slow.client.address, "model")
    assert coordinator["num_running"] == 1
    assert found["targets"][0]["vocab_size"] == VOCAB
    assert found["targets"][0]["weights_fingerprint"]
    assert found["drafts"][0]["model"] == "emulated"
    code, out, _ = await run("status")
    assert code == 0
    for words in ("drafted by ngram", slow.target_server.address, "serving", "0 sessions"):
        assert words in out
    await slow.draft_server.stop()
    found = await facts(0)
    assert (found["drafts"][0]["serving"], found["targets"][0]["serving"]) == (False, True)
    assert found["drafts"][0]["error"]
    await slow.target_server.stop()
    found = await facts(1)
    assert (found["running"], found["serving"]) == (True, False)


async def test_a_named_server_is_asked(slow: Stack) -> None:
    found = await facts(0, "--server", slow.client.address)
    assert found["coordinators"][0]["max_model_len"] == 8192
    assert found["deployment"] is None
    assert (await facts(1, "--server", "127.0.0.1:1"))["running"] is False
    assert (await run("status"))[:2] == (1, "nothing runs\n")
    with exclusive(state_directory(os.environ)):
        assert (await run("status"))[1] == f"starting (pid {os.getpid()})\n"
        mark_stopping(state_directory(os.environ))
        assert (await run("status"))[:2] == (1, f"being stopped (pid {os.getpid()})\n")
        assert (await facts(1))["stopping"]
    assert (await facts(1))["lease"]["holder"] is None
