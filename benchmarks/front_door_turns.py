"""Asks the coordinator of `bench front-door` through each door in turn."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final

from outrider.client import Client, InProcessTransport
from outrider.errors import Unavailable

from .front_door import (
    GRPC,
    HTTP,
    IN_PROCESS,
    FrontDoorOptions,
    FrontDoorReport,
    Passage,
    summarise,
)
from .front_door_stack import MODEL, StampedCoordinator, open_http, running_coordinator, words
from .measurement import Progress
from .prompts import BenchPrompt
from .serving import ServingOptions
from .serving_grpc import GrpcServingClient
from .serving_http import TEXT, HttpServer, HttpServingClient
from .serving_records import Heard, RequestFailed, ServingClient

WARM_UP_TURNS: Final = 3
PROMPT_WORDS: Final = 48


OpenHttp = Callable[[StampedCoordinator], AbstractAsyncContextManager[str]]
"""Serves a coordinator by HTTP on this event loop as long as the context lasts; its base URL."""


async def run(
    options: FrontDoorOptions, progress: Progress, http_door: OpenHttp = open_http
) -> FrontDoorReport:
    """Measures. Raises `Unavailable`."""
    progress("starting the target")
    asked = ServingOptions(
        max_tokens=options.max_tokens, raw=True, ignore_eos=True, num_draft_tokens=0
    )
    # What a chat and a text are sent as differs by nothing that takes time.
    asked_by_http = ServingOptions(max_tokens=options.max_tokens, ignore_eos=True)
    async with (
        running_coordinator(options.step_ms) as (coordinator, address),
        AsyncExitStack() as s,
    ):
        here = await s.enter_async_context(Client(InProcessTransport(coordinator)))
        there = await s.enter_async_context(Client(address))
        base_url = await s.enter_async_context(http_door(coordinator))
        server = HttpServer(base_url=base_url, endpoint=TEXT, model=MODEL)
        http = await s.enter_async_context(HttpServingClient(server, asked_by_http))
        doors: dict[str, ServingClient] = {
            IN_PROCESS: GrpcServingClient(here, asked),
            GRPC: GrpcServingClient(there, asked),
            HTTP: http,
        }
        gc.collect()
        gc.freeze()  # What is always there is not looked through while times are taken.
        passages = await _take_turns(options, coordinator, doors, progress)
    return summarise(options, passages)


async def _take_turns(
    options: FrontDoorOptions,
    coordinator: StampedCoordinator,
    doors: dict[str, ServingClient],
    progress: Progress,
) -> dict[str, list[Passage]]:
    names = list(doors)
    passages: dict[str, list[Passage]] = {name: [] for name in names}
    number = 0
    for turn in range(-WARM_UP_TURNS, options.turns):
        if turn % 10 == 0:
            progress(f"turn {turn} of {options.turns}")
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            number += 1
            prompt = BenchPrompt(words(number, PROMPT_WORDS), name)
            passage = await _pass(coordinator, doors[name], prompt, options.max_tokens)
            if turn >= 0:
                passages[name].append(passage)
    return passages


async def _pass(
    coordinator: StampedCoordinator, door: ServingClient, prompt: BenchPrompt, max_tokens: int
) -> Passage:
    clock = asyncio.get_running_loop().time
    coordinator.stamps.clear()
    heard = Heard(clock)
    began = clock()
    try:
        await door.answer(prompt, max_tokens, heard)
    except RequestFailed as failure:
        raise Unavailable(f"through the door {prompt.category}: {failure}") from failure
    if len(heard.chunk_s) != len(coordinator.stamps) or not heard.chunk_s:
        raise Unavailable(
            f"through the door {prompt.category} came {len(heard.chunk_s)} chunks where the "
            f"coordinator had {len(coordinator.stamps)}"
        )
    return Passage(
        heard.chunk_s[0] - began,
        tuple(at - had for at, had in zip(heard.chunk_s, coordinator.stamps, strict=True)),
    )
