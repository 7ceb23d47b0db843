"""`outrider bench emulate`: compares decoding modes on emulated models.

The engines are emulated, with given step times and acceptance (`outrider.engine.emulated`). The
services and Redis are real, each in a process of its own.

Each run of `RUNS` is one session. The modes are plain decoding, synchronous drafting, and drafting
with look-ahead, which drafts the next round during verification. Both modes with drafts also run
with a longer round trip between coordinator and draft. Each run uses the fastest known K.

fraction_of_ideal    R / I; R is the tokens a second, and I is the tokens a second of ideal rounds;
                     each takes one target step and commits the expected number of tokens
look_ahead_hit_rate  share of rounds whose proposal was ready when the round began; null without
                     look-ahead
overhead_ms_p50      median of T - S over the rounds; T is a round's time, and S is the time of its
                     target step and, without look-ahead, of its K draft steps
"""

from collections.abc import Sequence
from operator import sub
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

from outrider.config.deployment import EMULATED, CoordinatorConfig, DraftConfig, TargetConfig
from outrider.config.emulated_spec import EmulatedSpec
from outrider.foundation.settings import between, blaming, checked
from outrider.limits import LOOK_AHEAD_DEFAULT
from outrider.speculation.sampling_params import Rule

from .clients import complete
from .measurement import Progress, Round, bench_request
from .options import Options
from .processes import running_pair
from .report import Report, table

TOKENS_MAX = 8_000
"""Prompt and answer must fit into the context of the emulated models."""
SPARE_TOKENS = 16
"""Tokens at the end of a session that are not measured, because the last rounds draft fewer."""
WARM_UP_TOKENS = 24
DROPPED_SHARE = 0.05
DROPPED_MIN = 4
"""The first tokens of a session are not measured: `DROPPED_SHARE` of all tokens, and at least
`DROPPED_MIN`. The first round has no draft, and the second round waits for the draft's prefill."""
STEPS = {"verify_ms": 18.3, "verify_tokens": 16, "draft_ms": 1.3, "draft_branches": 64}
"""Step times of a target of 70 billion parameters and a draft of one billion."""
LAW = {"vocab_size": 32_000, "support": 64, "exponent": 1.706, "order": 3, "deviation": 0.645}
"""Parameters of `EmulatedSpec` for the distributions of the emulated models."""
ACCEPTANCE = {Rule.TOKEN: 0.8000, Rule.COUPLED: 0.7627}
"""A draft token's chance of acceptance if all earlier ones are accepted, computed from `LAW`."""


class Run(NamedTuple):
    mode: str
    rule: Rule
    num_draft_tokens: int
    round_trip_ms: float = 0.0
    """Time added to each round trip between coordinator and draft."""


RUNS = (
    Run("plain", Rule.TOKEN, 0),
    Run("synchronous", Rule.TOKEN, 6),
    Run("look_ahead", Rule.COUPLED, 9),
    Run("synchronous", Rule.TOKEN, 9, 5.0),
    Run("look_ahead", Rule.COUPLED, 8, 5.0),
)
Rates = tuple[float, ...]


def engine(rates: Rates = ()) -> str:
    values: dict[str, Any] = {**LAW, **STEPS}
    if rates:
        values["acceptance_rates"] = "/".join(map(str, rates))
    return EMULATED + ",".join(f"{key}={value}" for key, value in values.items())


@checked()
class EmulateOptions(Options):
    tokens: Annotated[int, between(32, TOKENS_MAX)] = 4_000
    """Tokens of each session."""
    acceptance_rates: tuple[Annotated[float, between(0, 1)], ...] = ()
    """Chances that a round accepts at least 1, 2, ... draft tokens, like vLLM's
    synthetic_acceptance_rates; unset = the chances that follow from the models' distributions."""


def window(rounds: Sequence[Round], num_tokens: int) -> list[Round]:
    """The rounds after the dropped tokens, up to the round that commits token `num_tokens`."""
    dropped = max(DROPPED_MIN, round(num_tokens * DROPPED_SHARE))
    return [timed for timed in rounds if dropped <= timed.tokens.first_index < num_tokens]


def figures(run: Run, rounds: Sequence[Round], rates: Rates = ()) -> dict[str, Any]:
    verify_ms, ahead = STEPS["verify_ms"], run.mode == "look_ahead"
    each_ms = 0.0 if ahead else STEPS["draft_ms"]
    reports, tokens, seconds = zip(*rounds, strict=True)
    tokens_per_round = mean(len(event.token_ids) for event in tokens)
    rate = tokens_per_round / mean(seconds)
    depths = range(1, run.num_draft_tokens + 1)
    accepted = rates[: len(depths)] or [ACCEPTANCE[run.rule] ** depth for depth in depths]
    ideal = (1.0 + sum(accepted)) / verify_ms * 1e3
    steps_ms = [verify_ms + len(report.proposed_token_ids) * each_ms for report in reports]
    return {
        "tokens_per_second": rate,
        "tokens_per_round": tokens_per_round,
        "fraction_of_ideal": rate / ideal,
        "look_ahead_hit_rate": mean(report.look_ahead_hit for report in reports) if ahead else None,
        "round_ms_p50": median(seconds) * 1e3,
        "overhead_ms_p50": median(map(sub, (1e3 * duration_s for duration_s in seconds), steps_ms)),
    }


async def run(options: EmulateOptions, progress: Progress) -> Report:
    with blaming("acceptance_rates"):
        EmulatedSpec.parse(engine(options.acceptance_rates))
    rows: list[dict[str, Any]] = []
    for case in RUNS:
        progress(f"run {len(rows) + 1} of {len(RUNS)}")
        rows.append(await _measure(options, case))
    shown = table(f"{options.tokens} tokens", rows)
    return Report({"tokens": options.tokens, "modes": rows}, [shown])


async def _measure(options: EmulateOptions, run: Run) -> dict[str, Any]:
    rates = options.acceptance_rates
    if rates:
        run = run._replace(num_draft_tokens=min(run.num_draft_tokens, len(rates)))
    services: Any = {"engine": engine(rates), "model": EMULATED.removesuffix(":"), "num_threads": 1}
    target, draft = TargetConfig(**services), DraftConfig(**services)
    look_ahead = LOOK_AHEAD_DEFAULT if run.mode == "look_ahead" else 0
    async with (
        running_pair(target, draft, CoordinatorConfig(), run.round_trip_ms / 2) as replicas,
        replicas.coordinator(look_ahead) as (client, _),
    ):
        for num_tokens in (WARM_UP_TOKENS, options.tokens):
            request = bench_request(
                (1,),
                num_tokens + SPARE_TOKENS,
                1.0,
                ignore_eos=True,
                seed=0,
                rule=run.rule,
                num_draft_tokens=run.num_draft_tokens,
                include_rounds=True,
            )
            done = await complete(client, request)
    return run._asdict() | figures(run, window(done.rounds, options.tokens), rates)
