"""The rehearsal of `outrider plan` measures the times of short sessions on the real services."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, NamedTuple

from outrider.bench.acceptance import Answer, Sample, rules_at
from outrider.bench.clients import complete
from outrider.bench.measurement import Completion, Progress, bench_request
from outrider.bench.processes import Replicas, running_pair
from outrider.client import Client
from outrider.config.deployment import DeploymentConfig, DraftConfig
from outrider.errors import Unavailable
from outrider.interfaces.request import RoundReport
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import SEED_MAX
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.link import DraftLink, TargetLink

from .choosing import TemperaturePlan, choose
from .rounds import Line, Script, ServiceTimes, fitted

REHEARSED_K = (0, 1, 8, 2, 4, 16)
"""Values of K in a rehearsal. Every second prompt uses these values in reverse order."""
TEXTS_MAX = 4
TOKENS_MAX = 48
OUTLIER = 3.0
"""A round is ignored if its time exceeds `OUTLIER` * (median time of rounds with the same K)."""
DESCRIBE_TIMEOUT_S = 60.0


class PlayedSession(NamedTuple):
    text: Answer
    """The prompt, and the target's answer in the sample."""
    num_draft_tokens: int
    done: Completion


async def rehearsed_plans(
    config: DeploymentConfig,
    samples: Sequence[Sample],
    progress: Progress,
    sessions: int,
    **link: Any,
) -> tuple[TemperaturePlan, ...]:
    """A plan for each sample. All samples have the same prompts. `link` has further fields of
    `ServiceTimes`. If a plan has a `doubt`, measures its times once more. Raises `Unavailable`."""
    progress("starting the services for a rehearsal")
    # Each prompt is answered several times, and a look-up must not copy from the earlier answers.
    # Nor may the target run ahead with drafts, because the time of each round is measured.
    lookup = replace(config.coordinator.lookup, suffix_tokens_per_tenant=0)
    coordinator = replace(config.coordinator, lookup=lookup, lookup_on="coordinator")
    async with running_pair(config.target, config.draft, coordinator) as replicas:
        target, draft = await _tables(replicas)
        if target is None:
            raise Unavailable("the target does not report the costs of its steps")
        known = ServiceTimes(
            target=target,
            draft=draft,
            target_max_num_seqs=config.target.max_num_seqs,
            max_num_seqs=config.draft.max_num_seqs,
            **link,
        )
        plans: list[TemperaturePlan] = []
        first: Line | None = None
        for sample in samples:
            async with replicas.coordinator() as (client, _):
                for _ in range(2):
                    rehearsed = await _rehearsed(client, sample, progress)
                    times = fit(known, config.draft, sample.temperature, rehearsed)
                    # Only the first rehearsal prefills whole prompts. Later, prompts are cached.
                    first = first or times.first
                    times = replace(times, first=first)
                    plan = await asyncio.to_thread(choose, sessions, config.draft, sample, times)
                    if not plan.doubt:
                        break
                    progress(plan.doubt)
            plans.append(plan)
    return tuple(plans)


async def _tables(replicas: Replicas) -> tuple[StepCosts | None, StepCosts | None]:
    links: list[TargetLink | DraftLink] = [GrpcLink(VERIFY, replicas.target_address)]
    if replicas.draft_address:
        links.append(GrpcLink(DRAFT, replicas.draft_address))
    try:
        costs = [(await link.describe(DESCRIBE_TIMEOUT_S)).step_costs for link in links]
    finally:
        for link in links:
            await link.close()
    return costs[0], costs[1] if len(costs) > 1 else None


