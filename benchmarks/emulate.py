"""`outrider bench emulate`: what the ways to decode bring on a pair of models of stated speed.

The engines are emulated (`outrider.engine.emulated`); services, wire and Redis are real, each in a
process of its own. Every mode decodes one session, at the K that short sessions found best, and
under each rule; then the faster rule once more with a longer way between coordinator and draft.

fraction_of_ideal    tokens a second over the tokens that a round is expected to commit, in a step
                     of the target alone
look_ahead_hit_rate  of rounds whose proposal was there when they began; null where nothing is
                     drafted ahead
overhead_ms_p50      median of a round's time beside the target's step and, where nothing is drafted
                     ahead, the K steps of the draft
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, median
from typing import Any, Final

from outrider.client import Client
from outrider.config import EMULATED, CoordinatorConfig, DraftConfig, TargetConfig
from outrider.errors import Unavailable, check
from outrider.limits import DEADLINE_MS_MAX, LOOK_AHEAD_DEFAULT, LOOK_AHEAD_MAX, SEED_MAX
from outrider.request import Event, GenerateRequest, RoundReport, Tokens
from outrider.settings import check_range
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
DROPPED_MAX: Final = 200
DROPPED_SHARE: Final = 0.25
SWEEP_SHARE: Final = 0.05
"""Of the tokens: a session that helps to choose K has so many."""
SWEEP_DROPPED: Final = 4
"""Tokens of it that do not count: the first round has no draft, and the next waits for its
prompt."""
COARSE_STEP: Final = 2
"""Between the K that are tried first."""


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


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode."""

    name: str
    rules: tuple[Rule, ...]
    """To try. The first alone: nothing is drafted, and the target runs ahead instead."""
    looks_ahead: bool = False
    """Whether the draft works on likely outcomes while the target verifies."""

    @property
    def drafts(self) -> bool:
        """Whether K is above 0."""
        return len(self.rules) > 1


MODES: Final = (
    Mode("plain", (Rule.TOKEN,)),
    Mode("synchronous", (Rule.TOKEN, Rule.COUPLED)),
    Mode("look_ahead", (Rule.TOKEN, Rule.COUPLED), looks_ahead=True),
)


