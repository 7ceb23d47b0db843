"""`outrider bench emulate`: what the ways to decode bring on a pair of models of stated speed.

The engines are emulated (`outrider.engine.emulated`); services, wire and Redis are real, each in a
process of its own. Every mode decodes one session under each rule, at the K that short sessions
found best; and so with a longer way between coordinator and draft.

fraction_of_ideal    tokens a second over the tokens that a round is expected to commit, in a step
                     of the target alone
look_ahead_hit_rate  of rounds whose proposal was there when they began; null where nothing is
                     drafted ahead
overhead_ms_p50      median of a round's time beside the target's step and, where nothing is drafted
                     ahead, the K steps of the draft
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

from outrider.client import Client
from outrider.config import EMULATED, CoordinatorConfig, DraftConfig, TargetConfig
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.limits import DEADLINE_MS_MAX, LOOK_AHEAD_DEFAULT
from outrider.request import GenerateRequest
from outrider.settings import between, blaming, checked
from outrider.speculation.sampling_params import Rule, SamplingParams

from .clients import complete
from .measurement import Progress, Round
from .options import Options
from .processes import running_pair
from .report import Report, table

PROMPT_TOKENS = 64
TOKENS_MAX = 8_000
"""With the prompt they must fit the emulated models' length."""
SPARE_TOKENS = 16
"""Beyond those that count: a session's last rounds draft less, and none of these is to count."""
SWEEP_SHARE = 0.05
"""Of the tokens: a session that helps to choose K has so many."""
SWEEP_TOKENS_MIN = 24
DROPPED_SHARE = 0.05
DROPPED_MIN = 4
"""Tokens at a session's beginning that do not count: the first round has no draft, and the next
waits for its prompt."""
MODES = {
    "plain": (Rule.TOKEN,),
    "synchronous": (Rule.TOKEN, Rule.COUPLED),
    "look_ahead": (Rule.TOKEN, Rule.COUPLED),
}
"""Ways to decode, and the rules to try. The last one drafts for likely outcomes of a round while
the target still verifies it."""

STEPS = {"verify_ms": 18.3, "verify_tokens": 16, "draft_ms": 1.3, "draft_branches": 64}
"""Of a target of 70 billion parameters and a draft of one."""
LAW = {
    "vocab_size": 32_000, "support": 64, "exponent": 1.706, "order": 3, "deviation": 0.645,
}  # fmt: skip
"""With `STEPS` parameters of `EmulatedSpec`."""
ACCEPTANCE = {Rule.TOKEN: 0.8000, Rule.COUPLED: 0.7627}
"""Of each draft token whose predecessors were accepted: what follows from `LAW`."""
NUM_DRAFT_TOKENS_MAX = 14
ROUND_TRIP_MS = 5.0
"""Added between coordinator and draft in the second part."""


Rates = tuple[float, ...]


def engine(rates: Rates = ()) -> str:
    """The `engine` setting of both replicas."""
    values = LAW | STEPS | ({"acceptance_rates": "/".join(map(str, rates))} if rates else {})
    return EMULATED + ",".join(f"{key}={value}" for key, value in values.items())


def expected_tokens(rule: Rule, num_draft_tokens: int, rates: Rates = ()) -> float:
    """That a round of K draft tokens commits, K = 0 included."""
    if rates:
        return 1.0 + sum(rates[:num_draft_tokens])
    return sum(ACCEPTANCE[rule] ** depth for depth in range(num_draft_tokens + 1))


@checked()
class EmulateOptions(Options):
    """What `bench emulate` is asked for."""

    tokens: Annotated[int, between(32, TOKENS_MAX)] = 4_000
    """Tokens of each mode's session."""
    acceptance_rates: tuple[Annotated[float, between(0, 1)], ...] = ()
    """The chances that a round accepts at least 1, 2, ... draft tokens, as vLLM's
    synthetic_acceptance_rates, and no more tokens than that; by default the pair's own."""


