"""The engine against the model's own forward pass, and rollback against never having run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MAX_MODEL_LEN, tiny_config, tiny_module

from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import BadRequest, ConfigError, InvariantError

FAMILIES = ("llama", "qwen3", "mistral", "gemma", "gemma3", "gpt_neox", "gpt2")
VOCAB = 32


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_engine(module: Any, max_num_seqs: int = 8) -> PagedEngine:
    info = ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, "float32", (), "", "")
    return PagedEngine(module, info, max_num_seqs)


def ids(num: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (num,), generator=generator).tolist())


def run(engine: PagedEngine, name: str, tokens: tuple[int, ...], rows: int) -> torch.Tensor:
    return engine.forward([SequenceStep(name, tokens, rows)])[0]


def full_forward(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-5)])
def test_equals_the_modules_own_forward(family: str, dtype: torch.dtype, tolerance: float) -> None:
    """Whatever the steps' sizes, rows are those of one pass over everything (longer than any
    sliding window). Bound: what sums in another order may differ by, for logits of about 10."""
    module = tiny_module(tiny_config(family, VOCAB), dtype=dtype)
    engine = make_engine(module)
    tokens = ids(40)
    expected = full_forward(module, tokens)
    rows, start = [], 0
    for size in (13, 1, 4, 1, 9, 12):
        rows.append(run(engine, "s", tokens[start : start + size], size))
        start += size
    actual = torch.cat(rows)
    assert actual.shape == (40, VOCAB)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (actual - expected).abs().max().item() <= tolerance * expected.abs().max().item()
    engine.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_leaves_no_trace(family: str) -> None:
    """float64: after tokens are run and taken back, the next rows are bit-equal to those of a
    sequence that never ran them."""
    module = tiny_module(tiny_config(family, VOCAB), dtype=torch.float64)
    engine = make_engine(module)
    prefix, refused, after = ids(20), ids(9, 2), ids(5, 3)
    run(engine, "a", prefix, 1)
    run(engine, "b", prefix, 1)
    run(engine, "a", refused, 9)
    engine.keep("a", 20)
    assert engine.length("a") == 20
    difference = run(engine, "a", after, 5) - run(engine, "b", after, 5)
    assert difference.abs().max().item() == 0.0


def test_rollback_into_the_prompt_and_regrowth() -> None:
    """Cutting below any earlier cut, and growing past the first allocation, lose nothing."""
    config = tiny_config("llama", VOCAB, 600)
    module = tiny_module(config, dtype=torch.float64)
    info = ModelInfo("tiny", VOCAB, 600, "float64", (), "", "")
    engine = PagedEngine(module, info, 2)
    tokens = ids(560)
    run(engine, "a", tokens[:250], 0)
    engine.keep("a", 100)
    run(engine, "a", tokens[100:300], 0)
    actual = run(engine, "a", tokens[300:], 3)
    expected = full_forward(module, tokens)[-3:]
    assert (actual - expected).abs().max().item() < 1e-5
    assert engine.length("a") == 560


def test_a_path_keeps_its_slots_in_order() -> None:
    """In every layer the kept slots' keys and values come to stand one after another."""
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.float64)
    engine = make_engine(module)
    tokens = ids(10)
    run(engine, "s", tokens, 0)
    layers = engine._caches["s"].layers
    before = [layer._keys[:, :, :10].clone() for layer in layers]
    engine.keep("s", 4, (5, 6, 9))
    assert engine.length("s") == 7
    for layer, keys in zip(layers, before, strict=True):
        assert torch.equal(layer._keys[:, :, :7], keys[:, :, [0, 1, 2, 3, 5, 6, 9]])
    engine.check_integrity()


def test_a_contiguous_path_is_a_length() -> None:
    """Keeping 4 and the path (4, 5, 6) is keeping 7."""
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.float64)
    engine = make_engine(module)
    tokens = ids(10)
    for name in ("a", "b"):
        run(engine, name, tokens, 0)
    engine.keep("a", 4, (4, 5, 6))
    engine.keep("b", 7)
    assert torch.equal(run(engine, "a", ids(3, 5), 3), run(engine, "b", ids(3, 5), 3))


def test_sequences_do_not_see_each_other() -> None:
    """A step of several sequences gives what each gives alone, bit by bit."""
    module = tiny_module(tiny_config("llama", VOCAB))
    together, alone = make_engine(module), make_engine(module)
    steps = [SequenceStep(str(i), ids(5 + i, i), 1 + i % 3) for i in range(5)]
    rows = together.forward(steps)
    for step, logits in zip(steps, rows, strict=True):
        assert torch.equal(logits, alone.forward([step])[0])


