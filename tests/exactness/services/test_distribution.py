"""Completions from the real services are distributed as if the target had written them alone: tiny
random models, real gRPC between the services, real Redis, the joint law of all tokens by
enumeration.

Each cell: Pearson's chi-square, false alarm 1e-6, and enough samples to find a law at total
variation 0.05 (0.2 in the cells that always run) with probability 0.99, which the test asserts.
Completions that are too rare to be counted on their own are counted together. Among these, with a
probability of at most 0.01 (0.13 in the cells that always run), the test sees no differences.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness.law import Fit, completion_law, fit, no_mask
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coordinator.draft_length.round_cost import Forecast, RoundCosts
from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from outrider.client import CompletionBuilder
from outrider.drafters.lookup import LookupDrafter, NgramDrafter
from outrider.drafters.names import LookupKind
from outrider.drafters.suffix import SuffixConfig, SuffixDrafter
from outrider.engine.paged_engine import PagedEngine
from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.interfaces.engine import ModelInfo
from outrider.interfaces.request import GenerateRequest
from outrider.models.tokenizer import TokenizerText
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service.actor import self_drafter_of
from tests.support.models import tiny_config, tiny_drafter, tiny_eagle3, tiny_module, twin
from tests.support.mtp_models import mtp_target, tiny_mtp
from tests.support.stack import HYBRID, Stack, running_stack

END = 3
PATTERN = "[ab]c?[abc]{0,2}"
CONSTRAINT = Constraint.of_regex(PATTERN)


@cache
def letters() -> Any:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "<|end|>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")  # noqa: S106


def grammars() -> Grammars:
    return Grammars(lambda: GrammarTokenizer(letters(), (END,)))


LETTERS = "abc"
TEXTS = [
    text
    for num in range(1, 5)
    for text in map("".join, product(LETTERS, repeat=num))
    if re.fullmatch(PATTERN, text)
]
"""All texts that meet the constraint."""


def may_follow(prefix: tuple[int, ...]) -> set[int]:
    """The tokens with which `TEXTS` go on after a prefix, or end."""
    before = "".join(LETTERS[token_id] for token_id in prefix)
    rest = [text[len(before) :] for text in TEXTS if text.startswith(before)]
    return {LETTERS.index(text[0]) if text else END for text in rest}


POWER = 0.99
SOON = 0.2
"""The total variation that must be found with a sixteenth of the samples."""
FEW_SAMPLES = 1_000
POOLED_MAX, POOLED_OF_FEW = 0.01, 0.13
"""Largest probability of the completions that are counted together."""
CONFIDENT = 0.7
"""Tokens that a look-up before a model must expect. Look-up and model then each draft some
rounds."""
SLOWER = 20.0
"""Factor by which plain decoding looks slower than it is, in cells where K is chosen."""
FLATTER = 0.5
"""Scales the random logits, so that few completions are too rare to be counted on their own."""
CONCURRENCY = 48
SEED = 20_260_000
"""Requests use the seeds from here on."""
PROMPT_LENGTH = 8
ACROSS: dict[str, Any] = {"prompt_length": 13, "num_skipped": 4, "max_tokens": 8}
"""Drafts cross the end of the first page, of 16 tokens, and are rolled back before it and after it.
Tokens after it are tested."""
RULES = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
PARAMS = {
    "plain": SamplingParams(),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.8),
    "penalised": SamplingParams(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "biased": SamplingParams(
        temperature=0.8, logit_bias=((0, 0.7), (3, -0.9)), presence_penalty=0.5
    ),
    "late": SamplingParams(top_p=0.9, min_tokens=2, stop_token_ids=(1,)),
}
"""The last ones end no completion before two tokens; for them `END` is an EOS."""


@dataclass(frozen=True)
class Cell:
    """One setting of the grid."""

    rule: Rule
    num_draft_tokens: int
    params: str = "plain"
    drafter: str = "model"
    """`parallel`: a model that drafts in one pass, with its last token as parallel token; `eagle3`
    or `mtp`: the target itself; `apart`: an EAGLE-3 head that the target sends features; `none`."""
    token_ids: tuple[int, ...] = ()
    """The target's tokens that are drafted; empty = `draft_vocab_size` tokens."""
    draft_vocab_size: int = 3
    vocab_size: int = 3
    lookup: LookupKind | None = None
    """Drafts without a model, or before a model where it is confident."""
    draft_seed: int = 4
    """The seed of the target's weights is 3."""
    length_control: bool = False
    """Whether K is chosen, up to `num_draft_tokens`."""
    grammar: bool = False
    """Whether completions follow `CONSTRAINT`, over a vocabulary of 4."""
    repeated: bool = False
    """Whether each seed is used twice; the second completions count."""
    num_tokens: int = 3
    """The tokens of a completion whose joint law is tested."""
    num_skipped: int = 0
    """Tokens of a completion before these."""
    max_tokens: int = 4
    """Length of the completions; a round drafts no further."""
    prompt_length: int = PROMPT_LENGTH
    num_samples: int = 9_600
    detects: float = 0.05

    @property
    def eos(self) -> tuple[int, ...]:
        return (END,) if self.grammar or self.params == "late" else ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """It repeats itself, so that n-grams find matches."""
        return tuple(islice(cycle((0, 1, 2)), self.prompt_length))

    def __str__(self) -> str:
        named = {one.name: getattr(self, one.name) for one in fields(self)[2:-2]}
        given = (f"{name}={value}" for name, value in named.items() if value != getattr(Cell, name))
        return "-".join((self.rule.value, f"K{self.num_draft_tokens}", *given))


