"""One seed: a few sessions under faults, and what must be true of every one of them.

At every event: what is shown is committed, in order, without gaps. At the end: every session has
ended, the store holds exactly what was shown, and the tokens are the fault-free ones (coupled,
greedy) or are distributed like the target's (token, block: counted over all seeds).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.clock import run_virtually
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.interface import SequenceStep
from outrider.errors import InvariantError, OutriderError, Unavailable, check
from outrider.generation import Event, Finished, GenerateRequest, Started, Tokens
from outrider.sessions.store import FinishReason, SessionState
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import EMPTY_PROPOSAL
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.scoring import score
from outrider.speculation.transforms import target_probabilities

from .adversary import Adversary, Odds
from .world import SPEC, World

SESSION_S_MAX = 300.0
"""Virtual seconds after which a session counts as stuck."""


@dataclass
class RankCount:
    """How often the target's r-th likeliest token was committed, and how often that is expected:
    for every rank the sum of (seen - p), whose variance is the sum of p (1 - p)."""

    excess: Counter[int] = field(default_factory=Counter)
    variance: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0

    def add(self, probabilities: list[float], token_id: int) -> None:
        self.num_tokens += 1
        ranked = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
        for rank, v in enumerate(ranked):
            p = probabilities[v]
            self.excess[rank] += (v == token_id) - p  # type: ignore[assignment]
            self.variance[rank] += p * (1 - p)  # type: ignore[assignment]

    def merge(self, other: RankCount) -> None:
        self.num_tokens += other.num_tokens
        for rank in other.excess:
            self.excess[rank] += other.excess[rank]
            self.variance[rank] += other.variance[rank]

    def largest_deviation(self) -> float:
        """In standard deviations. Beyond 6: probability < 2e-9 a rank."""
        return max(
            (
                abs(self.excess[rank]) / math.sqrt(variance)
                for rank, variance in self.variance.items()
                if variance > 25
            ),
            default=0.0,
        )


@dataclass
class Result:
    """What a seed came to."""

    seed: int
    faults: Counter[str]
    num_tokens: int
    num_sessions: int
    num_moves: int
    """Of sessions to another replica."""
    ranks: RankCount


@dataclass(frozen=True)
class Plan:
    """One session of a seed."""

    request: GenerateRequest
    start_s: float
    cancel_after: int | None
    """Events after which the client goes away."""


def draw_plan(rng: random.Random) -> Plan:
    temperature = rng.choice((0.0, 1.0, 1.0, 1.0))
    rule = None if temperature == 0 else rng.choice((Rule.TOKEN, Rule.BLOCK, Rule.COUPLED))
    sampling = SamplingParams(temperature=temperature, top_k=rng.choice((0, 0, 3)))
    request = GenerateRequest(
        prompt=tuple(rng.randrange(SPEC.vocab_size) for _ in range(rng.randint(1, 12))),
        sampling=sampling,
        max_tokens=rng.randint(16, 48),
        seed=rng.getrandbits(64),
        rule=rule,
        num_draft_tokens=rng.choice((0, 1, 3, 4)),
    )
    return Plan(request, rng.uniform(0, 0.3), rng.choice((None, None, None, rng.randint(1, 10))))


def run_seed(seed: int, odds: Odds | None = None) -> Result:
    """Runs one seed; raises what it finds wrong."""
    rng = random.Random(seed)
    drawn = odds or Odds.drawn(rng)
    plans = [draw_plan(rng) for _ in range(rng.randint(2, 4))]
    adversary = Adversary(random.Random(rng.getrandbits(64)), drawn)
    ranks = RankCount()

    async def main() -> tuple[int, int]:
        world = World(rng, adversary)
        await world.start()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_session(world, plan, ranks)) for plan in plans]
        await asyncio.sleep(1.0)
        await world.stop()
        return sum(task.result() for task in tasks), world.moves.num_moves

    try:
        num_tokens, num_moves = run_virtually(main())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return Result(seed, adversary.faults, num_tokens, len(plans), num_moves, ranks)


async def _run_session(world: World, plan: Plan, ranks: RankCount) -> int:
    await asyncio.sleep(plan.start_s)
    while True:
        try:
            async with asyncio.timeout(SESSION_S_MAX):
                return await _generate(world, plan, ranks)
        except _NotOpened:
            await asyncio.sleep(0.1)
        except TimeoutError:
            raise InvariantError(f"stuck for {SESSION_S_MAX} s: {plan}") from None


async def _generate(world: World, plan: Plan, ranks: RankCount) -> int:
    request = plan.request
    prompt = request.prompt
    shown: list[int] = []
    session_id, finished, num_events = "", None, 0
    async with aclosing(world.client.generate(request)) as events:
        async for event in _or_not_opened(events):
            num_events += 1
            if isinstance(event, Started):
                session_id = event.session_id
            elif isinstance(event, Tokens):
                check(event.first_index == len(shown), f"a gap before {event}")
                shown.extend(event.token_ids)
                stored = await _stored(world, session_id)
                check(stored[: len(prompt) + len(shown)] == (*prompt, *shown), "shown, not stored")
            elif isinstance(event, Finished):
                finished = event
            if num_events == plan.cancel_after:
                break
    if plan.cancel_after is None:
        check(finished is not None, "the stream ended without its last event")
        check(finished.finish_reason is FinishReason.LENGTH, f"ended with {finished}")  # type: ignore[union-attr]
        check(len(shown) == request.max_tokens, f"{len(shown)} tokens of {request.max_tokens}")
        record = await world.store.load(session_id)
        check(record.state is SessionState.FINISHED, "not finished in the store")
        check(record.token_ids == (*prompt, *shown), "the store holds something else")
    _check_tokens(request, shown, ranks)
    return len(shown)


class _NotOpened(Exception):
    """The store did not open the session: the client is to ask again."""


async def _or_not_opened(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The same events; a store or a coordinator that fails before the first of them is
    `_NotOpened`. Later neither must fail the stream."""
    started = False
    try:
        async for event in events:
            started = True
            yield event
    except Unavailable as error:
        if started:
            raise
        raise _NotOpened from error


async def _stored(world: World, session_id: str) -> tuple[int, ...]:
    try:
        return (await world.store.load(session_id)).token_ids
    except OutriderError as error:
        raise InvariantError(f"shown of a session that is not stored: {error}") from error


def _check_tokens(request: GenerateRequest, shown: list[int], ranks: RankCount) -> None:
    """Against the target alone: equal, or counted."""
    engine = EmulatedEngine(SPEC, "target")
    rule = Rule.GREEDY if request.sampling.greedy else request.rule or Rule.TOKEN
    tokens = [int(v) for v in request.prompt]  # type: ignore[arg-type]
    new = tuple(tokens)
    for position, token_id in enumerate(shown):
        (logits,) = engine.forward([SequenceStep("reference", new, 1)])
        probabilities = target_probabilities(logits, request.sampling)
        if rule.absolute_noise:
            noise = RoundNoise(request.seed or 0, rule, len(tokens))
            (expected,) = score(probabilities, EMPTY_PROPOSAL, noise).correction
            check(token_id == expected, f"token {position} is {token_id}, fault-free {expected}")
        else:
            row = probabilities[0].tolist()
            check(row[token_id] > 0, f"token {position} is {token_id}, which is impossible")
            ranks.add(row, token_id)
        tokens.append(token_id)
        new = (token_id,)
