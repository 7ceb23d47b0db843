"""A coordinator compiles a request's constraint before it opens a session."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer

from coordinator.requests import grammar_check as constraint_checks
from coordinator.requests.grammar_check import ConstraintChecks, FairQueue, _Compiler
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
    [b"junk\n", b"[]\n", b'"' + b"a" * 2**17 + b'"\n'],
    ids=["no JSON", "no object", "too long"],
)
async def test_a_compiler_that_writes_no_message_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """What it was compiling is refused, to be tried again; closing is no different."""
    (tmp_path / "line").write_bytes(line)
    stub = STUB % {"was_here": str(tmp_path / "was here"), "line": str(tmp_path / "line")}
    monkeypatch.setattr("coordinator.requests.grammar_check._PROGRAM", stub)
    async with asyncio.timeout(10), encoder() as prompts:
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")


async def test_a_compiler_that_does_not_answer_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives back the places of what it was compiling."""
    (tmp_path / "line").touch()
    stub = STUB % {"was_here": str(tmp_path / "was here"), "line": str(tmp_path / "line")}
    monkeypatch.setattr(constraint_checks, "_PROGRAM", stub)
    monkeypatch.setattr(constraint_checks, "COMPILE_WAIT_S_MAX", 0.5)
    async with asyncio.timeout(20), encoder() as prompts:
        num_refused = 0
        while True:
            try:
                await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
                break
            except Overloaded:
                num_refused += 1
        assert num_refused


def alter(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Of the compiler's process, in which `p` is its module."""
    change = f"import coordinator.requests.grammar_process as p; {change}; from coordinator"
    program = constraint_checks._PROGRAM.replace("from coordinator", change)
    monkeypatch.setattr(constraint_checks, "_PROGRAM", program)


async def test_a_line_that_a_library_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by Python's `print` nor by C's."""
    printing = "print('junk', flush=True), p.os.write(1, b'junk\\n')"
    alter(monkeypatch, f"before = p._limit; p._limit = lambda: ({printing}, before())")
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")


async def test_a_second_answer_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a fork that is killed when it has just told its outcome."""
    alter(monkeypatch, "write = p.os.write; p.os.write = lambda to, line: write(to, 2 * line)")
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        first = compiler(prompts)
        await prompts.check_constraint(Constraint.of_regex("b"), EOS, "a")
        assert compiler(prompts) is first


IN_A_FORK = "p.os.getpid() != p.os.getpgrp()"


@pytest.mark.parametrize(
    ("change", "trace"),
    [
        ("p._limit = lambda: {}['a bug']", "KeyError: 'a bug'"),
        ("p._limit = lambda: sys.exit('a bug')", "SystemExit: a bug"),
        (f"fork = p.os.fork; p.os.fork = lambda: {IN_A_FORK} and 1 // 0 or fork()", "ZeroDivision"),
    ],
    ids=["an exception", "no exception", "no second fork"],
)
async def test_a_bug_in_a_compilation_leaves_its_trace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], change: str, trace: str
) -> None:
    """And its request is answered."""
    alter(monkeypatch, change)
    async with encoder() as prompts:
        with pytest.raises(InvariantError, match="regex: could not be compiled"):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
    assert trace in capfd.readouterr().err


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


async def test_a_compiler_that_is_closed_starts_no_more() -> None:
    loaded: list[None] = []
    late = _Compiler(lambda: loaded.append(None) or ("", EOS))
    await late.close()
    with pytest.raises(Overloaded, match="cannot be compiled now"):
        await late.compile(Constraint.of_regex("a"))
    assert not loaded


@pytest.mark.parametrize("ends", [False, True], ids=["answered", "the process ends"])
async def test_a_compilation_that_nobody_waits_for_is_of_use(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Its verdict is kept, and its error, if it has none, is nobody's."""
    num_compiled, go_on = 0, asyncio.Event()
    unheard: list[Any] = []

    async def compile_one(*_: object) -> dict[str, Any]:
        nonlocal num_compiled
        num_compiled += 1
        await go_on.wait()
        if ends and num_compiled == 1:
            raise Overloaded("ended")
        return {"outcome": "done"}

    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    monkeypatch.setattr(_Compiler, "compile", compile_one)
    checks = ConstraintChecks(lambda: ("", EOS))
    checking = asyncio.create_task(checks.check(Constraint.of_regex("a"), "a"))
    await settle()
    checking.cancel()
    await settle()
    go_on.set()
    await settle()
    await checks.check(Constraint.of_regex("a"), "a")
    del checking
    gc.collect()
    assert not unheard
    assert num_compiled == 1 + ends


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


class Work:
    """What has begun, in order; each goes on until it is told to end."""

    def __init__(self, turns: FairQueue) -> None:
        self._turns = turns
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def start(self, name: str) -> asyncio.Task[None]:
        """The tenant is the first letter."""

        async def work() -> None:
            await self._turns.take(name[0])
            self.begun.append(name)
            await self.ends[name].wait()
            self._turns.give_back(name[0])

        self.ends[name] = asyncio.Event()
        return asyncio.create_task(work())

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_with_much_work_holds_up_no_other() -> None:
    """All places are one's as long as it is alone; then others go first."""
    work = Work(FairQueue(2, 100, 10, "jobs"))
    tasks = [work.start(f"a{index}") for index in range(6)]
    await settle()
    assert work.begun == ["a0", "a1"]
    tasks += [work.start(name) for name in ("b0", "b1", "c0")]
    await settle()
    for index in range(9):  # The one that began first ends first.
        await work.end(work.begun[index])
    assert work.begun == ["a0", "a1", "b0", "a2", "c0", "b1", "a3", "a4", "a5"]
    await asyncio.gather(*tasks)


async def test_no_more_wait_than_may() -> None:
    """Neither of one tenant, nor in all."""
    work = Work(FairQueue(1, 5, 3, "jobs"))
    waiting = [work.start(f"a{index}") for index in range(4)]
    await settle()
    with pytest.raises(Overloaded, match=r"^3 jobs of yours wait already"):
        await work.start("a9")
    waiting += [work.start(f"b{index}") for index in range(2)]
    await settle()
    with pytest.raises(Overloaded, match=r"^5 jobs wait already"):
        await work.start("c0")
    for end in work.ends.values():
        end.set()
    await asyncio.gather(*waiting)
    assert sorted(work.begun) == ["a0", "a1", "a2", "a3", "b0", "b1"]


async def test_those_that_have_gone_do_not_wait() -> None:
    work = Work(FairQueue(1, 2, 2, "jobs"))
    first, *gone = (work.start(f"a{index}") for index in range(3))
    await settle()
    for task in gone:
        task.cancel()
    await settle()
    waiting = [work.start("b0"), work.start("c0")]
    await settle()
    for name in ("a0", "b0", "c0"):
        await work.end(name)
    await asyncio.gather(first, *waiting)


async def test_one_that_is_cancelled_takes_no_place() -> None:
    """While it waits, or in the moment in which it is given one."""
    work = Work(FairQueue(1, 9, 9, "jobs"))
    first, second, third, fourth = (work.start(f"a{index}") for index in range(4))
    await settle()
    second.cancel()
    await settle()
    work.ends["a0"].set()
    while not first.done():
        await asyncio.sleep(0)
    assert "a2" not in work.begun
    third.cancel()  # It has been given a place, and has not run since.
    await settle()
    assert work.begun == ["a0", "a3"]
    await work.end("a3")
    await fourth
    assert third.cancelled()