CELLS = [
    # A draft that knows two tokens more than the target, which are never accepted.
    Cell(Rule.TOKEN, 2, "top-k", vocab_size=4, draft_vocab_size=6, num_samples=540, detects=SOON),
    # A head that is sent the target's features.
    Cell(Rule.TOKEN, 2, drafter="apart", token_ids=(0, 1), num_samples=660, detects=SOON),
    # An EAGLE-3 head on the target's pages, which knows two of its tokens.
    Cell(Rule.TOKEN, 3, "top-p", "eagle3", (0, 2), **ACROSS, num_samples=660, detects=SOON),
    # A target's own MTP layer, with latent attention and experts.
    Cell(Rule.TOKEN, 3, "top-p", "mtp", num_samples=660, detects=SOON),
    # Ends that are masked for the first tokens of a completion alone, on both sides.
    Cell(Rule.BLOCK, 3, "late", vocab_size=4, draft_vocab_size=5, num_samples=740, detects=SOON),
    # A model that drafts in one pass.
    Cell(Rule.BLOCK, 3, "top-p", "parallel", draft_vocab_size=4, num_samples=740, detects=SOON),
    # A draft whose head has rows for two tokens of the target's, not its first ones.
    Cell(
        Rule.BLOCK,
        2,
        "biased",
        vocab_size=4,
        token_ids=(1, 3),
        **ACROSS,
        num_samples=740,
        detects=SOON,
    ),
]
FEW: dict[str, Any] = {"num_samples": 440, "detects": 0.23, "max_tokens": 5, "length_control": True}
ADAPTIVE_CELLS = [
    # A model drafts, K is chosen, and every seed comes twice, at the same time or one after the
    # other; a look-up that has seen the first answer goes before the model.
    Cell(Rule.TOKEN, 3, lookup=LookupKind.SUFFIX, repeated=True, **FEW),
    # The same with a grammar, of one kind of drafter after the other.
    Cell(Rule.BLOCK, 3, vocab_size=4, draft_vocab_size=4, grammar=True, **FEW),
    Cell(Rule.TOKEN, 3, drafter="parallel", vocab_size=4, draft_vocab_size=5, grammar=True, **FEW),
    *(
        Cell(Rule.TOKEN, 3, "plain", drafter, (0, 2, 3), vocab_size=4, grammar=True, **FEW)
        for drafter in ("apart", "eagle3")
    ),
]
"""Cells in which more than the target's answers decides what is drafted. They have few samples,
because such faults are large."""
WIDE: dict[str, Any] = {"max_tokens": 6, "num_samples": 13_500}
GRID = [
    # Suffix decoding over all that was written before, and a model where that is not confident; in
    # fewer samples among the adaptive cells.
    Cell(Rule.TOKEN, 2, "top-p", lookup=LookupKind.SUFFIX, num_samples=1_750, detects=0.15),
    *(
        Cell(rule, k, params, max_tokens=6 if k == 4 else 4)
        for rule, k, params in product(RULES, (0, 1, 2, 4), list(PARAMS)[:4])
    ),
    *(
        replace(cell, rule=rule, repeated=repeated, num_samples=6_500, detects=0.07)
        for cell, rule, repeated in product(ADAPTIVE_CELLS, RULES, (False, True))
    ),
    # 5 tokens have more than one drafted round, so a fault that one round passes on to the next
    # shows. It shows most with this draft.
    Cell(
        Rule.BLOCK,
        2,
        "top-k",
        draft_seed=12,
        num_tokens=5,
        max_tokens=6,
        num_samples=5_400,
        detects=0.07,
    ),
    *(
        Cell(rule, k, params, token_ids=token_ids, vocab_size=4, **WIDE)
        for rule, k, params, token_ids in product(
            RULES, (1, 4), ("penalised", "top-p", "biased"), ((1, 3), (0, 2, 3), (2,))
        )
    ),
    Cell(Rule.TOKEN, 2, vocab_size=8, draft_vocab_size=5, num_tokens=2, num_samples=13_500),
    Cell(
        Rule.BLOCK, 2, "top-p", vocab_size=8, draft_vocab_size=8, num_tokens=2, num_samples=13_500
    ),
    Cell(Rule.BLOCK, 4, vocab_size=4, num_samples=13_500),
    *(
        Cell(rule, 4, drafter=drafter, lookup=lookup, num_tokens=4, **WIDE)
        for rule, drafter, lookup in product(RULES, ("none", "model"), LookupKind)
    ),
    *(
        Cell(rule, 4, params, drafter, (0, 1, 3), vocab_size=4, **WIDE)
        for drafter in ("apart", "eagle3")
        for rule, params in product(RULES, ("plain", "penalised", "biased"))
    ),
    *(
        Cell(rule, 4, params, "parallel", draft_vocab_size=4, num_tokens=4, **WIDE)
        for rule, params in product(RULES, ("plain", "penalised"))
    ),
    *(
        Cell(
            rule,
            4,
            "late",
            drafter,
            (0, 1, 3) if drafter != "model" else (),
            vocab_size=4,
            draft_vocab_size=4,
            **WIDE,
        )
        for rule, drafter in product(RULES, ("model", "eagle3", "apart"))
    ),
    # Drafts that cross the end of a page.
    *(
        Cell(rule, 4, "top-p", drafter, (0, 2, 3), vocab_size=4, num_samples=13_500, **ACROSS)
        for rule, drafter in product(RULES, ("model", "eagle3", "apart"))
    ),
    Cell(Rule.TOKEN, 4, num_tokens=1, max_tokens=1, num_samples=7_600),
    Cell(Rule.BLOCK, 4, "top-k", num_tokens=6, max_tokens=6, num_samples=12_500),
]


