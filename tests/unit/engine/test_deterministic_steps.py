"""A deterministic engine: a token's logits are bit-equal however the token is run."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outrider.engine.paged_engine import PagedEngine
from outrider.errors import SettingError
from outrider.interfaces.engine import SequenceStep
from outrider.limits import PAGE_SIZE
from outrider.models.compatibility import dependent_at
from outrider.models.linear_layers import AlignedActivation
from outrider.models.module_replacement import speed_up
from tests.support.models import tiny_config, tiny_module
from tests.support.paged_engines import VOCAB, EngineMaker, checked_engines, ids, run

LENGTH = 150  # length of the tested sequence: two splits, ten pages, many windows of 6
MAX_MODEL_LEN = 512
FAMILIES = ("llama", "mistral", "gpt_neox", "generic gemma2")
_NAMES = count()


@pytest.fixture(scope="module")
def make_engine() -> Iterator[EngineMaker]:
    with checked_engines() as maker:
        yield maker


def tiny(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model as it is served; for `generic`, with the library's own modules."""
    family = kind.removeprefix("generic ")
    module = tiny_module(tiny_config(family, VOCAB, MAX_MODEL_LEN), dtype=dtype)
    if family == kind:
        speed_up(module)
    return module


@dataclass
class Subject:
    """An engine and the logits [T, V] of one sequence that was run token by token."""

    engine: PagedEngine
    expected: torch.Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, make_engine: EngineMaker) -> Subject:
    engine = make_engine(tiny(request.param), max_model_len=MAX_MODEL_LEN, deterministic=True)
    rows = [run(engine, "alone", (token,), 1) for token in ids(LENGTH)]
    engine.release("alone")
    return Subject(engine, torch.cat(rows))


@dataclass(frozen=True)
class Part:
    """A step that runs some tokens of the sequence, together with others."""

    num_tokens: int
    before: tuple[int, ...]  # tokens of other sequences, whose rows come first
    after: tuple[int, ...]  # tokens of other sequences, whose rows come last
    num_refused: int  # tokens that are run after them and taken back


crowds = st.lists(st.integers(1, 40), max_size=4).map(tuple)
parts = st.builds(Part, st.integers(1, 90), crowds, crowds, st.integers(0, 8))


def others(sizes: tuple[int, ...], seed: int) -> list[SequenceStep]:
    """New sequences of random tokens."""
    return [
        SequenceStep(f"other-{next(_NAMES)}", ids(size, seed + index), 1)
        for index, size in enumerate(sizes)
    ]


def run_in_parts(engine: PagedEngine, plan: list[Part], seed: int, num_shared: int) -> torch.Tensor:
    """Logits of the sequence after the prefix that another sequence left, which ran these tokens at
    once beside others. The sequence is run by the plan; what the plan leaves is run at once."""
    name, tokens, rows = f"s-{next(_NAMES)}", ids(LENGTH), []
    former, beside = f"former-{name}", others((33, 5), seed)
    engine.attach(former, tokens, name)  # Its salt is new, so nothing is found.
    engine.forward([*beside, SequenceStep(former, tokens[:num_shared], 0)])
    assert engine.attach(name, tokens, name) == num_shared // PAGE_SIZE * PAGE_SIZE
    for sequence_id in (former, *(step.sequence_id for step in beside)):
        engine.release(sequence_id)
    for part in [*plan, Part(LENGTH, (), (), 0)]:
        start = engine.length(name)
        own = tokens[start : start + part.num_tokens]
        if not own:
            break
        refused = ids(part.num_refused, seed)
        step = SequenceStep(name, (*own, *refused), len(own) + len(refused))
        first, last = others(part.before, seed), others(part.after, seed + 50)
        found = engine.forward([*first, step, *last])[len(first)]
        rows.append(found[: len(own)])
        engine.keep(name, start + len(own))
        for other in (*first, *last):
            engine.release(other.sequence_id)
    engine.release(name)
    return torch.cat(rows)


@given(
    plan=st.lists(parts, max_size=6), seed=st.integers(0, 1000), num_shared=st.integers(1, LENGTH)
)
@settings(max_examples=40)
def test_parts_neighbours_and_refused_tokens_change_nothing(
    subject: Subject, plan: list[Part], seed: int, num_shared: int
) -> None:
    found = run_in_parts(subject.engine, plan, seed, num_shared)
    assert torch.equal(found, subject.expected[LENGTH - len(found) :])


class _MeanOfTheStep(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = self.inner(rows)
        return inside + 1e-6 * inside.mean(1, keepdim=True)


def test_a_model_whose_rows_depend_on_others_is_refused() -> None:
    with checked_engines() as maker:
        module = tiny("llama", torch.float32)
        module.model.norm = _MeanOfTheStep(module.model.norm)
        maker(module, max_model_len=MAX_MODEL_LEN)
    module = tiny("llama", torch.float32)
    module.model.norm = _MeanOfTheStep(module.model.norm)
    with pytest.raises(SettingError, match="model tiny: on this machine") as refusal:
        EngineMaker()(module, max_model_len=MAX_MODEL_LEN, deterministic=True)
    assert refusal.value.key == "deterministic"


class _TiledLinear(nn.Linear):
    """Rounds differently in products of many rows, as a CPU with matrix tiles does."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product = super().forward(rows)
        return product * (1 + 1e-6) if rows.shape[:-1].numel() > 32 else product


def test_a_model_whose_rows_depend_on_how_many_they_are_takes_them_in_blocks() -> None:
    module = tiny("generic llama", torch.float32)
    for block in module.model.layers:
        block.mlp.down_proj.__class__ = _TiledLinear
    with checked_engines() as maker:
        engine = maker(module, max_model_len=MAX_MODEL_LEN, deterministic=True)
        assert dependent_at(engine, 16) is None


@pytest.mark.parametrize("max_model_len", [1, 7, 40])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_small_engines_are_tried_too(max_model_len: int, max_num_seqs: int) -> None:
    with checked_engines() as maker:
        engine = maker(
            tiny("llama"),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_bytes=2**13,
            deterministic=True,
        )
        assert run(engine, "s", ids(1), 1).shape == (1, VOCAB)
        assert engine.page_counts().num_evictable == 0


FUNCTIONS = (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Sigmoid())


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_an_aligned_activation_knows_no_places(function: nn.Module, num_threads: int) -> None:
    aligned = AlignedActivation(function)
    values = torch.randn(90_000, generator=torch.Generator().manual_seed(1)) * 4
    torch.set_num_threads(num_threads)
    try:
        whole = aligned(values.view(1, 100, 900)).view(-1)
        for start in range(0, 80_000, 2971):
            for num in (1, 7, 63, 900):
                piece = values[start : start + num]
                assert torch.equal(aligned(piece), whole[start : start + num])
        half = aligned(values.view(300, 300).chunk(2, -1)[1])
        assert torch.equal(half, whole.view(300, 300)[:, 150:])
    finally:
        torch.set_num_threads(1)
    assert (whole - function(values)).abs().max() < 1e-5
