"""`outrider bench engine`: many sessions at once, steps against the library's, and verdicts.

Every session continues a prompt of its own, 256 tokens, by its likeliest 128; EOS does not end it.
Tokens a second are new tokens over the time from the first request to the last token, prefill
included. The sides take turns in processes of their own, and every figure is a median of rounds.

A gap is the time between two tokens of one session as they come to the client; those of one
message, for which the first of them has waited, share the time until the next message.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from outrider.client import Client
from outrider.config import CoordinatorConfig, TargetConfig
from outrider.errors import SettingError
from outrider.limits import DEADLINE_MS_MAX
from outrider.replica.process_setup import available_cores, build_engine, use_threads
from outrider.request import GenerateRequest, Tokens
from outrider.speculation.sampling_params import Rule, SamplingParams

from .measurement import Progress, medians_ms
from .options import Options, option, words
from .processes import Process, Role, running_pair, unbounded_threads
from .report import figures_table, percentile

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from outrider.engine.interface import Engine
    from outrider.speculation.verification import Question

PARTS: Final = ("sessions", "waits", "steps", "verdicts")
SESSIONS: Final = (1, 4, 16, 32)
LIBRARY_SESSIONS: Final = 16
"""Prompts that the library's continuous batching is given at once."""
ONE_BY_ONE: Final = 4
"""Prompts of its `generate`, one after the other."""
TOKENS_MAX: Final = 65_536
DECODING_TIMEOUT_S: Final = 1_800.0
_STRIDE: Final = 7
"""Tokens by which every measurement's prompts are shifted, so that none begins like an earlier one
and finds it cached."""
_MEMORY_PART: Final = 0.2
"""Of the machine's memory, for the keys and values of the library's continuous batching."""

PREFIX_TOKENS: Final = 1_000
OWN_TOKENS: Final = 20
"""What follows the prefix in each request."""
LONG_TOKENS: Final = 4_000
RUNNING_SESSIONS: Final = 8
"""That decode beside the long prompt ..."""
RUNNING_TOKENS: Final = 256
"""... and began with so many tokens."""
SETTLING_GAPS: Final = 16
"""Of each running session, which do not count: others are still beginning."""
GAPS_BEFORE: Final = 64
"""Of each, which do, before the long prompt is sent."""
_POLL_S: Final = 0.005

CACHED_TOKENS: Final = 256
STEP_TOKENS: Final = 5
ROWS_SESSIONS: Final = 16
"""Sessions of the steps whose rows are compared."""
STEP_REPETITIONS: Final = 50
GENERIC_SHAPE: Final = {
    "vocab_size": 50_304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3_072, "max_position_embeddings": 2_048,
}  # fmt: skip
"""Of Pythia 160M. A step reads 124 million weights; one of the demo target reads 135."""