def test_no_logits_where_none_are_wanted() -> None:
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    assert run(engine, "s", ids(5), 0).shape == (0, VOCAB)
    assert engine.length("s") == 5


def test_logits_may_be_changed_in_place() -> None:
    """They are the caller's: changing them changes neither the model nor later rows."""
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    logits = run(engine, "s", ids(5), 1)
    kept = logits.clone()
    logits.add_(1.0)
    engine.keep("s", 4)
    assert torch.allclose(run(engine, "s", ids(5)[4:], 1), kept, atol=1e-4)


def test_the_longest_unused_sequence_makes_room() -> None:
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)), max_num_seqs=3)
    for name in ("a", "b", "c"):
        run(engine, name, ids(4), 1)
    run(engine, "a", ids(1), 1)
    engine.forward([SequenceStep("d", ids(2), 1), SequenceStep("a", ids(1), 1)])
    assert [engine.length(name) for name in "abcd"] == [6, 0, 4, 2]
    engine.check_integrity()


def test_a_step_may_fill_every_place() -> None:
    """Members of the running step are never dropped for each other."""
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)), max_num_seqs=2)
    run(engine, "a", ids(4), 1)
    engine.forward([SequenceStep("b", ids(2), 1), SequenceStep("a", ids(1), 1)])
    assert (engine.length("a"), engine.length("b")) == (5, 2)


def test_release_forgets() -> None:
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    run(engine, "a", ids(4), 1)
    engine.release("a")
    engine.release("a")
    assert engine.length("a") == 0


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40])
def test_a_bad_token_changes_nothing(bad: int) -> None:
    """The error names the id, and the other sequences of the call have not run either."""
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    run(engine, "a", ids(4), 1)
    with pytest.raises(BadRequest, match=f"token_ids: {bad} is not in 0..31"):
        engine.forward([SequenceStep("a", (1,), 1), SequenceStep("b", (1, bad), 1)])
    assert (engine.length("a"), engine.length("b")) == (4, 0)


def test_too_long_a_sequence_changes_nothing() -> None:
    """The longest allowed length is allowed; one more is refused."""
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    run(engine, "a", ids(MAX_MODEL_LEN - 1), 1)
    with pytest.raises(BadRequest, match=f"{MAX_MODEL_LEN + 1} tokens; the model takes at most"):
        run(engine, "a", (1, 2), 1)
    assert engine.length("a") == MAX_MODEL_LEN - 1
    run(engine, "a", (1,), 1)
    assert engine.length("a") == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "steps",
    [
        [SequenceStep("a", (), 0)],
        [SequenceStep("a", (1,), 2)],
        [SequenceStep("a", (1,), 1), SequenceStep("a", (2,), 1)],
        [SequenceStep(str(i), (1,), 1) for i in range(9)],
    ],
)
def test_a_services_mistake_is_an_invariant_error(steps: list[SequenceStep]) -> None:
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    with pytest.raises(InvariantError):
        engine.forward(steps)
    assert engine.length("a") == 0


@pytest.mark.parametrize(("length", "path"), [(5, ()), (-1, ()), (2, (1,)), (2, (3, 3)), (2, (4,))])
def test_slots_that_are_not_there_cannot_be_kept(length: int, path: tuple[int, ...]) -> None:
    engine = make_engine(tiny_module(tiny_config("llama", VOCAB)))
    run(engine, "a", ids(4), 1)
    with pytest.raises(InvariantError):
        engine.keep("a", length, path)
    assert engine.length("a") == 4


def test_a_step_that_fails_midway_is_undone() -> None:
    """A failure in the second layer of the second sequence leaves all as before the call."""
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.float64)
    engine = make_engine(module)
    for name in ("a", "b"):
        run(engine, name, ids(6), 1)
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError

    handle = module.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.forward([SequenceStep(name, ids(3, 9), 1) for name in ("a", "b", "c")])
    handle.remove()
    assert [engine.length(name) for name in "abc"] == [6, 6, 0]
    engine.check_integrity()
    expected = full_forward(module, ids(6) + ids(3, 4))[-3:]
    assert (run(engine, "b", ids(3, 4), 3) - expected).abs().max().item() < 1e-5


def test_a_recurrent_model_is_refused() -> None:
    """Its state cannot be cut back."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match="model tiny: tokens cannot be taken back"):
        make_engine(MambaForCausalLM(config))


def test_a_hybrid_model_is_refused() -> None:
    """One layer without keys and values is enough."""
    module = tiny_module(tiny_config("qwen3", VOCAB))
    module.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        make_engine(module)
