"""The three services with both models on vLLM. The text has the target's law, and does not depend
on drafts, look-ahead or other sessions. A target is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.client import Client, GenerateRequest, Tokens
from outrider.config.deployment import load_config
from outrider.fleet.launcher import Deployment
from outrider.interfaces.request import RoundReport
from outrider.models.sources import resolve_model
from outrider.speculation.sampling_params import Rule
from tests.exactness import cells
from tests.exactness.cells import POWER, SOON, Cell, measure
from tests.support.models import byte_level_tokenizer, depth_cut
from tests.support.same_tokens import Prompt, check_tokens, request
from tests.support.stack import running_stack
from tests.support.vllm_models import MakeEngine, config_of, save

NUM_TOKENS, NUM_LONG = 24, 200
PROMPTS: list[Prompt] = [tuple(range(1, 30)) + tuple(range(1, 3 + 2 * i)) for i in range(8)]
START_S, STEP_S = 240.0, 0.03


@pytest.mark.parametrize(
    "cell",
    [
        Cell(Rule.TOKEN, 2, "top-k", num_samples=2_400, detects=SOON),
        Cell(Rule.BLOCK, 3, drafter="eagle3", token_ids=(0, 1), num_samples=3_000, detects=SOON),
    ],
    ids=str,
)
async def test_completions_follow_the_targets_law(
    cell: Cell, tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft looks ahead, and a head reads the target's hidden states."""

    def narrow(family: str, vocab_size: int, **sizes: Any) -> Any:
        return config_of(family, vocab_size=vocab_size, hidden_size=32, **sizes)

    def engine_of(module: Any, _: Any, draft_layer: Any = None) -> Any:
        directory = tmp_path / f"model-{id(module)}"
        module.save_pretrained(directory)
        check = None if draft_layer is None else lambda loaded, *_: loaded
        return make_engine(directory, max_num_seqs=64, draft_layer=draft_layer, draft_check=check)

    monkeypatch.setattr(cells, "tiny_config", narrow)
    monkeypatch.setattr(cells, "engine_of", engine_of)
    result, num_accepted = await measure(cell, tmp_path)
    assert result.power(cell.detects) >= POWER
    assert not result.rejects
    assert num_accepted > 0


def saved_pair(directory: Path, **changes: Any) -> tuple[str, str]:
    for seed, name in enumerate(names := ("target", "draft"), 1):
        save("llama", directory / name, seed, torch.bfloat16, **changes)
    return names


@pytest.mark.real_model
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
async def test_tokens_depend_on_neither_k_nor_the_batch(
    temperature: float, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """The draft is the first 4 layers of the target. Prompts share a beginning."""
    demo = resolve_model("demo")
    engines = [
        make_engine(path, dtype="bfloat16", deterministic=True, kv_cache_memory_bytes=2**27)
        for path in (demo, depth_cut(demo, tmp_path / "cut", 4))
    ]
    async with running_stack(engines[0], engines[1], tmp_path / "redis") as stack:
        await check_tokens(stack, PROMPTS[:4], 32, num_alone=2, temperature=temperature)


async def test_look_ahead_changes_no_token(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Some predicted outcomes come true, if the target's steps leave enough time."""
    target, draft = (
        make_engine(tmp_path / name, dtype="bfloat16", deterministic=True)
        for name in saved_pair(tmp_path)
    )
    forward = target.forward

    def slow(steps: Any) -> Any:
        time.sleep(STEP_S)
        return forward(steps)

    target.forward = slow
    wanted = GenerateRequest(
        PROMPTS[0], seed=0, num_draft_tokens=3, max_tokens=100, include_rounds=True
    )
    async with running_stack(target, draft, tmp_path / "redis", look_ahead=8) as stack:
        await check_tokens(stack, PROMPTS[:2], NUM_TOKENS, 2)
        events = [event async for event in stack.client.generate(wanted)]
    assert any(one.look_ahead_hit for one in events if isinstance(one, RoundReport))


@pytest.mark.timeout(2 * START_S)
async def test_text_goes_on_at_another_target(tmp_path: Path) -> None:
    for name in saved_pair(tmp_path, vocab_size=320):
        byte_level_tokenizer(320).save_pretrained(tmp_path / name)
    settings = {
        "model": str(tmp_path / "target"),
        "draft_model": str(tmp_path / "draft"),
        "engine": "vllm",
        "enforce_eager": True,
        "deterministic": True,
        "device": "cpu",
        "kv_cache_memory_bytes": 2**24,
        "draft_kv_cache_memory_bytes": 2**24,
        "max_num_seqs": 8,
        "num_targets": 2,
        "grpc_port": 0,
        "http": False,
        "target_num_threads": 1,
        "draft_num_threads": 1,
        "length_control": False,
        "audit_share": 0,
    }
    requests = [request(prompt, seed, 3, NUM_LONG) for seed, prompt in enumerate(PROMPTS[:4])]
    async with (
        Deployment(load_config(settings, {}), tmp_path / "fleet") as deployment,
        Client(deployment.address) as client,
    ):
        expected = [(await client.complete(each)).token_ids for each in requests]
        victim = deployment.overview.of("target")[0]
        progress = [0] * len(requests)

        async def text(index: int) -> tuple[int, ...]:
            tokens: list[int] = []
            async for event in client.generate(requests[index]):
                if isinstance(event, Tokens):
                    tokens += event.token_ids
                    progress[index] = len(tokens)
            return tuple(tokens)

        texts = asyncio.gather(*map(text, range(len(requests))))
        while not all(progress):
            await asyncio.sleep(0.001)
        os.kill(victim.locations[0].pid, signal.SIGKILL)
        assert max(progress) < NUM_LONG // 2
        assert await texts == expected


def test_openmp_is_the_one_that_vllm_requires() -> None:
    """The library is identified when torch first divides an operator among threads."""
    program = (
        "from outrider.replica.threads import use_threads; use_threads(2, 'vllm')\n"
        "import torch; torch.zeros(2**22).add_(1)"
    )
    if not Path(sys.prefix, "lib", "libiomp5.so").exists():
        pytest.skip("this build of vLLM comes without it")
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"KMP_VERSION": "TRUE"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Intel(R) OMP version" in ran.stderr