NUM_DRAFT_TOKENS: Final = 4
DRAFT_ENTRIES: Final = 8_192
"""Width of the draft's logits: those of the target's first so many tokens."""
HIGH_NATS: Final = 4.0
"""Half of the rows have more entropy than this, half have at most as much."""
NUM_CASES: Final = 40
"""Verdicts' worth of rows: more than the processor's caches hold."""
VERDICT_REPETITIONS: Final = 200
VERDICT_SESSIONS: Final = 8
"""That are judged at once in the second measurement."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """What `bench engine` is asked for. Wrong values raise `SettingError`."""

    repetitions: int = option(3, "rounds of all sides, of which medians are taken", low=1, high=100)
    prompt_tokens: int = option(256, "tokens of each session's prompt", low=1, high=TOKENS_MAX)
    new_tokens: int = option(128, "tokens that each session decodes", low=1, high=TOKENS_MAX)
    parts: tuple[str, ...] = option(
        PARTS, "what to measure", choices=PARTS, metavar="NAMES", parse=words
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The result of one `bench engine`; medians. None: left out, or the model is too short."""

    model: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    repetitions: int
    sessions: Mapping[str, Mapping[str, float]] | None = None
    """Tokens a second by number of sessions: through coordinator and target ..."""
    engine_sessions: Mapping[str, Mapping[str, float]] | None = None
    """... and of the engine alone."""
    transformers_continuous_batching_tokens_per_second: float | None = None
    """The library's `generate_batch`, `LIBRARY_SESSIONS` prompts at once."""
    transformers_generate_tokens_per_second: float | None = None
    """Its `generate`, one prompt after the other."""
    verify_step_ms: float | None = None
    """5 new tokens over 256 cached ones, one session."""
    transformers_forward_ms: float | None = None
    """The same in the library."""
    generic_verify_step_ms: float | None = None
    """As `verify_step_ms`, of a random GPT-NeoX in bfloat16 (`GENERIC_SHAPE`)."""
    generic_transformers_forward_ms: float | None = None
    rows_80_over_16: float | None = None
    """A step of 16 sessions with 5 tokens each over one with a token each."""
    prefix_first_token_ms: float | None = None
    """Of a request with a fresh prefix of `PREFIX_TOKENS`."""
    prefix_second_first_token_ms: float | None = None
    """Of the next one, with the same prefix."""
    prefix_ratio: float | None = None
    gap_median_ms: float | None = None
    """Of `RUNNING_SESSIONS` that decode."""
    gap_p99_beside_ms: float | None = None
    """Of the same, from the sending of a prompt of `LONG_TOKENS` until its first token."""
    gap_ratio: float | None = None
    long_first_token_ms: float | None = None
    """Of the long prompt beside them ..."""
    long_alone_first_token_ms: float | None = None
    """... and of another one alone."""
    vocab_size: int | None = None
    verdict_ms: Mapping[str, float] | None = None
    """By rule: from logits [K+1, V] to the verdict, on one thread."""
    verdict_of_several_ms: Mapping[str, float] | None = None
    """Likewise, of each of `VERDICT_SESSIONS` that are judged at once."""
    draft_sampling_ms: float | None = None
    """From logits [`DRAFT_ENTRIES`] to a drawn token and its q."""

    def values(self) -> dict[str, object]:
        """By names in JSON."""
        return asdict(self)

    def render(self) -> Table:
        """For people."""
        rows = []
        for name, value in asdict(self).items():
            if isinstance(value, Mapping):
                for key, found in value.items():
                    figure = found["tokens_per_second"] if isinstance(found, Mapping) else found
                    rows.append((f"{name.replace('_', ' ')}: {key}", f"{figure:.3f}"))
            elif isinstance(value, float):
                rows.append((name.replace("_", " "), f"{value:.3f}"))
        title = (
            f"{self.model}, {self.dtype}: {self.prompt_tokens} prompt tokens, "
            f"{self.new_tokens} new ones; tokens/s of sessions"
        )
        return figures_table(title, rows)


