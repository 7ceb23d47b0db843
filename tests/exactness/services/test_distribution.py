"""Completions that come out of the real services are distributed as if the target had written
them alone: tiny random models, real gRPC, real Redis, the joint law of all tokens by enumeration.

Each cell: Pearson's chi-square, false alarm 1e-6; enough samples that a law at total variation
0.05 (0.09 in the cells that always run) is found with probability 0.99, which the test asserts of
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness.law import FALSE_ALARM, Fit, completion_law, fit, product
from models import (
    tiny_config,
    tiny_drafter,
    tiny_eagle,
    tiny_exit,
    tiny_heads,
    tiny_module,
    twin,
)
from small_grammar import CONSTRAINT, END, constrained_law, grammars, letters
from stack import HYBRID, RARE, Stack, running_stack
from verdict_laws import NoiseRows

from coordinator.draft_length.round_cost import Forecast, RoundCosts
from draft_service.eagle_drafter import EagleDrafter
from outrider.drafters.lookup import LookupDrafter, NgramDrafter
from outrider.drafters.names import LookupKind
from outrider.drafters.suffix import SuffixConfig, SuffixDrafter
from outrider.engine.interface import ModelInfo
from outrider.engine.paged_engine import PagedEngine
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.models.module_replacement import speed_up
from outrider.request import GenerateRequest
from outrider.speculation.random_streams import Place, RoundNoise, WordArray
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokenizer import TokenizerText
from target_service.actor import self_drafter_of

DETECTS = 0.05
DETECTS_SOON = 0.09
"""Where a third of the samples must do."""
POWER = 0.99
CONFIDENT = 0.7
"""Tokens that a look-up before a model must expect: so that each of them drafts some rounds."""
SLOWER = 20.0
"""How much slower plain decoding looks than it is, where K is chosen."""
FLATTER = 0.5
"""Scales the random logits, so that few completions are too rare to be counted on their own."""
CONCURRENCY = 48
SEED = 20_260_000
"""Requests use the seeds from here on."""

PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
"""Repeats itself, so that n-grams have something to find."""
RULES = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
PLAIN = SamplingParams()
TOP_K = SamplingParams(top_k=2)
TOP_P = SamplingParams(top_p=0.8)
PENALISED = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
)
BIASED = SamplingParams(temperature=0.8, logit_bias=((0, 0.7), (3, -0.9)), presence_penalty=0.5)


@dataclass(frozen=True)
class Cell:
    """One setting of the grid."""

    rule: Rule
    num_draft_tokens: int
    params: SamplingParams
    vocab_size: int = 3
    draft_vocab_size: int | None = 3
    """None = no model drafts."""
    lookup: LookupKind | None = None
    """Drafts where no model does, or in its place where it is confident."""
    draft_seed: int = 4
    """That of the target's weights is 3."""
    draft_bits: int | None = None
    """What the draft's weights are rounded to."""
    draft_token_ids: tuple[int, ...] = ()
    """Those that a draft's head has rows for, of the target's; empty = as wide as said above."""
    num_heads: int = 0
    """Of the target, which drafts itself then, for `draft_token_ids`."""
    reads_features: bool = False
    """Whether a head drafts `draft_token_ids` from what the target's head reads."""
    exits: bool = False
    """Whether the target drafts with the first of two layers, for `draft_token_ids`."""
    siblings: int = 0
    """Candidates beside each draft token: proposals are trees then."""
    length_control: bool = False
    """Whether K is chosen, up to what is said above."""
    grammar: bool = False
    """Whether completions follow `CONSTRAINT`, of a vocabulary of 4."""
    repeated: bool = False
    """Whether each seed is used twice; the second completions count."""
    num_tokens: int = 3
    """Tokens whose joint law is tested: the first ones of ..."""
    max_tokens: int = 4
    """... completions of this length. A round drafts no further than that."""
    num_samples: int = 9_600
    detects: float = DETECTS

    def __str__(self) -> str:
        drafters = [self.lookup] if self.lookup else []
        bits = f"-{self.draft_bits}bits" if self.draft_bits else ""
        drafters += [f"draft{self.draft_vocab_size}{bits}"] if self.draft_vocab_size else []
        draft = "+".join(drafters)
        if self.draft_token_ids:
            head = "eagle" if self.reads_features else f"{self.num_heads or ''}head"
            head = "exit" if self.exits else head
            draft = head + "".join(map(str, self.draft_token_ids))
        transforms = (
            f"T{self.params.temperature:g}-k{self.params.top_k}-p{self.params.top_p:g}"
            f"{'-penalised' if self.params.penalised else ''}"
            f"{'-biased' if self.params.logit_bias else ''}"
        )
        kinds = {
            "-tree": self.siblings, "-chosen": self.length_control, "-grammar": self.grammar,
            "-repeated": self.repeated,
        }  # fmt: skip
        return (
            f"{self.rule.value}-K{self.num_draft_tokens}{''.join(k for k in kinds if kinds[k])}-"
            f"{transforms}-V{self.vocab_size}-{draft}-"
            f"{self.num_tokens}of{self.max_tokens}"
        )


