"""`outrider plan --simulate` simulates fleets, and finds the smallest fleet that is fast enough.

A fleet is all replicas of a deployment. The real services run with a session store in memory, in
one event loop on a virtual clock. The engines are emulated: the plan's cost tables give the time of
each step, and made-up distributions (`_rows`) determine which tokens are accepted.
"""

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter

from coordinator.service import CoordinatorService
from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.bench.measurement import bench_request
from outrider.bench.report import Report, table
from outrider.config.deployment import EMULATED, DeploymentConfig, DraftConfig
from outrider.config.emulated_spec import PAGES_MAX, EmulatedSpec
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter
from outrider.engine.emulated import EmulatedEngine
from outrider.errors import OutriderError, SettingError
from outrider.foundation.clock import cancelling_others, run_virtually
from outrider.interfaces.engine import SequenceStep, take_stated_seconds
from outrider.interfaces.request import RoundReport, Tokens
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import DEADLINE_MS_MAX, PAGE_SIZE, REPLICAS_MAX
from outrider.registry.registry import Role
from outrider.replica.drivers import InlineDriver
from outrider.replica.engines import batched_tokens
from outrider.sessions.store import Append, Finish, SessionRecord, StoreMemory, not_found
from outrider.speculation.sampling_params import Rule
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

from .rounds import Line, Option, ServiceTimes

ANSWER_TOKENS_MAX = 2**17
VOCABULARY = 64
_GUESSED_MASS = 2.0**-10
_DECOY_MASS = 2.0**-15
ROLES: tuple[Role, ...] = ("target", "draft", "coordinator")
"""The order in which the search sets the numbers of replicas: the most expensive role first."""
STEPPED_ROWS = 512
SEARCH_S = 5.0
"""Longest measured part of a simulation in a search, s. The warm-up lasts at most half as long."""
TOLERANCE = 0.02
"""The search may exceed the smallest sufficient number of replicas by this share."""
GENEROUS, HOPELESS = 4, 16
"""Multiples of a lower bound on a role's number of replicas. At this bound, all replicas would
always be busy. While the search varies one role, each later role has `GENEROUS` times its own lower
bound. The search gives up at `HOPELESS` times the lower bound of the varied role."""
LOAD = ("sessions", "rate", "prompt_tokens", "answer_tokens")
ReplicaRole = Literal["target", "draft"]
Fleet = Mapping[Role, int]
"""Number of replicas of each role. If no model drafts, the number of drafts is 0."""


@dataclass(frozen=True)
class Pair:
    """A target and a draft, each on its own device, and the `way` in which they decode."""

    times: ServiceTimes
    way: Option
    survival: tuple[float, ...]
    """[K]: the chances that at least 1, 2, ... draft tokens are accepted; empty if K = 0."""
    name: str = ""

    @property
    def has_drafts(self) -> bool:
        return len(self.survival) > 0 and self.times.draft is not None

    def seats(self, role: ReplicaRole) -> int:
        """Largest number of sessions in a step of a replica with this role (`max_num_seqs`)."""
        return self.times.target_max_num_seqs if role == "target" else self.times.max_num_seqs

    def costs(self, role: ReplicaRole) -> StepCosts:
        """The cost table of a role's steps, corrected by the functions (`Line`) in `times`."""
        times, k = self.times, len(self.survival)
        costs, line = times.target, times.verify if k else times.plain
        if role == "draft":
            costs = times.draft or StepCosts((1, 2), (0.0, 0.0))
            line = Line(0, times.wait.factor * self.way.steps_per_round / max(1, k))
        return StepCosts(
            costs.rows,
            tuple(map(line.at, costs.seconds)),
            costs.session_s * line.factor,
            costs.slot_s * line.factor,
            costs.row_slot_s * line.factor,
        )


@dataclass(frozen=True)
class Scenario:
    """A fleet and its load. Either `sessions` or `rate` (requests a second) is set."""

    pair: Pair
    fleet: Fleet
    sessions: int | None = None
    """Number of concurrent sessions; when a session ends, the next begins."""
    rate: float | None = None
    prompt_tokens: int = 64
    answer_tokens: float = 256.0
    """Mean of a geometric distribution; `inf` = all answers have `ANSWER_TOKENS_MAX` tokens."""
    config: DeploymentConfig = field(default_factory=DeploymentConfig)
    coordinator_s: float = 0.00029
    """CPU time of a coordinator for a round. `outrider bench overhead` measures this time."""
    warm_up_s: float = 3.0
    seconds: float = 10.0


