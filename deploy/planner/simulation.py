"""A simulated fleet: the real services in one event loop, on a virtual clock.

Coordinators, targets, drafts, the memory store and the client are the code that is deployed. Two
things are stated instead of computed: what a step takes, by the cost tables of the plan, and what
is accepted, by an emulated pair of languages (`_rows`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import torch

from coordinator.routing.discovery import Discovery
from coordinator.service import CoordinatorService
from draft_service.service import DraftService
from outrider.client import Client
from outrider.client.failover import ResumingTransport
from outrider.clock import cancelling_others, run_virtually
from outrider.config import DeploymentConfig, DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.engine.interface import SequenceStep
from outrider.engine.step_costs import StepCosts
from outrider.errors import OutriderError, StreamBroken, Unavailable
from outrider.limits import DEADLINE_MS_MAX, PAGE_SIZE, SEED_BITS
from outrider.messages import ReplicaDescription
from outrider.registry.registry import LEASE_S, ReplicaRecord, Role
from outrider.replica.scheduler import InlineExecutor
from outrider.request import Event, GenerateRequest, ResumeRequest, RoundReport, Started, Tokens
from outrider.sessions.memory_store import MemoryStore
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

from .round_times import ServiceTimes

COORDINATOR_S: Final = 0.00029
"""Of a coordinator's one thread for a round, as `outrider bench overhead` measures it."""
SECONDS: Final = 10.0
WARM_UP_S: Final = 3.0
ANSWER_TOKENS_MAX: Final = 2**17
"""Of an answer that does not end."""
VOCABULARY: Final = 64
PAGES_MIN: Final = 2**14
_GUESSED_MASS: Final = 2.0**-10
_DECOY_MASS: Final = 2.0**-15
"""What the draft's law gives a correction that is to be guessed, and each one that is not."""
ROLES: Final[tuple[Role, ...]] = ("target", "draft", "coordinator")
"""In the order in which their numbers are found: those that cost most first."""
RoleName = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Replicas of each role; a look-up needs no drafts."""

    targets: int
    drafts: int
    coordinators: int = 1

    def of(self, role: Role) -> int:
        """How many of one role."""
        return int(getattr(self, f"{role}s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of the fleet; exactly one of `sessions` and `rate`."""

    sessions: int | None = None
    """That run at any time: where one ends the next one begins."""
    rate: float | None = None
    """Requests a second that begin whatever runs (a Poisson process)."""
    prompt_tokens: int = 64
    answer_tokens: float = 256.0
    """Mean; each token may be the last with the same chance. `inf` = nothing ends."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One replica of a role that falls silent; another may take its place, with nothing held."""

    role: Role
    at_s: float
    """Since measuring began."""
    back_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and a draft: how much of what rounds propose is accepted, and their times."""

    name: str = ""
    survival: tuple[float, ...]
    """[K]: the chance that 1, 2, ... K draft tokens or more are accepted; empty = plain."""
    num_proposed: float
    """Draft tokens a round, mean: fewer than K where a look-up finds nothing."""
    num_steps: float
    """Of the draft's model for a round, mean."""
    look_ahead: int = 0
    """Outcomes of each round worked out ahead."""
    hit_rate: float = 0.0
    """Share of the rounds whose outcome is among these, as far as so many outcomes allow it."""
    times: ServiceTimes
    """Of a target and of a draft that do not share a device; `max_num_seqs` sessions share a step
    of the draft."""
    target_max_num_seqs: int | None = None
    """Sessions that share a step of a target; None = as many as of the draft."""
    round_trip_ms: float = 0.0
    """Between coordinators and drafts, beside what messages take on one machine."""

    @property
    def k(self) -> int:
        """Draft tokens of a round."""
        return len(self.survival)

    @property
    def has_drafts(self) -> bool:
        """Whether there are draft replicas: neither for plain decoding nor for a look-up."""
        return self.k > 0 and self.times.draft is not None

    @property
    def target_seats(self) -> int:
        """Sessions that share a step of a target."""
        return self.target_max_num_seqs or self.times.max_num_seqs

    def costs(self, role: RoleName) -> StepCosts:
        """Of the steps of a role, with what rounds were measured to take beside the table."""
        times = self.times
        if role == "draft":
            table = times.draft or StepCosts((1, 2), (0.0, 0.0))
            return _scaled(table, times.wait.factor * self.num_steps / max(1, self.k))
        if self.k == 0:
            return _scaled(times.target, times.plain.factor, times.plain.base_s)
        return times.verify


