"""The engine, compared with the model's own forward pass and the library's `generate`. After a
rollback, sharing or eviction, results are as if it had not happened."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outrider.engine import paged_engine
from outrider.engine.cpu.fused_decoder import SPAN_TOKENS_MAX
from outrider.errors import BadRequest
from outrider.interfaces.engine import SequenceStep
from outrider.kernels.threads import on_threads
from tests.support.models import tiny_config, tiny_module, twin
from tests.support.paged_engines import (
    FAMILIES,
    VOCAB,
    EngineMaker,
    checked_engines,
    dense,
    gap,
    ids,
    run,
)
from tests.support.pages import check_pages

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3")
"""Families that run on fused kernels."""
PAGE_BYTES = 2 * 2 * 8 * 16 * 2 * 8
"""For a tiny Llama in float64: keys and values, heads, width, slots, layers, bytes."""
EXACT = 1e-10  # allowed difference in float64 of sums in another order, for logits of about 10


@pytest.fixture(params=["library", "fused"])
def make_engine(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with checked_engines(fused=request.param == "fused") as maker:
        yield maker


def llama(dtype: torch.dtype = torch.float64) -> Any:
    return tiny_module(tiny_config("llama", VOCAB), dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_any_sizes_equal_the_modules_own_forward(
    family: str, dtype: torch.dtype, make_engine: EngineMaker
) -> None:
    """Sequences are longer than any sliding window and than a page. On fused kernels, most of them
    have several spans. What is kept of a sequence continues as if the rest had not run."""
    module = tiny_module(tiny_config(family, VOCAB), dtype=dtype)
    engine, library = make_engine(module), twin(module)
    if make_engine.fused and dtype == torch.float64:
        assert bool(engine.kernels_name) == (family in FUSED)
    # The library's attention that caps scores softens them in float32.
    exact = 1e-4 if family == "gemma2" else EXACT
    allowed = exact if dtype == torch.float64 else 1e-3
    held: dict[str, tuple[int, ...]] = dict.fromkeys("abcd", ())
    span = SPAN_TOKENS_MAX
    for sizes in (
        (3 * span + 2, 3, span + 1, 1),
        (1, 2 * span + 5, 2 * span, span),
        (5, 1, 2, 3),
        (13,),
        (1,),
    ):
        steps = [
            SequenceStep(name, ids(size, 7 * size), size)
            for name, size in zip(held, sizes, strict=False)
        ]
        for step, rows in zip(steps, engine.forward(steps), strict=True):
            name, tokens = step.sequence_id, held[step.sequence_id] + step.token_ids
            assert rows.dtype == dtype
            assert gap(rows, dense(library, tokens)[-step.num_logits :]) <= allowed
            held[name] = tokens[: len(tokens) * 3 // 4]
            engine.keep(name, len(held[name]))
            assert engine.length(name) == len(held[name])


def test_rows_are_those_of_the_tokens_held(make_engine: EngineMaker) -> None:
    """Random sequences share prefixes, branch, run side by side, are cut anywhere and are released.
    Each row equals that of a pass over the sequence's tokens."""
    module = llama()
    engine, library = make_engine(module), twin(module)
    chance = random.Random(16)
    held: dict[str, tuple[int, ...]] = {}
    for number in range(20):
        for name in list(held):
            action = chance.randrange(8)
            if action == 0 or len(held[name]) > 90:
                engine.release(name)
                del held[name]
            elif action < 3:
                held[name] = held[name][: chance.randrange(len(held[name]) + 1)]
                engine.keep(name, len(held[name]))
            elif action == 3 and len(held) < 6:
                engine.fork(name, f"{number}'{name}")
                held[f"{number}'{name}"] = held[name]
        prompt = ids(40)[: chance.randrange(41)] + ids(chance.randrange(1, 9), number)
        held[str(number)] = prompt[: engine.attach(str(number), prompt)]
        steps = []
        for name, before in held.items():
            new = prompt[len(before) :] if name == str(number) else ids(8, chance.randrange(9))
            steps.append(SequenceStep(name, new, len(new)))
        for step, rows in zip(steps, engine.forward(steps), strict=True):
            name, num = step.sequence_id, len(held[step.sequence_id])
            held[name] += step.token_ids
            assert gap(rows, dense(library, held[name])[num:]) <= EXACT
    assert engine.page_counts().prefix_hits > 50
    for name in held:
        engine.release(name)
        assert engine.length(name) == 0


