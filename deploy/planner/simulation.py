"""A simulated fleet: the real services in one event loop, on a virtual clock.

Coordinators, targets, drafts and the memory store are the code that is deployed. Two things are
stated instead of computed: what a step takes, by the cost tables of the plan, and what is accepted,
by an emulated pair of languages (`_rows`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from coordinator.service import CoordinatorService
from draft_service.service import DraftService
from outrider.clock import cancelling_others, run_virtually
from outrider.config import DeploymentConfig, DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import PAGES_MAX, EmulatedSpec
from outrider.engine.interface import SequenceStep
from outrider.engine.step_costs import StepCosts
from outrider.errors import OutriderError
from outrider.limits import DEADLINE_MS_MAX, PAGE_SIZE, SEED_BITS
from outrider.registry.registry import Role
from outrider.replica.executors import InlineExecutor
from outrider.request import GenerateRequest, RoundReport, Tokens
from outrider.sessions.memory_store import MemoryStore
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

from .round_times import Line, Option, ServiceTimes

ANSWER_TOKENS_MAX = 2**17
"""Of an answer that does not end."""
VOCABULARY = 64
_GUESSED_MASS = 2.0**-10
_DECOY_MASS = 2.0**-15
"""What the draft's law gives a correction that is to be guessed, and each one that is not."""
ROLES: tuple[Role, ...] = ("target", "draft", "coordinator")
"""In the order in which their numbers are found: those that cost most first."""
ReplicaRole = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas of each role; a look-up needs no drafts."""

    targets: int
    drafts: int
    coordinators: int = 1

    def of(self, role: Role) -> int:
        """How many of one role."""
        return int(getattr(self, f"{role}s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the fleet; exactly one of `sessions` and `rate`."""

    sessions: int | None = None
    """That run at any time: where one ends the next one begins."""
    rate: float | None = None
    """Requests a second that begin whatever runs (a Poisson process)."""
    prompt_tokens: int = 64
    answer_tokens: float = 256.0
    """Mean; each token may be the last with the same chance. `inf` = nothing ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and a draft that do not share a device, and how they decode."""

    name: str = ""
    times: ServiceTimes
    way: Option
    survival: tuple[float, ...]
    """[K]: the chance that 1, 2, ... K draft tokens or more are accepted; empty = plain."""

    @property
    def has_drafts(self) -> bool:
        """Whether there are draft replicas: neither for plain decoding nor for a look-up."""
        return len(self.survival) > 0 and self.times.draft is not None

    def seats(self, role: ReplicaRole) -> int:
        """Sessions that share a step."""
        times = self.times
        return times.target_max_num_seqs if role == "target" else times.max_num_seqs

    def costs(self, role: ReplicaRole) -> StepCosts:
        """Of steps, with what rounds were measured to take beside the table."""
        times, k = self.times, len(self.survival)
        if role == "target":
            return _on_line(times.target, times.verify if k else times.plain)
        table = times.draft or StepCosts((1, 2), (0.0, 0.0))
        return _on_line(table, Line(0, times.wait.factor * self.way.steps_per_round / max(1, k)))