class Timed(NamedTuple):
    """What counts of a round."""

    num_draft_tokens: int
    num_tokens: int
    """Committed."""
    look_ahead_hit: bool
    """Whether its proposal was there before it began."""
    ms: float
    """From the arrival of the tokens of the round before."""


def window(rounds: Sequence[Round], num_tokens: int) -> list[Timed]:
    """The rounds of a session up to that with the last of `num_tokens`, without those that begin
    before the dropped tokens have come."""
    dropped = max(DROPPED_MIN, round(num_tokens * DROPPED_SHARE))
    found: list[Timed] = []
    total, last_s = 0, 0.0
    for report, tokens, arrived_s in rounds:
        number = len(tokens.token_ids)
        if dropped <= total < num_tokens:
            drafted = len(report.proposed_token_ids)
            found.append(Timed(drafted, number, report.look_ahead_hit, (arrived_s - last_s) * 1e3))
        total, last_s = total + number, arrived_s
    return found


def figures(
    mode: str, rule: Rule, num_draft_tokens: int, rounds: Sequence[Timed], rates: Rates = ()
) -> dict[str, Any]:
    """Of a mode's rounds, by names in JSON."""
    verify_ms, ahead = STEPS["verify_ms"], mode == "look_ahead"
    each_ms = 0.0 if ahead else STEPS["draft_ms"]
    rate = sum(one.num_tokens for one in rounds) / sum(one.ms for one in rounds) * 1e3
    ideal = expected_tokens(rule, num_draft_tokens, rates) / verify_ms * 1e3
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
    runs: list[dict[str, Any]] = []
    progress("starting the services")
    model, spec = EMULATED.removesuffix(":"), engine(options.acceptance_rates)
    with blaming("acceptance_rates"):
        EmulatedSpec.parse(spec)
    target = TargetConfig(engine=spec, model=model, num_threads=1)
    draft = DraftConfig(engine=spec, model=model, num_threads=1)
    async with running_pair(target, draft, CoordinatorConfig()) as replicas:
        for mode, rules in MODES.items():
            look_ahead = LOOK_AHEAD_DEFAULT if mode == "look_ahead" else 0
            for added_ms in (0.0, ROUND_TRIP_MS) if mode != "plain" else (0.0,):
                async with replicas.coordinator(look_ahead, added_ms / 2) as client:
                    for rule in rules:
                        progress(f"{mode}, {rule}, {added_ms:g} ms more to the draft and back")
                        found = await _measure(options, client, mode, rule)
                        runs.append(found | {"round_trip_ms": added_ms})
    values = {
        "tokens": options.tokens,
        "runs": runs,
    }
    return Report(values, [table(f"{options.tokens} tokens of each", runs)])


async def _measure(
    options: EmulateOptions, client: Client, mode: str, rule: Rule
) -> dict[str, Any]:
    """The figures at the best K."""
    speeds, rates = {0: 0.0}, options.acceptance_rates
    most = min(NUM_DRAFT_TOKENS_MAX, len(rates) or NUM_DRAFT_TOKENS_MAX)
    for count in range(1, most + 1) if mode != "plain" else ():
        tried = await _decode(client, rule, count, round(options.tokens * SWEEP_SHARE))
        # Expected tokens, not those that came: of a few rounds, whose times vary little, they say
        # more.
        expected = sum(expected_tokens(rule, one.num_draft_tokens, rates) for one in tried)
        speeds[count] = expected / sum(one.ms for one in tried)
    best = max(speeds, key=speeds.__getitem__)
    rounds = await _decode(client, rule, best, options.tokens)
    return figures(mode, rule, best, rounds, rates)


async def _decode(
    client: Client, rule: Rule, num_draft_tokens: int, num_tokens: int
) -> list[Timed]:
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
    return window((await complete(client, request)).rounds, num_tokens)