MANY_ROUNDS = Cell(
    Rule.BLOCK, 2, TOP_K, draft_seed=12, num_tokens=5, max_tokens=6, num_samples=5_400,
    detects=0.07,
)  # fmt: skip
"""The law of so many tokens sees drafted rounds follow each other, and what one lends the next. The
draft is one of those under which such a fault shows most."""
CELLS = [
    # Trees by a draft that knows two tokens more than the target, which are never accepted.
    Cell(
        Rule.TOKEN, 2, TOP_K, vocab_size=4, draft_vocab_size=6, siblings=2, num_samples=2_400,
        detects=DETECTS_SOON,
    ),
    # A head that reads the target's features, in trees.
    Cell(
        Rule.TOKEN, 2, PLAIN, draft_token_ids=(0, 1), reads_features=True, siblings=1,
        num_samples=3_000, detects=DETECTS_SOON,
    ),
    # A draft whose head has rows for two tokens of the target's, not its first ones.
    Cell(
        Rule.BLOCK, 2, BIASED, vocab_size=4, draft_token_ids=(1, 3), num_samples=3_500,
        detects=DETECTS_SOON,
    ),
]  # fmt: skip
OTHER_CELLS = [
    # Suffix decoding over all that was written before, and a model where that is not confident; in
    # fewer samples among the adaptive cells, as the next one.
    Cell(Rule.TOKEN, 2, TOP_P, lookup=LookupKind.SUFFIX, num_samples=3_000, detects=DETECTS_SOON),
    # A target whose first layer drafts all tokens but one, in trees.
    Cell(
        Rule.TOKEN, 3, TOP_P, draft_token_ids=(0, 2), exits=True, siblings=1, num_samples=3_000,
        detects=DETECTS_SOON,
    ),
]  # fmt: skip
SOON: dict[str, Any] = {"num_samples": 440, "detects": 0.23, "max_tokens": 5}
ADAPTIVE_CELLS = [
    # A model drafts, K is chosen, and every seed comes twice, at the same time or one after the
    # other; a look-up that has seen the first answer goes before the model.
    Cell(
        Rule.TOKEN, 3, PLAIN, lookup=LookupKind.SUFFIX, length_control=True, repeated=True, **SOON
    ),
    # The same with a grammar, of one kind of drafter after the other.
    *(
        Cell(rule, 3, PLAIN, vocab_size=4, grammar=True, length_control=True, **SOON, **drafter)
        for rule, drafter in (
            (Rule.BLOCK, {"draft_vocab_size": 4}),
            (Rule.TOKEN, {"draft_token_ids": (0, 2, 3), "num_heads": 3, "siblings": 1}),
            (Rule.TOKEN, {"draft_token_ids": (0, 2, 3), "exits": True}),
            (Rule.TOKEN, {"draft_token_ids": (0, 2, 3), "reads_features": True}),
        )
    ),
]
"""What may go wrong where more than the target's answers decides what is drafted, in few samples:
faults of this kind are large."""
SMALL_GRID = [
    Cell(rule, k, params, max_tokens=6 if k == 4 else 4)
    for rule, k, params in product(RULES, (0, 1, 2, 4), (PLAIN, TOP_K, TOP_P, PENALISED))
]
ADAPTIVE_GRID = [
    replace(cell, rule=rule, repeated=repeated, num_samples=6_500, detects=0.07)
    for cell, rule, repeated in product(ADAPTIVE_CELLS, RULES, (False, True))
    if not (cell.siblings and rule is Rule.BLOCK)
]
WIDE: dict[str, Any] = {"max_tokens": 6, "num_samples": 13_500}
WIDE_GRID = [
    MANY_ROUNDS,
    *(
        Cell(rule, k, params, vocab_size=4, draft_token_ids=token_ids, **WIDE)
        for rule, k, params, token_ids in product(
            RULES, (1, 4), (PENALISED, TOP_P, BIASED), ((1, 3), (0, 2, 3), (2,))
        )
    ),
    Cell(Rule.TOKEN, 2, PLAIN, vocab_size=8, draft_vocab_size=5, num_tokens=2, num_samples=13_500),
    Cell(Rule.BLOCK, 2, TOP_P, vocab_size=8, draft_vocab_size=8, num_tokens=2, num_samples=13_500),
    Cell(Rule.BLOCK, 4, PLAIN, vocab_size=4, draft_vocab_size=3, num_samples=13_500),
    *(
        Cell(rule, 4, PLAIN, draft_vocab_size=draft, lookup=lookup, num_tokens=4, **WIDE)
        for rule, draft, lookup in product(RULES, (None, 3), tuple(LookupKind))
    ),
    *(Cell(rule, 4, PLAIN, draft_seed=3, draft_bits=8, num_tokens=4, **WIDE) for rule in RULES),
    *(
        Cell(rule, 4, params, vocab_size=4, draft_token_ids=(0, 1, 3), **WIDE, **kind)
        for kind in ({"num_heads": 3}, {"exits": True}, {"reads_features": True})
        for rule, params in product(RULES, (PLAIN, PENALISED, BIASED))
    ),
    # Heads draft trees of fewer places than are asked for.
    Cell(Rule.TOKEN, 3, TOP_P, draft_token_ids=(0, 2), num_heads=2, siblings=1),
    Cell(Rule.TOKEN, 4, PLAIN, num_tokens=1, max_tokens=1, num_samples=7_600),
    Cell(Rule.BLOCK, 4, TOP_K, num_tokens=6, max_tokens=6, num_samples=12_500),
]


