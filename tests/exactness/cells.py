"""A cell: one setting of the three services, whose completions are sampled and compared with the
target's law: tiny random models, real gRPC between the services, real Redis."""

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
from outrider.models.module_replacement import speed_up
from outrider.models.tokenizer import TokenizerText
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service.actor import self_drafter_of
from tests.exactness.law import Fit, completion_law, fit, no_mask
from tests.support.models import tiny_config, tiny_drafter, tiny_eagle3, tiny_module, twin
from tests.support.mtp_models import mtp_target, tiny_mtp
from tests.support.paged_engines import openvino_kernels
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
    lookup_on: str = "coordinator"
    """`target`: the target's look-up drafts, and rounds run ahead."""
    draft_seed: int = 4
    """The seed of the target's weights is 3."""
    length_control: bool = False
    """Whether K is chosen, up to `num_draft_tokens`."""
    grammar: bool = False
    """Whether completions follow `CONSTRAINT`, over a vocabulary of 4."""
    openvino: bool = False
    """Whether the target's steps run on OpenVINO."""
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
    own = twin(module)
    if cell.openvino:
        own = own.float()
        speed_up(own, packs_linears=False)
        options["kernels"] = openvino_kernels()
    target = engine_of(own, eos, **options)
    assert bool(target.kernels_name) == cell.openvino
    return found | {"target_engine": target, "self_drafter": self_drafter_of(target)}


def lookup_of(kind: LookupKind | None, *, has_history: bool = True) -> LookupDrafter | None:
    if kind is LookupKind.SUFFIX:
        # With three token ids, matches have many occurrences; to save time, fewer are read.
        config = SuffixConfig(depth=6, occurrences_max=16)
        return SuffixDrafter(config if has_history else replace(config, tokens_per_tenant=0))
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
    law, is_resident = law_of(cell, module), cell.lookup_on == "target"
    async with running_stack(
        directory=directory,
        lookup=lookup_of(cell.lookup, has_history=not is_resident),
        target_lookup=lookup_of(cell.lookup) if is_resident else None,
        hybrid=replace(HYBRID, hybrid_min_score=CONFIDENT),
        length_control=cell.length_control,
        lookup_on=cell.lookup_on,
        **engines_of(cell, module),
        **options,
    ) as stack:
        with drafting_pays() if cell.length_control else nullcontext():
            samples, num_accepted = await sample(stack, cell)
    result = fit(samples, law)
    print(f"{cell}: {result}, {num_accepted} draft tokens accepted")
    return result, num_accepted
