"""A drafting head on an engine's pages, compared with its own dense chains over the library's
states."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider.engine.cpu import openvino_decoder
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError, InvariantError, StepUndone
from outrider.interfaces.engine import DraftingEngine, ModelInfo, SequenceStep
from outrider.limits import PAGE_SIZE
from outrider.models.eagle3 import LoadedEagle3
from outrider.models.module_replacement import speed_up
from tests.support.cuda_substitutes import backend_on
from tests.support.models import tiny_config, tiny_eagle3, tiny_module, twin
from tests.support.paged_engines import VOCAB, WIDE, fuse, ids, openvino_kernels, pace_kernels
from tests.support.pages import check_pages

TAPS = (2, 0, 3)
DEPTHS = 3
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.25}
"""Allowed difference, relative to a row's norm. Norms are in float32, whatever the model's
dtype."""
KINDS = {
    "gathered": torch.float32,
    "deterministic": torch.float32,
    "tables": torch.float32,
    "fused": torch.float64,
    "pace": torch.bfloat16,
    "openvino": torch.float32,
}


class Pair:
    """An engine with a head, an engine of the same model without one, and the library's model."""

    def __init__(self, kind: str, **options: Any) -> None:
        dtype = KINDS[kind]
        sizes = {"num_hidden_layers": 4} | (WIDE if kind == "pace" else {})
        module = tiny_module(tiny_config("llama", VOCAB, **sizes), dtype=dtype)
        info = ModelInfo("tiny", VOCAB, 128, str(dtype).removeprefix("torch."), (), "", "")
        self.library = twin(module)
        made = tiny_eagle3(module, range(0, VOCAB, 2), layer_ids=TAPS)
        self.head = tiny_eagle3(module, range(0, VOCAB, 2), layer_ids=TAPS).module
        if kind == "tables":
            options["backend"] = backend_on("cpu", dtype)
        if kind == "fused":
            options["kernels"] = fuse(module)
            speed_up(made.module, kernels=options["kernels"])
        if kind == "pace":
            options["kernels"] = pace_kernels()
            for each in (module, made.module):
                speed_up(each, kernels=options["kernels"])
        if kind == "openvino":
            options["kernels"] = openvino_kernels()
            speed_up(module, packs_linears=False)
        options["deterministic"] = kind == "deterministic"
        other = twin(module)
        self.engine = PagedEngine(module, info, draft_layer=made, **options)
        self.plain = PagedEngine(other, info, **options)
        assert bool(self.engine.kernels_name) == (kind in ("fused", "pace", "openvino"))
        self.close = CLOSE[dtype]
        self.tokens = iter(range(10**6))

    def features(self, text: Sequence[int]) -> torch.Tensor:
        """g [T, D] at every token."""
        with torch.no_grad():
            states: Any = self.library(torch.tensor([text]), output_hidden_states=True)
            taps = [states.hidden_states[index][0] for index in TAPS]
            return self.head.fuse(torch.cat(taps, -1))

    def forward(self, steps: Sequence[SequenceStep]) -> None:
        """Runs a step. Its logits are those without a head, and its features are those of the
        library's states."""
        held = {step.sequence_id: self.held(step.sequence_id) for step in steps}
        logits = zip(self.engine.forward(steps), self.plain.forward(steps), strict=True)
        assert all(torch.equal(*each) for each in logits)
        for step, rows in zip(steps, self.engine.features(), strict=True):
            text = (*held[step.sequence_id], *step.token_ids)
            expected = self.features(text)[len(text) - step.num_logits :]
            for row, feature in zip(rows, expected, strict=True):
                self.check(row, feature)

    def call(self, name: str, *arguments: Any) -> None:
        for engine in (self.engine, self.plain):
            getattr(engine, name)(*arguments)

    def held(self, name: str) -> tuple[int, ...]:
        return self.engine.tokens(name).since(0)

    def draft(self, *names: str) -> None:
        """Drafts a chain after each sequence, all together, and takes them back."""
        chains = {name: ids(DEPTHS, next(self.tokens)) for name in names}
        features = [self.features(self.held(name))[-1] for name in names]
        expected = {name: self.chain(self.held(name) + chains[name]) for name in names}
        lengths = {name: self.engine.length(name) for name in names}
        for depth in range(DEPTHS):
            steps = [SequenceStep(name, (chains[name][depth],), 1) for name in names]
            found = self.engine.forward_draft(steps, features)
            for name, row in zip(names, found, strict=True):
                self.check(row, expected[name][depth])
            features = list(self.head.carry(found))
        for name, length in lengths.items():
            self.engine.keep(name, length)
        check_pages(self.engine)

    def chain(self, text: tuple[int, ...]) -> list[torch.Tensor]:
        """h [D] of the pairs that end with the last `DEPTHS` tokens of a text; all but the first
        are drafted."""
        features = self.features(text[:-DEPTHS])
        with torch.no_grad():
            found = self.head.unroll(features[None], torch.tensor([text[1:]]), DEPTHS)
            return [hidden[0, -1] for hidden in found]

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.shape == expected.shape
        assert (found - expected).norm() <= self.close * expected.norm()