def test_what_can_never_fit_is_refused(make_engine: EngineMaker) -> None:
    engine = make_engine(llama(), num_bytes=3 * PAGE_BYTES + 1)
    assert engine.page_counts().num_pages == 3
    assert engine.info.max_model_len == 48
    run(engine, "a", ids(48), 1)
    with pytest.raises(BadRequest, match="49 tokens; the model takes at most 48"):
        run(engine, "a", (1,), 1)
    assert engine.length("a") == 48
    assert make_engine(llama(), max_num_seqs=2).page_counts().num_pages == 2 * 128 // 16


def test_bfloat16_gives_float32_logits(make_engine: EngineMaker) -> None:
    """They are close to those of the same weights in float64: within 3 times the error of the
    library's own attention."""
    module = llama(torch.bfloat16)
    library, exact_module = twin(module), twin(module).double()
    engine = make_engine(module)
    expected = dense(exact_module, ids(40))
    rows = run(engine, "s", ids(40), 40)
    assert rows.dtype == torch.float32
    assert (rows - expected).norm() <= 3 * (dense(library, ids(40)) - expected).norm()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pass_begins_at_its_launch_on_a_gpu_and_in_the_wait_on_a_cpu(
    device: str, make_engine: EngineMaker
) -> None:
    """The kernels of this engine run on the CPU in both cases."""
    module = llama()
    engine, library = make_engine(module), twin(module)
    forward, on_cpu = engine.forward, engine._device

    def run_on_cpu(steps: Any) -> Any:
        engine._device = on_cpu
        return forward(steps)

    engine.forward = run_on_cpu  # type: ignore[method-assign]
    engine._device = torch.device(device)
    wait = engine.launch([SequenceStep("a", ids(6), 2)])
    assert engine.length("a") == (6 if device == "cuda" else 0)
    [rows] = wait()
    assert engine.length("a") == 6
    assert gap(rows, dense(library, ids(6))[-2:]) < EXACT


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40])
def test_a_bad_token_changes_nothing(bad: int, make_engine: EngineMaker) -> None:
    engine = make_engine(llama())
    run(engine, "a", ids(4), 1)
    with pytest.raises(BadRequest, match=f"token_ids: {bad} is not in 0..31"):
        engine.forward([SequenceStep("a", (1,), 1), SequenceStep("b", (1, bad), 1)])
    assert (engine.length("a"), engine.length("b")) == (4, 0)