def tiny(vocab_size: int, seed: int, num_layers: int = 1) -> Any:
    torch.set_num_threads(1)
    config = tiny_config("llama", vocab_size, num_hidden_layers=num_layers)
    return flatter(tiny_module(config, seed))


def flatter(module: Any) -> Any:
    with torch.no_grad():
        module.lm_head.weight.mul_(FLATTER)
    return module


def engine_of(module: Any, eos: tuple[int, ...], **options: Any) -> PagedEngine:
    size, token_ids = module.config.vocab_size, options.pop("token_ids", ())
    info = ModelInfo("tiny", size, 128, "float32", eos, "w", "tiny", token_ids)
    return PagedEngine(module, info, max_num_seqs=64, **options)


def engines_of(cell: Cell, module: Any) -> dict[str, Any]:
    """The engines of a cell for `running_stack`; the target's has a copy of the module."""
    eos, ids = cell.eos, cell.token_ids
    options: dict[str, Any] = {}
    found: dict[str, Any] = {"draft_engine": None}
    if cell.drafter == "eagle3":
        options["draft_layer"] = tiny_eagle3(module, ids)
    elif cell.drafter == "mtp":
        options["draft_layer"] = tiny_mtp(module)
    elif cell.drafter == "apart":
        head = tiny_eagle3(module, ids)
        options |= {"draft_layer": head, "drafts_apart": True}
        info = ModelInfo("head", module.config.vocab_size, 128, "float32", (), "w", "tiny", ids)
        engine = HeadEngine(head, info, max_num_seqs=64, kv_cache_memory_bytes=2**20)
        found["head"] = FeatureDrafter(head, engine)
    elif ids:
        draft = flatter(tiny_drafter(module, ids, seed=cell.draft_seed))
        found["draft_engine"] = engine_of(draft, (), token_ids=ids)
    elif cell.drafter in ("model", "parallel"):
        draft = tiny(cell.draft_vocab_size, cell.draft_seed)
        found["draft_engine"] = engine_of(draft, eos)
        if cell.drafter == "parallel":
            found["parallel_token"] = cell.draft_vocab_size - 1
    target = engine_of(twin(module), eos, **options)
    return found | {"target_engine": target, "self_drafter": self_drafter_of(target)}


