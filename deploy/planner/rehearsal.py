"""The rehearsal and the validation of `outrider plan`: sessions through the real services."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

from benchmarks.acceptance import Answer, Sample, rules_at
from benchmarks.clients import complete
from benchmarks.measurement import Completion, Progress
from benchmarks.processes import Replicas, running_pair
from outrider.client import Client
from outrider.config import DeploymentConfig, DraftConfig
from outrider.engine.step_costs import StepCosts
from outrider.errors import Unavailable
from outrider.limits import DEADLINE_MS_MAX, NUM_DRAFT_TOKENS_MAX, PAGE_SIZE, SEED_MAX
from outrider.request import GenerateRequest, RoundReport
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.grpc_link import draft_link, target_link
from outrider.transport.link import Link

from .choosing import SWEEP, Replays, TemperaturePlan, choose
from .rounds import Option, Rounds, Script, ServiceTimes, fitted, total

REHEARSED_K = (0, 1, 8, 2, 4, 16)
"""Values of K in a rehearsal; every second prompt has them in reverse order."""
TEXTS_MAX = 4
TOKENS_MAX = 48
"""Length of a rehearsed answer."""
OUTLIER = 3.0
"""Rounds longer than this many medians of their K are ignored."""
DESCRIBE_TIMEOUT_S = 60.0
REACHED_MIN = 50
"""Rounds that must have reached a depth for its acceptance to be compared."""
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class PlayedSession:
    """One session through the services."""

    text: Answer
    """The target's answer to the same prompt, as it was read."""
    num_draft_tokens: int
    done: Completion
    is_cached: bool = True
    """Whether both replicas had the prompt in their prefix caches."""

    @property
    def unread_tokens(self) -> int:
        """Tokens of the prompt that had to be prefilled; full pages are cached."""
        num = len(self.text.prompt_ids)
        return num - (num - 1) // PAGE_SIZE * PAGE_SIZE if self.is_cached else num


async def play(
    client: Client, text: Answer, temperature: float, rule: Rule, num_draft_tokens: int
) -> PlayedSession:
    """Lets the services answer the prompt of `text`, with its seed. Raises as `complete`."""
    request = GenerateRequest(
        prompt=text.prompt_ids, sampling=SamplingParams(temperature=temperature), rule=rule,
        num_draft_tokens=num_draft_tokens, deadline_ms=DEADLINE_MS_MAX, include_rounds=True,
        max_tokens=text.max_tokens, seed=text.seed,
    )  # fmt: skip
    return PlayedSession(text, num_draft_tokens, await complete(client, request))


async def play_all(
    client: Client, sample: Sample, rule: Rule, counts: Sequence[int], progress: Progress
) -> list[PlayedSession]:
    """Plays every prompt at each K of `counts`, whose order is reversed for every second prompt."""
    played: list[PlayedSession] = []
    for index, text in enumerate(sample.texts):
        number = f"prompt {index + 1} of {len(sample.texts)}"
        progress(f"temperature {sample.temperature:g}, {number}: {text.category}")
        order = counts if index % 2 == 0 else reversed(counts)
        played += [await play(client, text, sample.temperature, rule, k) for k in order]
    return played


async def rehearsed_plans(
    config: DeploymentConfig, samples: Sequence[Sample], progress: Progress, sessions: int, *,
    validates: bool, **link: Any,
) -> tuple[tuple[TemperaturePlan, ...], dict[str, Any] | None]:  # fmt: skip
    """A plan for each sample (all of the same prompts), and if `validates` the validation of the
    first one, with a fixed K and without look-ahead. `link` are further fields of `ServiceTimes`.
    Raises `Unavailable`."""
    replays = [Replays(config.draft, sample) for sample in samples]
    progress("starting the services for a rehearsal")
    coordinator = config.coordinator
    if coordinator.lookup is not None:
        # Prompts are answered several times, so answers must not be copied.
        lookup = replace(coordinator.lookup, suffix_tokens_per_tenant=0)
        coordinator = replace(coordinator, lookup=lookup)
    async with running_pair(config.target, config.draft, coordinator) as replicas:
        target, draft = await _tables(replicas)
        if target is None:
            raise Unavailable("the target does not report the costs of its steps")
        known = ServiceTimes(
            target=target, draft=draft, target_max_num_seqs=config.target.max_num_seqs,
            max_num_seqs=config.draft.max_num_seqs, **link,
        )  # fmt: skip
        times: list[ServiceTimes] = []
        for sample in samples:
            async with replicas.coordinator() as (client, _):
                rehearsed = await _rehearsed(client, sample, progress, is_first=not times)
            found = fit(known, config.draft, sample.temperature, rehearsed)
            # Only the first sample prefills whole prompts; the others would take as long.
            times.append(replace(found, first=times[0].first) if times else found)
        plans = tuple(choose(sessions, *pair) for pair in zip(replays, times, strict=True))
        if not validates:
            return plans, None
        chosen, counts = plans[0].chosen, (0, *SWEEP)
        rule = chosen.rule if chosen.num_draft_tokens else replays[0].rules[-1]
        async with replicas.coordinator() as (client, _):
            played = await play_validation(client, samples[0], rule, counts, progress)
    predicted = {k: replays[0].rounds[rule, k] for k in counts}
    return plans, validation(played, predicted, times[0], rule, chosen.num_draft_tokens)


