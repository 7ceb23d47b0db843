"""`outrider bench engine`: many sessions at once, steps beside the library's, and verdicts.

Every session continues a prompt of its own, 256 tokens, by its likeliest 128; EOS does not end it.
Tokens a second are new tokens over the time from the first request to the last token, prefill
included. Every figure is a median.

sessions  `sessions`: tokens a second by number of sessions, through coordinator and target;
          `engine_sessions`: of the engine alone
waits     `prefix_ratio`: time to first token of a prompt whose first 1,000 tokens were seen before,
          over that of a new one; `gap_ratio`: the 99th percentile of the gaps between tokens of 8
          sessions, from the sending of a prompt of 4,000 tokens until its first token, over their
          median gap before
steps     `verify_step_ms`: 5 new tokens over 256 cached ones of one session;
          `transformers_forward_ms`: the same in the library
verdicts  `verdict_ms`, by rule: from logits [5, V] to the verdict, on one thread;
          `draft_sampling_ms`: from logits [8,192] to a drawn token and its q

A gap is the time between two tokens of one session as they come to the client; those of one
message, for which the first of them has waited, share the time until the next message.
"""

from __future__ import annotations

import asyncio
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
from .processes import Process, Role, running_pair
from .report import Report, percentile

if TYPE_CHECKING:
    import torch

    from outrider.engine.interface import Engine
    from outrider.speculation.verification import Question

PARTS: Final = ("sessions", "waits", "steps", "verdicts")
SESSIONS: Final = (1, 4, 16, 32)
TOKENS_MAX: Final = 65_536
DECODING_TIMEOUT_S: Final = 1_800.0
_STRIDE: Final = 7
"""Tokens by which every measurement's prompts are shifted, so that none begins like an earlier one
and finds it cached."""

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
STEP_REPETITIONS: Final = 50

NUM_DRAFT_TOKENS: Final = 4
DRAFT_ENTRIES: Final = 8_192
"""Width of the draft's logits: those of the target's first so many tokens."""
NUM_CASES: Final = 40
"""Verdicts' worth of rows: more than the processor's caches hold."""
VERDICT_REPETITIONS: Final = 200


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """What `bench engine` is asked for. Wrong values raise `SettingError`."""

    repetitions: int = option(3, "rounds, of which medians are taken", low=1, high=100)
    prompt_tokens: int = option(256, "tokens of each session's prompt", low=1, high=TOKENS_MAX)
    new_tokens: int = option(128, "tokens that each session decodes", low=1, high=TOKENS_MAX)
    parts: tuple[str, ...] = option(
        PARTS, "what to measure", choices=PARTS, metavar="NAMES", parse=words
    )


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
) -> Report:
    """Measures `target`; prompts are cut out of `texts`, token ids. Raises `Unavailable` where a
    process breaks off, and `ConfigError`."""
    prompts = Prompts([token_id for text in texts for token_id in text])
    wanted = set(options.parts)
    figures: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        progress("starting: engine")
        process = Process(
            "benchmarks.engine:engine_role", "the engine process", {"config": asdict(target)}
        )
        engine = await stack.enter_async_context(process)
        room = engine.ready["max_model_len"]
        if wanted & {"sessions", "waits"}:
            progress("starting: services")
            replicas = await stack.enter_async_context(
                running_pair(target, None, CoordinatorConfig())
            )
            client = await stack.enter_async_context(replicas.coordinator())
        if "sessions" in wanted:
            if options.prompt_tokens + options.new_tokens > room:
                raise SettingError(
                    "prompt_tokens",
                    f"{options.prompt_tokens} and {options.new_tokens} new tokens are more than "
                    f"the {room} that the model takes",
                )
            figures |= await _rates(options, prompts, client, engine, progress)
        if "waits" in wanted:
            progress("waits")
            found = [await _waits(client, prompts, room) for _ in range(options.repetitions)]
            figures |= {name: median(each[name] for each in found) for name in found[0]}
        for part in wanted & {"steps", "verdicts"}:
            progress(part)
            question = {"measure": part, "prompts": prompts.take(1, CACHED_TOKENS), "texts": texts}
            figures |= await engine.ask(question, DECODING_TIMEOUT_S)
    setup = {
        "model": target.model,
        "dtype": str(engine.ready["dtype"]),
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repetitions": options.repetitions,
    }
    return Report.of(f"{target.model}, {engine.ready['dtype']}", setup | figures)