class Prompts:
    """Token ids of real text, other ones at each call."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = token_ids
        self._start = 0

    def take(self, number: int, length: int) -> list[list[int]]:
        """`number` prompts of `length` tokens that share no beginning with each other or with
        earlier ones."""
        self._start += _STRIDE
        size = len(self._ids)
        starts = [self._start + index * size // number for index in range(number)]
        return [[self._ids[(start + place) % size] for place in range(length)] for start in starts]


async def run(
    options: EngineOptions, target: TargetConfig, texts: Sequence[Sequence[int]], progress: Progress
) -> EngineReport:
    """Measures `target`; prompts are cut out of `texts`, token ids. Raises `Unavailable` where a
    process breaks off, and `ConfigError`."""
    prompts = Prompts([token_id for text in texts for token_id in text])
    wanted = set(options.parts)
    figures: dict[str, Any] = {}
    async with AsyncExitStack() as stack:

        async def start(name: str, role: str) -> Process:
            progress(f"starting: {name}")
            return await stack.enter_async_context(_process(name, role, target))

        engine = await start("engine", "engine_role")
        if wanted & {"sessions", "waits"}:
            progress("starting: services")
            pair = running_pair(target, None, CoordinatorConfig())
            replicas = await stack.enter_async_context(pair)
            client = await stack.enter_async_context(replicas.coordinator(0))
        if "sessions" in wanted:
            libraries = {name: await start(name, "library_role") for name in _LIBRARY}
            sides = _Sides(options, prompts, client, engine, libraries)
            figures |= await sides.rates(progress)
        if "waits" in wanted:
            progress("waits")
            found = [
                await _waits(client, prompts, engine.ready["max_model_len"])
                for _ in range(options.repetitions)
            ]
            figures |= {name: median(each[name] for each in found) for name in found[0]}
        for part in wanted & {"steps", "verdicts"}:
            progress(part)
            question = {"measure": part, "prompts": prompts.take(ROWS_SESSIONS, CACHED_TOKENS)}
            figures |= await engine.ask(question | {"texts": texts}, DECODING_TIMEOUT_S)
    return EngineReport(
        model=target.model,
        dtype=str(engine.ready["dtype"]),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repetitions=options.repetitions,
        **figures,
    )


_LIBRARY: Final = {"generate_batch": LIBRARY_SESSIONS, "generate": ONE_BY_ONE}
"""The library's ways to decode, a process each, and the prompts of each."""


