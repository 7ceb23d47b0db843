"""Sessions that are really played, for the rehearsal and the validation of `outrider plan`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any, Final, NamedTuple

from rich.console import RenderableType

from benchmarks.acceptance import Answer, Sample, rules_at
from benchmarks.measurement import Progress
from benchmarks.processes import Replicas, running_pair
from benchmarks.report import table
from outrider.client import Client
from outrider.config import DeploymentConfig, DraftConfig
from outrider.engine.step_costs import StepCosts
from outrider.errors import Unavailable
from outrider.limits import DEADLINE_MS_MAX, NUM_DRAFT_TOKENS_MAX, PAGE_SIZE, SEED_MAX
from outrider.request import Finished, GenerateRequest, RoundReport, Tokens
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.grpc_link import draft_link, target_link
from outrider.transport.link import Link

from .round_times import Load, MeasuredStep, ServiceTimes, fitted, rebased
from .rounds import Rounds, Script, total

REHEARSED_K: Final = (0, 1, 8, 2, 4, 16)
"""The first prompt begins with the first of them, the second with the second, ..."""
TEXTS_MAX: Final = 4
"""Of as many categories."""
TOKENS_MAX: Final = 48
"""Of an answer."""
OUTLIER: Final = 3.0
"""A time of more than so many medians of its K was not the round's own."""
DESCRIBE_TIMEOUT_S: Final = 60.0
REACHED_MIN: Final = 50
"""Rounds that came to a depth, for what was accepted there to be compared."""
WARM_UP_TOKENS: Final = 4


class PlayedRound(NamedTuple):
    """One round, as its client saw it."""

    start: int
    """Tokens of the completion before it."""
    token_ids: tuple[int, ...]
    """Committed."""
    num_proposed: int
    num_accepted: int
    wait_s: float
    """For the proposal."""
    target_s: float
    """The target's queue and step."""
    arrived_s: float
    """Of its tokens, from the request's sending."""


@dataclass(frozen=True, slots=True)
class PlayedSession:
    """One whole answer."""

    text: Answer
    """That was read from the same prompt."""
    num_draft_tokens: int
    rounds: tuple[PlayedRound, ...]
    seconds: float
    """From the request's sending to its final event."""
    is_cached: bool = True
    """Whether both replicas had read the prompt before."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The completion."""
        return tuple(token_id for entry in self.rounds for token_id in entry.token_ids)


async def play(
    client: Client,
    text: Answer,
    sampling: tuple[float, Rule],
    num_draft_tokens: int,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> PlayedSession:
    """Lets the services answer the prompt of `text` at a temperature, under a rule; with its seed
    where no other is given. Raises what they refuse it with, and `Unavailable` where the answer was
    cut short."""
    temperature, rule = sampling
    request = GenerateRequest(
        prompt=text.prompt_ids, sampling=SamplingParams(temperature=temperature), rule=rule,
        num_draft_tokens=num_draft_tokens, deadline_ms=DEADLINE_MS_MAX, include_rounds=True,
        max_tokens=min(max_tokens or text.max_tokens, text.max_tokens),
        seed=text.seed if seed is None else seed,
    )  # fmt: skip
    rounds: list[PlayedRound] = []
    report: RoundReport | None = None
    sent_s = time.perf_counter()
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, RoundReport):
                report = event
            elif isinstance(event, Tokens) and report is not None and event.token_ids:
                rounds.append(
                    PlayedRound(
                        event.first_index, event.token_ids, len(report.proposed_token_ids),
                        report.num_accepted, report.draft_ms / 1e3,
                        (report.queue_ms + report.verify_ms) / 1e3, time.perf_counter() - sent_s,
                    )
                )  # fmt: skip
            elif isinstance(event, Finished):
                reason = event.finish_reason
    if not rounds or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise Unavailable(f"a measured request ended early: {reason.value}")
    return PlayedSession(text, num_draft_tokens, tuple(rounds), time.perf_counter() - sent_s)


