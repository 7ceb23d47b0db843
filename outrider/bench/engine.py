"""`outrider bench engine`: many sessions at once, and steps compared with transformers.

sessions
    sessions                 tokens a second by number of sessions, through coordinator and target
    engine_sessions          tokens a second by number of sessions, in the engine alone
waits
    prefix_ratio             a / b. a is the time to the first token if the first 1,000 tokens of
                             the prompt are cached, and b if none are
    gap_ratio                c / d, for 8 sessions. c is the 99th percentile of their gaps while a
                             prompt of 4,000 tokens is prefilled, and d their median gap before
steps
    verify_step_ms           a step of 5 new tokens after 256 cached tokens of one session
    transformers_forward_ms  the same step in transformers

Each figure is a median over repetitions. Prompts are random tokens. In the part `sessions`, each
session has its own prompt of 256 tokens and decodes 128 tokens greedily, ignoring EOS. The time
runs from the first request to the last token, so it includes prefill. A gap is the time between two
successive tokens of a session at the client. A message of n tokens counts as n gaps, each 1/n of
the time until the next message."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from outrider.client import Client
from outrider.config.deployment import CoordinatorConfig, DeploymentConfig, TargetConfig
from outrider.errors import SettingError
from outrider.interfaces.engine import Engine, SequenceStep
from outrider.interfaces.request import GenerateRequest, Tokens
from outrider.models.loading import load_model
from outrider.replica.engines import build_engine
from outrider.replica.threads import available_cores
from outrider.speculation.sampling_params import Rule, SamplingParams

from .acceptance import Answer, decode
from .measurement import Progress, bench_request, medians_ms, together
from .options import EngineOptions
from .processes import running_pair
from .report import Report

SESSIONS = (1, 4, 16, 32)
PROMPT_TOKENS = 256
NEW_TOKENS = 128
GREEDY = SamplingParams(temperature=0.0)

PREFIX_TOKENS = 1_000
OWN_TOKENS = 20
LONG_TOKENS = 4_000
RUNNING_SESSIONS = 8
RUNNING_TOKENS = 256
SETTLING_GAPS = 16
"""Gaps at the start of a session that are not measured, because other sessions are starting."""
GAPS_BEFORE = 64
_POLL_S = 0.005
_REST_S = 0.5
"""Wait after the long prompt's answer, so that gaps that began during its prefill can end."""

CACHED_TOKENS = 256
STEP_TOKENS = 5
STEP_REPETITIONS = 50
LENGTHS = {
    "sessions": PROMPT_TOKENS + NEW_TOKENS,
    "waits": LONG_TOKENS + 1,
    "steps": CACHED_TOKENS + STEP_TOKENS,
}
"""Tokens of the longest sequence of each part."""

Prompts = Callable[[int, int], list[tuple[int, ...]]]
"""Called with a number of prompts and their length in tokens. Returns new random prompts."""


async def run(options: EngineOptions, config: DeploymentConfig, progress: Progress) -> Report:
    target = config.target
    progress("loading the engine")
    num_threads = target.num_threads or available_cores()
    # `num_threads` is always set here, because with 0, steps may use fewer threads.
    engine = build_engine(replace(target, num_threads=num_threads), num_threads)
    room, needed = engine.info.max_model_len, max(LENGTHS[part] for part in options.parts)
    if room < needed:
        raise SettingError("model", f"takes at most {room} tokens; these --parts need {needed}")
    prompts = random_prompts(engine.info.vocab_size)
    figures: dict[str, Any] = {"model": target.model, "dtype": engine.info.dtype, **asdict(options)}
    if "steps" in options.parts:
        progress("steps")
        figures |= step_times(engine, target, prompts(1, CACHED_TOKENS)[0])
    if {"sessions", "waits"} & set(options.parts):
        progress("starting the services")
        async with (
            running_pair(target, None, CoordinatorConfig()) as replicas,
            replicas.coordinator() as (client, _),
        ):
            if "sessions" in options.parts:
                figures |= await _rates(options, prompts, client, engine, progress)
            if "waits" in options.parts:
                progress("waits")
                waits = [await _waits(client, prompts) for _ in range(options.repetitions)]
                figures |= {name: median(each[name] for each in waits) for name in waits[0]}
    return Report.of(f"{target.model}, {engine.info.dtype}", figures)


def random_prompts(vocab_size: int) -> Prompts:
    generator = np.random.default_rng(0)

    def draw(number: int, length: int) -> list[tuple[int, ...]]:
        return [*map(tuple, generator.integers(vocab_size, size=(number, length)).tolist())]

    return draw