@dataclass(frozen=True)
class FleetFigures:
    tokens_per_second: float
    rounds_per_second: float
    tokens_per_round: float
    num_requests: int
    num_refused: int
    """How many of the `num_requests` were refused or failed."""
    tpot_ms: tuple[float, float] | None
    """p50 and p99 of the requests' times per token. Each request is weighted by its number of
    tokens. None = no request had a second token."""
    ttft_ms: tuple[float, float] | None
    """p50 and p99 of a request's time to the first token; None = no request had a token."""
    draft_ms: float
    """Mean time for which a round with draft tokens waits for its proposal."""
    hit_rate: float
    busy: tuple[float, ...]
    """How busy a target, a draft and a coordinator were on average, 0 to 1."""


def simulate(scenario: Scenario) -> FleetFigures:
    """Runs a scenario. Each run of the same scenario returns the same figures."""
    return run_virtually(cancelling_others(_Simulation(scenario).run()))


def _rows(pair: Pair, role: ReplicaRole) -> torch.Tensor:
    """Logits [VOCABULARY + 1, VOCABULARY]. Row i is for contexts that end with token i. The last
    row is for an empty context.

    The draft proposes token d at depth d = 1..K, so the last token tells the depth. At depth d, the
    target draws token d with the plan's chance of acceptance, and otherwise a correction: token 0
    or K + 1. A look-ahead draft guesses the correction 0 and never K + 1, and a look-up finds
    nothing after K + 1. So the share of 0 among the corrections determines how often look-ahead
    hits, or how often a look-up proposes. Besides 0, look-ahead guesses decoys: tokens that the
    target never draws. They make look-ahead guess as many outcomes as in the plan."""
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


class _Replica(EmulatedEngine):
    def __init__(self, scenario: Scenario, role: ReplicaRole) -> None:
        length = scenario.prompt_tokens + ANSWER_TOKENS_MAX + VOCABULARY
        spec = EmulatedSpec(
            vocab_size=VOCABULARY, support=1, order=1, max_model_len=length, num_pages=PAGES_MAX
        )
        super().__init__(spec, role, scenario.pair.seats(role))
        self.costs = scenario.pair.costs(role)
        self.busy_s = 0.0
        self._law = _rows(scenario.pair, role)
        service: Any = TargetService if role == "target" else DraftService
        self.service = service(
            self if role == "target" else ModelDrafter(self),
            InlineDriver(partial(take_stated_seconds, self)),
            max_num_seqs=scenario.pair.seats(role),
            costs=self.costs,
            max_num_batched_tokens=batched_tokens(scenario.config.target),
        )

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
        self.busy_s += seconds
        return seconds


class _Lookup(LookupDrafter):
    """After token i < K, proposes i + 1 to K. After K, proposes 1 to K. Otherwise nothing."""

    def __init__(self, num_tokens: int) -> None:
        self._num = num_tokens

    def guess(self, request: DraftRequest, index_max: int | None = None) -> Guess:
        last = request.token_ids[-1]
        if last > self._num or self._num == 0:
            return NO_GUESS
        ids = tuple(range(last % self._num + 1, self._num + 1))
        return Guess(ids[: request.num_draft_tokens], float(self._num))

    def release(self, session_id: str) -> None: ...


class _Store:
    """Those methods of `SessionStore` that a session needs if it stays at one coordinator."""

    def __init__(self) -> None:
        self._lengths: Counter[str] = Counter()

    async def open(self, session: SessionRecord) -> None:
        self._lengths[session.session_id] = len(session.token_ids)

    async def append(self, appends: Sequence[Append]) -> list[int]:
        self._lengths.update({append.session_id: len(append.token_ids) for append in appends})
        return [self._lengths[append.session_id] for append in appends]

    async def finish(self, finish: Finish) -> int:
        return self._lengths.pop(finish.session_id, finish.length or 0)

    async def load(self, session_id: str) -> SessionRecord:
        raise not_found(session_id)

    async def renew(self, sessions: Sequence[SessionRecord]) -> None: ...

    async def memory(self) -> StoreMemory:
        return StoreMemory()

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        return {}


