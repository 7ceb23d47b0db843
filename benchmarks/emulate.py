"""`outrider bench emulate`: what the ways to decode bring on a pair of models of stated speed.

The engines are emulated (`outrider.engine.emulated`); services, wire and Redis are real, each in a
process of its own. Every mode decodes one session, at the K that short sessions found best, and
under each rule; then the faster rule once more with a longer way between coordinator and draft.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

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
from .report import table

if TYPE_CHECKING:
    from rich.table import Table

RULES: Final = (Rule.TOKEN, Rule.COUPLED)
PROMPT_TOKENS: Final = 64
TOKENS_MAX: Final = 8_000
"""With the prompt they must fit the emulated models' length."""
SPARE_TOKENS: Final = 16
"""Beyond those that count: a session's last rounds draft less, and none of these is to count."""
DROPPED_MAX: Final = 200
DROPPED_SHARE: Final = 0.25
SWEEP_SHARE: Final = 0.05
"""Of the tokens: a session that helps to choose K has so many."""
COARSE_STEP: Final = 2
"""Between the K that are tried first."""
NUM_PREFIXES: Final = 8_192
"""A prefix's overlap has a standard deviation of 0.1 about 0.8, so its mean has one of 0.001."""
DEVIATION_MAX: Final = 8.0
DEVIATION_DIGITS: Final = 4
"""Decimals of a solved deviation: it is to be printed as it is used."""

Laws = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode."""

    name: str
    drafts: bool
    """Whether K is above 0; else the target runs ahead of the coordinator's answers."""
    looks_ahead: bool = False
    """Whether the draft works on likely outcomes while the target verifies."""