async def _rates(
    options: EngineOptions, prompts: Prompts, client: Client, engine: Engine, progress: Progress
) -> dict[str, object]:
    rates: dict[int, list[tuple[float, float]]] = {number: [] for number in SESSIONS}
    for index in range(-1, options.repetitions):
        for number in SESSIONS if index >= 0 else SESSIONS[:2]:
            progress(f"repetition {index + 1}: {number} sessions")
            served, alone = (prompts(number, PROMPT_TOKENS) for _ in range(2))
            served_s = await _decode(client, served, NEW_TOKENS)
            alone_s = decode_with_engine(engine, alone)
            num_tokens = number * NEW_TOKENS
            if index >= 0:
                rates[number].append((num_tokens / served_s, num_tokens / alone_s))
    return {
        name: {
            str(number): median(each[side] for each in rounds) for number, rounds in rates.items()
        }
        for side, name in enumerate(("sessions", "engine_sessions"))
    }


def decode_with_engine(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> float:
    started = time.perf_counter()
    asked = [Answer("", 0, prompt, NEW_TOKENS) for prompt in prompts]
    for _ in decode(engine, asked, GREEDY, Rule.GREEDY, ()):
        pass
    return time.perf_counter() - started


def _request(prompt: tuple[int, ...], num_tokens: int) -> GenerateRequest:
    return bench_request(prompt, num_tokens, ignore_eos=True, num_draft_tokens=0)


async def _decode(client: Client, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> float:
    started = time.perf_counter()
    async with together() as group:
        for prompt in prompts:
            group.create_task(client.complete(_request(prompt, num_tokens)))
    return time.perf_counter() - started


async def _waits(client: Client, prompts: Prompts) -> dict[str, float]:
    [prefix] = prompts(1, PREFIX_TOKENS)
    first_s, second_s = [await _decode(client, [prefix + own], 1) for own in prompts(2, OWN_TOKENS)]
    gap_ratio = await _beside_a_long_prompt(client, prompts)
    return {"prefix_ratio": second_s / first_s, "gap_ratio": gap_ratio}


async def _beside_a_long_prompt(client: Client, prompts: Prompts) -> float:
    clock = asyncio.get_running_loop().time
    arrivals: list[list[float]] = [[] for _ in range(RUNNING_SESSIONS)]

    async def stream(prompt: tuple[int, ...], own: list[float]) -> None:
        async for event in client.generate(_request(prompt, LONG_TOKENS - RUNNING_TOKENS)):
            if isinstance(event, Tokens):
                own += [clock()] * len(event.token_ids)

    async with together() as group:
        running = zip(prompts(RUNNING_SESSIONS, RUNNING_TOKENS), arrivals, strict=True)
        tasks = [group.create_task(stream(*pair)) for pair in running]
        while min(map(len, arrivals)) <= SETTLING_GAPS + GAPS_BEFORE:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        began, sent = max(own[SETTLING_GAPS] for own in arrivals), clock()
        long_s = await _decode(client, prompts(1, LONG_TOKENS), 1)
        await asyncio.sleep(_REST_S)
        for task in tasks:
            task.cancel()
    before = median(gaps(arrivals, began, sent))
    beside = np.percentile(gaps(arrivals, sent, sent + long_s), 99)
    return float(beside / before)


def gaps(arrivals: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """All gaps, in seconds, that overlap the time from `start` to `end`. `arrivals` has the times
    of arrival of each session's tokens."""
    return [
        (after - before) / num_tokens
        for own in arrivals
        for (before, num_tokens), (after, _) in pairwise(Counter(own).items())
        if before < end and after > start
        for _ in range(num_tokens)
    ]


def step_times(engine: Engine, config: TargetConfig, prompt: tuple[int, ...]) -> dict[str, float]:
    """Times of a step of `STEP_TOKENS` new tokens after `CACHED_TOKENS` cached tokens, in the
    engine and in transformers with its own cache."""
    module: Any = load_model(
        Path(config.directory),
        name=config.model,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.num_threads or available_cores(),
        trust_remote_code=config.trust_remote_code,
    )[0]
    new = prompt[:STEP_TOKENS]
    cache = DynamicCache(config=module.config)

    def step(_: int) -> None:
        engine.forward([SequenceStep("step", new, STEP_TOKENS)])

    def library(token_ids: tuple[int, ...]) -> None:
        ids = torch.tensor([token_ids], device=module.device)
        module(input_ids=ids, past_key_values=cache, use_cache=True)

    def undo() -> None:
        if new_slots := cache.get_seq_length() - CACHED_TOKENS:
            cache.crop(-new_slots)
        engine.keep("step", CACHED_TOKENS)

    with torch.inference_mode():
        engine.forward([SequenceStep("step", prompt, 0)])
        library(prompt)
        works = [step, lambda _: library(new)]
        verify, forward = medians_ms(works, STEP_REPETITIONS, undo)
    engine.release("step")
    return {"verify_step_ms": verify, "transformers_forward_ms": forward}