class _Coordinator:
    def __init__(
        self, scenario: Scenario, place: int, replicas: Mapping[ReplicaRole, Sequence[_Replica]]
    ) -> None:
        self.busy_s = self._free_at = 0.0
        store: Any = _Store()
        pair, k, rng = scenario.pair, len(scenario.pair.survival), random.Random(place)  # noqa: S311
        looks_up = k > 0 and not pair.has_drafts
        times, turn_s = pair.times, scenario.coordinator_s
        carriers = {
            "target": self._carrier(times.rest_s - turn_s if k else 0.0, turn_s),
            "draft": self._carrier(times.wait.base_s + times.round_trip_s, 0.0),
        }
        links: dict[str, dict[str, Any]] = {}
        for role, group in replicas.items():
            made = (MemoryLink(replica.service, carriers[role]) for replica in group)
            links[role] = {f"{role}-{number}": link for number, link in enumerate(made)}
        config = replace(
            scenario.config.coordinator,
            served_model_name="simulated",
            num_draft_tokens=k,
            deadline_ms=DEADLINE_MS_MAX,
            length_control=False,
            drafting_delays=False,
            look_ahead=pair.way.look_ahead if pair.has_drafts else 0,
            lookup=DraftConfig(model="suffix" if looks_up else "model"),
        )
        self.service = CoordinatorService(
            config,
            f"coordinator-{place}",
            store=store,
            targets=links["target"],
            drafts=links["draft"],
            fallback=_Lookup(k if looks_up else 0),
            random_bits=rng.getrandbits,
        )

    def _carrier(self, both_s: float, turn_s: float) -> Callable[[Callable[[], None]], None]:
        """Returns a function that delivers messages. The request and the answer of a call each
        occupy the coordinator's only thread for `turn_s` / 2, then travel for `both_s` / 2."""

        def carry(message: Callable[[], None]) -> None:
            loop = asyncio.get_running_loop()
            self._free_at = max(self._free_at, loop.time()) + turn_s / 2
            self.busy_s += turn_s / 2
            loop.call_at(self._free_at + max(0.0, both_s) / 2, message)

        return carry


class _Request(NamedTuple):
    """What the client of a request sees. Times are by the event loop's clock, s."""

    began_at: float
    events: list[tuple[float, int]]
    """The time and the number of tokens of each event. Of the events before the end of the warm-up,
    only the last is kept."""

    @property
    def pace(self) -> tuple[float, int] | None:
        """Seconds per token and number of tokens after the first event; None = no such tokens."""
        num = sum(n for _, n in self.events[1:])
        return ((self.events[-1][0] - self.events[0][0]) / num, num) if num else None


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(0)
        self._tasks: list[asyncio.Task[Any]] = []
        self._requests: list[_Request] = []
        self._rounds: list[RoundReport] = []
        self._ends: list[bool] = []
        """For each request that has ended, whether the request was served."""

    async def run(self) -> FleetFigures:
        scenario, fleet = self._scenario, self._scenario.fleet
        roles: tuple[ReplicaRole, ...] = ("target", "draft")
        replicas = {role: [_Replica(scenario, role) for _ in range(fleet[role])] for role in roles}
        coordinators = [
            _Coordinator(scenario, place, replicas) for place in range(fleet["coordinator"])
        ]
        for coordinator in coordinators:
            await coordinator.service.start()
        self._turns = itertools.cycle(coordinators)
        for index in range(scenario.sessions or 0):
            self._begin(self._keep(scenario.warm_up_s / 2 * index / (scenario.sessions or 1)))
        if scenario.rate:
            self._begin(self._arrive(scenario.rate))
        groups: list[Sequence[Any]] = [*replicas.values(), coordinators]
        await asyncio.sleep(scenario.warm_up_s)
        self._rounds.clear()
        self._ends.clear()
        for request in self._requests:
            del request.events[:-1]
        for replica in itertools.chain(*groups):
            replica.busy_s = 0.0
        await asyncio.sleep(scenario.seconds)
        for task in self._tasks:
            if task.done():
                task.result()  # Raises the exception of the task.
        busy_s = (sum(replica.busy_s for replica in group) / max(1, len(group)) for group in groups)
        return self._measured(tuple(mean_s / scenario.seconds for mean_s in busy_s))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _keep(self, start_s: float) -> None:
        """Sends requests one by one. A short first prompt lets decoding begin in the warm-up."""
        await asyncio.sleep(start_s)
        prompt_tokens = self._scenario.prompt_tokens
        is_served = await self._request(min(PAGE_SIZE, prompt_tokens))
        while True:
            if not is_served:
                await asyncio.sleep(1.0)
            is_served = await self._request(prompt_tokens)

    async def _arrive(self, rate: float) -> None:
        while True:
            await asyncio.sleep(float(self._rng.exponential(1.0 / rate)))
            self._begin(self._request(self._scenario.prompt_tokens))

    async def _request(self, prompt_tokens: int) -> bool:
        mean, loop = self._scenario.answer_tokens, asyncio.get_running_loop()
        answer = ANSWER_TOKENS_MAX
        if mean < math.inf:
            answer = min(answer, int(self._rng.geometric(1.0 / mean)))
        prompt = self._rng.integers(VOCABULARY, size=prompt_tokens)
        generate_request = bench_request(
            (*prompt.tolist()[:-1], 0),
            answer,
            1.0,
            rule=Rule.TOKEN,
            include_rounds=True,
            num_draft_tokens=len(self._scenario.pair.survival),
        )
        request = _Request(loop.time(), [])
        self._requests.append(request)
        try:
            async with aclosing(
                next(self._turns).service.streams.generate(generate_request)
            ) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        request.events.append((loop.time(), len(event.token_ids)))
                    elif isinstance(event, RoundReport):
                        self._rounds.append(event)
            self._ends.append(True)
        except OutriderError:
            self._ends.append(False)
        return self._ends[-1]

    def _measured(self, busy: tuple[float, ...]) -> FleetFigures:
        begin, seconds = self._scenario.warm_up_s, self._scenario.seconds
        requests, num_rounds = self._requests, len(self._rounds)
        drafted = [report for report in self._rounds if report.proposed_token_ids]
        total = sum(n for request in requests for at, n in request.events if at >= begin)
        pace = [request.pace for request in requests if request.pace is not None]
        firsts = [
            (request.events[0][0], request.began_at) for request in requests if request.events
        ]
        return FleetFigures(
            tokens_per_second=total / seconds,
            rounds_per_second=num_rounds / seconds,
            tokens_per_round=total / max(1, num_rounds),
            num_requests=len(self._ends),
            num_refused=self._ends.count(False),
            tpot_ms=_percentiles_ms(pace),
            ttft_ms=_percentiles_ms([(at - began, 1) for at, began in firsts if at >= begin]),
            draft_ms=sum(report.draft_ms for report in drafted) / max(1, len(drafted)),
            hit_rate=sum(report.look_ahead_hit for report in drafted) / max(1, len(drafted)),
            busy=busy,
        )