async def rehearse(
    config: DeploymentConfig, samples: Sequence[Sample], shares_device: bool, progress: Progress
) -> list[ServiceTimes]:
    """The times of the services of `config` on this machine, for the temperature of each of
    `samples`, which are of the same prompts. Raises `Unavailable` where a service breaks off, and
    `ConfigError`."""
    progress("starting the services for a rehearsal")
    coordinator = config.coordinator
    if coordinator.lookup is not None:
        # Answers are rehearsed several times: none is to be copied from.
        lookup = replace(coordinator.lookup, suffix_tokens_per_tenant=0)
        coordinator = replace(coordinator, lookup=lookup)
    found: list[ServiceTimes] = []
    async with running_pair(config.target, config.draft, coordinator) as replicas:
        target, draft = await _tables(replicas)
        if target is None:
            raise Unavailable("the target does not say what its steps cost")
        known = ServiceTimes(
            target=target, verify=target, draft=draft, shares_device=shares_device,
            max_num_seqs=config.draft.step_sessions,
        )  # fmt: skip
        for sample in samples:
            async with replicas.coordinator(look_ahead=0) as client:
                played = await _play_all(client, sample, progress, is_first=not found)
            times = fit(known, config.draft, sample.temperature, played)
            # Whole prompts are read for the first sample alone, at the same cost for the others.
            found.append(replace(times, first=found[0].first) if found else times)
    return found


async def _tables(replicas: Replicas) -> tuple[StepCosts | None, StepCosts | None]:
    """Of the target and of the draft's model, if there is one."""
    links: list[Link[Any, Any]] = [target_link(replicas.target_address)]
    if replicas.draft_address:
        links.append(draft_link(replicas.draft_address))
    try:
        found = [(await link.describe(DESCRIBE_TIMEOUT_S)).step_costs for link in links]
    finally:
        for link in links:
            await link.close()
    return found[0], found[1] if len(found) > 1 else None


async def _play_all(
    client: Client, sample: Sample, progress: Progress, is_first: bool
) -> list[PlayedSession]:
    """`is_first`: the replicas have not read the prompts of the sample yet."""
    sampling = sample.temperature, rehearsed_rule(sample.temperature)
    # The first of each category, as far as there is time; then further ones.
    firsts = list({text.category: text for text in reversed(sample.texts)}.values())[::-1]
    texts = [*firsts, *(text for text in sample.texts if text not in firsts)][:TEXTS_MAX]
    seed = (texts[0].seed - 1) & SEED_MAX
    for warm_up in (0, REHEARSED_K[-1]):
        await play(client, texts[-1], sampling, warm_up, TOKENS_MAX, seed)
    played = []
    for index, text in enumerate(texts):
        number = f"prompt {index + 1} of {len(texts)}"
        progress(f"rehearsing temperature {sample.temperature:g}, {number}: {text.category}")
        first = index % len(REHEARSED_K)
        for place, k in enumerate((*REHEARSED_K[first:], *REHEARSED_K[:first])):
            session = await play(client, text, sampling, k, TOKENS_MAX)
            is_fresh = is_first and place == 0 and text is not texts[-1]
            played.append(replace(session, is_cached=not is_fresh))
    return played


def rehearsed_rule(temperature: float) -> Rule:
    """Coupled above 0, as its answers do not depend on K."""
    return rules_at(temperature)[-1]


