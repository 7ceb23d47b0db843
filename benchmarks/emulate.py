"""`outrider bench emulate`: decoding modes on a pair of models of stated speed and acceptance.

The engines are emulated (`outrider.engine.emulated`). The services and Redis are real, each in a
process of its own.

modes       Each mode decodes one session under each of its rules, at the K that was fastest in
            short sessions. Modes that draft decode a second time with a longer round trip between
            coordinator and draft.
features    A head on the target drafts, and then a head on a draft replica, to which the target
            sends its hidden states. Each measurement is one session under the rule token.

fraction_of_ideal    tokens a second, divided by the tokens a second of ideal rounds; an ideal round
                     takes one target step and commits the expected number of tokens
look_ahead_hit_rate  share of rounds whose proposal was ready when the round began; null without
                     look-ahead
overhead_ms_p50      median of a round's time minus its model steps, which are the target's step
                     and, without look-ahead, the draft's K steps
X_bytes_per_round    mean number of bytes that coordinator and X send each other in a round
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from statistics import mean, median
from typing import Annotated, Any, Literal, NamedTuple

from outrider.client import Client
from outrider.config import EMULATED, CoordinatorConfig, DraftConfig, TargetConfig
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.limits import DEADLINE_MS_MAX, LOOK_AHEAD_DEFAULT
from outrider.request import GenerateRequest
from outrider.settings import between, blaming, checked
from outrider.speculation.sampling_params import Rule, SamplingParams

from .clients import complete
from .measurement import Completion, Progress, Round
from .options import Options
from .processes import Process, Replicas, running_pair
from .report import Report, table

PROMPT_TOKENS = 64
TOKENS_MAX = 8_000
"""Maximum of `--tokens`, because prompt and answer must fit into the emulated models' length."""
SPARE_TOKENS = 16
"""The last tokens of a session are not measured, because the last rounds draft fewer tokens."""
SWEEP_SHARE = 0.05
"""Length of the short sessions that determine the fastest K, as a share of `--tokens`."""
SWEEP_TOKENS_MIN = 24
DROPPED_SHARE = 0.05
DROPPED_MIN = 4
"""The first tokens of a session are not measured, because the first round has no draft, and the
second waits until the draft has prefilled. They are `DROPPED_SHARE` of all tokens, and at least
`DROPPED_MIN`."""
MODES = {
    "plain": (Rule.TOKEN,),
    "synchronous": (Rule.TOKEN, Rule.COUPLED),
    "look_ahead": (Rule.TOKEN, Rule.COUPLED),
}

STEPS = {"verify_ms": 18.3, "verify_tokens": 16, "draft_ms": 1.3, "draft_branches": 64}
"""Step times of a target of 70 billion parameters and a draft of one billion."""
LAW = {
    "vocab_size": 32_000, "support": 64, "exponent": 1.706, "order": 3, "deviation": 0.645,
}  # fmt: skip
"""The distributions of the emulated models, by parameters of `EmulatedSpec`."""
ACCEPTANCE = {Rule.TOKEN: 0.8000, Rule.COUPLED: 0.7627}
"""Chance that a draft token is accepted, given that all earlier draft tokens were accepted. The
values follow from `LAW`."""
NUM_DRAFT_TOKENS_MAX = 14
ROUND_TRIP_MS = 5.0
"""Time by which `modes` lengthens the round trip between coordinator and draft."""

PLACES = (("target", 1), ("draft", 576), ("draft", 4_096))
"""Where a head drafts, and the width of its hidden states. The demo target has width 576, a model
of eight billion parameters 4,096."""
FEATURE_ROUND_TRIPS_MS = (0.0, 1.0, 5.0)
"""Times by which `features` lengthens the round trip between coordinator and draft."""
FEATURES_K = 6
"""The fastest K of `modes` without look-ahead."""

Rates = tuple[float, ...]


def engine(rates: Rates = (), **values: object) -> str:
    values = LAW | STEPS | values
    if rates:
        values["acceptance_rates"] = "/".join(map(str, rates))
    return EMULATED + ",".join(f"{key}={value}" for key, value in values.items())


def expected_tokens(rule: Rule, num_draft_tokens: int, rates: Rates = ()) -> float:
    """Expected number of tokens that a round commits."""
    if rates:
        return 1.0 + sum(rates[:num_draft_tokens])
    return sum(ACCEPTANCE[rule] ** depth for depth in range(num_draft_tokens + 1))


@checked()
class EmulateOptions(Options):
    """Options of `bench emulate`."""

    parts: tuple[Literal["modes", "features"], ...] = ("modes",)
    """What to measure."""
    tokens: Annotated[int, between(32, TOKENS_MAX)] = 4_000
    """Tokens of each session."""
    acceptance_rates: tuple[Annotated[float, between(0, 1)], ...] = ()
    """Chances that a round accepts at least 1, 2, ... draft tokens, like vLLM's
    synthetic_acceptance_rates; unset = they follow from the models' distributions."""


class Timed(NamedTuple):
    num_draft_tokens: int
    num_tokens: int
    look_ahead_hit: bool
    ms: float
    """Time since the tokens of the previous round arrived."""


