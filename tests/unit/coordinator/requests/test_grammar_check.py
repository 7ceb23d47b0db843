"""The checks of constraints in child processes."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import create_autospec

import pytest

from coordinator.requests import grammar_check
from coordinator.requests.grammar_check import _Compiler
from coordinator.requests.validation import PromptEncoder
from outrider.errors import BadRequest, InvariantError, Overloaded
from outrider.grammar.constraint import Constraint
from outrider.models.tokenizer import TokenizerText
from tests.support.models import byte_level_tokenizer

EOS = (0,)
ENDLESS = Constraint.of_schema({"type": "integer", "multipleOf": 9_999_991})
"""A small, valid schema, for which the compiler needs minutes."""


@asynccontextmanager
async def encoder() -> AsyncIterator[PromptEncoder]:
    prompts = PromptEncoder(TokenizerText(byte_level_tokenizer(), "small"))
    try:
        async with asyncio.timeout(30):
            yield prompts
    finally:
        await prompts.close()


def compilers(prompts: PromptEncoder) -> list[Any]:
    """The processes of a prompt encoder."""
    checks = prompts._checks
    return [one.process for one in checks._compilers if one.process] if checks else []


async def compiling(prompts: PromptEncoder) -> asyncio.Task[None]:
    """A running check of `ENDLESS`. A process compiles it already."""
    endless = asyncio.create_task(prompts.check_constraint(ENDLESS, EOS, "a"))
    while not compilers(prompts):
        await asyncio.sleep(0.01)
    return endless


async def test_a_constraint_that_cannot_be_compiled_is_refused_by_its_field() -> None:
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
    compile_one = create_autospec(_Compiler.compile, side_effect=_Compiler.compile)
    monkeypatch.setattr(_Compiler, "compile", compile_one)
    async with encoder() as prompts:
        for tenant in ("a", "b", "a"):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, tenant)
        assert compile_one.call_count == 2
        other = Constraint.of_regex("b")
        await asyncio.gather(*(prompts.check_constraint(other, EOS, "a") for _ in range(5)))
        assert compile_one.call_count == 3


async def test_a_compilation_that_takes_too_long_is_ended() -> None:
    async with encoder() as prompts:
        endless = await compiling(prompts)
        [busy] = compilers(prompts)
        for index in range(5):
            await prompts.check_constraint(Constraint.of_regex(f"a{index}"), EOS, "b")
        assert not endless.done()
        with pytest.raises(BadRequest, match=r"^json_schema: takes more than 2 s to compile"):
            await endless
        assert busy.returncode is not None
        # The refusal is kept for a minute.
        with pytest.raises(BadRequest, match="takes more than 2 s"):
            async with asyncio.timeout(0.5):
                await prompts.check_constraint(ENDLESS, EOS, "a")
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")


async def test_a_compilation_that_takes_too_much_memory_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that earlier constraints have left counts, too."""
    keep = "kept = []; p.GrammarTokenizer.compile = lambda *_: kept.append(bytearray(3 << 28))"
    alter(monkeypatch, keep)
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        with pytest.raises(BadRequest, match=r"^regex: takes more than 1073741824 bytes"):
            await prompts.check_constraint(Constraint.of_regex("b"), EOS, "a")


async def test_a_compiler_that_dies_or_gives_no_answer_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The constraint that it was compiling is refused, and may be tried again. The tokenizer is
    written as JSON only once."""
    write = create_autospec(TokenizerText.backend_json, side_effect=TokenizerText.backend_json)
    monkeypatch.setattr(TokenizerText, "backend_json", write)
    async with encoder() as prompts:
        endless = await compiling(prompts)
        [first] = compilers(prompts)
        first.kill()
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await endless
        [second] = compilers(prompts)
        assert second.returncode is None
        second.terminate()
        await second.wait()
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
        [third] = compilers(prompts)
        third.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as soon, pytest.raises(Overloaded) as refused:
            soon.setattr("outrider.limits.COMPILE_WAIT_S_MAX", 0.1)
            await prompts.check_constraint(Constraint.of_regex("b"), EOS, "a")
        assert refused.value.of_server
        await third.wait()
        await prompts.check_constraint(Constraint.of_regex("b"), EOS, "a")
    assert write.call_count == 1


def alter(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Runs `change` in new compiler processes. There, `p` is the module `grammar_process`."""
    change = f"import coordinator.requests.grammar_process as p; {change}; from coordinator"
    program = grammar_check._PROGRAM.replace("from coordinator", change)
    monkeypatch.setattr(grammar_check, "_PROGRAM", program)


async def test_a_line_that_a_library_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    printing = "print('junk', flush=True), p.os.write(1, b'junk\\n')"
    alter(monkeypatch, f"before = p.limit; p.limit = lambda *_: ({printing}, before(*_))")
    async with encoder() as prompts:
        await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")


async def test_a_bug_in_a_compilation_leaves_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    alter(monkeypatch, "p.limit = lambda *_: {}['a bug']")
    async with encoder() as prompts:
        with pytest.raises(InvariantError, match="regex: could not be compiled"):
            await prompts.check_constraint(Constraint.of_regex("a"), EOS, "a")
    assert "KeyError: 'a bug'" in capfd.readouterr().err


async def test_a_compiler_ends_with_its_coordinator() -> None:
    async with encoder() as prompts:
        endless = await compiling(prompts)
        [process] = compilers(prompts)
    with pytest.raises(Overloaded):
        await endless
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the model has no tokenizer"),
        (byte_level_tokenizer, "constraints need an end-of-text token"),
    ],
)
async def test_a_model_may_have_no_constraints(text: Any, said: str) -> None:
    prompts = PromptEncoder(text and TokenizerText(text(), "small"))
    with pytest.raises(BadRequest, match=f"^regex: {said}"):
        await prompts.check_constraint(Constraint.of_regex("a"), (), "a")
    await prompts.close()
