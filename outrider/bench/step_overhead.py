"""The part `steps` of `outrider bench overhead`: tokens/s beside an ideal, and CPU time of a token.

The engines are emulated. Each step of the target takes the same time, and each step of the draft
takes `DRAFT_MS`, whatever their sizes. These times cover the forward pass and the verdicts. The
services and Redis are real, each in a process of its own. The client is this process.

A *configuration* is a step time, a number of sessions at a time, a kind of drafting and a
temperature. The configurations take turns. In a turn, new sessions start, warm up, and are then
measured.

drafting    K         tokens come from
plain       0
lookup      `DRAFTS`  `ngram` in the coordinator
resident    `DRAFTS`  `ngram` in the target, which runs rounds ahead
remote      `DRAFTS`  the draft, without look-ahead

A round with draft tokens accepts at least 1, 2, ... of them with probability `ACCEPTANCE`,
`ACCEPTANCE`^2, ... A remote draft proposes in each round, a look-up in `PROPOSAL_SHARE` of them.

ideal_tokens_per_second  S * T / (t + K * d): S sessions, T measured tokens a round, t the time of
                         a target's step, d that of a draft's step; d = 0 without a remote draft
fraction_of_ideal        tokens_per_second / ideal_tokens_per_second
core_ms_per_token        CPU time of all processes, divided by the tokens that the client has got;
                         a service's CPU time includes that of its child processes"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from itertools import count, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.config.deployment import EMULATED, CoordinatorConfig, DraftConfig, TargetConfig
from outrider.config.emulated_spec import PAGES_MAX
from outrider.errors import Unavailable
from outrider.interfaces.request import GenerateRequest, Tokens
from outrider.redis.address import RedisAddress
from outrider.redis.connection import new_client
from outrider.speculation.accept_reject import Origin

from .measurement import Progress, bench_request, together
from .processes import Process, Replicas, running_pair
from .report import DataTable, table

if TYPE_CHECKING:
    from outrider.client import Client

    from .options import OverheadOptions

STEP_SESSIONS = (1, 8, 32, 128)
TURNS = 2
WARM_UP_S = 1.0
DRAFTS = 3
"""Draft tokens of a round. A look-up proposes as many even after a match of a single token."""
DRAFT_MS = 1.0
ACCEPTANCE = 0.6
PROPOSAL_SHARE = 0.9
PROMPT_TOKENS = 64
"""The prompt has all ids of the text, except those that occur only once (`novel_share`). So after
each of these ids, a look-up has a match from the first round on."""
MAX_MODEL_LEN = 4_096
SUPPORT = 8
EMULATED_SPEC: Mapping[str, object] = {
    "vocab_size": PROMPT_TOKENS + MAX_MODEL_LEN,
    "support": SUPPORT,
    "max_model_len": MAX_MODEL_LEN,
    "verify_tokens": 2**20,
    "draft_ms": DRAFT_MS,
    "draft_branches": 2**20,
    "acceptance_rates": "/".join(f"{ACCEPTANCE**depth:.6g}" for depth in range(1, DRAFTS + 1)),
    "novel_share": round(1 - PROPOSAL_SHARE, 6),
}
"""The vocabulary is small, so that the engines' own arithmetic fits into short steps."""
PAGES_PER_SESSION = 258
"""Pages of `MAX_MODEL_LEN` tokens, and two more."""
_CPU_OF_REDIS = ("user", "sys", "user_children", "sys_children")
PROCESSES = ("coordinator", "target", "draft", "client", "redis")