def unread_tokens(prompt_tokens: int) -> int:
    """Tokens of a prompt that a replica reads again which has read it before: pages are kept."""
    return prompt_tokens - (prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def fit(
    known: ServiceTimes, draft: DraftConfig, temperature: float, played: Sequence[PlayedSession]
) -> ServiceTimes:
    """Puts the engines' tables where the sessions stood."""
    first, plain, wait = (list[tuple[float, float]]() for _ in range(3))
    verify, rest = list[MeasuredStep](), list[float]()
    for session in played:
        num_tokens, rounds = len(session.text.prompt_ids), session.rounds
        rows = unread_tokens(num_tokens) if session.is_cached else num_tokens
        first.append((known.target.step_seconds(rows), rounds[0].arrived_s))
        if session.num_draft_tokens == 0 and len(rounds) > 1:
            # A mean over the session: the target runs ahead, and its answers come in bunches.
            table_s = known.target.step_seconds(1, 1, num_tokens + len(rounds) // 2)
            elapsed_s = rounds[-1].arrived_s - rounds[0].arrived_s
            plain.append((table_s, elapsed_s / (len(rounds) - 1)))
    for k in sorted({session.num_draft_tokens for session in played} - {0}):
        drafted = [
            one
            for session in played
            if session.num_draft_tokens == k
            for one in _drafted_rounds(draft, temperature, session)
        ]
        longest_s = OUTLIER * median([took_s for *_, took_s in drafted] or [0.0])
        for steps, context, now, took_s in drafted:
            if took_s <= longest_s:
                step_s = 0.0 if known.draft is None else known.draft.step_seconds(1, 1, context)
                wait.append((steps * step_s, now.wait_s))
                verify.append(MeasuredStep(1 + now.num_proposed, context, now.target_s))
                rest.append(took_s - now.wait_s - now.target_s)
    return replace(
        known, verify=rebased(known.target, verify), plain=fitted(plain), wait=fitted(wait),
        rest_s=mean(rest or [0.0]), first=fitted(first),
    )  # fmt: skip


def _drafted_rounds(
    draft: DraftConfig, temperature: float, session: PlayedSession
) -> Iterator[tuple[int, int, PlayedRound, float]]:
    """Steps of the draft's model, context, the round, and its time, of those that were drafted
    behind one that was: before the first of these the draft may still read the prompt."""
    script, text = Script(draft, temperature), session.text
    max_tokens = min(TOKENS_MAX, text.max_tokens)
    for index, (before, now) in enumerate(pairwise(session.rounds)):
        wanted = min(session.num_draft_tokens, max_tokens - now.start - 1)
        if wanted < 1:
            continue
        committed = session.token_ids[: now.start]
        found = script.proposed(text, committed, wanted, rehearsed_rule(temperature))
        if index > 0 and found.num_tokens == now.num_proposed:
            context = len(text.prompt_ids) + now.start
            yield found.num_steps, context, now, now.arrived_s - before.arrived_s


@dataclass(frozen=True, slots=True)
class ValidatedK:
    """One K, predicted and measured. 0 is plain decoding."""

    num_draft_tokens: int
    predicted_tokens_per_second: float
    """With prompts that were read before: each K finds them so."""
    measured_tokens_per_second: float
    predicted_tokens_per_round: float
    measured_tokens_per_round: float
    predicted_by_position: tuple[float | None, ...]
    measured_by_position: tuple[float | None, ...]
    reached: tuple[int, ...]
    """Rounds that came to each depth."""

    @property
    def error(self) -> float:
        """Of the tokens a second, as a share of those measured."""
        return self.predicted_tokens_per_second / self.measured_tokens_per_second - 1.0

    @property
    def positions(self) -> list[tuple[float, float] | None]:
        """Acceptance by depth, predicted and measured; None where too few rounds came."""
        found = zip(
            self.predicted_by_position, self.measured_by_position, self.reached, strict=True
        )
        return [
            None if number < REACHED_MIN or ours is None or theirs is None else (ours, theirs)
            for ours, theirs, number in found
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All that was tried."""

    temperature: float
    rule: Rule
    chosen_num_draft_tokens: int
    by_k: tuple[ValidatedK, ...]
    num_same: int
    """Answers that were the ones that were read, over all K; all of them but for near ties."""
    num_answers: int

    def values(self) -> dict[str, Any]:
        """All of it, by its names in JSON."""
        pairs = [pair for entry in self.by_k for pair in entry.positions if pair is not None]
        rates = {entry.num_draft_tokens: entry.measured_tokens_per_second for entry in self.by_k}
        best = max(rates, key=rates.__getitem__)
        return asdict(self) | {
            "worst_error": max(abs(entry.error) for entry in self.by_k),
            "worst_position": max((abs(a - b) for a, b in pairs), default=None),
            "best_num_draft_tokens": best,
            "chosen_loss": 1.0 - rates[self.chosen_num_draft_tokens] / rates[best],
        }

    def render(self) -> list[RenderableType]:
        """For people."""
        speeds = [
            (
                str(one.num_draft_tokens), f"{one.predicted_tokens_per_second:.1f}",
                f"{one.measured_tokens_per_second:.1f}", f"{one.error:+.1%}",
                f"{one.predicted_tokens_per_round:.2f}", f"{one.measured_tokens_per_round:.2f}",
            )
            for one in self.by_k
        ]  # fmt: skip
        found = self.values()
        worst = found["worst_position"]
        return [
            table(
                f"Predicted and measured, temperature {self.temperature:g}, {self.rule.value}, "
                "prompts read before",
                ("K", "predicted tokens/s", "measured", "error", "a round", "measured"),
                speeds,
            ),
            f"tokens/s are off by {found['worst_error']:.1%} at most, acceptance at a position by "
            f"{'-' if worst is None else f'{worst:.3f}'}; K = {self.chosen_num_draft_tokens} is "
            f"{found['chosen_loss']:.1%} slower than the best, K = "
            f"{found['best_num_draft_tokens']}; {self.num_same} of {self.num_answers} answers are "
            "the ones that were read",
        ]


async def play_validation(
    client: Client, sample: Sample, rule: Rule, counts: Sequence[int], progress: Progress
) -> list[PlayedSession]:
    """Every prompt at each K of `counts`, the order of which turns round with each prompt. Before,
    each prompt is read once: then all find it alike."""
    texts, sampling, played = sample.texts, (sample.temperature, rule), []
    progress("warming up: every prompt is read")
    for index, text in enumerate(texts):
        # Seeds that no prompt has, as the second session of a seed may be drafted otherwise.
        seed = (texts[0].seed - 1 - index) & SEED_MAX
        await play(client, text, sampling, max(counts), WARM_UP_TOKENS, seed)
    for index, text in enumerate(texts):
        progress(f"prompt {index + 1} of {len(texts)}: {text.category}")
        order = counts if index % 2 == 0 else reversed(counts)
        played += [await play(client, text, sampling, k) for k in order]
    return played


def compared(
    played: Sequence[PlayedSession],
    predicted: Mapping[int, Sequence[Rounds]],
    times: ServiceTimes,
    sampling: tuple[float, Rule],
    chosen: int,
) -> Validation:
    """What was played at a temperature, under a rule, beside what `predicted` [K][texts] says."""
    by_k = []
    for k in sorted(predicted):
        sessions = [session for session in played if session.num_draft_tokens == k]
        told = total(predicted[k])
        timed = times.plain_seconds if k == 0 else times.drafted_seconds
        rows = [unread_tokens(len(session.text.prompt_ids)) for session in sessions]
        num_tokens = sum(len(session.token_ids) for session in sessions)
        reached, accepted = _positions(sessions)
        by_k.append(
            ValidatedK(
                k,
                told.num_tokens / (times.first_seconds(rows) + timed(told, Load())),
                num_tokens / sum(session.seconds for session in sessions),
                told.tokens_per_round,
                num_tokens / sum(len(session.rounds) for session in sessions),
                told.by_position,
                tuple(a / r if r else None for a, r in zip(accepted, reached, strict=True)),
                tuple(reached),
            )
        )
    return Validation(
        temperature=sampling[0], rule=sampling[1], chosen_num_draft_tokens=chosen,
        by_k=tuple(by_k), num_answers=len(played),
        num_same=sum(session.text.token_ids == session.token_ids for session in played),
    )  # fmt: skip


def _positions(sessions: Sequence[PlayedSession]) -> tuple[list[int], list[int]]:
    """Of each depth, how often a round came to it and how often it was accepted. Behind the end of
    an answer nothing is reached."""
    reached, accepted = ([0] * NUM_DRAFT_TOKENS_MAX for _ in range(2))
    for session in sessions:
        left = len(session.token_ids)
        for entry in session.rounds:
            for depth in range(min(entry.num_accepted + 1, entry.num_proposed, left)):
                reached[depth] += 1
                accepted[depth] += depth < entry.num_accepted
            left -= len(entry.token_ids)
    return reached, accepted