def _percentiles_ms(weighted: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    if not weighted:
        return None
    seconds, weights = zip(*weighted, strict=True)
    p50, p99 = np.quantile(seconds, (0.5, 0.99), weights=weights, method="inverted_cdf")
    return 1e3 * float(p50), 1e3 * float(p99)


def read_report(path: Path) -> Pair:
    """The target and draft in an output of `outrider plan --json`."""
    try:
        plan = json.loads(path.read_bytes())
        return TypeAdapter(Pair).validate_python(plan["pair"])
    except OSError as error:
        raise SettingError("from_report", f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError(
            "from_report",
            f"{path} is not the output of `outrider plan --json` of this version: {error}",
        ) from error


def of_emulated(text: str, target_seats: int, draft_seats: int) -> Pair:
    """The target and draft that the specification of an emulated engine describes."""
    spec = EmulatedSpec.parse(text)
    survival = spec.acceptance_rates
    if not survival:
        raise SettingError(
            "engine",
            f"{EMULATED}{text} has no acceptance_rates, which a simulation needs; add "
            "acceptance_rates=A1/A2/..; Ai is the chance that draft tokens 1 to i are accepted",
        )
    times = ServiceTimes(
        target=_stepped(spec.verify_ms, spec.verify_tokens),
        draft=_stepped(spec.draft_ms, spec.draft_branches),
        target_max_num_seqs=target_seats,
        max_num_seqs=draft_seats,
    )
    k = len(survival)
    way = Option(rule=Rule.TOKEN, num_draft_tokens=k, proposed_per_round=k, steps_per_round=k)
    return Pair(times, way, survival, f"{EMULATED}{text}")


def _stepped(ms: float, rows: int) -> StepCosts:
    """The cost of n rows is `ms * ceil(n / rows)`. Above `STEPPED_ROWS`, it is linear in n."""
    last = math.ceil(STEPPED_ROWS / rows) + 1
    table: dict[int, float] = {}
    for begun in range(1, last):
        table |= dict.fromkeys(((begun - 1) * rows + 1, begun * rows), begun * ms / 1e3)
    table[last * rows] = last * ms / 1e3
    return StepCosts(tuple(table), tuple(table.values()))


def simulated(
    scenario: Scenario, tpot_ms: float | None, free: Sequence[Role], progress: Callable[[str], None]
) -> Report:
    """Simulates a scenario. The `free` roles get the smallest numbers of replicas that meet
    `tpot_ms`. In the table, replicas and busy shares are in the order targets, drafts,
    coordinators. Each pair of times has the p50 and the p99."""
    pair, figures = scenario.pair, None
    fleet = smallest(scenario, tpot_ms, free, progress) if free and tpot_ms else scenario.fleet
    load = f"sessions={scenario.sessions}"
    if scenario.sessions is None:
        load = f"{scenario.rate:g} requests a second"
    parts: list[Any] = []
    if fleet is None:
        parts.append(f"No fleet meets {tpot_ms:g} ms a token for {load}.")
    else:
        progress(f"simulating {_in_words(fleet)}")
        figures = asdict(simulate(replace(scenario, fleet=fleet)))
        row = {"load": load, "replicas": [*fleet.values()], **figures}
        rows = [{"figure": name.replace("_", " "), "value": value} for name, value in row.items()]
        if free:
            parts.append(f"{_in_words(fleet)} meet {tpot_ms:g} ms a token for {load}.")
        parts.append(table(f"Simulated: {pair.name}; K = {len(pair.survival)}", rows))
    load_values = {name: getattr(scenario, name) for name in LOAD}
    values = {"load": load_values, "fleet": None, "was_found": bool(free), "figures": figures}
    if fleet is not None:
        values["fleet"] = {f"{role}s": number for role, number in fleet.items()}
    return Report(values, parts)


def keeps(figures: FleetFigures, tpot_ms: float) -> bool:
    """Whether no request was refused, and 99 % of the tokens take at most `tpot_ms`."""
    return figures.tpot_ms is not None and figures.tpot_ms[1] <= tpot_ms and not figures.num_refused


def smallest(
    scenario: Scenario,
    tpot_ms: float,
    free: Sequence[Role],
    progress: Callable[[str], None] = lambda line: None,
) -> Fleet | None:
    """The smallest fleet that meets `tpot_ms`; None if no fleet does. The search minimises the
    number of targets, then of drafts, then of coordinators, each within `TOLERANCE`. Roles that are
    not `free` keep the scenario's numbers."""
    tokens = (scenario.rate or 0.0) * scenario.answer_tokens
    if scenario.sessions is not None:
        tokens = scenario.sessions / (tpot_ms / 1e3)
    rounds = tokens / (1.0 + sum(scenario.pair.survival))
    seconds = min(scenario.seconds, SEARCH_S)
    scenario = replace(scenario, seconds=seconds, warm_up_s=min(scenario.warm_up_s, seconds / 2))
    needs = {role: rounds * _busy_s(scenario, role) for role in ROLES if role in free}
    fleet = {**scenario.fleet, **{role: _bounded(GENEROUS * needs[role]) for role in needs}}

    def is_enough(role: Role, number: int) -> bool:
        tried = fleet | {role: _bounded(number)}
        figures = simulate(replace(scenario, fleet=tried))
        _, p99 = figures.tpot_ms or (0.0, 0.0)
        progress(f"{_in_words(tried)}: 99 % of the tokens take at most {p99:.1f} ms each")
        return keeps(figures, tpot_ms)

    for role, need in needs.items():
        number = _fewest(partial(is_enough, role), math.ceil(need), math.ceil(HOPELESS * need))
        if number is None:
            return None
        fleet[role] = _bounded(number)
    return fleet


def _busy_s(scenario: Scenario, role: Role) -> float:
    """The shortest time for which a round can occupy a replica, s."""
    pair = scenario.pair
    if role == "coordinator":
        return scenario.coordinator_s
    costs, seats, rows = pair.costs(role), pair.seats(role), 1.0
    if role == "target":
        rows += pair.way.proposed_per_round
        seats = max(1, min(seats, int(batched_tokens(scenario.config.target) / rows)))
    step_s = min(costs.step_seconds(rows * n, n) / n for n in (1, seats))
    return step_s * (len(pair.survival) if role == "draft" else 1)


def _fewest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number that is `enough`, within `TOLERANCE`; None if `most` is too small."""
    low, high = least - 1, least
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(most, math.ceil(high * 1.5))
    while high - low > max(1.0, TOLERANCE * high):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _bounded(number: float) -> int:
    return min(REPLICAS_MAX, max(1, math.ceil(number)))


def _in_words(fleet: Fleet) -> str:
    return ", ".join(f"{role}={number}" for role, number in fleet.items())