async def _rates(
    options: EngineOptions, prompts: Prompts, client: Client, engine: Process, progress: Progress
) -> dict[str, object]:
    """Of services and engine in turns, after what is slow only once."""

    async def rates(number: int) -> tuple[float, float]:
        asked = prompts.take(number, options.prompt_tokens)
        served_s = await _decode(client, asked, options.new_tokens)
        asked = prompts.take(number, options.prompt_tokens)
        question = {"measure": "sessions", "prompts": asked, "num_tokens": options.new_tokens}
        alone = await engine.ask(question, DECODING_TIMEOUT_S)
        num_tokens = number * options.new_tokens
        return num_tokens / served_s, num_tokens / float(alone["seconds"])

    progress("warming up")
    for number in SESSIONS[:2]:
        await rates(number)
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in SESSIONS}
    for index in range(options.repetitions):
        for number in SESSIONS:
            progress(f"round {index + 1}: {number} sessions")
            found[number].append(await rates(number))
    return {
        name: {
            str(number): {"tokens_per_second": median(each[side] for each in rounds)}
            for number, rounds in found.items()
        }
        for side, name in enumerate(("sessions", "engine_sessions"))
    }


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
    arrivals: list[list[float]] = [[] for _ in range(RUNNING_SESSIONS)]
    running = [
        asyncio.create_task(_stream(client, prompt, max_model_len - RUNNING_TOKENS, own))
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
    """The engine without a service, and for `steps` the library's module beside it."""
    config = TargetConfig(**setup["config"])
    num_threads = config.num_threads or available_cores()
    use_threads(num_threads)
    # Stated, they are those of every step: nothing runs beside it.
    engine = build_engine(replace(config, num_threads=num_threads), "target", num_threads)

    def answer(question: dict[str, Any]) -> Mapping[str, object]:
        if question["measure"] == "sessions":
            return decode_with_engine(engine, question["prompts"], question["num_tokens"])
        if question["measure"] == "verdicts":
            return verdict_times(engine, question["texts"])
        from outrider.models.loading import load_model

        module, _ = load_model(
            Path(config.directory), name=config.model, dtype=config.dtype, device=config.device,
            num_threads=num_threads, trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
        return step_times(engine, module, question["prompts"][0])

    yield Role({"dtype": engine.info.dtype, "max_model_len": engine.info.max_model_len}, answer)


def decode_with_engine(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, object]:
    """Continues every prompt by its likeliest `num_tokens`, all in step; the seconds it took."""
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
        return {"seconds": time.perf_counter() - started}
    finally:
        for name in names:
            engine.release(name)


def step_times(engine: Engine, module: Any, prompt: Sequence[int]) -> dict[str, object]:
    """Of `STEP_TOKENS` after `CACHED_TOKENS` of one session: the engine's step, and the library's
    forward pass on a cache of its own."""
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
    return {"verify_step_ms": verify, "transformers_forward_ms": forward}


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

    sampled = SamplingParams(temperature=1.0, top_p=0.95)
    with torch.inference_mode():
        rows = read_rows(engine, texts, num_cases * (NUM_DRAFT_TOKENS + 1))
        narrow = rows[:, :DRAFT_ENTRIES].contiguous()

        def draw(index: int) -> None:
            noise = RoundNoise(seed=7, rule=Rule.TOKEN, committed_length=100 + index)
            draw_from_logits(narrow[index % len(narrow)][None], sampled, [noise], [0])

        with on_threads(1):
            cases = {rule: make_cases(rows, rule) for rule in Rule}

            def judge(rule: Rule, index: int) -> None:
                verdicts_from_logits([cases[rule][index % len(cases[rule])]])

            works = [partial(judge, rule) for rule in Rule]
            *judged, drawn = medians_ms([*works, draw], repetitions, warm_up=10)
    return {
        "vocab_size": rows.shape[1],
        "verdict_ms": {rule.value: ms for rule, ms in zip(Rule, judged, strict=True)},
        "draft_sampling_ms": drawn,
    }


def read_rows(engine: Engine, texts: Sequence[Sequence[int]], num_rows: int) -> torch.Tensor:
    """Logits [num_rows, V], float32, of the model reading `texts` (token ids)."""
    import torch

    from outrider.engine.interface import SequenceStep

    rows: list[torch.Tensor] = []
    for ids in texts:
        taken = tuple(ids[: engine.info.max_model_len])
        [logits] = engine.forward([SequenceStep("rows", taken, num_logits=len(taken))])
        engine.release("rows")
        rows += logits.cpu().unbind()
        if len(rows) >= num_rows:
            break
    return torch.stack(rows[:num_rows]).contiguous()


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
