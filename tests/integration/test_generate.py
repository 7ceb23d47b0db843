"""`outrider generate` as a process of its own, with a coordinator here."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from models import byte_level_tokenizer
from stack import Stack, running_stack
from toy_engine import ToyEngine

from outrider.client import GenerateRequest
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.speculation.sampling_params import SamplingParams
from outrider.tokenizer import TokenizerText

VOCAB = 320
GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 30.0


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    engine = ToyEngine(VOCAB, salt=1, max_model_len=256)
    async with running_stack(engine, None, tmp_path, text=text) as running:
        yield running


async def start(stack: Stack, *words: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli.main", "generate", "--server", stack.client.address,
        *words, stdin=PIPE, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip


async def generate(stack: Stack, *words: str, given: bytes = b"") -> tuple[int | None, str, str]:
    process = await start(stack, *words)
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate(given)
    return process.returncode, out.decode(), err.decode()


async def test_a_prompt_may_come_from_standard_input(stack: Stack) -> None:
    """To its end but for the last line feed, so that the answer is that to the same argument; what
    is no text, and a bad number, are refused by name."""
    request = GenerateRequest("a\nb", sampling=GREEDY, max_tokens=5)
    expected = (await stack.client.complete(request)).text
    code, out, err = await generate(stack, "--max-tokens", "5", "-", given=b"a\nb\n")
    assert (code, out) == (0, expected + "\n"), err
    assert "tokens/s" in err
    assert "tokens per round" in err
    assert await generate(stack, "--max-tokens", "5", "a\nb", "--quiet") == (0, out, "")
    for deadline, expected_code in (("500", 0), ("0", 2)):
        words = ("a", "--max-tokens", "5", "--draft-deadline-ms", deadline)
        code, out, err = await generate(stack, *words)
        assert code == expected_code
    assert err.startswith("outrider: error: --draft-deadline-ms: got 0; allowed: 1..")
    code, out, err = await generate(stack, "-", given=b"\xff")
    assert (code, out) == (2, "")
    assert err.startswith("outrider: error: PROMPT: standard input is not UTF-8")


async def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    """And answers with token ids, on which one may go on; a text is refused."""
    engine = ToyEngine(VOCAB, salt=1, max_model_len=256)
    async with running_stack(engine, None, tmp_path) as stack:
        request = GenerateRequest((5, 6, 7), sampling=GREEDY, max_tokens=4)
        expected = (await stack.client.complete(request)).token_ids
        words = ("--token-ids", "5, 6,7", "--max-tokens", "4")
        code, out, err = await generate(stack, *words)
        assert (code, out) == (0, ",".join(map(str, expected)) + "\n"), err
        code, out, err = await generate(stack, *words, "--json")
        assert json.loads(out)["token_ids"] == list(expected)
        code, out, err = await generate(stack, "--token-ids", f"5,{VOCAB}")
        assert code == 2
        assert err.startswith(f"outrider: error: --token-ids (number 2): {VOCAB} is not a token")
        code, out, err = await generate(stack, "text")
        assert (code, out) == (2, "")
        assert err == (
            "outrider: error: PROMPT: the model has no tokenizer; give token ids by "
            "`outrider generate --token-ids`\n"
        )


async def test_log_probabilities_stand_behind_the_text(stack: Stack) -> None:
    """The same numbers as in JSON, a line per token."""
    words = ("hello", "--max-tokens", "3", "--logprobs", "2")
    code, out, err = await generate(stack, *words, "--json")
    found = json.loads(out)
    code, out, err = await generate(stack, *words)
    assert code == 0, err
    assert out.startswith(found["text"] + "\n")
    lines = out.removeprefix(found["text"] + "\n").splitlines()[1:]
    assert len(lines) == 3
    for line, token_id, at in zip(lines, found["token_ids"], found["logprobs"], strict=True):
        top = ", ".join(f"{other} {logprob:.4f}" for other, logprob in at["top"])
        assert line.rstrip().split(maxsplit=2) == [str(token_id), f"{at['logprob']:.4f}", top]


async def test_an_interrupted_text_ends_its_line(tmp_path: Path) -> None:
    """So that the shell's prompt does not stand behind it; the session ends at the coordinator."""
    spec = EmulatedSpec(vocab_size=VOCAB, max_model_len=8192, verify_ms=20.0)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(EmulatedEngine(spec, "target"), None, tmp_path, text=text) as stack:
        process = await start(stack, "hello", "--max-tokens", "4000")
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            shown = await process.stdout.read(16)
            assert shown
            process.send_signal(signal.SIGINT)
            shown += await process.stdout.read()
            assert await process.wait() == 130
            while stack.coordinator.num_running:
                await asyncio.sleep(0.01)
    assert shown.endswith(b"\n")