def test_a_step_that_fails_midway_is_undone(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure behind the first layer, all sequences are as before the call. What was to be
    written is not found as a prefix."""
    module = llama()
    engine, library = make_engine(module), twin(module)
    for name in ("a", "b"):
        run(engine, name, ids(6), 1)
    engine.attach("c", ids(40, 9), "tenant")

    def fail(*_: object) -> None:
        raise MemoryError

    handle = module.model.layers[1].mlp.register_forward_pre_hook(fail)
    steps = [SequenceStep(name, ids(40, 9), 1) for name in ("a", "b", "c", "d")]
    with pytest.raises(MemoryError), monkeypatch.context() as patch:
        if make_engine.fused:
            patch.setattr(engine._decoder, "logits", fail)
        engine.forward(steps)
    handle.remove()
    assert [engine.length(name) for name in "abcd"] == [6, 6, 0, 0]
    check_pages(engine)
    assert gap(run(engine, "b", ids(3, 4), 3), dense(library, ids(6) + ids(3, 4))[-3:]) <= EXACT
    assert engine.attach("e", ids(40, 9), "tenant") == 0
    run(engine, "c", ids(40, 9), 1)
    engine.release("c")
    assert engine.attach("f", ids(40, 9)) == 0
    assert engine.attach("g", ids(40, 9), "tenant") == 32  # the salt is still that of c


def test_what_cannot_be_copied_is_forgotten_and_nothing_else(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies fail before a step and for a branch, as on a full device. Only the step's sequences
    are forgotten; others on their pages continue. What was not copied is not found as a prefix."""
    module = llama()
    engine, library = make_engine(module), twin(module)
    for name, cut in (("a", 40), ("b", 20)):
        held = engine.attach(name, ids(40))
        run(engine, name, ids(40)[held:], 0)
        engine.keep(name, cut)
    run(engine, "c", ids(24), 0)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._stores[0], "copy_pages", fail)
        with pytest.raises(MemoryError):
            engine.forward([SequenceStep("b", ids(20, 7), 1)])
        engine.fork("c", "branch")
        with pytest.raises(MemoryError):
            engine.forward([SequenceStep(name, ids(3, 4), 1) for name in ("branch", "new")])
        check_pages(engine)
    assert [engine.length(name) for name in ("a", "b", "branch", "new", "c")] == [40, 0, 0, 0, 24]
    assert engine.attach("d", (*ids(20), *ids(20, 7))) == 16
    assert engine.attach("e", (*ids(40), *ids(8, 6))) == 32
    for name, tokens in (("a", ids(40) + ids(3, 4)), ("e", ids(40) + ids(8, 6))):
        rows = run(engine, name, tokens[engine.length(name) :], 3)
        assert gap(rows, dense(library, tokens)[-3:]) <= EXACT


@pytest.mark.parametrize(("contended_threads", "counts"), [(1, {8: 1, 9: 2}), (None, {8: 2, 9: 2})])
def test_short_steps_run_on_one_thread_if_the_engine_may_use_fewer(
    contended_threads: int | None,
    counts: dict[int, int],
    make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_engine, "find_short_tokens", lambda counts, run_step: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = make_engine(llama(), contended_threads=contended_threads)
        run_step, found = engine._run_whole, dict[int, int]()

        def noted(step: Any) -> torch.Tensor:
            found[num_tokens] = torch.get_num_threads()
            return run_step(step)

        monkeypatch.setattr(engine, "_run_whole", noted)
        for num_tokens in counts:
            run(engine, f"of {num_tokens}", ids(num_tokens), 1)
    finally:
        torch.set_num_threads(before)
    assert found == counts


@pytest.mark.parametrize("contended_threads", [1, None])
@pytest.mark.parametrize("own_cores", [True, False])
def test_before_a_step_its_threads_go_to_their_cores(
    own_cores: bool,
    contended_threads: int | None,
    make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_engine, "find_short_tokens", lambda counts, run_step: 8)
    cores = Mock()
    monkeypatch.setattr("outrider.kernels.threads.OwnCores", cores)
    with on_threads(2):
        engine = make_engine(llama(), contended_threads=contended_threads, own_cores=own_cores)
        cores.assert_called_once_with(2 if own_cores else 0)
        run(engine, "a", ids(9), 1)
    cores.return_value.use.assert_called_with(2)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_trying_short_steps_leaves_no_sequence_and_no_page(
    max_num_seqs: int, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()

    def find(counts: Sequence[int], run_step: Callable[[int], None]) -> int:
        tried.extend(counts)
        for num_tokens in counts:
            run_step(num_tokens)
        return counts[-1]

    monkeypatch.setattr(paged_engine, "find_short_tokens", find)
    engine = make_engine(llama(), contended_threads=1, max_num_seqs=max_num_seqs)
    assert tried[:5] == [1, 2, 4, 8, 16]
    counts = engine.page_counts()
    assert counts.num_free + counts.num_evictable == counts.num_pages
