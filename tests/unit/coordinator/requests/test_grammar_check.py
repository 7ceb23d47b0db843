"""A coordinator compiles a request's constraint before it opens a session."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer

from coordinator.requests import grammar_check
from coordinator.requests.grammar_check import FairQueue, _Compiler
from coordinator.requests.validation import PromptEncoder
from outrider.errors import BadRequest, InvariantError, Overloaded
from outrider.grammar.constraint import Constraint
from outrider.limits import COMPILE_S_MAX
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


def compiler(prompts: PromptEncoder) -> Any:
    """Its process; None = it is not there yet."""
    checks = prompts._checks
    return None if checks is None else checks._compiler.process


def group_of(prompts: PromptEncoder) -> list[int]:
    """Ids of its process and of its forks."""
    leader = compiler(prompts)
    if leader is None:
        return []
    found = subprocess.run(["pgrep", "-g", str(leader.pid)], capture_output=True, text=True)
    ids = [int(one) for one in found.stdout.split()]
    return ids if len(ids) > 1 else []


def is_there(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


async def compiling(prompts: PromptEncoder) -> asyncio.Task[None]:
    """A check of `ENDLESS`, once a process compiles it."""
    endless = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
    while not group_of(prompts):
        await asyncio.sleep(0.01)
    return endless


async def test_what_can_be_compiled_passes_and_what_cannot_is_told_by_its_field() -> None:
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_schema({"type": "object"}), EOS, "a")
        await prompts.check_constraint(Constraint.of_choices(["a", "b"]), EOS, "a")
        with pytest.raises(BadRequest, match=r"json_schema: cannot be compiled: .*nonsense"):
            await prompts.check_constraint(Constraint.of_schema({"type": "nonsense"}), EOS, "a")
        with pytest.raises(BadRequest, match="regex: cannot be compiled"):
            await prompts.check_constraint(Constraint.of_regex("(a"), EOS, "a")


async def test_a_constraint_is_compiled_once_for_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many ask for it at a time."""
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
        endless = await compiling(prompts)
        for index in range(5):
            await prompts.check_constraint(Constraint.of_regex(f"a{index}"), EOS, "b")
        assert not endless.done()
        with pytest.raises(BadRequest, match=r"^json_schema: takes more than 2 s to compile"):
            await endless
        assert time.monotonic() - began >= COMPILE_S_MAX * 0.9
        while group_of(prompts):
            await asyncio.sleep(0.01)
        with pytest.raises(BadRequest, match="takes more than 2 s"):  # Known, for a minute.
            async with asyncio.timeout(0.5):
                await prompts.check_constraint(ENDLESS, EOS, "a")


async def test_a_compiler_that_dies_is_started_again() -> None:
    """What it was compiling is refused, to be tried again."""
    async with encoder() as prompts:
        endless = await compiling(prompts)
        first = compiler(prompts)
        os.killpg(first.pid, signal.SIGKILL)
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await endless
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        assert compiler(prompts) is not first


STUB = """
import json, os, sys
input = iter(sys.stdin.readline, "")
next(input)
print(json.dumps({"id": 0, "outcome": "done"}), flush=True)
asked = json.loads(next(input))
if os.path.exists(%(was_here)r):
    print(json.dumps({"id": asked["id"], "outcome": "done"}), flush=True)
else:
    open(%(was_here)r, "w").close()
    os.write(1, open(%(line)r, "rb").read())
for _ in input:
    pass
"""
"""A compiler whose first process answers with a line, and later ones as they should."""


@pytest.mark.parametrize(
    "line",
    [b"junk\n", b"[]\n", b'"' + b"a" * 2**17 + b'"\n', b""],
    ids=["no JSON", "no object", "too long", "no answer"],
)
async def test_a_compiler_that_writes_no_message_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """What it was compiling is refused, to be tried again."""
    (tmp_path / "line").write_bytes(line)
    stub = STUB % {"was_here": str(tmp_path / "was here"), "line": str(tmp_path / "line")}
    monkeypatch.setattr(grammar_check, "_PROGRAM", stub)
    monkeypatch.setattr(grammar_check, "COMPILE_WAIT_S_MAX", 1.0)
    async with asyncio.timeout(20), encoder() as prompts:
        with pytest.raises(Overloaded):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        while True:
            with suppress(Overloaded):
                await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
                break


