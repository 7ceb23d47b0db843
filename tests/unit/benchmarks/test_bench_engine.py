"""`bench engine`: its load generator against a target in one process, and one small run of all."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from models import byte_level_tokenizer, quick_linear, save_tiny_model
from toy_engine import ToyEngine, toy_logits

from benchmarks.engine import LIBRARY_SESSIONS, EngineOptions, _Sides
from benchmarks.engine_load import Load, Prompts
from benchmarks.engine_roles import _decode
from benchmarks.engine_steps import GENERIC_SHAPE, alternately, generic_step_times
from benchmarks.engine_waits import Waits
from deploy.cli.main import main
from outrider.clock import run_virtually
from outrider.errors import InvariantError, SettingError, Unavailable
from outrider.limits import ANSWERS_HELD_MS, RUN_AHEAD_ROUNDS_MAX
from outrider.messages import VerifyAnswer, VerifyItem
from outrider.replica.scheduler import InlineExecutor
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

SALT = 1
VOCAB_SIZE = 8


def greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(toy_logits(SALT, tokens, VOCAB_SIZE).argmax()))
    return tokens


class _Target:
    """A target on a toy engine, and what it was asked."""

    def __init__(self, num_pages: int = 1024, step_s: float = 0.01) -> None:
        self.engine = ToyEngine(VOCAB_SIZE, SALT, max_model_len=128, num_pages=num_pages)
        service = TargetService(self.engine, InlineExecutor(lambda: step_s), max_num_seqs=8)
        self.link: MemoryLink[VerifyItem, VerifyAnswer] = MemoryLink(service)
        self.released: list[tuple[str, list[int]]] = []
        forget = self.engine.release

        def release(session_id: str) -> None:
            if session_id in self.engine.held:
                self.released.append((session_id, list(self.engine.held[session_id])))
            forget(session_id)

        self.engine.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize("num_tokens", [1, RUN_AHEAD_ROUNDS_MAX, 3 * RUN_AHEAD_ROUNDS_MAX + 1])
def test_every_session_decodes_all_its_tokens_and_is_released(num_tokens: int) -> None:
    """What the engine held at the release is the target's own greedy text, but for the last
    token, which was never run."""
    prompts = [(1, 2, 3), (4,), (5, 6)]

    async def decode() -> _Target:
        target = _Target()
        await Load(target.link).decode(prompts, num_tokens)
        while len(target.released) < len(prompts):  # a release is a message like any other
            await asyncio.sleep(0.01)
        return target

    target = run_virtually(decode())
    texts = [tokens for _, tokens in target.released]
    assert texts == [greedy(prompt, num_tokens)[:-1] for prompt in prompts]


def test_a_session_that_lost_its_pages_goes_on() -> None:
    """Two sessions of 22 tokens need 11 pages; where there are 8, one asks again from where it is
    held."""

    async def decode() -> float:
        return await Load(_Target(num_pages=8).link).decode([(1, 2), (3, 4)], 20)

    assert run_virtually(decode()) > 20 * 0.01


def test_a_goal_is_told_when_its_token_comes_and_not_before() -> None:
    """At a step so long that each verdict leaves at once, without waiting for the next."""

    async def decode() -> None:
        target = _Target(step_s=2 * ANSWERS_HELD_MS / 1e3)
        async with Load(target.link).running([(1, 2, 3)], 5) as (session,):
            second = session.reached(2)
            await second
            assert len(session.arrivals) == 2
            assert session.reached(1).done()
            assert session.reached(2) is second
            with pytest.raises(InvariantError, match="it ends after 5 tokens"):
                session.reached(6)

    run_virtually(decode())


def test_a_target_that_refuses_ends_the_measurement() -> None:
    async def decode() -> None:
        await Load(_Target().link).decode([(VOCAB_SIZE + 1,)], 4)

    with pytest.raises(Unavailable, match="outside the vocabulary"):
        run_virtually(decode())


def test_the_engine_alone_decodes_in_step_and_keeps_nothing() -> None:
    engine = ToyEngine(VOCAB_SIZE, SALT)
    assert _decode(engine, [[1, 2], [3]], 5) > 0
    assert not engine.held
    assert len(engine.batches) == 2 + 4


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(range(1000))
    taken = [prompt for number in (1, 16, 16, 4) for prompt in prompts.take(number, 20)]
    assert {len(prompt) for prompt in taken} == {20}
    assert len({prompt[0] for prompt in taken}) == len(taken)


def test_what_is_compared_takes_turns() -> None:
    order: list[str] = []
    works = [lambda: order.append("a"), lambda: order.append("b")]
    times = alternately(works, lambda: order.append("undone"))
    assert len(times) == 2
    assert order[:4] == ["a", "undone", "b", "undone"]


def test_no_block_of_the_generic_model_is_fused(caplog: pytest.LogCaptureFixture) -> None:
    """One layer: four linear layers and the head are swapped, and nothing else is."""
    shape = {**GENERIC_SHAPE, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 4, "intermediate_size": 48}  # fmt: skip
    with caplog.at_level("INFO"):
        times = generic_step_times(torch.device("cpu"), shape=shape)
    assert list(times) == ["generic_verify_step_ms", "generic_transformers_forward_ms"]
    assert all(time > 0 for time in times.values())
    kind = quick_linear(torch.bfloat16).__name__
    assert f"modules swapped: {{'{kind}': 5}}" in caplog.text


@pytest.mark.parametrize("name", ["repetitions", "prompt_tokens", "new_tokens"])
def test_options_are_bounded(name: str) -> None:
    assert getattr(EngineOptions(**{name: 1}), name) == 1
    for value in (0, 10**6):
        with pytest.raises(SettingError, match=f"{name}: {value} is wrong"):
            EngineOptions(**{name: value})


def test_sessions_that_do_not_fit_the_model_are_refused_before_any_is_timed() -> None:
    options = EngineOptions(prompt_tokens=100, new_tokens=28)
    options.check_fits(128)
    with pytest.raises(SettingError, match="100 and 28 new tokens are more than the 127"):
        options.check_fits(127)


def test_one_run_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_tiny_model(
        tmp_path, vocab_size=320, tokenizer=byte_level_tokenizer(), max_model_len=512
    )
    words = ["--prompt-tokens", "8", "--new-tokens", "2", "--repetitions", "1", "--json"]
    assert main(["bench", "engine", "--model", str(directory), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    for sessions in (found["sessions"], found["engine_sessions"]):
        assert list(sessions) == ["1", "4", "16", "32"]
        assert all(rate["tokens_per_second"] > 0 for rate in sessions.values())
    for name in (
        "transformers_continuous_batching_tokens_per_second", "rows_80_over_16",
        "transformers_generate_tokens_per_second", "verify_step_ms", "transformers_forward_ms",
        "generic_verify_step_ms", "generic_transformers_forward_ms",
    ):  # fmt: skip
        assert found[name] > 0
    assert all(found[field.name] is None for field in fields(Waits)), "for 512 tokens"


class _Asked:
    """A process or a load generator that notes how many prompts it is given for what."""

    def __init__(self) -> None:
        self.prompts: list[tuple[str, int]] = []

    async def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.prompts.append((question["measure"], len(question["prompts"])))
        return {"seconds": 1.0, "num_tokens": 1}

    async def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        return 1.0


def test_the_library_first_gets_as_many_prompts_as_are_measured() -> None:
    """The first ones decide for how many it makes room."""
    asked = _Asked()
    processes: Any = dict.fromkeys(("engine", "generate_batch", "generate"), asked)
    load: Any = asked
    sides = _Sides(EngineOptions(), Prompts(range(4096)), load, processes)
    asyncio.run(sides.warm_up(lambda _: None))
    warmed = [number for measure, number in asked.prompts if measure == "generate_batch"]
    asyncio.run(sides.rates(lambda _: None))
    assert warmed == [LIBRARY_SESSIONS]
    assert ("generate_batch", LIBRARY_SESSIONS) in asked.prompts[len(warmed) :]