@dataclass(frozen=True, kw_only=True)
class EmulateOptions(Options):
    """What `bench emulate` is asked for."""

    scenario: str = option("70b-1b", "which pair of models", choices=tuple(SCENARIOS))
    tokens: int = option(4_000, "tokens of each mode's session", low=32, high=TOKENS_MAX)
    look_ahead: int = option(
        LOOK_AHEAD_DEFAULT, "outcomes of a round that are worked out ahead", low=1,
        high=LOOK_AHEAD_MAX,
    )  # fmt: skip
    seed: int = option(0, "of the sampling; the pair is always the same", low=0, high=SEED_MAX)
    dropped: int | None = option(
        None, f"those of --tokens at its beginning that do not count [{DROPPED_MAX}, at most "
        f"{DROPPED_SHARE:.0%}]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_range("dropped", self.dropped, 1, self.tokens - SPARE_TOKENS)

    @property
    def num_dropped(self) -> int:
        """Tokens at a session's beginning that do not count."""
        return self.dropped or min(DROPPED_MAX, int(self.tokens * DROPPED_SHARE))


@dataclass(frozen=True, slots=True)
class Round:
    """One round as its client saw it."""

    num_draft_tokens: int
    num_tokens: int
    """Committed."""
    look_ahead_hit: bool
    """Whether its proposal was there before it began."""
    arrived_s: float
    """When its tokens came to the client."""
    ms: float = 0.0
    """From the arrival of the one before."""


async def read_rounds(events: AsyncIterator[Event], clock: Callable[[], float]) -> list[Round]:
    """The rounds of a generation with `include_rounds`, to its end; `clock` gives seconds."""
    rounds: list[Round] = []
    report: RoundReport | None = None
    last = 0.0
    async for event in events:
        if isinstance(event, RoundReport):
            report = event
        elif isinstance(event, Tokens) and report is not None:
            drafted, now = len(report.proposed_token_ids), clock()
            hit, ms = report.look_ahead_hit, (now - last) * 1e3
            rounds.append(Round(drafted, len(event.token_ids), hit, now, ms))
            last = now
    return rounds


def counted(rounds: Sequence[Round], num_tokens: int, num_dropped: int) -> list[Round]:
    """The rounds after the one with the last dropped token, to that with the last of `num_tokens`.
    Raises `Unavailable` where the session was shorter."""
    check(0 < num_dropped < num_tokens, "a window begins before it ends")
    totals = list(accumulate(entry.num_tokens for entry in rounds))
    if not totals or totals[-1] < num_tokens:
        raise Unavailable(f"a session ended before its {num_tokens} tokens had come")
    first, last = (
        next(index for index, total in enumerate(totals) if total >= number)
        for number in (num_dropped, num_tokens)
    )
    check(first < last, "the window lies within one round")
    return list(rounds[first + 1 : last + 1])


def tokens_per_second(rounds: Sequence[Round]) -> float:
    """From the first round's beginning to the last one's end."""
    return sum(entry.num_tokens for entry in rounds) / sum(entry.ms for entry in rounds) * 1e3


async def best_num_draft_tokens(rate: Callable[[int], Awaitable[float]], most: int) -> int:
    """The K of 1..`most` with the highest rate, which rises to it and falls after it: `most` and
    each second K below it are tried, and then the neighbours of the best of these."""
    rates = {count: await rate(count) for count in range(most, 0, -COARSE_STEP)}
    best = max(rates, key=rates.__getitem__)
    for count in (best - 1, best + 1):
        if 1 <= count <= most:
            rates[count] = await rate(count)
    return max(rates, key=rates.__getitem__)


def figures(
    scenario: Scenario, mode: Mode, rule: Rule, num_draft_tokens: int, rounds: Sequence[Round]
) -> dict[str, Any]:
    """Of a mode's rounds, by names in JSON."""
    verify_ms, draft_ms = scenario.steps["verify_ms"], scenario.steps["draft_ms"]
    ahead, rate = mode.looks_ahead, tokens_per_second(rounds)
    each_ms = 0.0 if ahead else draft_ms
    ideal = scenario.expected_tokens(rule, num_draft_tokens) / verify_ms * 1e3
    return {
        "tokens_per_second": rate,
        "num_draft_tokens": num_draft_tokens,
        "rule": rule.value,
        "tokens_per_round": mean(entry.num_tokens for entry in rounds),
        "fraction_of_ideal": rate / ideal,
        "look_ahead_hit_rate": mean(entry.look_ahead_hit for entry in rounds) if ahead else None,
        "overhead_ms_p50": median(
            entry.ms - verify_ms - entry.num_draft_tokens * each_ms for entry in rounds
        ),
    }


async def run(options: EmulateOptions, progress: Progress) -> Report:
    """Measures. Raises `Unavailable` where a process breaks off."""
    scenario = SCENARIOS[options.scenario]
    by_rule: dict[str, dict[str, Any]] = {rule.value: {} for rule in scenario.acceptance}
    modes: dict[str, Any] = {}
    delayed: dict[str, Any] = {}
    progress("starting the services")
    model = EMULATED.removesuffix(":")
    target = TargetConfig(engine=scenario.engine, model=model, num_threads=1)
    draft = DraftConfig(engine=scenario.engine, model=model, num_threads=1)
    async with running_pair(target, draft, CoordinatorConfig()) as replicas:
        for mode in MODES:
            look_ahead = options.look_ahead if mode.looks_ahead else 0
            async with replicas.coordinator(look_ahead) as client:
                bench = _Bench(options, scenario, mode, client, progress)
                found = {rule: await bench.measure(rule) for rule in mode.rules}
            faster = max(found, key=lambda rule: found[rule]["tokens_per_second"])
            modes[mode.name] = found[faster]
            if not mode.drafts:
                continue
            for rule in mode.rules:
                by_rule[rule.value][mode.name] = found[rule]
            progress(f"{mode.name}: {scenario.round_trip_ms:g} ms more to the draft and back")
            async with replicas.coordinator(look_ahead, scenario.round_trip_ms / 2) as client:
                bench = _Bench(options, scenario, mode, client, progress)
                delayed[mode.name] = await bench.measure(faster)
    values = {
        "scenario": options.scenario,
        "seed": options.seed,
        "tokens": options.tokens,
        "dropped": options.num_dropped,
        "look_ahead_outcomes": options.look_ahead,
        "deviation": scenario.law["deviation"],
        "acceptance": {rule.value: share for rule, share in scenario.acceptance.items()},
        **modes,
        "by_rule": by_rule,
        "with_round_trip": {"ms": scenario.round_trip_ms, **delayed},
    }
    return Report(values, [_table(values, modes)])


def _table(values: Mapping[str, Any], modes: Mapping[str, Any]) -> Any:
    """Each mode, then under the other rule, then with the round trip."""

    def named() -> Iterator[tuple[str, Mapping[str, Any]]]:
        delayed = values["with_round_trip"]
        for name, best in modes.items():
            yield name, best
            for by_mode in values["by_rule"].values():
                if name in by_mode and by_mode[name]["rule"] != best["rule"]:
                    yield name, by_mode[name]
            if name in delayed:
                yield f"  + {delayed['ms']:g} ms", delayed[name]

    plain = modes[MODES[0].name]["tokens_per_second"]
    accepted = ", ".join(f"{rule} {share:.3f}" for rule, share in values["acceptance"].items())
    found = table(
        f"{values['scenario']}, deviation {values['deviation']}, acceptance {accepted};\n"
        f"tokens {values['dropped'] + 1} to {values['tokens']} of each mode",
        ("mode", "rule, K", "tokens/s", "over plain", "per round", "of ideal", "hits", "ms over"),
        [
            (
                name,
                f"{one['rule']} {one['num_draft_tokens']}" if one["num_draft_tokens"] else "-",
                f"{one['tokens_per_second']:.1f}",
                f"{one['tokens_per_second'] / plain:.2f}x",
                f"{one['tokens_per_round']:.2f}",
                f"{one['fraction_of_ideal']:.2f}",
                "-" if one["look_ahead_hit_rate"] is None else f"{one['look_ahead_hit_rate']:.2f}",
                f"{one['overhead_ms_p50']:.2f}",
            )
            for name, one in named()
        ],
    )
    found.caption = (
        "of ideal: rounds of one verification each are 1; hits: rounds whose proposal was\n"
        "there when they began; ms over: the median of what a round took beside the models"
    )
    return found


@dataclass(frozen=True, slots=True)
class _Bench:
    """One mode through one coordinator."""

    options: EmulateOptions
    scenario: Scenario
    mode: Mode
    client: Client
    progress: Progress

    async def measure(self, rule: Rule) -> dict[str, Any]:
        """The figures at the best K."""
        options, scenario = self.options, self.scenario

        async def rate(num_draft_tokens: int) -> float:
            """With the number of tokens that each round is expected to commit in place of the one
            that it did: of a few rounds this says more, as their times vary little."""
            num_tokens = max(24, round(options.tokens * SWEEP_SHARE))
            tried = await self._decode(rule, num_draft_tokens, num_tokens, SWEEP_DROPPED)
            expected = sum(scenario.expected_tokens(rule, one.num_draft_tokens) for one in tried)
            return expected / sum(one.ms for one in tried)

        name, num_draft_tokens = self.mode.name, 0
        if self.mode.drafts:
            name += f", {rule.value}"
            self.progress(f"{name}: choosing K")
            num_draft_tokens = await best_num_draft_tokens(rate, scenario.num_draft_tokens_max)
        self.progress(f"{name}: {options.tokens} tokens at K = {num_draft_tokens}")
        rounds = await self._decode(rule, num_draft_tokens, options.tokens, options.num_dropped)
        found = figures(scenario, self.mode, rule, num_draft_tokens, rounds)
        self.progress(f"{name}: {found['tokens_per_second']:.1f} tokens/s")
        return found

    async def _decode(
        self, rule: Rule, num_draft_tokens: int, num_tokens: int, num_dropped: int
    ) -> list[Round]:
        """One session."""
        request = GenerateRequest(
            prompt=tuple(range(1, PROMPT_TOKENS + 1)),
            sampling=SamplingParams(temperature=1.0),
            max_tokens=num_tokens + SPARE_TOKENS,
            ignore_eos=True,
            seed=self.options.seed,
            rule=rule,
            num_draft_tokens=num_draft_tokens,
            deadline_ms=DEADLINE_MS_MAX,
            include_rounds=True,
        )
        async with aclosing(self.client.generate(request)) as events:
            rounds = await read_rounds(events, asyncio.get_running_loop().time)
        return counted(rounds, num_tokens, num_dropped)