def _scaled(costs: StepCosts, factor: float, base_s: float = 0.0) -> StepCosts:
    return StepCosts(
        costs.rows, tuple(max(0.0, base_s + factor * seconds) for seconds in costs.seconds),
        costs.session_s * factor, costs.slot_s * factor, costs.row_slot_s * factor,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet of a pair, and what is asked of it."""

    pair: Pair
    fleet: FleetSize
    demand: Demand
    config: DeploymentConfig = field(default_factory=DeploymentConfig)
    """Of the services: time-outs and bounds."""
    coordinator_s: float = COORDINATOR_S
    """Of a coordinator's one thread for a round."""
    losses: tuple[Loss, ...] = ()
    warm_up_s: float = WARM_UP_S
    """Before measuring begins ..."""
    seconds: float = SECONDS
    """... for so long."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFigures:
    """The replicas of one role: the share of the time that they were in a step, and sessions of a
    step (means)."""

    replicas: int
    busy: float
    sessions_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """What the loss of a replica cost: rates before it and, while it is away, behind the last
    pause (None where that is no whole second); and the pauses of the sessions that it had."""

    role: Role
    at_s: float
    back_s: float | None
    tokens_per_second_before: float | None
    tokens_per_second_after: float | None
    tokens_in_worst_second: float
    num_paused: int
    pause_ms_p50: float
    pause_ms_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """What was measured. Times of requests are None where none of them was."""

    tokens_per_second: float
    rounds_per_second: float
    tokens_per_round: float
    sessions: float
    """At a time, mean."""
    num_requests: int
    """That ended; refused are those that no coordinator took, or that failed."""
    num_refused: int
    tpot_ms_p50: float | None
    """Time per token: half of the tokens are of requests that took no longer for one."""
    tpot_ms_p99: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    draft_ms: float
    """What a round with a draft waited for its proposal, mean; and as a share of all time."""
    draft_share: float
    hit_rate: float
    """Share of these rounds whose proposal was there before they began."""
    targets: RoleFigures
    drafts: RoleFigures
    coordinators: RoleFigures
    tokens_by_second: tuple[int, ...]
    losses: tuple[LossFigures, ...]


def simulate(scenario: Scenario) -> FleetFigures:
    """Runs a scenario to its end; the same one always comes to the same."""
    logging.disable(logging.WARNING)  # Losses are stated, and no news.
    try:
        return run_virtually(cancelling_others(_Fleet(scenario).run()))
    finally:
        logging.disable(logging.NOTSET)


def _rows(pair: Pair, role: RoleName) -> torch.Tensor:
    """Logits [VOCABULARY + 1, VOCABULARY] behind each token; the last row is for no token.

    Token d = 1..K is what is proposed at depth d, which is told by the token before it; the target
    accepts it with the chance that the plan has for that depth, else it says 0 or K + 1. No draft
    guesses K + 1, and behind it no look-up finds anything. What a draft might guess in place of 0
    the target never says: so many outcomes are worked out as are asked for, and of those as many
    hit as is stated."""
    k = pair.k
    chances = [b / a if a > 0 else 0.0 for a, b in pairwise((1.0, *pair.survival))]
    ends = sorted((a - b for a, b in pairwise((1.0, *pair.survival, 0.0))), reverse=True)
    guessed = 1.0
    if not pair.has_drafts:
        guessed = pair.num_proposed / max(1, k)
    elif pair.look_ahead:
        guessed = min(1.0, pair.hit_rate / sum(ends[: pair.look_ahead]))
    decoys = math.ceil(pair.look_ahead / (k + 1)) - 1
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

    def __init__(self, scenario: Scenario, role: RoleName, max_num_seqs: int) -> None:
        demand = scenario.demand
        length = demand.prompt_tokens + ANSWER_TOKENS_MAX + VOCABULARY
        held = 8 * max_num_seqs * (demand.prompt_tokens + min(demand.answer_tokens, 2**14))
        pages = min(2**16, max(PAGES_MIN, math.ceil(max(held, length) / PAGE_SIZE)))
        spec = EmulatedSpec(
            vocab_size=VOCABULARY, support=1, order=1, max_model_len=length, num_pages=pages
        )
        super().__init__(spec, role, max_num_seqs)
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
    """The look-up of a pair that has one: it finds all K tokens, or none. In place of draft
    replicas that are gone it finds none: what one would bring there is not known."""

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

    def __init__(self, scenario: Scenario, role: RoleName, name: str) -> None:
        self.role: RoleName = role
        self.name = name
        self.lost_at: float | None = None
        pair, target = scenario.pair, scenario.config.target
        seats = pair.target_seats if role == "target" else pair.times.max_num_seqs
        self.engine = _Engine(scenario, role, seats)
        executor = InlineExecutor(self.engine.take_step_seconds)
        bounds: dict[str, Any] = {
            "max_num_seqs": seats, "max_num_batched_tokens": target.max_num_batched_tokens,
            "costs": self.engine.costs,
        }  # fmt: skip
        self.service: Any = (
            TargetService(self.engine, executor, delays_batches=target.gather_sessions, **bounds)
            if role == "target"
            else DraftService.with_model(self.engine, executor, **bounds)
        )


class _Link(MemoryLink[Any, Any]):
    """Takes the time that messages were measured to take, and at the coordinator's end that of its
    one thread. What is sent to or by a replica that is lost is lost, too."""

    def __init__(
        self, replica: _Replica, coordinator: _Coordinator, travel_s: float, turn_s: float
    ) -> None:
        super().__init__(replica.service, self._carry)
        self._replica, self._coordinator = replica, coordinator
        self._travel_s, self._turn_s = travel_s, turn_s
        self._goes_out = False

    def send(self, item: Any) -> None:
        self._goes_out = True
        super().send(item)
        self._goes_out = False

    def release(self, session_id: str, epoch: int) -> None:
        self._goes_out = True
        super().release(session_id, epoch)
        self._goes_out = False

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        if self._is_cut:
            await asyncio.sleep(timeout_s)
            raise Unavailable(f"{self._replica.name} does not answer")
        return await super().describe(timeout_s)

    @property
    def _is_cut(self) -> bool:
        return self._replica.lost_at is not None or self._coordinator.is_lost

    def _carry(self, message: Callable[[], None]) -> None:
        if self._is_cut:
            return
        loop = asyncio.get_running_loop()
        if self._goes_out:
            loop.call_later(self._travel_s, lambda: None if self._is_cut else message())
        else:
            loop.call_later(self._travel_s, self._coordinator.take, self._turn_s, message)


class _Store:
    """The store as one coordinator reaches it: it never answers one that is lost."""

    def __init__(self, store: MemoryStore, coordinator: _Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*arguments: Any) -> Any:
            if self._coordinator.is_lost:
                await asyncio.get_running_loop().create_future()
            return await method(*arguments)

        return call


class _Coordinator:
    """One coordinator, its thread, and the clients' way to it."""

    def __init__(self, fleet: _Fleet, name: str) -> None:
        self.name = name
        self.is_lost = False
        self.busy_s = 0.0
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Of clients whose streams it serves, in the order in which these began."""
        self._fleet = fleet
        self._free_at = 0.0
        scenario, rng, pair = fleet.scenario, fleet.rng, fleet.scenario.pair
        settings = scenario.config.coordinator
        looks_up = pair.k > 0 and not pair.has_drafts
        store: Any = _Store(fleet.store, self)
        registry: Any = fleet
        self.service = CoordinatorService(
            replace(
                settings,
                served_model_name="simulated",
                num_draft_tokens=pair.k,
                deadline_ms=DEADLINE_MS_MAX,
                length_control=False,
                drafting_delays=False,
                draft_siblings=0,
                look_ahead=pair.look_ahead if pair.has_drafts else 0,
                lookup=DraftConfig() if looks_up else None,
                membership=None,
            ),
            name,
            store=store,
            targets={one.name: self.link(one.name) for one in fleet.present("target")},
            drafts={one.name: self.link(one.name) for one in fleet.present("draft")},
            fallback=_Lookup(pair.k if looks_up else 0),
            text=None,
            random_bits=rng.getrandbits,
            random_seed=lambda: rng.getrandbits(SEED_BITS),
            registry=registry,
        )

    async def start(self) -> None:
        """Serves, and follows the replicas that come and go."""
        service, registry = self.service, self._fleet
        await service.start()
        for role, pool in service.fleet.pools.items():
            known = {name: name for name in pool.names}
            discovery = Discovery(role, service.fleet, registry, self.link, known)  # type: ignore[arg-type]
            self._fleet.begin(discovery.run())

    def link(self, name: str) -> _Link:
        """To the replica at an address, which is its name."""
        scenario, replica = self._fleet.scenario, self._fleet.replicas[name]
        pair, turn_s = scenario.pair, scenario.coordinator_s
        if replica.role == "draft":
            both_s, turn_s = pair.times.wait.base_s + pair.round_trip_ms / 1e3, 0.0
        else:
            both_s = pair.times.rest_s - turn_s if pair.k else 0.0
        return _Link(replica, self, max(0.0, both_s) / 2, turn_s)

    def take(self, turn_s: float, message: Callable[[], None]) -> None:
        """A message has come: its turn is behind those before it."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._free_at = max(self._free_at, now) + turn_s
        self.busy_s += turn_s
        if self._free_at > now:
            loop.call_at(self._free_at, message)
        else:
            message()

    def lose(self) -> None:
        """It is gone: its clients' streams break."""
        self.is_lost = True
        for task in list(self.tasks):
            task.cancel()

    async def told(self, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """A client's stream, which breaks when this is lost."""
        task: Any = asyncio.current_task()
        if self.is_lost:
            raise StreamBroken(f"{self.name} does not answer")
        self.tasks[task] = None
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except asyncio.CancelledError:
            if not self.is_lost:
                raise
            task.uncancel()
            raise StreamBroken(f"{self.name} fell silent") from None
        finally:
            del self.tasks[task]


class _Transport:
    """The clients' way to the coordinator that has a place now."""

    def __init__(self, fleet: _Fleet, place: int) -> None:
        self.address = f"coordinator-{place}"
        self._fleet = fleet
        self._place = place

    def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        coordinator = self._fleet.coordinators[self._place]
        return coordinator.told(coordinator.service.generate(request))

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        coordinator = self._fleet.coordinators[self._place]
        return coordinator.told(coordinator.service.resume(request))


class _Request:
    """What its client has seen of one request. Times are seconds of the loop's clock."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.ended_at = math.inf
        self.failed = False
        self.tokens: list[tuple[float, int]] = []
        """When how many came."""
        self.rounds: list[tuple[float, RoundReport]] = []
        self.losses: set[Loss] = set()
        """Of a replica that had it."""

    def pace(self, begin: float) -> tuple[float, int] | None:
        """Seconds a token from then on, or from its first tokens on, and of how many tokens."""
        start = max(sum(at < begin for at, _ in self.tokens) - 1, 0)
        num = sum(n for _, n in self.tokens[start + 1 :])
        return ((self.tokens[-1][0] - self.tokens[start][0]) / num, num) if num else None


class _Fleet:
    """All replicas, the clients, and what these see."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)  # noqa: S311 (sampling, not secrecy)
        self.replicas: dict[str, _Replica] = {}
        """By name, with those that were lost."""
        self.coordinators: list[_Coordinator] = []
        self._drawn = np.random.default_rng(scenario.seed)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._requests: list[_Request] = []
        self._running: dict[asyncio.Task[Any], _Request] = {}
        self._by_session: dict[str, _Request] = {}

    async def run(self) -> FleetFigures:
        """The whole scenario."""
        scenario, loop = self.scenario, asyncio.get_running_loop()
        fleet, demand = scenario.fleet, scenario.demand
        self.store = MemoryStore(lambda: loop.time() * 1e3)
        for role, number in (("target", fleet.targets), ("draft", fleet.drafts)):
            for _ in range(number if role == "target" or scenario.pair.has_drafts else 0):
                self._add(role)  # type: ignore[arg-type]
        for place in range(fleet.coordinators):
            await self._add_coordinator(place)
        transports: list[Any] = [_Transport(self, place) for place in range(fleet.coordinators)]
        self._client = Client(ResumingTransport(transports, random=self.rng.random))
        for index in range(demand.sessions or 0):
            self.begin(self._keep(scenario.warm_up_s / 2 * index / (demand.sessions or 1)))
        if demand.rate:
            self.begin(self._arrive(demand.rate))
        for loss in scenario.losses:
            self.begin(self._lose(loss))
        await asyncio.sleep(scenario.warm_up_s)
        before = self._work()
        await asyncio.sleep(scenario.seconds)
        if self._failure is not None:
            raise self._failure
        nothing = np.zeros(3)
        work = {name: now - before.get(name, nothing) for name, now in self._work().items()}
        return _measured(self._requests, scenario, work)

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs to the end of the simulation."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    def present(self, role: Role) -> list[_Replica]:
        """The replicas of a role that are there."""
        return [one for one in self.replicas.values() if one.role == role and one.lost_at is None]

    async def records(self, role: Role) -> list[ReplicaRecord]:
        """As a `Registry` has them: a lease longer than they are there."""
        ends_at = asyncio.get_running_loop().time() - LEASE_S
        return [
            ReplicaRecord(role=role, name=one.name, address=one.name, host="simulated", pid=1)
            for one in self.replicas.values()
            if one.role == role and (one.lost_at is None or one.lost_at > ends_at)
        ]

    def _add(self, role: RoleName) -> None:
        name = f"{role}-{len(self.replicas)}"
        self.replicas[name] = _Replica(self.scenario, role, name)

    async def _add_coordinator(self, place: int) -> None:
        """In the place of one that is lost, if there is one."""
        one = _Coordinator(self, f"coordinator-{place}-{len(self._tasks)}")
        await one.start()
        self.coordinators[place : place + 1] = [one]

    async def _keep(self, start_s: float) -> None:
        """One request after the other. The first prompt is short: else a fleet would begin with the
        prompts of all at once."""
        await asyncio.sleep(start_s)
        prompt_tokens = self.scenario.demand.prompt_tokens
        is_served = await self._request(min(PAGE_SIZE, prompt_tokens))
        while True:
            if not is_served:
                await asyncio.sleep(1.0)
            is_served = await self._request(prompt_tokens)

    async def _arrive(self, rate: float) -> None:
        while True:
            await asyncio.sleep(float(self._drawn.exponential(1.0 / rate)))
            self.begin(self._request(self.scenario.demand.prompt_tokens))

    async def _request(self, prompt_tokens: int) -> bool:
        """Whether it was served."""
        demand, loop = self.scenario.demand, asyncio.get_running_loop()
        answer = ANSWER_TOKENS_MAX
        if demand.answer_tokens < math.inf:
            answer = min(answer, int(self._drawn.geometric(1.0 / demand.answer_tokens)))
        prompt = self._drawn.integers(VOCABULARY, size=prompt_tokens)
        asked = GenerateRequest(
            prompt=(*prompt.tolist()[:-1], 0), sampling=SamplingParams(temperature=1.0),
            max_tokens=answer, seed=self.rng.getrandbits(SEED_BITS), rule=Rule.TOKEN,
            num_draft_tokens=self.scenario.pair.k, deadline_ms=DEADLINE_MS_MAX,
            include_rounds=True,
        )  # fmt: skip
        task: Any = asyncio.current_task()
        request, session_id = _Request(loop.time()), ""
        self._running[task] = request
        self._requests.append(request)
        try:
            async with aclosing(self._client.generate(asked)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        request.tokens.append((loop.time(), len(event.token_ids)))
                    elif isinstance(event, RoundReport):
                        request.rounds.append((loop.time(), event))
                    elif isinstance(event, Started):
                        session_id = event.session_id
                        self._by_session[session_id] = request
        except OutriderError:
            request.failed = True
        finally:
            request.ended_at = loop.time()
            self._by_session.pop(session_id, None)
            del self._running[task]
        return not request.failed

    async def _lose(self, loss: Loss) -> None:
        """The first replica of the role that is there, if there is one."""
        scenario, hit = self.scenario, list[_Request]()
        await asyncio.sleep(scenario.warm_up_s + loss.at_s)
        places = [i for i, one in enumerate(self.coordinators) if not one.is_lost]
        if loss.role == "coordinator" and places:
            lost = self.coordinators[places[0]]
            hit = [self._running[task] for task in lost.tasks]
            lost.lose()
        for replica in self.present(loss.role)[:1]:
            hit = [self._by_session[one] for one in self._sessions_of(replica.name)]
            replica.lost_at = asyncio.get_running_loop().time()
        for request in hit:
            request.losses.add(loss)
        if loss.back_s >= scenario.seconds:
            return
        await asyncio.sleep(loss.back_s - loss.at_s)
        if loss.role != "coordinator":
            self._add(loss.role)
        elif places:
            await self._add_coordinator(places[0])

    def _sessions_of(self, name: str) -> list[str]:
        pools: list[Any] = []
        for one in self.coordinators:
            if not one.is_lost:
                pools += [one.service.targets.replicas, one.service.drafts.replicas]
        found = [session for pool in pools if name in pool for session in pool[name].routes]
        return [session for session in found if session in self._by_session]

    def _work(self) -> dict[str, Any]:
        """Of each replica so far: seconds busy, steps, and sessions in them."""
        found = {name: one.engine.work.copy() for name, one in self.replicas.items()}
        return found | {one.name: np.array([one.busy_s, 0, 0]) for one in self.coordinators}


def _measured(
    requests: Sequence[_Request], scenario: Scenario, work: Mapping[str, Any]
) -> FleetFigures:
    """From the warm-up's end on. `work` is by replica, as of `_Engine.work`."""
    begin, seconds = scenario.warm_up_s, scenario.seconds
    end = begin + seconds
    tokens = [(at, n) for one in requests for at, n in one.tokens if at >= begin]
    rounds = [report for one in requests for at, report in one.rounds if at >= begin]
    drafted = [report for report in rounds if report.proposed_token_ids]
    ended = [one for one in requests if begin <= one.ended_at <= end]
    total, draft_s = sum(n for _, n in tokens), sum(one.draft_ms for one in drafted) / 1e3
    session_s = sum(max(0.0, min(one.ended_at, end) - max(one.began_at, begin)) for one in requests)
    by_second = [0] * max(1, int(seconds))
    for at, n in tokens:
        if at - begin < len(by_second):
            by_second[int(at - begin)] += n
    pace = [found for one in requests if (found := one.pace(begin)) is not None]
    first = [
        (one.tokens[0][0] - one.began_at, 1)
        for one in requests
        if one.tokens and one.tokens[0][0] >= begin
    ]

    def role(name: Role) -> RoleFigures:
        num = scenario.fleet.of(name) if name != "draft" or scenario.pair.has_drafts else 0
        found = [one for key, one in work.items() if key.startswith(name)]
        return RoleFigures(
            replicas=num,
            busy=float(sum(min(1.0, one[0] / seconds) for one in found)) / max(1, num),
            sessions_per_step=float(
                sum(one[2] for one in found) / max(1, sum(o[1] for o in found))
            ),
        )

    return FleetFigures(
        tokens_per_second=total / seconds,
        rounds_per_second=len(rounds) / seconds,
        tokens_per_round=total / max(1, len(rounds)),
        sessions=session_s / seconds,
        num_requests=sum(not one.failed for one in ended),
        num_refused=sum(one.failed for one in ended),
        tpot_ms_p50=_percentile_ms(pace, 0.5),
        tpot_ms_p99=_percentile_ms(pace, 0.99),
        ttft_ms_p50=_percentile_ms(first, 0.5),
        ttft_ms_p99=_percentile_ms(first, 0.99),
        draft_ms=1e3 * draft_s / max(1, len(drafted)),
        draft_share=min(1.0, draft_s / max(1e-9, session_s)),
        hit_rate=sum(one.look_ahead_hit for one in drafted) / max(1, len(drafted)),
        targets=role("target"),
        drafts=role("draft"),
        coordinators=role("coordinator"),
        tokens_by_second=tuple(by_second),
        losses=tuple(
            _loss(loss, [one for one in requests if loss in one.losses], by_second, scenario)
            for loss in scenario.losses
        ),
    )


def _loss(
    loss: Loss, requests: Sequence[_Request], by_second: Sequence[int], scenario: Scenario
) -> LossFigures:
    at, pauses = scenario.warm_up_s + loss.at_s, [0.0]
    for one in requests:
        before, after = ([t for t, _ in one.tokens if (t > at) is late] for late in (False, True))
        if before and after:
            pauses.append(after[0] - before[-1])
    end_s = min(loss.back_s, scenario.seconds)

    def rate(start_s: float, until_s: float) -> float | None:
        whole = by_second[math.ceil(start_s) : math.floor(until_s)]
        return sum(whole) / len(whole) if whole else None

    worst = by_second[int(loss.at_s) : max(int(loss.at_s) + 1, int(end_s))]
    return LossFigures(
        role=loss.role,
        at_s=loss.at_s,
        back_s=None if loss.back_s > scenario.seconds else loss.back_s,
        tokens_per_second_before=rate(0.0, loss.at_s),
        tokens_per_second_after=rate(loss.at_s + max(pauses), end_s),
        tokens_in_worst_second=min(worst, default=0),
        num_paused=len(pauses) - 1,
        pause_ms_p50=1e3 * float(np.median(pauses[1:] or pauses)),
        pause_ms_max=1e3 * max(pauses),
    )


def _percentile_ms(weighted: Sequence[tuple[float, int]], share: float) -> float | None:
    if not weighted:
        return None
    seconds, weights = zip(*weighted, strict=True)
    return 1e3 * float(np.quantile(seconds, share, weights=weights, method="inverted_cdf"))
