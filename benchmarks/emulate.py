"""`outrider bench emulate`: what the ways to decode bring on a pair of models of stated speed.

The engines are emulated (`outrider.engine.emulated`); services, wire and Redis are real, each in a
process of its own. Every mode decodes one session, at the K that short sessions found best, and
under each rule; then the faster rule once more with a longer way between coordinator and draft.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from outrider.client import Client
from outrider.limits import DEADLINE_MS_MAX, LOOK_AHEAD_DEFAULT, LOOK_AHEAD_MAX, SEED_MAX
from outrider.request import GenerateRequest
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule, SamplingParams

from .emulate_report import EmulateReport, ModeFigures, figures
from .emulate_rounds import TimedRounds, Window, best_num_draft_tokens, read_rounds, timed
from .emulate_scenarios import MODES, RULES, SCENARIOS, Mode, Pair, Scenario
from .emulate_services import running_replicas
from .measurement import Progress

DEFAULT_SCENARIO: Final = next(iter(SCENARIOS.values()))
PROMPT_TOKENS: Final = 64
TOKENS_MIN: Final = 32
TOKENS_MAX: Final = 8_000
"""With the prompt they must fit the emulated models' length."""
SPARE_TOKENS: Final = 16
"""Beyond those that count: a session's last rounds draft less, and none of these is to count. Nor
does anything where fewer are left between the dropped ones and the last."""
DROPPED_MAX: Final = 200
DROPPED_SHARE: Final = 0.25
"""Where nobody says how many tokens at a session's beginning do not count: this part of all, and at
most so many."""
SWEEP_SHARE: Final = 0.05
"""Of the tokens: a session that helps to choose K has so many, ..."""
SWEEP: Final = Window(num_tokens=24, num_dropped=4)
"""... but no fewer than these; the first round has no draft, and the next waits for its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateOptions:
    """What `bench emulate` is asked for. Wrong values raise `SettingError`."""

    scenario: Scenario = DEFAULT_SCENARIO
    tokens: int = 4_000
    dropped: int | None = None
    """None = as many as `num_dropped` says."""
    seed: int = 0
    """Of every session."""
    look_ahead: int = LOOK_AHEAD_DEFAULT
    """Outcomes of a round that are worked out ahead, in the mode that does so."""

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("tokens", self.tokens, TOKENS_MIN, TOKENS_MAX),
            ("dropped", self.dropped, 1, self.tokens - SPARE_TOKENS),
            ("seed", self.seed, 0, SEED_MAX),
            ("look_ahead", self.look_ahead, 1, LOOK_AHEAD_MAX),
        ):
            check_range(name, value, low, high)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> EmulateOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(
            scenario=SCENARIOS[arguments.scenario],
            tokens=arguments.tokens,
            dropped=arguments.dropped,
            seed=arguments.seed,
            look_ahead=arguments.look_ahead,
        )

    @property
    def num_dropped(self) -> int:
        """Tokens at a session's beginning that do not count."""
        if self.dropped is not None:
            return self.dropped
        return min(DROPPED_MAX, int(self.tokens * DROPPED_SHARE))

    @property
    def window(self) -> Window:
        """What counts of each session."""
        return Window(self.tokens, self.num_dropped)

    @property
    def sweep(self) -> Window:
        """What counts of a session that helps to choose K."""
        return Window(max(SWEEP.num_tokens, round(self.tokens * SWEEP_SHARE)), SWEEP.num_dropped)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench emulate`."""
    defaults = EmulateOptions()
    parser.add_argument(
        "--scenario", choices=list(SCENARIOS), default=defaults.scenario.name,
        help="which pair of models [%(default)s]",
    )  # fmt: skip
    for name, value, purpose in (
        ("--tokens", defaults.tokens, "tokens of each mode's session"),
        ("--look-ahead", defaults.look_ahead, "outcomes of a round that are worked out ahead"),
        ("--seed", defaults.seed, "of the sampling; the pair is always the same"),
    ):
        parser.add_argument(
            name, type=int, default=value, metavar="N", help=f"{purpose} [%(default)s]"
        )
    parser.add_argument(
        "--dropped", type=int, default=defaults.dropped, metavar="N",
        help=f"those of --tokens at its beginning that do not count [{DROPPED_MAX}, at most "
        f"{DROPPED_SHARE:.0%}]".replace("%", "%%"),
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


async def run(options: EmulateOptions, progress: Progress) -> EmulateReport:
    """Measures. Raises `Unavailable` where a process breaks off."""
    scenario = options.scenario
    pair = Pair.of(scenario)
    accepted = {rule.value: share for rule, share in pair.acceptance.items()}
    shares = ", ".join(f"{share:.4f} under {rule}" for rule, share in accepted.items())
    progress(f"deviation {pair.deviation}: acceptance {shares}")
    by_rule: dict[str, dict[str, ModeFigures]] = {rule.value: {} for rule in RULES}
    modes: dict[str, ModeFigures] = {}
    delayed: dict[str, ModeFigures] = {}
    progress("starting the services")
    async with running_replicas(pair.engine) as replicas:
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


class _Bench:
    """One mode through one coordinator."""

    def __init__(
        self, options: EmulateOptions, pair: Pair, mode: Mode, client: Client, progress: Progress
    ) -> None:
        self._options = options
        self._pair = pair
        self._mode = mode
        self._client = client
        self._progress = progress

    async def measure(self, rule: Rule) -> ModeFigures:
        """The figures at the best K."""

        async def rate(num_draft_tokens: int) -> float:
            tried = await self._decode(rule, num_draft_tokens, self._options.sweep)
            return tried.expected_rate(self._pair.acceptance[rule])

        name = f"{self._mode.name}, {rule.value}" if self._mode.drafts else self._mode.name
        num_draft_tokens = 0
        if self._mode.drafts:
            self._progress(f"{name}: choosing K")
            most = self._pair.scenario.num_draft_tokens_max
            num_draft_tokens = await best_num_draft_tokens(rate, most)
        self._progress(f"{name}: {self._options.tokens} tokens at K = {num_draft_tokens}")
        rounds = await self._decode(rule, num_draft_tokens, self._options.window)
        found = figures(self._pair, self._mode, rule, num_draft_tokens, rounds)
        self._progress(f"{name}: {found.tokens_per_second:.1f} tokens/s")
        return found

    async def _decode(self, rule: Rule, num_draft_tokens: int, window: Window) -> TimedRounds:
        """One session."""
        request = GenerateRequest(
            prompt=tuple(range(1, PROMPT_TOKENS + 1)),
            sampling=SamplingParams(temperature=1.0),
            max_tokens=window.num_tokens + SPARE_TOKENS,
            ignore_eos=True,
            seed=self._options.seed,
            rule=rule,
            num_draft_tokens=num_draft_tokens,
            deadline_ms=DEADLINE_MS_MAX,
            include_rounds=True,
        )
        clock = asyncio.get_running_loop().time
        async with aclosing(self._client.generate(request)) as events:
            rounds = await read_rounds(events, clock)
        return timed(rounds, window)