async def _tables(replicas: Replicas) -> tuple[StepCosts | None, StepCosts | None]:
    """The cost tables of the target and of the draft model, if there is one."""
    links: list[Link] = [target_link(replicas.target_address)]
    if replicas.draft_address:
        links.append(draft_link(replicas.draft_address))
    try:
        found = [(await link.describe(DESCRIBE_TIMEOUT_S)).step_costs for link in links]
    finally:
        for link in links:
            await link.close()
    return found[0], found[1] if len(found) > 1 else None


async def _rehearsed(
    client: Client, sample: Sample, progress: Progress, is_first: bool
) -> list[PlayedSession]:
    """`is_first`: the prompts are not cached yet."""
    rule = rehearsed_rule(sample.temperature)
    # Evenly from the sample, so from different categories.
    texts = sample.texts[:: math.ceil(len(sample.texts) / TEXTS_MAX)]
    texts = tuple(replace(text, max_tokens=min(TOKENS_MAX, text.max_tokens)) for text in texts)
    warm_up = replace(texts[-1], seed=(texts[0].seed - 1) & SEED_MAX)
    for k in (0, REHEARSED_K[-1]):
        await play(client, warm_up, sample.temperature, rule, k)
    played = await play_all(client, replace(sample, texts=texts), rule, REHEARSED_K, progress)
    fresh = range(0, len(played) - len(REHEARSED_K), len(REHEARSED_K)) if is_first else ()
    return [replace(one, is_cached=index not in fresh) for index, one in enumerate(played)]


def rehearsed_rule(temperature: float) -> Rule:
    """Greedy, or coupled above 0: answers do not depend on K."""
    return rules_at(temperature)[-1]