def lookup_of(kind: LookupKind | None) -> LookupDrafter | None:
    if kind is LookupKind.SUFFIX:
        # With three token ids, matches have many occurrences; to save time, fewer are read.
        return SuffixDrafter(SuffixConfig(depth=6, occurrences_max=16))
    return NgramDrafter() if kind else None


async def sample(stack: Stack, cell: Cell) -> tuple[list[tuple[int, ...]], int]:
    """All completions, and the total number of accepted draft tokens."""
    gate = asyncio.Semaphore(CONCURRENCY)
    num_accepted = 0

    async def two(number: int) -> tuple[int, ...]:
        """The second completion with a seed, while the first runs or after it."""
        first = asyncio.create_task(one(number))
        await (first if number % 2 else asyncio.sleep(0))
        second = await one(number)
        await first
        return second

    async def one(number: int) -> tuple[int, ...]:
        nonlocal num_accepted
        request = GenerateRequest(
            cell.prompt,
            sampling=PARAMS[cell.params],
            max_tokens=cell.max_tokens,
            seed=SEED + number,
            rule=cell.rule,
            num_draft_tokens=cell.num_draft_tokens,
            constraint=CONSTRAINT if cell.grammar else None,
        )
        builder = CompletionBuilder()
        async with gate:
            async for event in stack.coordinator.streams.generate(request):
                builder.add(event)
        completion = builder.build()
        num_accepted += completion.metrics.num_accepted_draft_tokens
        end = cell.num_skipped + cell.num_tokens
        tokens = completion.token_ids[:end]
        return (tokens + (END,) * (end - len(tokens)))[cell.num_skipped :]

    complete = two if cell.repeated else one
    samples = await asyncio.gather(*(complete(number) for number in range(cell.num_samples)))
    return list(samples), num_accepted


def law_of(cell: Cell, module: Any) -> Counter[tuple[int, ...]]:
    mask = may_follow if cell.grammar else no_mask
    params = PARAMS[cell.params]
    num, law = cell.num_skipped, Counter[tuple[int, ...]]()
    whole = completion_law(module, cell.prompt, num + cell.num_tokens, params, mask, cell.eos)
    for tokens, chance in whole.items():
        law[tokens[num:]] += chance
    return law


def target_of(cell: Cell) -> Any:
    if cell.drafter == "mtp":
        return flatter(mtp_target("deepseek_v3", cell.vocab_size))
    return tiny(cell.vocab_size, 3, 2 if cell.drafter in ("eagle3", "apart") else 1)


@contextmanager
def drafting_pays() -> Iterator[None]:
    """Makes length control overestimate plain decoding: drafts of tiny models cost as much as their
    targets and would hardly be used."""
    forecast = RoundCosts.forecast

    def slower(*arguments: Any) -> Forecast:
        found = forecast(*arguments)
        return replace(found, plain_s=SLOWER * found.plain_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundCosts, "forecast", slower)
        yield


async def measure(cell: Cell, directory: Path) -> tuple[Fit, int]:
    """How well completions fit the law, and the total number of accepted draft tokens."""
    module = target_of(cell)
    options: dict[str, Any] = {}
    if cell.grammar:
        options = {"text": TokenizerText(letters(), "small"), "grammars": grammars}
    law = law_of(cell, module)
    async with running_stack(
        directory=directory,
        lookup=lookup_of(cell.lookup),
        hybrid=replace(HYBRID, hybrid_min_score=CONFIDENT),
        length_control=cell.length_control,
        **engines_of(cell, module),
        **options,
    ) as stack:
        with drafting_pays() if cell.length_control else nullcontext():
            samples, num_accepted = await sample(stack, cell)
    result = fit(samples, law)
    print(f"{cell}: {result}, {num_accepted} draft tokens accepted")
    return result, num_accepted


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [*CELLS, *ADAPTIVE_CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in GRID)],
    ids=str,
)
async def test_completions_follow_the_targets_law(cell: Cell, tmp_path: Path) -> None:
    result, num_accepted = await measure(cell, tmp_path)
    assert result.power(cell.detects) >= POWER
    is_few = cell.num_samples < FEW_SAMPLES
    assert result.pooled <= (POOLED_OF_FEW if is_few else POOLED_MAX)
    assert not result.rejects
    if cell.num_draft_tokens and cell.max_tokens > 2:
        assert num_accepted > (cell.num_samples / 8 if cell.length_control else 0)