async def _rehearsed(client: Client, sample: Sample, progress: Progress) -> list[PlayedSession]:
    # Greedy or coupled, because with these rules answers do not depend on K.
    rule = rules_at(sample.temperature)[-1]

    async def play(text: Answer, num_draft_tokens: int) -> PlayedSession:
        request = bench_request(
            text.prompt_ids,
            text.max_tokens,
            sample.temperature,
            rule=rule,
            seed=text.seed,
            num_draft_tokens=num_draft_tokens,
            include_rounds=True,
        )
        return PlayedSession(text, num_draft_tokens, await complete(client, request))

    # The chosen texts are spread over the sample, so that they are of different categories.
    texts = sample.texts[:: math.ceil(len(sample.texts) / TEXTS_MAX)]
    texts = tuple(replace(text, max_tokens=min(TOKENS_MAX, text.max_tokens)) for text in texts)
    # Reversed, because the warm-up must not put the prompt of a text into the prefix caches.
    warm_up = replace(
        texts[-1], prompt_ids=texts[-1].prompt_ids[::-1], seed=(texts[0].seed - 1) & SEED_MAX
    )
    for k in (0, REHEARSED_K[-1]):
        await play(warm_up, k)
    played: list[PlayedSession] = []
    for index, text in enumerate(texts):
        number = f"prompt {index + 1} of {len(texts)}"
        progress(f"temperature {sample.temperature:g}, {number}: {text.category}")
        ks = REHEARSED_K if index % 2 == 0 else REHEARSED_K[::-1]
        played += [await play(text, k) for k in ks]
    return played


def fit(
    known: ServiceTimes, draft: DraftConfig, temperature: float, played: Sequence[PlayedSession]
) -> ServiceTimes:
    """Returns `known` with corrections of the cost tables, each a `Line` fitted to `played`."""
    plain, wait, verify = (list[tuple[float, float]]() for _ in range(3))
    first: dict[int, tuple[float, float]] = {}
    rest = list[float]()
    step_seconds = known.target.step_seconds
    drafted: dict[int, list[tuple[int, int, RoundReport, float]]] = {}
    for session in played:
        num_tokens, rounds = len(session.text.prompt_ids), session.done.rounds
        k = session.num_draft_tokens
        # Only the first session with a prompt prefills it.
        first.setdefault(session.text.seed, (step_seconds(num_tokens), rounds[0].seconds))
        if k > 0:
            drafted.setdefault(k, []).extend(_drafted_rounds(draft, temperature, session))
        elif len(rounds) > 1:
            # Only the mean time of these rounds is known, because the target runs ahead and sends
            # the verdicts of several rounds together.
            table_s = step_seconds(1, 1, num_tokens + len(rounds) // 2)
            plain.append((table_s, mean(timed.seconds for timed in rounds[1:])))
    for drafted_rounds in drafted.values():
        longest_s = OUTLIER * median([seconds for *_, seconds in drafted_rounds] or [0.0])
        for steps, context, report, seconds in drafted_rounds:
            if seconds <= longest_s:
                step_s = 0.0 if known.draft is None else known.draft.step_seconds(1, 1, context)
                wait_s, target_s = report.draft_ms / 1e3, (report.queue_ms + report.verify_ms) / 1e3
                wait.append((steps * step_s, wait_s))
                rows = 1 + len(report.proposed_token_ids)
                verify.append((step_seconds(rows, 1, context), target_s))
                rest.append(seconds - wait_s - target_s)
    return replace(
        known,
        verify=fitted(verify),
        plain=fitted(plain),
        wait=fitted(wait),
        rest_s=mean(rest or [0.0]),
        first=fitted([*first.values()]),
    )


def _drafted_rounds(
    draft: DraftConfig, temperature: float, session: PlayedSession
) -> Iterator[tuple[int, int, RoundReport, float]]:
    """Yields for each round with a draft the number of draft steps, the number of tokens before the
    round, the report, and the duration in seconds. Skips the first round with a draft, in which the
    draft may prefill the prompt. Also skips rounds with an unexpected number of draft tokens."""
    script, text = Script(draft, temperature), session.text
    for index, now in enumerate(session.done.rounds[1:]):
        start = now.tokens.first_index
        wanted = min(session.num_draft_tokens, text.max_tokens - start - 1)
        if wanted < 1:
            continue
        attempt = script.attempt(text, start, wanted, rules_at(temperature)[-1])
        if index > 0 and attempt.num_proposed == len(now.report.proposed_token_ids):
            yield attempt.num_steps, len(text.prompt_ids) + start, now.report, now.seconds