class Configuration(NamedTuple):
    step_ms: float
    sessions: int
    drafting: str
    temperature: float

    def __str__(self) -> str:
        where = f"{self.step_ms:g} ms, {self.sessions} sessions"
        return f"{where}, {self.drafting}, temperature {self.temperature:g}"

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self.drafting == "plain" else DRAFTS

    def request(self, number: int) -> GenerateRequest:
        """The request of session `number`. Its prompt is another order of the same ids."""
        prompt = np.random.default_rng(number).permutation(PROMPT_TOKENS)
        return bench_request(
            tuple(map(int, prompt)),
            MAX_MODEL_LEN - PROMPT_TOKENS - DRAFTS,
            self.temperature,
            ignore_eos=True,
            num_draft_tokens=self.num_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured of a configuration in one turn."""

    num_tokens: int
    num_rounds: int
    seconds: float
    cpu_s: Mapping[str, float]
    """CPU time of each process, by its name in `PROCESSES`."""


def figures(configuration: Configuration, samples: Sequence[Sample]) -> dict[str, Any]:
    num_tokens = sum(sample.num_tokens for sample in samples)
    num_rounds = sum(sample.num_rounds for sample in samples)
    seconds = sum(sample.seconds for sample in samples)
    if not num_rounds:
        raise Unavailable(f"{configuration}: no round ended within the measured time")
    round_ms = configuration.step_ms
    if configuration.drafting == "remote":
        round_ms += configuration.num_draft_tokens * DRAFT_MS
    rate, tokens_per_round = num_tokens / seconds, num_tokens / num_rounds
    ideal = configuration.sessions * tokens_per_round / round_ms * 1e3
    cpu_ms = {
        name: 1e3 * sum(sample.cpu_s[name] for sample in samples) / num_tokens
        for name in PROCESSES
        if name in samples[0].cpu_s
    }
    return configuration._asdict() | {
        "num_draft_tokens": configuration.num_draft_tokens,
        "seconds": seconds,
        "tokens_per_round": tokens_per_round,
        "tokens_per_second": rate,
        "ideal_tokens_per_second": ideal,
        "fraction_of_ideal": rate / ideal,
        "core_ms_per_token": sum(cpu_ms.values()),
        **{f"{name}_core_ms_per_token": cpu_ms.get(name) for name in PROCESSES},
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> list[DataTable]:
    speeds, costs = [], []
    for row in rows:
        key = {
            "step ms": f"{row['step_ms']:g}",
            "sessions": row["sessions"],
            "drafting": f"{row['drafting']} T={row['temperature']:g}",
        }
        speeds.append(
            key
            | {
                "tokens a round": f"{row['tokens_per_round']:.2f}",
                "tokens/s": f"{row['tokens_per_second']:.0f}",
                "ideal tokens/s": f"{row['ideal_tokens_per_second']:.0f}",
                "of ideal": f"{row['fraction_of_ideal']:.2f}",
            }
        )
        costs.append(
            key
            | {"all": row["core_ms_per_token"]}
            | {name: row[f"{name}_core_ms_per_token"] for name in PROCESSES}
        )
    return [
        table("tokens/s of emulated steps", speeds, num_keys=3),
        table("CPU time, core-ms a token", costs, num_keys=3),
    ]


async def measure_steps(options: OverheadOptions, progress: Progress) -> list[dict[str, Any]]:
    grid = product(
        options.steps_ms, options.sessions or STEP_SESSIONS, options.drafting, options.temperatures
    )
    samples: dict[Configuration, list[Sample]] = {Configuration(*one): [] for one in grid}
    window_s = options.seconds / TURNS
    async with AsyncExitStack() as stack:
        deployments: dict[float, _Deployment] = {}
        for step_ms in dict.fromkeys(options.steps_ms):
            progress(f"starting the services with steps of {step_ms:g} ms")
            deployments[step_ms] = await _deployment(stack, step_ms, samples)
        for turn in range(TURNS):
            for configuration in reversed(samples) if turn % 2 else list(samples):
                progress(f"turn {turn + 1} of {TURNS}: {configuration}")
                deployment = deployments[configuration.step_ms]
                sample = await deployment.measure(configuration, window_s)
                samples[configuration].append(sample)
    return [figures(configuration, taken) for configuration, taken in samples.items()]


class _Deployment(NamedTuple):
    """The services whose target has one step time."""

    replicas: Replicas
    coordinators: Mapping[str, tuple[Client, Process]]
    """For each kind of drafting, a coordinator's client and process."""

    async def measure(self, configuration: Configuration, seconds: float) -> Sample:
        client, coordinator = self.coordinators[configuration.drafting]
        processes = {"coordinator": coordinator, **self.replicas.processes}
        if configuration.drafting != "remote":
            processes.pop("draft", None)
        tally = _Tally(configuration.sessions)
        async with together() as group:
            tasks = [
                group.create_task(tally.decode(client, configuration, index))
                for index in range(configuration.sessions)
            ]
            await tally.all_run.wait()
            await asyncio.sleep(WARM_UP_S)
            cpu_s, began = await self._cpu_s(processes), time.monotonic()
            num_tokens, num_rounds = tally.num_tokens, tally.num_rounds
            await asyncio.sleep(seconds)
            num_tokens, num_rounds = tally.num_tokens - num_tokens, tally.num_rounds - num_rounds
            elapsed_s, after_s = time.monotonic() - began, await self._cpu_s(processes)
            for task in tasks:
                task.cancel()
        used_s = {name: after_s[name] - cpu_s[name] for name in cpu_s}
        return Sample(num_tokens, num_rounds, elapsed_s, used_s)

    async def _cpu_s(self, processes: Mapping[str, Process]) -> dict[str, float]:
        """The CPU time of the processes, the client and Redis so far, s."""
        answers = await asyncio.gather(*(process.ask({}) for process in processes.values()))
        async with new_client(RedisAddress(url=self.replicas.redis_url)) as store:
            used = await store.info("cpu")
        return {
            **{name: answer["cpu_s"] for name, answer in zip(processes, answers, strict=True)},
            "client": time.process_time(),
            "redis": sum(used[f"used_cpu_{part}"] for part in _CPU_OF_REDIS),
        }


class _Tally:
    """Counts the tokens and rounds of a number of sessions."""

    def __init__(self, num_sessions: int) -> None:
        self._waiting = set(range(num_sessions))
        """The sessions without a token so far."""
        self.all_run = asyncio.Event()
        self.num_tokens = 0
        self.num_rounds = 0

    async def decode(self, client: Client, configuration: Configuration, index: int) -> None:
        """Runs session after session."""
        for number in count(index, configuration.sessions):
            async with aclosing(client.generate(configuration.request(number))) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        self._note(event, index)

    def _note(self, event: Tokens, index: int) -> None:
        """Each round ends with one token that was not drafted."""
        self.num_tokens += len(event.token_ids)
        self.num_rounds += sum(origin is not Origin.ACCEPTED for origin in event.origins)
        self._waiting.discard(index)
        if not self._waiting:
            self.all_run.set()


async def _deployment(
    stack: AsyncExitStack, step_ms: float, configurations: Mapping[Configuration, object]
) -> _Deployment:
    num_sessions = max(configuration.sessions for configuration in configurations)
    drafting = {configuration.drafting for configuration in configurations}
    spec = {
        **EMULATED_SPEC,
        "verify_ms": step_ms,
        "num_pages": min(PAGES_PER_SESSION * num_sessions, PAGES_MAX),
    }
    engine = EMULATED + ",".join(f"{key}={value}" for key, value in spec.items())
    settings: Any = {
        "engine": engine,
        "model": EMULATED.removesuffix(":"),
        "num_threads": 1,
        "max_num_seqs": num_sessions,
    }
    lookup = DraftConfig(model="ngram")
    target = TargetConfig(**settings, lookup=lookup)
    draft = DraftConfig(**settings) if "remote" in drafting else None
    # A session whose stream breaks ends at once, so that it costs the next turn nothing.
    coordinator = CoordinatorConfig(resume_grace_ms=0)
    replicas = await stack.enter_async_context(running_pair(target, draft, coordinator))
    local_settings = replace(coordinator, lookup=lookup)
    without_draft = replace(replicas, draft_address="", settings=local_settings)
    local = await stack.enter_async_context(without_draft.coordinator())
    coordinators = {"plain": local, "lookup": local}
    if "resident" in drafting:
        resident = replace(without_draft, settings=replace(local_settings, lookup_on="target"))
        coordinators["resident"] = await stack.enter_async_context(resident.coordinator())
    if draft is not None:
        coordinators["remote"] = await stack.enter_async_context(replicas.coordinator())
    return _Deployment(replicas, coordinators)
