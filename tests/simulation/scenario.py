"""One seed: a few sessions under faults, and what must be true of each.

At every event: shown tokens were committed, in order, without gaps, and have the target's
log-probabilities. At the end: every session has ended soon after the faults, as its request or its
client's `Cancel` says, the store holds exactly what was shown, and the tokens are the fault-free
ones (coupled, greedy) or distributed like the target's (token, block: counted over all seeds).
Clients with the same idempotency key saw the same session. A session in flight when Redis loses
data may end early with `DATA_LOSS`, or with `ABORTED` if another coordinator was given it, too;
then it is requested again, and must complete. The fleet is as wanted, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import patch

import torch
from scipy.stats import chi2

from outrider.errors import (
    DataLoss,
    DeadlineExceeded,
    InvariantError,
    NotFound,
    StaleEpoch,
    Unavailable,
    check,
)
from outrider.interfaces.request import Event, GenerateRequest
from outrider.sessions.store import SessionRecord
from outrider.speculation.sampling_params import SamplingParams
from tests.simulation import nodes
from tests.simulation.answers import Answer
from tests.simulation.cancels import Canceller
from tests.simulation.draws import checked_draws
from tests.simulation.faults import GREATER, Faults
from tests.simulation.keyed import keyed_events
from tests.simulation.network import NOISE, Adversary, Odds
from tests.simulation.plans import Plan, draw_plans
from tests.simulation.processes import run_processes
from tests.simulation.redis_host import Redis
from tests.simulation.slots import limited_events
from tests.simulation.toy import ranked_law, ranks_of, rule_of
from tests.simulation.world import World

STUCK_S = 60.0
"""Virtual seconds after the last fault after which a session counts as stuck."""
CANCELLED_S = 5.0
"""If the coordinator that answered `Cancel` had lost the session, the store has its end then."""
ROUNDED_S = 0.001
"""The remaining time of a resumed request is rounded to milliseconds."""
IN_PARTS_SHARE = 0.3
"""Share of the seeds in which records are read, and lost tokens sent again, in several parts."""
PARTS = {
    "outrider.limits.RECORD_INLINE_BYTES": 64,
    "outrider.limits.RECORD_PART_BYTES": 32,
    "outrider.sessions.state.APPEND_TOKENS_MAX": 8,
}
"""Bounds in these seeds."""
SLOW_STARTS_SHARE = 0.1
"""Share of the seeds with a single target, whose replacement takes longer than `target_gone_ms` to
start."""
SLOW_STARTS = {
    "tests.simulation.world.NUM_TARGETS": 1,
    "tests.simulation.nodes.TARGET_LOADING_S": (31, 40),
    # If all coordinators die meanwhile, others start only after the target.
    "tests.simulation.world.RESUME_TIMEOUT_S": 120.0,
    "tests.simulation.scenario.STUCK_S": 120.0,
}
ALL_FAULTS = GREATER | NOISE | {"oom_refusal"}
SHAPES = {
    "preempted",
    "cancel_at_owner",
    "cancel_elsewhere",
    "stop_string",
    "stop_token_id",
    "same_key",
    "no_slot",
    "deadline",
    "constraint",
    "deadline_error",
    "learned",
}
SEEDS_FOR_ALL = 400
P_VALUE_MIN = 1e-6
"""Threshold of each of the two chi-square tests of a run: the probability of a false alarm."""
Cell = tuple[str, int, int, int]
"""(rule, number of possible ranks, rank of the token before or -1, rank)."""


@dataclass
class Result:
    faults: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    """How often the sessions met each of `SHAPES`."""
    num_seeds: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_sessions: int = 0
    num_moves: int = 0
    num_lost: int = 0
    """Sessions that ended because Redis lost data, and were requested again."""
    ranks: Counter[Cell] = field(default_factory=Counter)

    def merge(self, other: Result) -> None:
        for name, found in vars(other).items():
            setattr(self, name, getattr(self, name) + found)

    def count(self, request: GenerateRequest, shown: Sequence[int]) -> None:
        """Counts the tokens of one session. Raises `InvariantError` for an impossible one."""
        law = ranked_law(request.sampling)
        ranks = ranks_of(request, shown)
        check(all(rank < len(law) for rank in ranks), "an impossible token was shown")
        rule, num = rule_of(request).value, len(law)
        for before, rank in pairwise((-1, *ranks)):
            self.ranks[rule, num, before, rank] += 1

    def p_values(self) -> dict[str, float]:
        """By rule: the probability that a correct one deviates at least this much."""
        found = {}
        for rule in sorted({cell[0] for cell in self.ranks}):
            statistic, freedom = 0.0, 0
            groups = {cell[1:3] for cell in self.ranks if cell[0] == rule}
            for num, before in groups:
                seen = [self.ranks[rule, num, before, rank] for rank in range(num)]
                law = ranked_law(SamplingParams(temperature=1.0, top_k=num))
                expected = [sum(seen) * p for p in law]
                if min(expected) < 5:
                    continue
                statistic += sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
                freedom += num - 1
            found[rule] = float(chi2.sf(statistic, freedom)) if freedom else 1.0
        return found

    @property
    def is_good(self) -> bool:
        """Whether no seed failed, drawn tokens follow the target's distribution, and in many seeds
        every kind of fault and every shape occurred."""
        has_all = set(self.faults) == ALL_FAULTS and set(self.shapes) == SHAPES
        has_all = has_all or self.num_seeds < SEEDS_FOR_ALL
        is_drawn = min(self.p_values().values(), default=1.0) > P_VALUE_MIN
        return not self.num_failed and has_all and is_drawn

    def lines(self) -> list[str]:
        faults = " ".join(f"{kind}={count}" for kind, count in sorted(self.faults.items()))
        shapes = " ".join(f"{shape}={count}" for shape, count in sorted(self.shapes.items()))
        chi_squares = " ".join(f"{rule}: p={p:.3g}" for rule, p in self.p_values().items())
        return [
            f"chi-square of {self.ranks.total()} drawn tokens {{{chi_squares}}}",
            f"seeds={self.num_seeds} failed={self.num_failed} faults{{{faults}}} "
            f"shapes{{{shapes}}} "
            f"tokens={self.num_tokens} sessions={self.num_sessions} lost={self.num_lost} "
            f"sessions_moved={self.num_moves}",
        ]


def run_seed(
    seed: int, odds: Odds | None = None, kinds: Collection[str] = frozenset(GREATER)
) -> Result:
    """Runs one seed, with greater faults of these kinds; raises the first violation."""
    random.seed(seed)  # For pauses between retries.
    rng = random.Random(seed)
    drawn = odds or Odds.drawn(rng)
    plans = draw_plans(rng)
    adversary = Adversary(random.Random(rng.getrandbits(64)), drawn)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    changes: dict[str, object] = {}
    if random.Random(f"in parts {seed}").random() < IN_PARTS_SHARE:
        changes |= PARTS
    if random.Random(f"slow starts {seed}").random() < SLOW_STARTS_SHARE:
        changes |= SLOW_STARTS
    try:
        with ExitStack() as patches:
            for name, value in changes.items():
                patches.enter_context(patch(name, value))
            return run_processes(_Seed(plans, adversary).run(rng, kinds))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        logging.disable(level)


class _Seed:
    """The sessions of a seed, and their state."""

    def __init__(self, plans: list[Plan], adversary: Adversary) -> None:
        self._plans = plans
        self._adversary = adversary
        self._num_over = 0
        self.running: set[int] = set()
        """Indices of the plans of sessions in flight."""
        self.num_shown = 0
        self.num_planned = sum(plan.leave_after or plan.request.max_tokens or 0 for plan in plans)
        self._result = Result(num_seeds=1, num_sessions=len(plans))
        self._by_key: dict[str, Answer] = {}
        """The first whole answer with each key."""
        self._answers: list[Answer] = []
        """Answers of drawn tokens, each request once."""

    @property
    def all_over(self) -> bool:
        """Whether all sessions are over."""
        return self._num_over == len(self._plans)

    async def run(self, rng: random.Random, kinds: Collection[str]) -> Result:
        odds, self._adversary.odds = self._adversary.odds, Odds()
        world = World(rng, self._adversary)
        with nodes.short_waits(world.is_hasty), checked_draws(world.hear_failure):
            try:
                await world.start()
                self._adversary.odds = odds
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch(world, kinds))
                    if any(plan.is_limited for plan in self._plans):
                        group.create_task(self._watch_slots(world))
                    for index, plan in enumerate(self._plans):
                        client = world.clients.context.copy()
                        group.create_task(self._session(world, index, plan), context=client)
                await world.whole()
                await world.stop()
            finally:
                world.clear_away()
        for answer in self._answers:
            self._result.count(answer.request, answer.token_ids)
        self._result.faults = self._adversary.faults
        self._result.shapes += world.shapes
        self._result.num_moves = world.moves.num_moves
        return self._result

    async def _watch_slots(self, world: World) -> None:
        while not self.all_over:
            world.look_at_slots()
            await asyncio.sleep(0.25)

    async def _watch(self, world: World, kinds: Collection[str]) -> None:
        if kinds:
            await Faults(world, self, kinds).run()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + STUCK_S
        while not self.all_over:
            world.check()
            if loop.time() > give_up_at:
                raise InvariantError(f"stuck: {[self._plans[index] for index in self.running]}")
            await asyncio.sleep(0.25)

    async def _session(self, world: World, index: int, plan: Plan) -> None:
        await asyncio.sleep(plan.start_s)
        while True:
            # The session of a key may be older than this request.
            num_losses = 0 if plan.key else world.redis.history.num_losses
            answer = Answer(plan.request)
            try:
                await self._generate(world, index, plan, answer)
            except _NotOpened:
                await asyncio.sleep(0.1)
                continue
            except (DataLoss, NotFound, StaleEpoch) as error:
                check(world.redis.has_lost(num_losses), f"lost, but nothing was: {error}")
                answer.check_part()
                self._result.num_lost += 1
                continue
            finally:
                self.running.discard(index)
            break
        self._num_over += 1
        self._result.num_tokens += len(answer.token_ids)
        answer.check_part()
        # Which tokens come before `Cancel` or a deadline may depend on the time that they took.
        is_timed = plan.cancel_after is not None or plan.request.deadline_ms is not None
        is_repeated = plan.request.seed in [one.request.seed for one in self._plans[:index]]
        has_law = plan.request.constraint is None and not rule_of(plan.request).absolute_noise
        if has_law and not (is_repeated or is_timed):
            self._answers.append(answer)

    async def _generate(self, world: World, index: int, plan: Plan, answer: Answer) -> None:
        redis, history = world.redis, world.redis.history
        num_losses = history.num_losses
        client = world.limited if plan.is_limited else world.client
        canceller, deadline = Canceller(client, redis), Deadline(plan.request)
        if plan.key:
            stream = keyed_events(world, plan.request, plan.key)
        elif plan.is_limited:
            stream = limited_events(client, plan.request, world.shapes)
        else:
            stream = client.generate(plan.request)
        try:
            async with aclosing(stream) as events:
                async for event in _or_not_opened(events, deadline):
                    self.running.add(index)
                    num_before = len(answer.token_ids)
                    answer.add(event, history)
                    self.num_shown += len(answer.token_ids) - num_before
                    if answer.num_events == plan.leave_after:
                        return
                    if answer.num_events == plan.cancel_after:
                        canceller.begin(answer.session_id)
            answer.check_end(canceller.has_begun, deadline.has_passed)
            num_at_end = history.num_losses
            await canceller.done()
        except DeadlineExceeded as error:
            check(deadline.has_passed, f"too early: {error}")
            world.shapes["deadline_error"] += 1
            return
        except StaleEpoch:  # Another coordinator may have taken the session over to end it.
            num_at_end = history.num_losses
            if not await canceller.done():
                raise
        finally:
            canceller.close()
        world.shapes.update(answer.shapes)
        lost = num_losses, num_at_end
        record = await _stored(redis, answer.session_id, *lost)
        if record is not None and world.cancels.is_late(record):
            await asyncio.sleep(CANCELLED_S)
            record = await _stored(redis, answer.session_id, *lost)
        if record is not None:
            answer.check_stored(record)
            if plan.key and history.num_losses == 0:
                first = self._by_key.setdefault(plan.key, answer)
                answer.check_same(first)
                world.shapes["same_key"] += first is not answer
            world.cancels.check_end(record)


async def _stored(
    redis: Redis, session_id: str, num_at_start: int, num_at_end: int
) -> SessionRecord | None:
    """The session as it is stored; None if the store may have lost something of it. The numbers
    are those of losses before its stream began, and when it ended."""
    history = redis.history
    is_kept = history.num_losses == num_at_start or history.is_kept(session_id)
    has_lost = redis.has_lost(num_at_end)  # Afterwards, `Cancel` may have ended it again.
    return await redis.at_once().load(session_id) if is_kept and not has_lost else None


class Deadline:
    """The time at which a request that is sent now must end."""

    def __init__(self, request: GenerateRequest) -> None:
        self._clock = asyncio.get_running_loop().time
        left_s = math.inf if request.deadline_ms is None else request.deadline_ms / 1e3
        self._until = self._clock() + left_s - ROUNDED_S

    @property
    def has_passed(self) -> bool:
        return self._clock() >= self._until


class _NotOpened(Exception):
    """The session was not opened: the client must ask again."""


async def _or_not_opened(events: AsyncIterator[Event], deadline: Deadline) -> AsyncIterator[Event]:
    """The same events; a failure of the store or a coordinator before the first of them is
    `_NotOpened`. Later none may fail the stream before the deadline."""
    started = False
    try:
        async for event in events:
            started = True
            yield event
    except Unavailable as error:
        if not started:
            raise _NotOpened from error
        if not deadline.has_passed:
            raise InvariantError(f"a stream that had begun failed: {error!r}") from error
        raise DeadlineExceeded(error.message) from error


def run_seeds(seeds: range) -> tuple[Result, list[str]]:
    """Their results, and reports of failed seeds. One thread, as tensors are small; garbage
    collection is rarer, because most objects live as long as their seed."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)
    total, told = Result(), []
    for seed in seeds:
        try:
            total.merge(run_seed(seed))
        except Exception:  # noqa: BLE001 - any error is the seed's result
            total.merge(Result(num_seeds=1, num_failed=1))
            replay = f"python -m tests.simulation --seed {seed}"
            told.append(f"seed {seed} failed; replay with: {replay}\n{traceback.format_exc()}")
    return total, told