def tiny_engine(
    vocab_size: int,
    seed: int,
    bits: int | None = None,
    head_ids: tuple[int, ...] = (),
    num_heads: int = 0,
    shows_features: bool = False,
    exits: bool = False,
    eos: tuple[int, ...] = (),
) -> tuple[Any, PagedEngine]:
    torch.set_num_threads(1)
    config = tiny_config("llama", vocab_size)
    config.num_hidden_layers = 2 if exits else 1
    module = tiny_module(config, seed)
    with torch.no_grad():
        module.lm_head.weight.mul_(FLATTER)
    info = ModelInfo(f"tiny-{seed}", vocab_size, 128, "float32", eos, f"w{seed}", "tiny")
    original = twin(module)
    heads = tiny_heads(module, head_ids, num_heads) if num_heads else None
    made = tiny_exit(module, head_ids) if exits else None
    if bits is not None:
        speed_up(module, bits)
    engine = PagedEngine(
        module, info, max_num_seqs=64, draft_heads=heads, exit_head=made,
        shows_features=shows_features,
    )  # fmt: skip
    return original, engine


def lookup_of(kind: LookupKind | None) -> LookupDrafter | None:
    if kind is LookupKind.SUFFIX:
        # Every match abounds with three token ids: fewer are looked at, for time's sake.
        return SuffixDrafter(SuffixConfig(depth=6, occurrences_max=16))
    return NgramDrafter() if kind else None


def reduced_engine(target: Any, token_ids: tuple[int, ...], seed: int) -> PagedEngine:
    """A draft with the target's embeddings, and a head for some of its tokens."""
    module = tiny_drafter(target, token_ids, seed=seed)
    with torch.no_grad():
        module.lm_head.weight.mul_(FLATTER)
    info = ModelInfo(
        "reduced", target.config.vocab_size, 128, "float32", (), "w", "tiny", token_ids
    )
    return PagedEngine(module, info, max_num_seqs=64)


async def sample(stack: Stack, cell: Cell) -> tuple[list[tuple[int, ...]], int]:
    """All completions, and how many draft tokens were accepted in all."""
    gate = asyncio.Semaphore(CONCURRENCY)
    num_accepted = 0

    async def two(number: int) -> tuple[int, ...]:
        """The second one with a seed, while the first runs or behind it."""
        first = asyncio.create_task(one(number))
        await (first if number % 2 else asyncio.sleep(0))
        second = await one(number)
        await first
        return second

    async def one(number: int) -> tuple[int, ...]:
        nonlocal num_accepted
        request = GenerateRequest(
            PROMPT,
            sampling=cell.params,
            max_tokens=cell.max_tokens,
            seed=SEED + number,
            rule=cell.rule,
            num_draft_tokens=cell.num_draft_tokens,
            constraint=CONSTRAINT if cell.grammar else None,
        )
        async with gate:
            completion = await stack.client.complete(request)
        num_accepted += completion.metrics.num_accepted_draft_tokens
        tokens = completion.token_ids[: cell.num_tokens]
        return tokens + (END,) * (cell.num_tokens - len(tokens))

    complete = two if cell.repeated else one
    samples = await asyncio.gather(*(complete(number) for number in range(cell.num_samples)))
    return list(samples), num_accepted


