"""`outrider bench emulate`: what the ways to decode bring on a pair of models of stated speed.

The engines are emulated (`outrider.engine.emulated`); services, wire and Redis are real, each in a
process of its own. Every mode decodes one session under each rule, at the K that short sessions
found best; then one under the faster rule with a longer way between coordinator and draft.

fraction_of_ideal    tokens a second over the tokens that a round is expected to commit, in a step
                     of the target alone
look_ahead_hit_rate  of rounds whose proposal was there when they began; null where nothing is
                     drafted ahead
overhead_ms_p50      median of a round's time beside the target's step and, where nothing is drafted
                     ahead, the K steps of the draft
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Final

from outrider.client import Client
from outrider.config import EMULATED, CoordinatorConfig, DraftConfig, TargetConfig
from outrider.errors import Unavailable
from outrider.limits import DEADLINE_MS_MAX, LOOK_AHEAD_DEFAULT
from outrider.request import Event, GenerateRequest, RoundReport, Tokens
from outrider.speculation.sampling_params import Rule, SamplingParams

from .measurement import Progress
from .options import Options, option
from .processes import running_pair
from .report import Report, table

PROMPT_TOKENS: Final = 64
TOKENS_MAX: Final = 8_000
"""With the prompt they must fit the emulated models' length."""
SPARE_TOKENS: Final = 16
"""Beyond those that count: a session's last rounds draft less, and none of these is to count."""
SWEEP_SHARE: Final = 0.05
"""Of the tokens: a session that helps to choose K has so many."""
SWEEP_TOKENS_MIN: Final = 24
DROPPED_SHARE: Final = 0.05
DROPPED_MIN: Final = 4
"""Tokens at a session's beginning that do not count: the first round has no draft, and the next
waits for its prompt."""
MODES: Final = {
    "plain": (Rule.TOKEN,),
    "synchronous": (Rule.TOKEN, Rule.COUPLED),
    "look_ahead": (Rule.TOKEN, Rule.COUPLED),
}
"""Ways to decode, and the rules to try. The last one drafts for likely outcomes of a round while
the target still verifies it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pair of models. `steps` and `law` are parameters of `EmulatedSpec`."""

    steps: Mapping[str, float]
    law: Mapping[str, float]
    acceptance: Mapping[Rule, float]
    """Of each draft token whose predecessors were accepted, by rule: what follows from `law`."""
    num_draft_tokens_max: int
    round_trip_ms: float
    """Added between coordinator and draft in the second part."""

    @property
    def engine(self) -> str:
        """The `engine` setting of both replicas."""
        values = {**self.law, **self.steps}
        return EMULATED + ",".join(f"{key}={value}" for key, value in values.items())

    def expected_tokens(self, rule: Rule, num_draft_tokens: int) -> float:
        """That a round of K draft tokens commits, K = 0 included."""
        return sum(self.acceptance[rule] ** depth for depth in range(num_draft_tokens + 1))