def window(rounds: Sequence[Round], num_tokens: int) -> list[Timed]:
    """The measured rounds of a session, from the end of the dropped tokens to the round that
    commits token number `num_tokens`."""
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
    with blaming("acceptance_rates"):
        EmulatedSpec.parse(engine(options.acceptance_rates))
    parts = {"modes": ("runs", _modes), "features": ("features", _features)}
    values: dict[str, Any] = {"tokens": options.tokens}
    for part in options.parts:
        name, measure = parts[part]
        progress("starting the services")
        values[name] = await measure(options, progress)
    title = f"sessions of {options.tokens} tokens"
    return Report(values, [table(title, values[parts[part][0]]) for part in options.parts])


def _pair(spec: str, *, drafts: bool = True) -> AbstractAsyncContextManager[Replicas]:
    model = EMULATED.removesuffix(":")
    target = TargetConfig(engine=spec, model=model, num_threads=1)
    draft = DraftConfig(engine=spec, model=model, num_threads=1) if drafts else None
    return running_pair(target, draft, CoordinatorConfig())


async def _modes(options: EmulateOptions, progress: Progress) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    async with _pair(engine(options.acceptance_rates)) as replicas:
        for mode, rules in MODES.items():
            look_ahead = LOOK_AHEAD_DEFAULT if mode == "look_ahead" else 0
            for added_ms in (0.0, ROUND_TRIP_MS) if mode != "plain" else (0.0,):
                async with replicas.coordinator(look_ahead, added_ms / 2) as (client, _):
                    for rule in rules:
                        progress(f"{mode}, {rule}, round trip {added_ms:g} ms longer")
                        found = await _measure(options, client, mode, rule)
                        runs.append(found | {"round_trip_ms": added_ms})
    return runs


async def _features(options: EmulateOptions, progress: Progress) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for place, width in PLACES:
        apart = place == "draft"
        spec = engine(options.acceptance_rates, head_on=place, feature_width=width)
        async with _pair(spec, drafts=apart) as replicas:
            for added_ms in FEATURE_ROUND_TRIPS_MS if apart else (0.0,):
                progress(f"head on {place}, width {width}, round trip {added_ms:g} ms longer")
                async with replicas.coordinator(delay_ms=added_ms / 2) as running:
                    found = await _measure_head(options, *running)
                at = {"head_on": place, "feature_width": width if apart else None}
                runs.append(at | {"round_trip_ms": added_ms} | found)
    return runs


async def _measure_head(
    options: EmulateOptions, client: Client, coordinator: Process
) -> dict[str, Any]:
    """Measures a session whose prompt has one token, because the hidden states of a longer prompt
    would count as bytes of the rounds."""
    rates = options.acceptance_rates
    k = min(FEATURES_K, len(rates) or FEATURES_K)
    await _decode(client, Rule.TOKEN, k, SWEEP_TOKENS_MIN)
    before = (await coordinator.ask({}))["wire_bytes"]
    done = await _decode(client, Rule.TOKEN, k, options.tokens, prompt_tokens=1)
    after = (await coordinator.ask({}))["wire_bytes"]
    rounds = window(done.rounds, options.tokens)
    found = figures("synchronous", Rule.TOKEN, k, rounds, rates)
    shown = ("num_draft_tokens", "tokens_per_second", "tokens_per_round", "overhead_ms_p50")
    return {
        "round_ms_p50": median(one.ms for one in rounds),
        **{name: found[name] for name in shown},
        **{
            f"{role}_bytes_per_round": (after[role] - before[role]) / len(done.rounds)
            for role in ("target", "draft")
        },
    }


async def _measure(
    options: EmulateOptions, client: Client, mode: str, rule: Rule
) -> dict[str, Any]:
    speeds, rates = {0: 0.0}, options.acceptance_rates
    most = min(NUM_DRAFT_TOKENS_MAX, len(rates) or NUM_DRAFT_TOKENS_MAX)
    for count in range(1, most + 1) if mode != "plain" else ():
        num_tokens = max(SWEEP_TOKENS_MIN, round(options.tokens * SWEEP_SHARE))
        tried = window((await _decode(client, rule, count, num_tokens)).rounds, num_tokens)
        # In so few rounds, the actual number of tokens varies much, so the expected number is used.
        expected = sum(expected_tokens(rule, one.num_draft_tokens, rates) for one in tried)
        speeds[count] = expected / sum(one.ms for one in tried)
    best = max(speeds, key=speeds.__getitem__)
    rounds = (await _decode(client, rule, best, options.tokens)).rounds
    return figures(mode, rule, best, window(rounds, options.tokens), rates)


async def _decode(
    client: Client, rule: Rule, num_draft_tokens: int, num_tokens: int,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Completion:  # fmt: skip
    request = GenerateRequest(
        prompt=tuple(range(1, prompt_tokens + 1)),
        sampling=SamplingParams(temperature=1.0),
        max_tokens=num_tokens + SPARE_TOKENS,
        ignore_eos=True,
        seed=0,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        deadline_ms=DEADLINE_MS_MAX,
        include_rounds=True,
    )
    return await complete(client, request)