@contextmanager
def drafting_pays() -> Iterator[None]:
    """Length control takes plain decoding for slow: drafts of tiny models cost as much as their
    targets, and would hardly be used."""
    forecast = RoundCosts.forecast

    def slower(*arguments: Any) -> Forecast:
        found = forecast(*arguments)
        return replace(found, plain_s=SLOWER * found.plain_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundCosts, "forecast", slower)
        yield


async def measure(cell: Cell, directory: Path) -> tuple[Fit, int]:
    """How well completions fit the law, and how many draft tokens were accepted in all."""
    eos = (END,) if cell.grammar else ()
    module, target = tiny_engine(
        cell.vocab_size, 3, head_ids=cell.draft_token_ids, num_heads=cell.num_heads,
        exits=cell.exits, shows_features=cell.reads_features, eos=eos,
    )  # fmt: skip
    draft = eagle = None
    self_drafter = self_drafter_of(target, DRAFT_SUPPORT_ENTRIES)
    if cell.reads_features:
        loaded = tiny_eagle(module, cell.draft_token_ids)
        eagle = EagleDrafter(loaded, RARE, sessions_max=CONCURRENCY)
    elif cell.draft_token_ids and self_drafter is None:
        draft = reduced_engine(module, cell.draft_token_ids, cell.draft_seed)
    elif cell.draft_vocab_size is not None:
        _, draft = tiny_engine(cell.draft_vocab_size, cell.draft_seed, cell.draft_bits, eos=eos)
    law_of = constrained_law if cell.grammar else completion_law
    law = law_of(module, PROMPT, cell.num_tokens, cell.params)
    lookup = lookup_of(cell.lookup)
    async with running_stack(
        target,
        draft,
        directory,
        lookup=lookup,
        hybrid=replace(HYBRID, hybrid_min_score=CONFIDENT),
        draft_siblings=cell.siblings,
        length_control=cell.length_control,
        self_drafter=self_drafter,
        eagle=eagle,
        text=TokenizerText(letters(), "small") if cell.grammar else None,
        grammars=grammars if cell.grammar else None,
    ) as stack:
        samples, num_accepted = await sample(stack, cell)
    result = fit(samples, law, cell.detects)
    print(f"{cell}: {result}, {num_accepted} draft tokens accepted")
    return result, num_accepted


async def check_cell(cell: Cell, directory: Path) -> None:
    with drafting_pays() if cell.length_control else nullcontext():
        result, num_accepted = await measure(cell, directory)
    assert result.power >= POWER
    assert result.p_value >= FALSE_ALARM
    if cell.num_draft_tokens and cell.max_tokens > 2:
        assert num_accepted > (cell.num_samples / 8 if cell.length_control else 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", [*CELLS, *ADAPTIVE_CELLS], ids=str)
async def test_completions_follow_the_targets_law(cell: Cell, tmp_path: Path) -> None:
    await check_cell(cell, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_noise_that_rounds_share_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault put in on purpose: under block every number is keyed by its absolute position, so
    that a slot that was thrown away lends its noise to the next round."""

    def absolute(self: RoundNoise, index: int, sibling: int = 0) -> Place:
        return Place(self.committed_length + index, 0)

    def absolute_many(
        self: NoiseRows, lengths: WordArray, indices: WordArray, sibling: int
    ) -> tuple[WordArray, WordArray]:
        return lengths + indices, np.zeros_like(indices)

    monkeypatch.setattr(RoundNoise, "place", absolute)
    monkeypatch.setattr(NoiseRows, "_places", absolute_many)
    result, _ = await measure(replace(MANY_ROUNDS, num_samples=4_500), tmp_path)
    assert result.p_value < FALSE_ALARM


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", [*OTHER_CELLS, *SMALL_GRID, *ADAPTIVE_GRID, *WIDE_GRID], ids=str)
async def test_completions_follow_the_targets_law_over_the_whole_grid(
    cell: Cell, tmp_path: Path
) -> None:
    await check_cell(cell, tmp_path)