def alter(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Of the compiler's process, in which `p` is its module."""
    change = f"import coordinator.requests.grammar_process as p; {change}; from coordinator"
    program = grammar_check._PROGRAM.replace("from coordinator", change)
    monkeypatch.setattr(grammar_check, "_PROGRAM", program)


async def test_a_line_that_a_library_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by Python's `print` nor by C's."""
    printing = "print('junk', flush=True), p.os.write(1, b'junk\\n')"
    alter(monkeypatch, f"before = p._limit; p._limit = lambda: ({printing}, before())")
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")


async def test_a_bug_in_a_compilation_leaves_its_trace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And its request is answered."""
    alter(monkeypatch, "p._limit = lambda: {}['a bug']")
    async with encoder() as prompts:
        with pytest.raises(InvariantError, match="regex: could not be compiled"):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
    assert "KeyError: 'a bug'" in capfd.readouterr().err


async def test_a_compiler_ends_with_its_coordinator() -> None:
    """Closed, or killed, when nobody tells it anything: then its input ends."""
    async with encoder() as prompts:
        endless = await compiling(prompts)
        ids = group_of(prompts)
    with pytest.raises(Overloaded):
        await endless
    for process_id in ids:
        while is_there(process_id):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "has no tokenizer"), (byte_level_tokenizer, "has no token that ends a text")],
)
async def test_a_model_may_have_no_constraints(text: Any, said: str) -> None:
    prompts = PromptEncoder(text and TokenizerText(text(), "small"))
    with pytest.raises(BadRequest, match=f"^regex: the model {said}"):
        await prompts.check_constraint(Constraint.of_regex("a"), (), "a")
    await prompts.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def take(queue: FairQueue, begun: list[str], name: str) -> asyncio.Task[None]:
    """Notes when it has a place. Its tenant is the first letter."""

    async def wait() -> None:
        await queue.take(name[0])
        begun.append(name)

    return asyncio.create_task(wait())


async def test_a_tenant_with_much_work_holds_up_no_other() -> None:
    """All places are one's as long as it is alone; then others go first."""
    queue, begun = FairQueue(2, 100, 10, "jobs"), list[str]()
    tasks = [take(queue, begun, f"a{index}") for index in range(6)]
    await settle()
    assert begun == ["a0", "a1"]
    tasks += [take(queue, begun, name) for name in ("b0", "b1", "c0")]
    await settle()
    for index in range(7):  # The one that began first ends first.
        queue.give_back(begun[index][0])
        await settle()
    assert begun == ["a0", "a1", "b0", "a2", "c0", "b1", "a3", "a4", "a5"]


async def test_no_more_wait_than_may() -> None:
    """Neither of one tenant, nor in all; one that is cancelled does not wait."""
    queue, begun = FairQueue(1, 5, 3, "jobs"), list[str]()
    waiting = [take(queue, begun, f"a{index}") for index in range(4)]
    await settle()
    with pytest.raises(Overloaded, match=r"^3 jobs of yours wait already"):
        await queue.take("a")
    waiting += [take(queue, begun, f"b{index}") for index in range(2)]
    await settle()
    with pytest.raises(Overloaded, match=r"^5 jobs wait already"):
        await queue.take("c")
    waiting[1].cancel()
    await settle()
    waiting.append(take(queue, begun, "c0"))
    queue.give_back("a")
    waiting[4].cancel()  # It has been given the place, and has not run since.
    for tenant in "cba":
        await settle()
        queue.give_back(tenant)
    await settle()
    assert sorted(begun) == ["a0", "a2", "a3", "b1", "c0"]