def _process(name: str, role: str, target: TargetConfig) -> Process:
    return Process(
        f"benchmarks.engine:{role}", f"the {name} process", {"config": asdict(target)},
        environment=unbounded_threads(os.environ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Sides:
    """What decodes, one at a time."""

    options: EngineOptions
    prompts: Prompts
    client: Client
    engine: Process
    libraries: Mapping[str, Process]

    async def rates(self, progress: Progress) -> dict[str, object]:
        """Medians of the rounds, after what is slow only once. The first call of `generate_batch`
        says how many sessions it will ever take side by side."""
        length = self.options.prompt_tokens + self.options.new_tokens
        if length > self.engine.ready["max_model_len"]:
            raise SettingError(
                "prompt_tokens",
                f"{self.options.prompt_tokens} and {self.options.new_tokens} new tokens are more "
                f"than the {self.engine.ready['max_model_len']} that the model takes",
            )
        progress("warming up")
        for number in (1, 4):
            await self._served(number)
            await self._alone(number)
        for way in _LIBRARY:
            await self._of_library(way)
        found: list[dict[str, float]] = []
        for index in range(self.options.repetitions):
            found.append({})
            for number in SESSIONS:
                progress(f"round {index + 1}: {number} sessions")
                found[-1][f"served {number}"] = await self._served(number)
                found[-1][f"alone {number}"] = await self._alone(number)
            for way in _LIBRARY:
                progress(f"round {index + 1}: {way}")
                found[-1][way] = await self._of_library(way)
        middle = {name: median(each[name] for each in found) for name in found[0]}

        def by_number(name: str) -> dict[str, dict[str, float]]:
            return {str(n): {"tokens_per_second": middle[f"{name} {n}"]} for n in SESSIONS}

        return {
            "sessions": by_number("served"),
            "engine_sessions": by_number("alone"),
            "transformers_continuous_batching_tokens_per_second": middle["generate_batch"],
            "transformers_generate_tokens_per_second": middle["generate"],
        }

    async def _served(self, number: int) -> float:
        seconds = await _decode(self.client, self._take(number), self.options.new_tokens)
        return number * self.options.new_tokens / seconds

    async def _alone(self, number: int) -> float:
        return await self._rate(self.engine, "decode", number)

    async def _of_library(self, way: str) -> float:
        return await self._rate(self.libraries[way], way, _LIBRARY[way])

    async def _rate(self, process: Process, measure: str, number: int) -> float:
        question = {
            "measure": measure,
            "prompts": self._take(number),
            "num_tokens": self.options.new_tokens,
        }
        answer = await process.ask(question, DECODING_TIMEOUT_S)
        return float(answer["num_tokens"]) / float(answer["seconds"])

    def _take(self, number: int) -> list[list[int]]:
        return self.prompts.take(number, self.options.prompt_tokens)


async def _stream(
    client: Client, prompt: Sequence[int], num_tokens: int, arrivals: list[float]
) -> None:
    """Decodes plainly; notes when each token came, those of one message together."""
    request = GenerateRequest(
        tuple(prompt), sampling=SamplingParams(temperature=0.0), max_tokens=num_tokens,
        ignore_eos=True, num_draft_tokens=0, deadline_ms=DEADLINE_MS_MAX,
    )  # fmt: skip
    clock = asyncio.get_running_loop().time
    async for event in client.generate(request):
        if isinstance(event, Tokens):
            arrivals += [clock()] * len(event.token_ids)


async def _decode(client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Seconds from the first request to the last token of all `prompts` side by side."""
    started = asyncio.get_running_loop().time()
    arrivals: list[list[float]] = [[] for _ in prompts]
    async with asyncio.TaskGroup() as group:
        for prompt, own in zip(prompts, arrivals, strict=True):
            group.create_task(_stream(client, prompt, num_tokens, own))
    return max(own[-1] for own in arrivals) - started


async def _waits(client: Client, prompts: Prompts, max_model_len: int) -> dict[str, float]:
    """Waits for a first token whose prefix was seen before, and for the next one while a long
    prompt is read beside it, as far as the model is long enough."""
    found = {}
    if max_model_len > PREFIX_TOKENS + OWN_TOKENS:
        (prefix,) = prompts.take(1, PREFIX_TOKENS)
        first, second = [
            1e3 * await _decode(client, [prefix + own], 1) for own in prompts.take(2, OWN_TOKENS)
        ]
        found = {
            "prefix_first_token_ms": first,
            "prefix_second_first_token_ms": second,
            "prefix_ratio": second / first,
        }
    if max_model_len > LONG_TOKENS:
        found |= await _beside_a_long_prompt(client, prompts, max_model_len)
    return found


async def _beside_a_long_prompt(
    client: Client, prompts: Prompts, max_model_len: int
) -> dict[str, float]:
    clock = asyncio.get_running_loop().time
    alone_s = await _decode(client, prompts.take(1, LONG_TOKENS), 1)
    arrivals: list[list[float]] = [[] for _ in range(RUNNING_SESSIONS)]
    num_tokens = max_model_len - RUNNING_TOKENS
    running = [
        asyncio.create_task(_stream(client, prompt, num_tokens, own))
        for prompt, own in zip(
            prompts.take(RUNNING_SESSIONS, RUNNING_TOKENS), arrivals, strict=True
        )
    ]

    async def go_on(more: int) -> None:
        goals = [len(own) + more for own in arrivals]
        while any(  # noqa: ASYNC110
            len(own) < goal and not task.done()
            for own, goal, task in zip(arrivals, goals, running, strict=True)
        ):
            await asyncio.sleep(_POLL_S)

    try:
        await go_on(SETTLING_GAPS)
        began = clock()
        await go_on(GAPS_BEFORE)
        sent = clock()
        long_s = await _decode(client, prompts.take(1, LONG_TOKENS), 1)
        await go_on(1)  # The gaps in which it came are over then.
    finally:
        for task in running:
            task.cancel()
        for task in running:
            with suppress(asyncio.CancelledError):
                await task
    before = median(gaps(arrivals, began, sent))
    beside = percentile(gaps(arrivals, sent, sent + long_s), 99)
    return {
        "gap_median_ms": 1e3 * before,
        "gap_p99_beside_ms": 1e3 * beside,
        "gap_ratio": beside / before,
        "long_first_token_ms": 1e3 * long_s,
        "long_alone_first_token_ms": 1e3 * alone_s,
    }


def gaps(arrivals: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Seconds between tokens of a session, of all that lie between these times, if only in part.
    Tokens that came in one message share the time until the next message."""
    return [
        (after - before) / num_tokens
        for own in arrivals
        for (before, num_tokens), (after, _) in pairwise(Counter(own).items())
        if before < end and after > start
        for _ in range(num_tokens)
    ]


@asynccontextmanager
async def engine_role(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """The engine without a service, and the library's module beside it."""
    config = TargetConfig(**setup["config"])
    num_threads = config.num_threads or available_cores()
    use_threads(num_threads)
    # Stated, they are those of every step: nothing runs beside it.
    engine = build_engine(replace(config, num_threads=num_threads), "target", num_threads)

    def answer(question: dict[str, Any]) -> Mapping[str, object]:
        if question["measure"] == "decode":
            return decode_with_engine(engine, question["prompts"], question["num_tokens"])
        if question["measure"] == "verdicts":
            return verdict_times(engine, question["texts"])
        module = _library_module(config, num_threads)
        found = step_times(engine, module, question["prompts"])
        return found | generic_step_times(module.device, deterministic=config.deterministic)

    yield Role({"dtype": engine.info.dtype, "max_model_len": engine.info.max_model_len}, answer)


@asynccontextmanager
async def library_role(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """The library's own ways to generate, with its default threads."""
    from transformers import GenerationConfig

    module = _library_module(TargetConfig(**setup["config"]), None)
    module.generation_config.eos_token_id = None  # Nothing ends a text before its time.

    def answer(question: dict[str, Any]) -> dict[str, object]:
        config = GenerationConfig(
            max_new_tokens=question["num_tokens"], do_sample=False, pad_token_id=0
        )
        generate = {"generate": _one_by_one, "generate_batch": _in_a_batch}[question["measure"]]
        started = time.perf_counter()
        num_tokens = generate(module, config, question["prompts"])
        return {"seconds": time.perf_counter() - started, "num_tokens": num_tokens}

    yield Role({}, answer)


def _library_module(config: TargetConfig, num_threads: int | None) -> Any:
    from outrider.models.loading import load_model

    module, _ = load_model(
        Path(config.directory), name=config.model, dtype=config.dtype, device=config.device,
        num_threads=num_threads, trust_remote_code=config.trust_remote_code,
    )  # fmt: skip
    return module


def _one_by_one(module: Any, config: Any, prompts: Sequence[Sequence[int]]) -> int:
    import torch

    num_tokens = 0
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=module.device)
            output = module.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
            num_tokens += output.shape[1] - len(prompt)
    return num_tokens


def _in_a_batch(module: Any, config: Any, prompts: Sequence[Sequence[int]]) -> int:
    """Its manager stays, so that what it does once is done before anything is measured; of the
    memory it gets less than by default, which others need beside it."""
    from transformers import ContinuousBatchingConfig

    outputs = module.generate_batch(
        [*prompts],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=_MEMORY_PART),
        persistent_manager=True,
        progress_bar=False,
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def decode_with_engine(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, object]:
    """Continues every prompt by its likeliest `num_tokens`, all in step."""
    import torch

    from outrider.engine.interface import SequenceStep

    names = [f"decode-{index}" for index in range(len(prompts))]
    started = time.perf_counter()
    try:
        rows = []
        for name, prompt in zip(names, prompts, strict=True):
            rows += engine.forward([SequenceStep(name, tuple(prompt), num_logits=1)])
        for _ in range(num_tokens - 1):
            token_ids = torch.cat(rows).argmax(dim=1).tolist()
            rows = engine.forward(
                [SequenceStep(n, (t,), num_logits=1) for n, t in zip(names, token_ids, strict=True)]
            )
        torch.cat(rows).argmax(dim=1).tolist()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "num_tokens": num_tokens * len(prompts)}
    finally:
        for name in names:
            engine.release(name)


def step_times(engine: Engine, module: Any, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The figures of a model that the engine has and, as `module`, the library. `prompts` has one
    of `CACHED_TOKENS` for each of `ROWS_SESSIONS`."""
    from outrider.engine.interface import SequenceStep

    verify, forward = _against_the_library(engine, module, prompts[0])
    names = [f"rows-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.forward([SequenceStep(name, tuple(prompt[:CACHED_TOKENS]), 0)])

    def step(num_rows: int, _: int) -> None:
        new = tuple(prompts[0][:num_rows])
        engine.forward([SequenceStep(name, new, num_rows) for name in names])

    def undo() -> None:
        for name in names:
            engine.keep(name, CACHED_TOKENS)

    works = [partial(step, STEP_TOKENS), partial(step, 1)]
    many, few = medians_ms(works, STEP_REPETITIONS, undo)
    for name in names:
        engine.release(name)
    return {
        "verify_step_ms": verify,
        "transformers_forward_ms": forward,
        "rows_80_over_16": many / few,
    }


def generic_step_times(
    device: torch.device, *, deterministic: bool = False, shape: Mapping[str, int] = GENERIC_SHAPE
) -> dict[str, float]:
    """The same of a random GPT-NeoX in bfloat16, which is made here and runs on the generic path:
    its linear layers are packed and its attention is on pages, as any model's; all else is the
    library's. `shape` is for its configuration."""
    import torch
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    from outrider.engine.interface import ModelInfo
    from outrider.engine.paged_engine import PagedEngine
    from outrider.models.module_replacement import speed_up

    config = GPTNeoXConfig(**shape)
    module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    module = module.requires_grad_(False).to(device).eval()
    own = copy.deepcopy(module)
    speed_up(own)
    length = config.max_position_embeddings
    info = ModelInfo("a random GPT-NeoX", config.vocab_size, length, "bfloat16", (), "", "")
    engine = PagedEngine(own, info, max_num_seqs=1, deterministic=deterministic)
    verify, forward = _against_the_library(engine, module, [0] * CACHED_TOKENS)
    return {"generic_verify_step_ms": verify, "generic_transformers_forward_ms": forward}


def _against_the_library(engine: Engine, module: Any, prompt: Sequence[int]) -> tuple[float, float]:
    """Medians, ms, of `STEP_TOKENS` after `CACHED_TOKENS` of one session: of the engine's step, and
    of the library's forward pass on a cache of its own."""
    import torch
    from transformers import DynamicCache

    from outrider.engine.interface import SequenceStep

    cached, new = tuple(prompt[:CACHED_TOKENS]), tuple(prompt[:STEP_TOKENS])
    cache = DynamicCache(config=module.config)
    new_ids = torch.tensor([new], device=module.device)

    def step(_: int) -> None:
        engine.forward([SequenceStep("step", new, STEP_TOKENS)])

    def library(_: int) -> None:
        module(input_ids=new_ids, past_key_values=cache, use_cache=True)

    def undo() -> None:
        new_slots = cache.get_seq_length() - CACHED_TOKENS
        if new_slots:
            cache.crop(-new_slots)
        engine.keep("step", CACHED_TOKENS)

    with torch.inference_mode():
        engine.forward([SequenceStep("step", cached, 0)])
        ids = torch.tensor([cached], device=module.device)
        module(input_ids=ids, past_key_values=cache, use_cache=True)
        verify, forward = medians_ms([step, library], STEP_REPETITIONS, undo)
    engine.release("step")
    return verify, forward


def verdict_times(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    repetitions: int = VERDICT_REPETITIONS,
    num_cases: int = NUM_CASES,
) -> dict[str, object]:
    """What verdicts and draft draws cost on one thread, on logits of the model reading `texts`: K =
    4, top-p 0.95, temperature 1 (0 under greedy). A verdict is all that a target does between its
    logits and its answer; a draft draw all that a draft does between logits and q."""
    import torch

    from outrider.engine.threads import on_threads
    from outrider.speculation.draft_sampling import draw_from_logits
    from outrider.speculation.random_streams import RoundNoise
    from outrider.speculation.verification import verdicts_from_logits

    with torch.inference_mode():
        rows = record_rows(engine, texts, num_cases * (NUM_DRAFT_TOKENS + 1))
        narrow = rows[:, :DRAFT_ENTRIES].contiguous()

        def draw(index: int) -> None:
            noise = RoundNoise(seed=7, rule=Rule.TOKEN, committed_length=100 + index)
            sampled = SamplingParams(temperature=1.0, top_p=0.95)
            draw_from_logits(narrow[index % len(narrow)][None], sampled, [noise], [0])

        with on_threads(1):
            cases = {rule: make_cases(rows, rule) for rule in Rule}

            def judge(rule: Rule, number: int, index: int) -> None:
                own, first = cases[rule], index * number
                verdicts_from_logits([own[(first + n) % len(own)] for n in range(number)])

            alone, several = (
                medians_ms([partial(judge, rule, n) for rule in Rule], repetitions, warm_up=10)
                for n in (1, VERDICT_SESSIONS)
            )
            [draw_ms] = medians_ms([draw], repetitions, warm_up=10)
    names = [rule.value for rule in Rule]
    return {
        "vocab_size": rows.shape[1],
        "verdict_ms": dict(zip(names, alone, strict=True)),
        "verdict_of_several_ms": {
            name: ms / VERDICT_SESSIONS for name, ms in zip(names, several, strict=True)
        },
        "draft_sampling_ms": draw_ms,
    }


def record_rows(engine: Engine, texts: Sequence[Sequence[int]], num_rows: int) -> torch.Tensor:
    """Logits [num_rows, V], float32, of the model reading `texts` (token ids): every second row has
    more than `HIGH_NATS` nats. Raises `SettingError` where the texts do not have so many."""
    import torch

    from outrider.engine.interface import SequenceStep

    high: list[torch.Tensor] = []
    low: list[torch.Tensor] = []
    wanted = -(-num_rows // 2)
    for ids in texts:
        if min(len(high), len(low)) >= wanted:
            break
        taken = tuple(ids[: engine.info.max_model_len])
        [logits] = engine.forward([SequenceStep("rows", taken, num_logits=len(taken))])
        engine.release("rows")
        logits = logits.cpu()
        probabilities = logits.double().softmax(dim=1)
        certain = torch.special.entr(probabilities).sum(dim=1) <= HIGH_NATS
        low += logits[certain].unbind()
        high += logits[~certain].unbind()
    if min(len(high), len(low)) < wanted:
        raise SettingError(
            "model",
            f"{engine.info.name} gave {len(high)} rows over {HIGH_NATS:g} nats and {len(low)} "
            f"others; {wanted} of each are needed (--parts without verdicts needs none)",
        )
    pairs = zip(high[:wanted], low[:wanted], strict=True)
    return torch.stack([row for pair in pairs for row in pair])[:num_rows].contiguous()


def make_cases(rows: torch.Tensor, rule: Rule) -> list[Question]:
    """Verdicts to take over `rows` [N, V], K + 1 at a time; what is left over is not used. The
    draft's distribution is the target's, a little flatter."""
    from outrider.speculation.draft_sampling import draw_from_logits
    from outrider.speculation.logits_processing import NO_HISTORY
    from outrider.speculation.proposal import Proposal
    from outrider.speculation.random_streams import RoundNoise
    from outrider.speculation.verification import Question

    greedy = rule is Rule.GREEDY
    params, draft_params = (
        SamplingParams(temperature=0.0 if greedy else temperature, top_p=1.0 if greedy else 0.95)
        for temperature in (1.0, 1.25)
    )
    cases = []
    width = NUM_DRAFT_TOKENS + 1
    for index in range(len(rows) // width):
        logits = rows[index * width : (index + 1) * width]
        noise = RoundNoise(seed=index, rule=rule, committed_length=100 + index)
        places = list(range(NUM_DRAFT_TOKENS))
        drawn, _ = draw_from_logits(
            logits[:NUM_DRAFT_TOKENS], draft_params, [noise] * NUM_DRAFT_TOKENS, places
        )
        q = tuple(q for _, q in drawn) if rule.needs_q else ()
        proposal = Proposal(tuple(token_id for token_id, _ in drawn), q)
        cases.append(Question(logits.clone(), params, NO_HISTORY, proposal, noise))
    return cases
