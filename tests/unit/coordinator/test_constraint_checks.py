"""A coordinator compiles a request's constraint before it opens a session."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer

from coordinator.constraint_checks import _Compiler
from coordinator.prompts import PromptEncoder
from outrider.constraints.constraint import Constraint
from outrider.errors import BadRequest, Overloaded
from outrider.limits import COMPILE_S_MAX
from outrider.text import TokenizerText

EOS = (0,)
ENDLESS = Constraint.of_schema({"type": "integer", "multipleOf": 9_999_991})
"""Small, valid, and more than minutes of work for the compiler."""


@asynccontextmanager
async def encoder() -> AsyncIterator[PromptEncoder]:
    prompts = PromptEncoder(TokenizerText(byte_level_tokenizer(), "small"))
    try:
        async with asyncio.timeout(30):
            yield prompts
    finally:
        await prompts.close()


def compiler_of(prompts: PromptEncoder) -> int:
    """The id of its process; 0 = it is not there yet."""
    checks = prompts._checks
    process = None if checks is None else checks._compiler._process
    return 0 if process is None else process.pid


def forks(prompts: PromptEncoder) -> list[int]:
    """Ids of processes that compile."""
    parent = compiler_of(prompts)
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(one) for one in children.read_text().split()] if parent else []


def is_there(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


async def test_what_can_be_compiled_passes_and_what_cannot_is_told_by_its_field() -> None:
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_schema({"type": "object"}), EOS, "a")
        await prompts.check_constraint(Constraint.of_choices(["a", "b"]), EOS, "a")
        with pytest.raises(BadRequest, match=r"json_schema: cannot be compiled: .*nonsense"):
            await prompts.check_constraint(Constraint.of_schema({"type": "nonsense"}), EOS, "a")
        with pytest.raises(BadRequest, match="regex: cannot be compiled"):
            await prompts.check_constraint(Constraint.of_regex("(a"), EOS, "a")


async def test_tenants_do_not_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one tenant's constraint is compiled once, however many ask for it at a time."""
    compiled: list[Constraint] = []
    compile_one = _Compiler.compile

    async def noting(self: _Compiler, constraint: Constraint) -> dict[str, Any]:
        compiled.append(constraint)
        return await compile_one(self, constraint)

    monkeypatch.setattr(_Compiler, "compile", noting)
    async with encoder() as prompts:
        for tenant in ("a", "b", "a"):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, tenant)
        assert len(compiled) == 2
        other = Constraint.of_regex("b")
        await asyncio.gather(*(prompts.check_constraint(other, EOS, "a") for _ in range(5)))
        assert len(compiled) == 3


async def test_a_compilation_that_takes_too_long_is_ended() -> None:
    """Its request hears which field it was, another tenant's constraints are checked meanwhile, and
    nothing works on it any more."""
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        began = time.monotonic()
        endless = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
        while not forks(prompts):
            await asyncio.sleep(0.01)
        for index in range(5):
            await prompts.check_constraint(Constraint.of_regex(f"a{index}"), EOS, "b")
        assert not endless.done()
        with pytest.raises(BadRequest, match=r"^json_schema: takes more than 2 s to compile"):
            await endless
        assert time.monotonic() - began >= COMPILE_S_MAX * 0.9
        assert not forks(prompts)
        with pytest.raises(BadRequest, match="takes more than 2 s"):  # Known, for a minute.
            async with asyncio.timeout(0.5):
                await prompts.check_constraint(ENDLESS, EOS, "a")


async def test_a_compilation_that_nobody_waits_for_is_ended() -> None:
    async with encoder() as prompts:
        endless = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
        while not forks(prompts):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        endless.cancel()
        while forks(prompts):
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < COMPILE_S_MAX / 2
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")


async def test_a_compiler_that_dies_is_started_again() -> None:
    """What it was compiling is refused, to be tried again."""
    async with encoder() as prompts:
        endless = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
        while not forks(prompts):
            await asyncio.sleep(0.01)
        [fork], process_id = forks(prompts), compiler_of(prompts)
        os.kill(process_id, signal.SIGKILL)
        os.kill(fork, signal.SIGKILL)
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await endless
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        assert compiler_of(prompts) != process_id


async def test_a_compiler_ends_with_its_coordinator() -> None:
    """Closed, or killed, when nobody tells it anything: then its input ends."""
    async with encoder() as prompts:
        endless = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
        while not forks(prompts):
            await asyncio.sleep(0.01)
        ids = [*forks(prompts), compiler_of(prompts)]
    with pytest.raises(Overloaded):
        await endless
    for process_id in ids:
        while is_there(process_id):
            await asyncio.sleep(0.01)


async def test_a_model_without_a_tokenizer_has_no_constraints() -> None:
    prompts = PromptEncoder(None)
    with pytest.raises(BadRequest, match=r"^regex: the model has no tokenizer"):
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
    await prompts.close()


async def test_a_model_without_an_end_of_text_has_none_either() -> None:
    prompts = PromptEncoder(TokenizerText(byte_level_tokenizer(), "small"))
    with pytest.raises(BadRequest, match=r"^json_object: the model has no token that ends a text"):
        await prompts.check_constraint(Constraint.any_object(), (), "a")
    await prompts.close()