MODES: Final = (
    Mode("plain", drafts=False),
    Mode("synchronous", drafts=True),
    Mode("look_ahead", drafts=True, looks_ahead=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a pair; names and meaning are those of `EmulatedSpec`."""

    verify_ms: float
    verify_tokens: int
    draft_ms: float
    draft_branches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pair of models; all but what is said here means what it does in `EmulatedSpec`."""

    name: str
    vocab_size: int
    support: int
    exponent: float
    order: int
    acceptance: float
    """E[sum min(p, q)], for which the deviation of the draft is solved."""
    steps: Steps
    num_draft_tokens_max: int
    round_trip_ms: float
    """Added between coordinator and draft in the second part."""


SCENARIOS: Final = {
    "70b-1b": Scenario(
        name="70b-1b",
        vocab_size=32_000,
        support=64,
        exponent=1.706,
        order=3,
        acceptance=0.80,
        steps=Steps(verify_ms=18.3, verify_tokens=16, draft_ms=1.3, draft_branches=64),
        num_draft_tokens_max=14,
        round_trip_ms=5.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class EmulateOptions(Options):
    """What `bench emulate` is asked for. Wrong values raise `SettingError`."""

    scenario: str = option("70b-1b", "which pair of models", choices=tuple(SCENARIOS), parse=str)
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
        super().__post_init__()
        check_range("dropped", self.dropped, 1, self.tokens - SPARE_TOKENS)

    @property
    def num_dropped(self) -> int:
        """Tokens at a session's beginning that do not count."""
        return self.dropped or min(DROPPED_MAX, int(self.tokens * DROPPED_SHARE))

    @property
    def sweep(self) -> tuple[int, int]:
        """Tokens of a session that helps to choose K, and those that do not count: the first round
        has no draft, and the next waits for its prompt."""
        return max(24, round(self.tokens * SWEEP_SHARE)), 4


class PairLaw:
    """What a toy pair (`outrider.engine.emulated`) accepts, for any deviation of its draft, told
    from its law without running it.

    After every prefix p is the same Zipf law on other ids, and log q - log p is fresh Gaussian
    noise. So acceptance is the same at every position of a draft and independent of the positions
    before. What has no closed form is a mean over `NUM_PREFIXES` prefixes, always the same ones.
    """

    def __init__(self, support: int, exponent: float) -> None:
        self._log_p = -exponent * np.log(np.arange(1, support + 1, dtype=np.float64))
        self._log_p -= np.log(np.exp(self._log_p).sum())
        self._gaussians = np.random.default_rng(0).standard_normal((NUM_PREFIXES, support))

    def acceptance(self, deviation: float, rule: Rule) -> float:
        """The chance that a draft token is accepted whose predecessors were, under token or
        coupled: that argmax(log q + g) = argmax(log p + g) for Gumbel noise g, the sum over tokens
        i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
        if rule is Rule.TOKEN:
            return self._overlap(deviation)
        p, q = np.exp(self._log_p), self._draft(deviation)
        matched = np.zeros(NUM_PREFIXES)
        for index, own in enumerate(p):
            matched += 1.0 / np.maximum(p / own, q / q[:, index : index + 1]).sum(axis=1)
        return float(matched.mean())

    def solve_deviation(self, acceptance: float) -> float:
        """The deviation at which E[sum min(p, q)] is `acceptance`, which falls as it grows."""
        low, high = 0.0, DEVIATION_MAX
        check(
            self._overlap(high) < acceptance <= 1.0,
            f"no deviation of 0..{high:g} gives an acceptance of {acceptance:g}",
        )
        while high - low > 10**-DEVIATION_DIGITS / 100:
            middle = (low + high) / 2
            low, high = (low, middle) if self._overlap(middle) < acceptance else (middle, high)
        return round((low + high) / 2, DEVIATION_DIGITS)

    def _draft(self, deviation: float) -> Laws:
        """q after each prefix, [NUM_PREFIXES, support]."""
        weights = np.exp(self._log_p + deviation * self._gaussians)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def _overlap(self, deviation: float) -> float:
        return float(np.minimum(np.exp(self._log_p), self._draft(deviation)).sum(axis=1).mean())


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens that a round of K draft tokens commits, K = 0 included, where each is accepted with
    this chance if those before it were."""
    return sum(acceptance**depth for depth in range(num_draft_tokens + 1))


@dataclass(frozen=True, slots=True)
class Pair:
    """The two emulated models of a scenario."""

    scenario: Scenario
    deviation: float
    """Of log q - log p."""
    acceptance: dict[Rule, float]
    """Of each draft token whose predecessors were accepted."""

    @classmethod
    def of(cls, scenario: Scenario) -> Pair:
        """Solves the deviation."""
        law = PairLaw(scenario.support, scenario.exponent)
        deviation = law.solve_deviation(scenario.acceptance)
        return cls(scenario, deviation, {rule: law.acceptance(deviation, rule) for rule in RULES})

    @property
    def engine(self) -> str:
        """The `engine` setting of both replicas."""
        names = ("vocab_size", "support", "exponent", "order")
        values = {name: getattr(self.scenario, name) for name in names}
        values |= {"deviation": self.deviation, **asdict(self.scenario.steps)}
        return EMULATED + ",".join(f"{key}={value}" for key, value in values.items())


@dataclass(frozen=True, slots=True)
class Round:
    """One round as its client saw it."""

    num_draft_tokens: int
    num_accepted: int
    num_tokens: int
    """Committed."""
    look_ahead_hit: bool
    """Whether its proposal was there before it began."""
    arrived_s: float
    """When its tokens came to the client."""


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """Rounds that follow each other, and how long each took, from the arrival of the one before."""

    rounds: tuple[Round, ...]
    milliseconds: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Committed by all of them."""
        return sum(entry.num_tokens for entry in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """From the first round's beginning to the last one's end."""
        return self.num_tokens / sum(self.milliseconds) * 1e3

    def hits(self, num_draft_tokens: int) -> dict[str, object]:
        """The share of rounds whose proposal was there before they began, by the outcome of the
        round before, which is what had to be guessed; None where there was no such outcome."""
        by_outcome: list[list[bool]] = [[] for _ in range(num_draft_tokens + 1)]
        for before, after in pairwise(self.rounds):
            if before.num_draft_tokens == num_draft_tokens:
                by_outcome[before.num_accepted].append(after.look_ahead_hit)
        *rejected, accepted = (mean(found) if found else None for found in by_outcome)
        return {"all_accepted": accepted, "rejected_at": rejected}

    def expected_rate(self, acceptance: float) -> float:
        """Tokens a second with the number of tokens that each round is expected to commit in place
        of the one that it did: of a few rounds this says more, as their times vary little."""
        expected = sum(expected_tokens(acceptance, entry.num_draft_tokens) for entry in self.rounds)
        return expected / sum(self.milliseconds) * 1e3

    def overhead_ms(self, verify_ms: float, draft_ms: float) -> float:
        """The median of what a round took beside a step of the target and, for each token that it
        drafted, `draft_ms`."""
        return median(
            took - verify_ms - entry.num_draft_tokens * draft_ms
            for entry, took in zip(self.rounds, self.milliseconds, strict=True)
        )


async def read_rounds(events: AsyncIterator[Event], clock: Callable[[], float]) -> list[Round]:
    """The rounds of a generation with `include_rounds`, to its end; `clock` gives seconds."""
    rounds: list[Round] = []
    report: RoundReport | None = None
    async for event in events:
        if isinstance(event, RoundReport):
            report = event
        elif isinstance(event, Tokens) and report is not None:
            drafted, committed = len(report.proposed_token_ids), len(event.token_ids)
            hit = report.look_ahead_hit
            rounds.append(Round(drafted, report.num_accepted, committed, hit, clock()))
    return rounds


def timed(rounds: Sequence[Round], num_tokens: int, num_dropped: int) -> TimedRounds:
    """The rounds after the one with the last dropped token, to that with the last of `num_tokens`.
    Raises `Unavailable` where the session was shorter."""
    check(0 < num_dropped < num_tokens, "a window begins before it ends")
    totals = list(accumulate(entry.num_tokens for entry in rounds))
    ends = [index for index, total in enumerate(totals) if total >= num_tokens]
    if not ends:
        raise Unavailable(f"a session ended before its {num_tokens} tokens had come")
    before = next(index for index, total in enumerate(totals) if total >= num_dropped)
    chosen = rounds[before : ends[0] + 1]
    check(len(chosen) > 1, "the window lies within one round")
    took = [(after.arrived_s - entry.arrived_s) * 1e3 for entry, after in pairwise(chosen)]
    return TimedRounds(tuple(chosen[1:]), tuple(took))


async def best_num_draft_tokens(rate: Callable[[int], Awaitable[float]], most: int) -> int:
    """The K of 1..`most` with the highest rate, which rises to it and falls after it: `most` and
    each second K below it are tried, and then the neighbours of the best of these."""
    rates: dict[int, float] = {}

    async def try_all(counts: Sequence[int]) -> int:
        for num_draft_tokens in counts:
            rates[num_draft_tokens] = await rate(num_draft_tokens)
        return max(rates, key=rates.__getitem__)

    best = await try_all(range(most, 0, -COARSE_STEP))
    return await try_all([count for count in (best - 1, best + 1) if 1 <= count <= most])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """One mode at one K and rule."""

    tokens_per_second: float
    num_draft_tokens: int
    rule: str
    tokens_per_round: float
    fraction_of_ideal: float
    """Of the tokens that a round is expected to commit over the target's step alone."""
    look_ahead_hit_rate: float | None
    """Null where nothing is drafted ahead, as `hits`."""
    overhead_ms_p50: float
    """Of a round's time beside the target's step and, where nothing is drafted ahead, the K steps
    of the draft."""
    hits: dict[str, object] | None


def figures(
    pair: Pair, mode: Mode, rule: Rule, num_draft_tokens: int, found: TimedRounds
) -> ModeFigures:
    """Those of a mode's rounds."""
    steps = pair.scenario.steps
    expected = expected_tokens(pair.acceptance[rule], num_draft_tokens)
    ahead = mode.looks_ahead
    return ModeFigures(
        tokens_per_second=found.tokens_per_second,
        num_draft_tokens=num_draft_tokens,
        rule=rule.value,
        tokens_per_round=found.num_tokens / len(found.rounds),
        fraction_of_ideal=found.tokens_per_second / (expected / steps.verify_ms * 1e3),
        look_ahead_hit_rate=mean(e.look_ahead_hit for e in found.rounds) if ahead else None,
        overhead_ms_p50=found.overhead_ms(steps.verify_ms, 0.0 if ahead else steps.draft_ms),
        hits=found.hits(num_draft_tokens) if ahead else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateReport:
    """The result of one `bench emulate`."""

    scenario: str
    seed: int
    tokens: int
    """Of each mode's session ..."""
    dropped: int
    """... and those at its beginning that do not count."""
    look_ahead_outcomes: int
    """Of a round that the draft was to work out ahead, where it does so."""
    deviation: float
    """Of log q - log p before both are normalised."""
    acceptance: Mapping[str, float]
    """By rule: of each draft token whose predecessors were accepted."""
    modes: Mapping[str, ModeFigures]
    """By mode, each at its faster rule."""
    by_rule: Mapping[str, Mapping[str, ModeFigures]]
    """Rule -> mode -> figures."""
    round_trip_ms: float
    with_round_trip: Mapping[str, ModeFigures]
    """By mode, with so much more between coordinator and draft."""

    def values(self) -> dict[str, object]:
        """By names in JSON; a mode's name is one of them."""
        values = asdict(self)
        modes = values.pop("modes")
        delayed = {"ms": values.pop("round_trip_ms"), **values.pop("with_round_trip")}
        found: dict[str, object] = values | modes | {"with_round_trip": delayed}
        return found

    def render(self) -> Table:
        """For people: each mode, then under the other rule, then with the round trip."""
        accepted = ", ".join(f"{rule} {share:.3f}" for rule, share in self.acceptance.items())
        plain = self.modes[MODES[0].name].tokens_per_second
        found = table(
            f"{self.scenario}, deviation {self.deviation}, acceptance {accepted};\n"
            f"tokens {self.dropped + 1} to {self.tokens} of each mode",
            ("mode", "rule, K", "tokens/s", "over plain", "per round", "of ideal", "hits",
             "ms over"),
            [_row(name, figures, plain) for name, figures in self._rows()],
        )  # fmt: skip
        found.caption = (
            "of ideal: rounds of one verification each are 1; hits: rounds whose proposal was\n"
            "there when they began; ms over: the median of what a round took beside the models"
        )
        return found

    def _rows(self) -> Iterator[tuple[str, ModeFigures]]:
        for name, best in self.modes.items():
            yield name, best
            for by_mode in self.by_rule.values():
                if name in by_mode and by_mode[name].rule != best.rule:
                    yield name, by_mode[name]
            if name in self.with_round_trip:
                yield f"  + {self.round_trip_ms:g} ms", self.with_round_trip[name]


def _row(name: str, found: ModeFigures, plain: float) -> tuple[str, ...]:
    return (
        name,
        f"{found.rule} {found.num_draft_tokens}" if found.num_draft_tokens else "-",
        f"{found.tokens_per_second:.1f}",
        f"{found.tokens_per_second / plain:.2f}x",
        f"{found.tokens_per_round:.2f}",
        f"{found.fraction_of_ideal:.2f}",
        "-" if found.look_ahead_hit_rate is None else f"{found.look_ahead_hit_rate:.2f}",
        f"{found.overhead_ms_p50:.2f}",
    )


async def run(options: EmulateOptions, progress: Progress) -> EmulateReport:
    """Measures. Raises `Unavailable` where a process breaks off."""
    scenario = SCENARIOS[options.scenario]
    pair = Pair.of(scenario)
    accepted = {rule.value: share for rule, share in pair.acceptance.items()}
    shares = ", ".join(f"{share:.4f} under {rule}" for rule, share in accepted.items())
    progress(f"deviation {pair.deviation}: acceptance {shares}")
    by_rule: dict[str, dict[str, ModeFigures]] = {rule.value: {} for rule in RULES}
    modes: dict[str, ModeFigures] = {}
    delayed: dict[str, ModeFigures] = {}
    progress("starting the services")
    model = EMULATED.removesuffix(":")
    target = TargetConfig(engine=pair.engine, model=model, num_threads=1)
    draft = DraftConfig(engine=pair.engine, model=model, num_threads=1)
    async with running_pair(target, draft, CoordinatorConfig()) as replicas:
        for mode in MODES:
            rules = RULES if mode.drafts else RULES[:1]
            look_ahead = options.look_ahead if mode.looks_ahead else 0
            async with replicas.coordinator(look_ahead) as client:
                bench = _Bench(options, pair, mode, client, progress)
                found = {rule: await bench.measure(rule) for rule in rules}
            faster = max(rules, key=lambda rule: found[rule].tokens_per_second)
            modes[mode.name] = found[faster]
            if not mode.drafts:
                continue
            for rule in rules:
                by_rule[rule.value][mode.name] = found[rule]
            progress(f"{mode.name}: {scenario.round_trip_ms:g} ms more to the draft and back")
            async with replicas.coordinator(look_ahead, scenario.round_trip_ms / 2) as client:
                bench = _Bench(options, pair, mode, client, progress)
                delayed[mode.name] = await bench.measure(faster)
    return EmulateReport(
        scenario=scenario.name,
        seed=options.seed,
        tokens=options.tokens,
        dropped=options.num_dropped,
        look_ahead_outcomes=options.look_ahead,
        deviation=pair.deviation,
        acceptance=accepted,
        modes=modes,
        by_rule=by_rule,
        round_trip_ms=scenario.round_trip_ms,
        with_round_trip=delayed,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """One mode through one coordinator."""

    options: EmulateOptions
    pair: Pair
    mode: Mode
    client: Client
    progress: Progress

    async def measure(self, rule: Rule) -> ModeFigures:
        """The figures at the best K."""

        async def rate(num_draft_tokens: int) -> float:
            tried = await self._decode(rule, num_draft_tokens, *self.options.sweep)
            return tried.expected_rate(self.pair.acceptance[rule])

        name = f"{self.mode.name}, {rule.value}" if self.mode.drafts else self.mode.name
        num_draft_tokens, tokens = 0, self.options.tokens
        if self.mode.drafts:
            self.progress(f"{name}: choosing K")
            most = self.pair.scenario.num_draft_tokens_max
            num_draft_tokens = await best_num_draft_tokens(rate, most)
        self.progress(f"{name}: {tokens} tokens at K = {num_draft_tokens}")
        rounds = await self._decode(rule, num_draft_tokens, tokens, self.options.num_dropped)
        found = figures(self.pair, self.mode, rule, num_draft_tokens, rounds)
        self.progress(f"{name}: {found.tokens_per_second:.1f} tokens/s")
        return found

    async def _decode(
        self, rule: Rule, num_draft_tokens: int, num_tokens: int, num_dropped: int
    ) -> TimedRounds:
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
        return timed(rounds, num_tokens, num_dropped)
