"""A coordinator compiles a request's constraint before it opens a session."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer

from coordinator.requests.grammar_check import ConstraintChecks
from coordinator.requests.validation import PromptEncoder
from outrider.errors import BadRequest, InvariantError, Overloaded
from outrider.grammar.constraint import Constraint
from outrider.limits import COMPILE_BYTES_MAX, COMPILE_S_MAX
from outrider.tokenizer import TokenizerText

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


def cpu_s() -> dict[int, float]:
    """What each process that compiles has worked, by its id."""
    found = {}
    for process in multiprocessing.active_children():
        with suppress(FileNotFoundError):
            stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            found[process.pid or 0] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return found


async def worker(*, is_busy: bool) -> int:
    """Waits until exactly one process works, or none does; returns its id, or that of some."""
    while True:
        before = cpu_s()
        await asyncio.sleep(0.3)
        after = cpu_s()
        busy = [pid for pid in after if after[pid] - before.get(pid, 0.0) > 0.1]
        if after.keys() == before.keys() and len(busy) == is_busy:
            return busy[0] if busy else next(iter(after))


@asynccontextmanager
async def endless(prompts: PromptEncoder) -> AsyncIterator[tuple[asyncio.Task[None], int]]:
    """A compilation that does not end by itself, and the process that it keeps busy."""
    await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
    await worker(is_busy=False)
    task = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
    yield task, await worker(is_busy=True)


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
    compile_one = ConstraintChecks._compile

    async def noting(self: ConstraintChecks, constraint: Constraint) -> Any:
        compiled.append(constraint)
        return await compile_one(self, constraint)

    monkeypatch.setattr(ConstraintChecks, "_compile", noting)
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
    async with encoder() as prompts, endless(prompts) as (task, process_id):
        for index in range(5):
            await prompts.check_constraint(Constraint.of_regex(f"a{index}"), EOS, "b")
        assert not task.done()
        with pytest.raises(BadRequest, match=r"^json_schema: takes more than 2 s to compile"):
            await task
        assert process_id not in cpu_s()
        with pytest.raises(BadRequest, match="takes more than 2 s"):  # Known, for a minute.
            async with asyncio.timeout(0.5):
                await prompts.check_constraint(ENDLESS, EOS, "a")


async def test_a_compilation_that_nobody_waits_for_is_ended() -> None:
    async with encoder() as prompts, endless(prompts) as (task, process_id):
        began = time.monotonic()
        task.cancel()
        while process_id in cpu_s():
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < COMPILE_S_MAX / 2
        await prompts.check_constraint(Constraint.of_regex("b"), EOS, "a")


async def test_a_worker_that_dies_is_replaced() -> None:
    """What it was compiling is refused, to be tried again."""
    async with encoder() as prompts, endless(prompts) as (task, process_id):
        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await task
        await prompts.check_constraint(Constraint.of_regex("b"), EOS, "a")


async def test_what_goes_wrong_in_a_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    most = f"regex: takes more than {COMPILE_BYTES_MAX} bytes to compile"
    ours = "regex: could not be compiled, by a fault of ours"
    async with encoder() as prompts:
        for fault, error, says in (
            (MemoryError, BadRequest, most), (KeyError, InvariantError, ours),
        ):  # fmt: skip
            monkeypatch.setattr(
                "coordinator.requests.grammar_check._reason_against", partial(_raise, fault)
            )
            with pytest.raises(error, match=says):
                await prompts.check_constraint(Constraint.of_regex(f"a{says}"), EOS, "a")


def _raise(fault: type[Exception], constraint: Constraint) -> None:
    raise fault


def test_the_memory_of_a_compilation_is_limited() -> None:
    """By the kernel, in a process of its own."""
    program = (
        "from coordinator.requests import grammar_check as check\n"
        "check.COMPILE_BYTES_MAX = 2**24\n"
        "check._limit()\n"
        "bytearray(2**25)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MemoryError" in found.stderr


async def test_workers_end_with_their_coordinator() -> None:
    """Closed while one of them compiles."""
    async with encoder() as prompts, endless(prompts) as (task, _):
        pass
    with pytest.raises((Overloaded, asyncio.CancelledError)):
        await task
    assert not cpu_s()


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