def test_features_of_a_step_that_runs_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("openvino")
    monkeypatch.setattr(openvino_decoder, "_ROWS_OF_A_PASS", 8)
    for engine in (pair.engine, pair.plain):
        monkeypatch.setattr(engine._decoder, "cuts_steps", True)
    pair.forward([SequenceStep("a", ids(37), 30), SequenceStep("b", ids(11, 2), 11)])
    pair.draft("a", "b")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_dense_head(kind: str) -> None:
    pair = Pair(kind)
    assert isinstance(pair.engine, DraftingEngine)
    first, other = ids(37), ids(11, 2)
    pair.forward([SequenceStep("a", first, 2)])
    pair.draft("a")
    for start, end in ((0, 3), (3, 4), (4, 11)):
        pair.forward([SequenceStep("parts", other[start:end], 1)])
    pair.draft("parts", "a")
    # Tokens of both are verified, and a part of them is kept.
    pair.forward([SequenceStep("a", ids(5, 4), 5), SequenceStep("parts", ids(7, 3), 7)])
    pair.call("keep", "a", 39)
    pair.call("keep", "parts", 14)
    pair.draft("a", "parts")
    pair.forward([SequenceStep("parts", ids(2, 5), 1), SequenceStep("a", ids(1, 6), 1)])
    pair.draft("a", "parts")
    # A fork within a page, and another sequence on its first pages.
    pair.call("fork", "a", "branch")
    pair.forward([SequenceStep("branch", ids(3, 7), 1), SequenceStep("a", ids(2, 8), 2)])
    pair.call("attach", "hit", (*first[: 2 * PAGE_SIZE], *ids(4, 9)))
    assert pair.engine.length("hit") == 2 * PAGE_SIZE
    pair.forward([SequenceStep("hit", ids(4, 9), 1), SequenceStep("one", (5,), 1)])
    pair.draft("hit", "a", "one", "branch", "parts")
    pair.call("keep", "hit", 1)
    pair.draft("hit")


@pytest.mark.parametrize("kind", ["gathered", "fused"])
def test_what_is_evicted_is_run_again(kind: str) -> None:
    """It runs behind the prefix that is left, on pages that another sequence has overwritten. What
    the head keeps is counted with the pages."""
    numbers = 4 * 2 * 2 * 8 + 2 * 2 * 8 + 24  # Keys and values of 4 layers and of pairs, and g.
    page_bytes = PAGE_SIZE * numbers * KINDS[kind].itemsize
    pair = Pair(kind, kv_cache_memory_bytes=8 * page_bytes)
    assert pair.engine.kv_cache_bytes == 8 * page_bytes
    text = ids(2 * PAGE_SIZE + 5)
    pair.forward([SequenceStep("a", text, 1)])
    pair.engine.release("a")
    pair.engine.forward([SequenceStep("b", ids(7 * PAGE_SIZE, 2), 1)])
    pair.engine.release("b")
    assert pair.engine.attach("a", (*text, 1)) == PAGE_SIZE
    pair.plain.keep("a", PAGE_SIZE)
    pair.forward([SequenceStep("a", text[PAGE_SIZE:], 1)])
    pair.draft("a")


def test_a_draft_step_leaves_nothing_behind() -> None:
    pair = Pair("gathered")
    pair.forward([SequenceStep("a", ids(9), 1)])
    before = pair.engine.page_counts()
    with pytest.raises(StepUndone, match="a draft step failed"):
        pair.engine.forward_draft([SequenceStep("a", (8,), 1)], [torch.zeros(pair.head.width + 1)])
    assert (pair.engine.length("a"), pair.engine.page_counts()) == (9, before)
    pair.engine.forward_draft([SequenceStep("a", (8,), 1)], [pair.features(ids(9))[-1]])
    with pytest.raises(InvariantError, match="last slots"):
        pair.engine.forward([SequenceStep("a", (3,), 1)])
    with pytest.raises(InvariantError, match="last slots"):
        pair.engine.fork("a", "branch")
    pair.engine.keep("a", 9)
    assert pair.engine.page_counts() == before
    pair.forward([SequenceStep("a", ids(4, 2), 4)])


def refused(pair: Pair, step: SequenceStep, count: int, reason: str) -> None:
    features = [torch.zeros(pair.head.width)] * count
    with pytest.raises(InvariantError, match=reason):
        pair.engine.forward_draft([step], features)


def test_what_cannot_be_drafted_is_refused() -> None:
    pair = Pair("gathered")
    pair.forward([SequenceStep("a", ids(9), 1)])
    refused(pair, SequenceStep("a", (1, 2), 1), 1, "must have one token")
    refused(pair, SequenceStep("a", (1,), 0), 1, "must have one token")
    refused(pair, SequenceStep("a", (1,), 1), 2, "2 features for 1 draft steps")
    refused(pair, SequenceStep("new", (1,), 1), 1, "holds no slots yet")
    with pytest.raises(InvariantError, match="without a draft layer"):
        pair.plain.forward_draft([SequenceStep("a", (1,), 1)], [])
    check_pages(pair.engine)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_without_the_tapped_layers_is_refused(family: str) -> None:
    module = tiny_module(tiny_config(family, VOCAB))
    made: LoadedEagle3 = tiny_eagle3(tiny_module(tiny_config("llama", VOCAB)), range(VOCAB))
    made.module.layer_ids = (0, 3)
    info = ModelInfo("tiny", VOCAB, 128, "float32", (), "", "")
    with pytest.raises(ConfigError, match=r"model tiny: .* no (list of layers|layer 3)"):
        PagedEngine(module, info, draft_layer=made)