def _on_line(costs: StepCosts, line: Line) -> StepCosts:
    factor = line.factor
    return StepCosts(
        costs.rows, tuple(map(line.at, costs.seconds)), costs.session_s * factor,
        costs.slot_s * factor, costs.row_slot_s * factor,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet of a pair, and what is asked of it."""

    pair: Pair
    fleet: Fleet
    workload: Workload
    config: DeploymentConfig = field(default_factory=DeploymentConfig)
    """Of the services: time-outs and bounds."""
    coordinator_s: float = 0.00029
    """Of a coordinator's one thread for a round, as `outrider bench overhead` measures it."""
    warm_up_s: float = 3.0
    """Before measuring begins ..."""
    seconds: float = 10.0
    """... for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """What was measured. Times of requests are p50 and p99, None where none of them was; busy
    shares are of targets, drafts and coordinators."""

    tokens_per_second: float
    rounds_per_second: float
    tokens_per_round: float
    num_requests: int
    """That ended ..."""
    num_refused: int
    """... of which so many were refused, or failed."""
    tpot_ms: tuple[float, float] | None
    """Time per token; half of the tokens are of requests that took no longer for one than p50."""
    ttft_ms: tuple[float, float] | None
    draft_ms: float
    """What a round with a draft waited for its proposal, mean."""
    hit_rate: float
    """Share of these rounds whose proposal was there before they began."""
    busy: tuple[float, float, float]
    """Share of the time that replicas were in a step, mean."""
    sessions_per_step: float
    """Of the targets, mean."""


def simulate(scenario: Scenario) -> FleetFigures:
    """Runs a scenario to its end; the same one always comes to the same."""
    return run_virtually(cancelling_others(_Simulation(scenario).run()))


def _rows(pair: Pair, role: ReplicaRole) -> torch.Tensor:
    """Logits [VOCABULARY + 1, VOCABULARY] behind each token; the last row is for no token.

    Token d = 1..K is what is proposed at depth d, which is told by the token before it; the target
    accepts it with the chance that the plan has for that depth, else it says 0 or K + 1. No draft
    guesses K + 1, and behind it no look-up finds anything. What a draft might guess in place of 0
    the target never says: so many outcomes are worked out as are asked for, and of those as many
    hit as is stated."""
    k, ahead = len(pair.survival), pair.way.look_ahead
    reached = (1.0, *pair.survival)
    chances = [b / a if a > 0 else 0.0 for a, b in pairwise(reached)]
    ends = sorted((a - b for a, b in pairwise((*reached, 0.0))), reverse=True)
    guessed = 1.0
    if not pair.has_drafts:
        guessed = pair.way.proposed_per_round / max(1, k)
    elif ahead:
        guessed = min(1.0, (pair.way.hit_rate or 0.0) / sum(ends[:ahead]))
    decoys = math.ceil(ahead / (k + 1)) - 1
    law = torch.zeros((VOCABULARY + 1, VOCABULARY), dtype=torch.float64)
    for last in range(VOCABULARY + 1):
        depth = last + 1 if last <= k else 1
        chance = chances[depth - 1] if depth <= k else 0.0
        if last == k + 1 and not pair.has_drafts:
            chance = 0.0
        if role == "target":
            law[last, 0] = (1 - chance) * guessed
            law[last, k + 1] = (1 - chance) * (1 - guessed)
        else:
            law[last, 0] = _GUESSED_MASS
            law[last, k + 2 : k + 2 + decoys] = _DECOY_MASS
            chance = 1.0 - float(law[last].sum())
        law[last, depth if depth <= k else 0] += chance
    return law.log().float()


class _Engine(EmulatedEngine):
    """States what the plan says that steps take, and counts them."""

    def __init__(self, scenario: Scenario, role: ReplicaRole) -> None:
        length = scenario.workload.prompt_tokens + ANSWER_TOKENS_MAX + VOCABULARY
        spec = EmulatedSpec(
            vocab_size=VOCABULARY, support=1, order=1, max_model_len=length, num_pages=PAGES_MAX
        )
        super().__init__(spec, role, scenario.pair.seats(role))
        self.costs = scenario.pair.costs(role)
        self.work = np.zeros(3)
        """Seconds in steps, steps, and sessions in them."""
        self._law = _rows(scenario.pair, role)

    def _logits(self, contexts: Any) -> torch.Tensor:
        last = np.minimum(contexts[:, 0], VOCABULARY).astype(np.int64)
        return self._law[torch.from_numpy(last)]

    def _step_time(self, steps: Sequence[SequenceStep]) -> float:
        rows, attention_s = 0, 0.0
        for step in steps:
            num = len(step.token_ids)
            rows += num
            held = self.length(step.sequence_id) - num
            attention_s += self.costs.attention_seconds(num, held)
        seconds = self.costs.mixed_seconds(rows, len(steps), attention_s)
        self.work += (seconds, 1, len(steps))
        return seconds


class _Lookup(LookupDrafter):
    """The look-up of a pair that has one: it finds all K tokens, or none."""

    def __init__(self, num_tokens: int) -> None:
        self._num = num_tokens

    def guess(self, request: DraftRequest) -> Guess:
        last = request.token_ids[-1]
        if last > self._num or self._num == 0:
            return NO_GUESS
        ids = tuple(range(last % self._num + 1, self._num + 1))
        return Guess(ids[: request.num_draft_tokens], float(self._num))

    def release(self, session_id: str) -> None:
        pass


class _Replica:
    """A target or a draft."""

    def __init__(self, scenario: Scenario, role: ReplicaRole) -> None:
        self.role = role
        target = scenario.config.target
        self.engine = _Engine(scenario, role)
        executor = InlineExecutor(self.engine.take_step_seconds)
        bounds: dict[str, Any] = {
            "max_num_seqs": scenario.pair.seats(role), "costs": self.engine.costs,
            "max_num_batched_tokens": target.max_num_batched_tokens,
        }  # fmt: skip
        self.service: Any = (
            TargetService(self.engine, executor, delays_batches=target.gather_sessions, **bounds)
            if role == "target"
            else DraftService.with_model(self.engine, executor, **bounds)
        )


class _Coordinator:
    """A coordinator and its one thread."""

    def __init__(
        self, scenario: Scenario, place: int, replicas: Sequence[_Replica], store: MemoryStore
    ) -> None:
        self.busy_s = 0.0
        self._free_at = 0.0
        pair, k, rng = scenario.pair, len(scenario.pair.survival), random.Random(place)  # noqa: S311
        looks_up = k > 0 and not pair.has_drafts
        times, turn_s = pair.times, scenario.coordinator_s
        carriers = {
            "target": self._carrier(times.rest_s - turn_s if k else 0.0, turn_s),
            "draft": self._carrier(times.wait.base_s + times.round_trip_s, 0.0),
        }
        links: dict[str, dict[str, Any]] = {"target": {}, "draft": {}}
        for number, one in enumerate(replicas):
            link: Any = MemoryLink(one.service, carriers[one.role])
            links[one.role][f"{one.role}-{number}"] = link
        self.service = CoordinatorService(
            replace(
                scenario.config.coordinator,
                served_model_name="simulated",
                num_draft_tokens=k,
                deadline_ms=DEADLINE_MS_MAX,
                length_control=False,
                drafting_delays=False,
                draft_siblings=0,
                look_ahead=pair.way.look_ahead if pair.has_drafts else 0,
                lookup=DraftConfig() if looks_up else None,
                membership=None,
            ),
            f"coordinator-{place}",
            store=store,
            targets=links["target"],
            drafts=links["draft"],
            fallback=_Lookup(k if looks_up else 0),
            random_bits=rng.getrandbits,
            random_seed=lambda: rng.getrandbits(SEED_BITS),
        )

    def _carrier(self, both_s: float, turn_s: float) -> Callable[[Callable[[], None]], None]:
        """Takes a message where it is to go: the time that those of a round were measured to take,
        half of it each way, behind the work of the thread for it and for others before it."""

        def carry(message: Callable[[], None]) -> None:
            loop = asyncio.get_running_loop()
            self._free_at = max(self._free_at, loop.time()) + turn_s / 2
            self.busy_s += turn_s / 2
            loop.call_at(self._free_at + max(0.0, both_s) / 2, message)

        return carry


class _Request:
    """What its client has seen of one request. Times are seconds of the loop's clock."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.ended_at = math.inf
        self.failed = False
        self.tokens: list[tuple[float, int]] = []
        """When how many came."""
        self.rounds: list[tuple[float, RoundReport]] = []

    def pace(self, begin: float) -> tuple[float, int] | None:
        """Seconds a token from then on, or from its first tokens on, and of how many tokens."""
        start = max(sum(at < begin for at, _ in self.tokens) - 1, 0)
        num = sum(n for _, n in self.tokens[start + 1 :])
        return ((self.tokens[-1][0] - self.tokens[start][0]) / num, num) if num else None


class _Simulation:
    """All replicas, and the clients."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(0)
        self._tasks: list[asyncio.Task[Any]] = []
        self._requests: list[_Request] = []

    async def run(self) -> FleetFigures:
        """The whole scenario."""
        scenario = self._scenario
        fleet, workload = scenario.fleet, scenario.workload
        drafts = fleet.drafts if scenario.pair.has_drafts else 0
        replicas = [_Replica(scenario, "target") for _ in range(fleet.targets)]
        replicas += [_Replica(scenario, "draft") for _ in range(drafts)]
        store = MemoryStore()
        coordinators = [
            _Coordinator(scenario, place, replicas, store) for place in range(fleet.coordinators)
        ]
        for coordinator in coordinators:
            await coordinator.service.start()
        self._turns = itertools.cycle(coordinators)
        for index in range(workload.sessions or 0):
            self.begin(self._keep(scenario.warm_up_s / 2 * index / (workload.sessions or 1)))
        if workload.rate:
            self.begin(self._arrive(workload.rate))

        def work() -> dict[Role, Any]:
            """Of each role so far: seconds busy, steps, and sessions in them."""
            found: dict[Role, Any] = {role: np.zeros(3) for role in ROLES}
            for one in replicas:
                found[one.role] += one.engine.work
            found["coordinator"][0] = sum(one.busy_s for one in coordinators)
            return found

        await asyncio.sleep(scenario.warm_up_s)
        before = work()
        await asyncio.sleep(scenario.seconds)
        for task in self._tasks:
            if task.done():
                task.result()  # Raises what has failed.
        done = {role: now - before[role] for role, now in work().items()}
        return _measured(self._requests, scenario, done)

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs to the end of the simulation."""
        self._tasks.append(asyncio.create_task(work))

    async def _keep(self, start_s: float) -> None:
        """One request after the other. The first prompt is short: else a fleet would begin with the
        prompts of all at once."""
        await asyncio.sleep(start_s)
        prompt_tokens = self._scenario.workload.prompt_tokens
        is_served = await self._request(min(PAGE_SIZE, prompt_tokens))
        while True:
            if not is_served:
                await asyncio.sleep(1.0)
            is_served = await self._request(prompt_tokens)

    async def _arrive(self, rate: float) -> None:
        while True:
            await asyncio.sleep(float(self._rng.exponential(1.0 / rate)))
            self.begin(self._request(self._scenario.workload.prompt_tokens))

    async def _request(self, prompt_tokens: int) -> bool:
        """Whether it was served."""
        mean, loop = self._scenario.workload.answer_tokens, asyncio.get_running_loop()
        answer = ANSWER_TOKENS_MAX
        if mean < math.inf:
            answer = min(answer, int(self._rng.geometric(1.0 / mean)))
        prompt = self._rng.integers(VOCABULARY, size=prompt_tokens)
        asked = GenerateRequest(
            prompt=(*prompt.tolist()[:-1], 0), sampling=SamplingParams(temperature=1.0),
            max_tokens=answer, rule=Rule.TOKEN,
            num_draft_tokens=len(self._scenario.pair.survival), deadline_ms=DEADLINE_MS_MAX,
            include_rounds=True,
        )  # fmt: skip
        request = _Request(loop.time())
        self._requests.append(request)
        try:
            async with aclosing(next(self._turns).service.generate(asked)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        request.tokens.append((loop.time(), len(event.token_ids)))
                    elif isinstance(event, RoundReport):
                        request.rounds.append((loop.time(), event))
        except OutriderError:
            request.failed = True
        request.ended_at = loop.time()
        return not request.failed


def _measured(
    requests: Sequence[_Request], scenario: Scenario, work: dict[Role, Any]
) -> FleetFigures:
    """From the warm-up's end on. `work` is as `_Simulation.run` counts it."""
    begin, seconds = scenario.warm_up_s, scenario.seconds
    rounds = [report for one in requests for at, report in one.rounds if at >= begin]
    drafted = [report for report in rounds if report.proposed_token_ids]
    ended = [one for one in requests if begin <= one.ended_at <= begin + seconds]
    total = sum(n for one in requests for at, n in one.tokens if at >= begin)
    pace = [found for one in requests if (found := one.pace(begin)) is not None]
    firsts = [(one.tokens[0][0], one.began_at) for one in requests if one.tokens]
    busy = [float(work[role][0]) / seconds / max(1, scenario.fleet.of(role)) for role in ROLES]
    return FleetFigures(
        tokens_per_second=total / seconds,
        rounds_per_second=len(rounds) / seconds,
        tokens_per_round=total / max(1, len(rounds)),
        num_requests=len(ended),
        num_refused=sum(one.failed for one in ended),
        tpot_ms=_percentiles_ms(pace),
        ttft_ms=_percentiles_ms([(at - began, 1) for at, began in firsts if at >= begin]),
        draft_ms=sum(one.draft_ms for one in drafted) / max(1, len(drafted)),
        hit_rate=sum(one.look_ahead_hit for one in drafted) / max(1, len(drafted)),
        busy=(busy[0], busy[1], busy[2]),
        sessions_per_step=float(work["target"][2] / max(1, work["target"][1])),
    )


def _percentiles_ms(weighted: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    if not weighted:
        return None
    seconds, weights = zip(*weighted, strict=True)
    p50, p99 = np.quantile(seconds, (0.5, 0.99), weights=weights, method="inverted_cdf")
    return 1e3 * float(p50), 1e3 * float(p99)