def fit(
    known: ServiceTimes, draft: DraftConfig, temperature: float, played: Sequence[PlayedSession]
) -> ServiceTimes:
    """Fits lines over the engines' tables to the times of the sessions."""
    first, plain, wait, verify = (list[tuple[float, float]]() for _ in range(4))
    rest = list[float]()
    step_seconds = known.target.step_seconds
    drafted: dict[int, list[tuple[int, int, RoundReport, float]]] = {}
    for session in played:
        num_tokens, rounds = len(session.text.prompt_ids), session.done.rounds
        k = session.num_draft_tokens
        first.append((step_seconds(session.unread_tokens), rounds[0].arrived_s))
        if k > 0:
            drafted.setdefault(k, []).extend(_drafted_rounds(draft, temperature, session))
        elif len(rounds) > 1:
            # The mean of the session, as the target runs ahead and tokens arrive in bursts.
            elapsed_s = rounds[-1].arrived_s - rounds[0].arrived_s
            table_s = step_seconds(1, 1, num_tokens + len(rounds) // 2)
            plain.append((table_s, elapsed_s / (len(rounds) - 1)))
    for found in drafted.values():
        longest_s = OUTLIER * median([seconds for *_, seconds in found] or [0.0])
        for steps, context, report, seconds in found:
            if seconds <= longest_s:
                step_s = 0.0 if known.draft is None else known.draft.step_seconds(1, 1, context)
                wait_s, target_s = report.draft_ms / 1e3, (report.queue_ms + report.verify_ms) / 1e3
                wait.append((steps * step_s, wait_s))
                rows = 1 + len(report.proposed_token_ids)
                verify.append((step_seconds(rows, 1, context), target_s))
                rest.append(seconds - wait_s - target_s)
    return replace(
        known, verify=fitted(verify), plain=fitted(plain), wait=fitted(wait),
        rest_s=mean(rest or [0.0]), first=fitted(first),
    )  # fmt: skip


def _drafted_rounds(
    draft: DraftConfig, temperature: float, session: PlayedSession
) -> Iterator[tuple[int, int, RoundReport, float]]:
    """Steps of the draft model, context, report and seconds of each drafted round, except the
    first, in which the draft may still prefill the prompt."""
    script, text = Script(draft, temperature), session.text
    for index, (before, now) in enumerate(pairwise(session.done.rounds)):
        start = now.tokens.first_index
        wanted = min(session.num_draft_tokens, text.max_tokens - start - 1)
        if wanted < 1:
            continue
        found = script.attempt(text, start, wanted, rehearsed_rule(temperature))
        if index > 0 and found.num_proposed == len(now.report.proposed_token_ids):
            context, seconds = len(text.prompt_ids) + start, now.arrived_s - before.arrived_s
            yield found.num_steps, context, now.report, seconds


async def play_validation(
    client: Client, sample: Sample, rule: Rule, counts: Sequence[int], progress: Progress
) -> list[PlayedSession]:
    """As `play_all`, with every prompt cached before."""
    texts = sample.texts
    progress("warming up: prefilling every prompt")
    for index, text in enumerate(texts):
        seed = (texts[0].seed - 1 - index) & SEED_MAX
        short = replace(text, seed=seed, max_tokens=min(WARM_UP_TOKENS, text.max_tokens))
        await play(client, short, sample.temperature, rule, max(counts))
    return await play_all(client, sample, rule, counts, progress)


def validation(
    played: Sequence[PlayedSession],
    predicted: Mapping[int, Sequence[Rounds]],
    times: ServiceTimes,
    rule: Rule,
    chosen: int,
) -> dict[str, Any]:
    """Compares `played` sessions, whose prompts were cached, with `predicted` [K][texts] rounds
    without look-ahead. Returns the JSON object: `error` is predicted over measured minus 1,
    `worst_position` the largest error of an acceptance, and `chosen_loss` how much slower the
    chosen K is than the fastest measured one."""
    by_k: list[dict[str, Any]] = []
    for k in sorted(predicted):
        sessions = [session for session in played if session.num_draft_tokens == k]
        told, way = total(predicted[k]), Option(rule=rule, num_draft_tokens=k)
        first_s = times.first_seconds(session.unread_tokens for session in sessions)
        num_tokens = sum(session.done.num_tokens for session in sessions)
        predicted_rate = told.num_tokens / (first_s + times.seconds(told, way))
        measured_rate = num_tokens / sum(session.done.seconds for session in sessions)
        by_k.append(
            {
                "num_draft_tokens": k,
                "predicted_tokens_per_second": predicted_rate,
                "measured_tokens_per_second": measured_rate,
                "error": predicted_rate / measured_rate - 1.0,
                "positions": _positions(sessions, told),
            }
        )  # fmt: skip
    rates = {entry["num_draft_tokens"]: entry["measured_tokens_per_second"] for entry in by_k}
    best = max(rates, key=rates.__getitem__)
    pairs = [pair for entry in by_k for pair in entry["positions"] if pair is not None]
    return {
        "rule": rule.value,
        "by_k": by_k,
        "num_answers": len(played),
        "num_same": sum(session.text.token_ids == session.done.token_ids for session in played),
        "worst_error": max(abs(entry["error"]) for entry in by_k),
        "worst_position": max((abs(a - b) for a, b in pairs), default=None),
        "best_num_draft_tokens": best,
        "chosen_loss": 1.0 - rates[chosen] / rates[best],
    }


def _positions(sessions: Sequence[PlayedSession], told: Rounds) -> list[tuple[float, float] | None]:
    """Acceptance by depth, predicted and measured; None if too few rounds reached the depth. Depths
    after the end of an answer do not count."""
    reached, accepted = ([0] * NUM_DRAFT_TOKENS_MAX for _ in range(2))
    for session in sessions:
        left = session.done.num_tokens
        for one in session.done.rounds:
            num_accepted = one.report.num_accepted
            num = min(num_accepted + 1, len(one.report.proposed_token_ids), left)
            for depth in range(num):
                reached[depth] += 1
                accepted[depth] += depth < num_accepted
            left -= len(one.tokens.token_ids)
    return [
        None if theirs is None or num < REACHED_MIN else (theirs, good / num)
        for theirs, good, num in zip(told.by_position, accepted, reached, strict=True)
    ]