SCENARIOS: Final = {
    "70b-1b": Scenario(
        steps={"verify_ms": 18.3, "verify_tokens": 16, "draft_ms": 1.3, "draft_branches": 64},
        law={
            "vocab_size": 32_000, "support": 64, "exponent": 1.706, "order": 3, "deviation": 0.645,
        },
        acceptance={Rule.TOKEN: 0.8000, Rule.COUPLED: 0.7627},
        num_draft_tokens_max=14,
        round_trip_ms=5.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EmulateOptions(Options):
    """What `bench emulate` is asked for."""

    scenario: str = option("70b-1b", "which pair of models", choices=tuple(SCENARIOS))
    tokens: int = option(4_000, "tokens of each mode's session", low=32, high=TOKENS_MAX)


@dataclass(frozen=True, slots=True)
class Round:
    """One round as its client saw it."""

    num_draft_tokens: int
    num_tokens: int
    """Committed."""
    look_ahead_hit: bool
    """Whether its proposal was there before it began."""
    ms: float
    """From the arrival of the tokens of the round before."""


async def read_rounds(events: AsyncIterator[Event], num_tokens: int) -> list[Round]:
    """The rounds of a generation with `include_rounds`, up to that with the last of `num_tokens`,
    without those that begin before the dropped tokens have come. Raises `Unavailable` where the
    session was shorter."""
    clock = asyncio.get_running_loop().time
    dropped = max(DROPPED_MIN, round(num_tokens * DROPPED_SHARE))
    rounds: list[Round] = []
    report: RoundReport | None = None
    total, last_s = 0, 0.0
    async for event in events:
        if isinstance(event, RoundReport):
            report = event
        elif isinstance(event, Tokens) and report is not None:
            now_s, number = clock(), len(event.token_ids)
            drafted, hit = len(report.proposed_token_ids), report.look_ahead_hit
            if dropped <= total < num_tokens:
                rounds.append(Round(drafted, number, hit, (now_s - last_s) * 1e3))
            total, last_s = total + number, now_s
    if total < num_tokens:
        raise Unavailable(f"a session ended before its {num_tokens} tokens had come")
    return rounds


def figures(
    scenario: Scenario, mode: str, rule: Rule, num_draft_tokens: int, rounds: Sequence[Round]
) -> dict[str, Any]:
    """Of a mode's rounds, by names in JSON."""
    verify_ms, ahead = scenario.steps["verify_ms"], mode == "look_ahead"
    each_ms = 0.0 if ahead else scenario.steps["draft_ms"]
    rate = sum(one.num_tokens for one in rounds) / sum(one.ms for one in rounds) * 1e3
    ideal = scenario.expected_tokens(rule, num_draft_tokens) / verify_ms * 1e3
    return {
        "mode": mode,
        "rule": rule.value,
        "num_draft_tokens": num_draft_tokens,
        "tokens_per_second": rate,
        "tokens_per_round": mean(one.num_tokens for one in rounds),
        "fraction_of_ideal": rate / ideal,
        "look_ahead_hit_rate": mean(one.look_ahead_hit for one in rounds) if ahead else None,
        "overhead_ms_p50": median(
            one.ms - verify_ms - one.num_draft_tokens * each_ms for one in rounds
        ),
    }


async def run(options: EmulateOptions, progress: Progress) -> Report:
    """Measures. Raises `Unavailable` where a process breaks off."""
    scenario = SCENARIOS[options.scenario]
    runs: list[dict[str, Any]] = []
    progress("starting the services")
    model = EMULATED.removesuffix(":")
    target = TargetConfig(engine=scenario.engine, model=model, num_threads=1)
    draft = DraftConfig(engine=scenario.engine, model=model, num_threads=1)
    async with running_pair(target, draft, CoordinatorConfig()) as replicas:
        for mode, rules in MODES.items():
            look_ahead = LOOK_AHEAD_DEFAULT if mode == "look_ahead" else 0
            of_mode = []
            async with replicas.coordinator(look_ahead) as client:
                for rule in rules:
                    progress(f"{mode}, {rule}")
                    found = await _measure(options, client, mode, rule)
                    of_mode.append(found | {"round_trip_ms": 0.0})
            if mode != "plain":
                faster = Rule(max(of_mode, key=lambda one: one["tokens_per_second"])["rule"])
                progress(f"{mode}, {faster}: {scenario.round_trip_ms:g} ms more to the draft")
                async with replicas.coordinator(look_ahead, scenario.round_trip_ms / 2) as client:
                    found = await _measure(options, client, mode, faster)
                    of_mode.append(found | {"round_trip_ms": scenario.round_trip_ms})
            runs += of_mode
    values = {
        "scenario": options.scenario,
        "tokens": options.tokens,
        "look_ahead_outcomes": LOOK_AHEAD_DEFAULT,
        "acceptance": {rule.value: share for rule, share in scenario.acceptance.items()},
        "runs": runs,
    }
    return Report(values, [_table(options, runs)])


async def _measure(
    options: EmulateOptions, client: Client, mode: str, rule: Rule
) -> dict[str, Any]:
    """The figures at the best K."""
    scenario = SCENARIOS[options.scenario]
    best, best_rate = 0, 0.0
    for count in range(1, scenario.num_draft_tokens_max + 1) if mode != "plain" else ():
        tried = await _decode(client, rule, count, round(options.tokens * SWEEP_SHARE))
        # Expected tokens, not those that came: of a few rounds, whose times vary little, they say
        # more.
        expected = sum(scenario.expected_tokens(rule, one.num_draft_tokens) for one in tried)
        rate = expected / sum(one.ms for one in tried)
        if rate > best_rate:
            best, best_rate = count, rate
    rounds = await _decode(client, rule, best, options.tokens)
    return figures(scenario, mode, rule, best, rounds)


async def _decode(
    client: Client, rule: Rule, num_draft_tokens: int, num_tokens: int
) -> list[Round]:
    """One session."""
    num_tokens = max(SWEEP_TOKENS_MIN, num_tokens)
    request = GenerateRequest(
        prompt=tuple(range(1, PROMPT_TOKENS + 1)),
        sampling=SamplingParams(temperature=1.0),
        max_tokens=num_tokens + SPARE_TOKENS,
        ignore_eos=True,
        seed=0,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        deadline_ms=DEADLINE_MS_MAX,
        include_rounds=True,
    )
    async with aclosing(client.generate(request)) as events:
        return await read_rounds(events, num_tokens)


def _table(options: EmulateOptions, runs: Sequence[Mapping[str, Any]]) -> Any:
    plain = runs[0]["tokens_per_second"]
    found = table(
        f"{options.scenario}, {options.tokens} tokens of each mode",
        ("mode", "rule, K", "tokens/s", "over plain", "per round", "of ideal", "hits", "ms over"),
        [
            (
                one["mode"] + (f" + {one['round_trip_ms']:g} ms" if one["round_trip_ms"] else ""),
                f"{one['rule']} {one['num_draft_tokens']}" if one["num_draft_tokens"] else "-",
                f"{one['tokens_per_second']:.1f}",
                f"{one['tokens_per_second'] / plain:.2f}x",
                f"{one['tokens_per_round']:.2f}",
                f"{one['fraction_of_ideal']:.2f}",
                "-" if one["look_ahead_hit_rate"] is None else f"{one['look_ahead_hit_rate']:.2f}",
                f"{one['overhead_ms_p50']:.2f}",
            )
            for one in runs
        ],
    )
    found.caption = (
        "of ideal: rounds of one verification each are 1; hits: rounds whose proposal was\n"
        "there when they began; ms over: the median of what a round took beside the models"
    )
    return found
