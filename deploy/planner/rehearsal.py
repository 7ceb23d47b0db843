"""Sessions that are really played, for the rehearsal and the validation of `outrider plan`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from benchmarks.measurement import Progress
from benchmarks.processes import Replicas, running_pair
from outrider.client import Client
from outrider.config import DeploymentConfig
from outrider.engine.step_costs import StepCosts
from outrider.errors import Unavailable, check
from outrider.limits import DEADLINE_MS_MAX, NUM_DRAFT_TOKENS_MAX, PAGE_SIZE, SEED_MAX
from outrider.request import Finished, GenerateRequest, RoundReport, Tokens
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.text_acceptance import NUM_DEPTHS
from outrider.transport.grpc_link import draft_link, target_link
from outrider.transport.link import Link

from .acceptance import Answer, DraftKind, Rounds, Sample, Script, rules_at, total
from .round_times import Load, MeasuredStep, ServiceTimes, fitted, rebased


@dataclass(frozen=True, slots=True)
class PlayedRound:
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

    num_draft_tokens: int
    rounds: tuple[PlayedRound, ...]
    seconds: float
    """From the request's sending to its final event."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The completion."""
        return tuple(token_id for entry in self.rounds for token_id in entry.token_ids)


async def play(
    client: Client,
    text: Answer,
    sampling: tuple[float, Rule],
    num_draft_tokens: int,
    max_tokens: int,
    seed: int | None = None,
) -> PlayedSession:
    """Lets the services answer the prompt of `text` at a temperature, under a rule; with its seed
    where no other is given. Raises what they refuse it with, and `Unavailable` where the answer was
    cut short."""
    temperature, rule = sampling
    request = GenerateRequest(
        prompt=text.prompt_ids,
        sampling=SamplingParams(temperature=temperature),
        max_tokens=min(max_tokens, text.max_tokens),
        seed=text.seed if seed is None else seed,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        deadline_ms=DEADLINE_MS_MAX,
        include_rounds=True,
    )
    rounds: list[PlayedRound] = []
    report: RoundReport | None = None
    sent_s = time.perf_counter()
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, RoundReport):
                report = event
            elif isinstance(event, Tokens) and report is not None and event.token_ids:
                arrived_s = time.perf_counter() - sent_s
                rounds.append(
                    PlayedRound(
                        event.first_index, event.token_ids, len(report.proposed_token_ids),
                        report.num_accepted, report.draft_ms / 1e3,
                        (report.queue_ms + report.verify_ms) / 1e3, arrived_s,
                    )
                )  # fmt: skip
            elif isinstance(event, Finished):
                reason = event.finish_reason
    seconds = time.perf_counter() - sent_s
    if not rounds or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise Unavailable(f"a measured request ended early: {reason.value}")
    return PlayedSession(num_draft_tokens, tuple(rounds), seconds)


REHEARSED_K: Final = (0, 1, 8, 2, 4, 16)
"""The first prompt begins with the first of them, the second with the second, ..."""
TEXTS_MAX: Final = 4
"""Of as many categories."""
TOKENS_MAX: Final = 48
"""Of an answer."""
OUTLIER: Final = 3.0
"""A time of more than so many medians of its K was not the round's own."""
DESCRIBE_TIMEOUT_S: Final = 60.0

Pairs = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One session, and its place."""

    text: Answer
    session: PlayedSession
    is_cached: bool
    """Whether both replicas had read the prompt before."""


async def rehearse(
    config: DeploymentConfig,
    kind: DraftKind,
    samples: Sequence[Sample],
    *,
    shares_device: bool,
    progress: Progress,
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
        target_costs, draft_costs = await _tables(replicas)
        if target_costs is None:
            raise Unavailable("the target does not say what its steps cost")
        tables = Tables(target_costs, draft_costs, config.draft.step_sessions)
        for sample in samples:
            async with replicas.coordinator(look_ahead=0) as client:
                played = await _play_all(client, sample, progress, is_first=not found)
            times = tables.fit(kind, sample.temperature, played, shares_device=shares_device)
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
    client: Client, sample: Sample, progress: Progress, *, is_first: bool
) -> list[Rehearsed]:
    """`is_first`: the replicas have not read the prompts of the sample yet."""
    sampling = sample.temperature, rehearsed_rule(sample.temperature)
    texts = rehearsed_texts(sample)
    for warm_up in (0, REHEARSED_K[-1]):
        seed = (texts[0].seed - 1) & SEED_MAX
        await play(client, texts[-1], sampling, warm_up, TOKENS_MAX, seed)
    played = []
    for index, text in enumerate(texts):
        progress(
            f"rehearsing temperature {sample.temperature:g}, prompt {index + 1} of {len(texts)}: "
            f"{text.category}"
        )
        first = index % len(REHEARSED_K)
        for place, k in enumerate((*REHEARSED_K[first:], *REHEARSED_K[:first])):
            session = await play(client, text, sampling, k, TOKENS_MAX)
            fresh = is_first and place == 0 and text is not texts[-1]
            played.append(Rehearsed(text, session, is_cached=not fresh))
    return played


def rehearsed_rule(temperature: float) -> Rule:
    """Coupled above 0, as its answers do not depend on K."""
    return rules_at(temperature)[-1]


def rehearsed_texts(sample: Sample) -> list[Answer]:
    """The first of each category, as far as there is time; then further ones."""
    firsts = list({text.category: text for text in reversed(sample.texts)}.values())[::-1]
    others = [text for text in sample.texts if text not in firsts]
    return [*firsts, *others][:TEXTS_MAX]


def unread_tokens(prompt_tokens: int) -> int:
    """Tokens of a prompt that a replica reads again which has read it before: pages are kept."""
    return prompt_tokens - (prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Tables:
    """What the engines say of their steps."""

    target: StepCosts
    draft: StepCosts | None
    max_num_seqs: int
    """Of a step of the draft."""

    def fit(
        self,
        kind: DraftKind,
        temperature: float,
        played: Sequence[Rehearsed],
        *,
        shares_device: bool,
    ) -> ServiceTimes:
        """Puts the tables where the sessions stood."""
        plain: Pairs = []
        first: Pairs = []
        for entry in played:
            first.append(self._first(entry))
            if entry.session.num_draft_tokens == 0 and len(entry.session.rounds) > 1:
                plain.append(self._plain(entry))
        wait: Pairs = []
        verify: list[MeasuredStep] = []
        rest: list[float] = []
        for k in sorted({entry.session.num_draft_tokens for entry in played} - {0}):
            drafted = [entry for entry in played if entry.session.num_draft_tokens == k]
            self._drafted(kind, temperature, drafted, wait, verify, rest)
        return ServiceTimes(
            target=self.target,
            verify=rebased(self.target, verify),
            draft=self.draft,
            plain=fitted(plain),
            wait=fitted(wait),
            rest_s=mean(rest) if rest else 0.0,
            first=fitted(first),
            max_num_seqs=self.max_num_seqs,
            shares_device=shares_device,
        )

    def _first(self, entry: Rehearsed) -> tuple[float, float]:
        num_tokens = len(entry.text.prompt_ids)
        rows = unread_tokens(num_tokens) if entry.is_cached else num_tokens
        return self.target.step_seconds(rows), entry.session.rounds[0].arrived_s

    def _plain(self, entry: Rehearsed) -> tuple[float, float]:
        """A mean over the session: the target runs ahead, and its answers come in bunches."""
        rounds = entry.session.rounds
        context = len(entry.text.prompt_ids) + len(rounds) // 2
        elapsed_s = rounds[-1].arrived_s - rounds[0].arrived_s
        return self.target.step_seconds(1, 1, context), elapsed_s / (len(rounds) - 1)

    def _drafted(
        self,
        kind: DraftKind,
        temperature: float,
        drafted: Sequence[Rehearsed],
        wait: Pairs,
        verify: list[MeasuredStep],
        rest: list[float],
    ) -> None:
        """Adds what rounds of one K say."""
        rounds = [
            (steps, context, before, now)
            for entry in drafted
            for steps, context, before, now in _drafted_rounds(kind, temperature, entry)
        ]
        if not rounds:
            return
        longest = OUTLIER * median(now.arrived_s - before.arrived_s for _, _, before, now in rounds)
        for steps, context, before, now in rounds:
            took_s = now.arrived_s - before.arrived_s
            if took_s > longest:
                continue
            step_s = 0.0 if self.draft is None else self.draft.step_seconds(1, 1, context)
            wait.append((steps * step_s, now.wait_s))
            verify.append(MeasuredStep(1 + now.num_proposed, context, now.target_s))
            rest.append(took_s - now.wait_s - now.target_s)


def _drafted_rounds(
    kind: DraftKind, temperature: float, entry: Rehearsed
) -> Iterator[tuple[int, int, PlayedRound, PlayedRound]]:
    """Steps of the draft's model, context, the round before and the round, of those that were
    drafted behind one that was: before the first of these the draft may still read the prompt."""
    script = Script(kind, temperature)
    rule = rehearsed_rule(temperature)
    text, session = entry.text, entry.session
    max_tokens = min(TOKENS_MAX, text.max_tokens)
    token_ids = session.token_ids
    for index, (before, now) in enumerate(pairwise(session.rounds)):
        wanted = min(session.num_draft_tokens, max_tokens - now.start - 1)
        if wanted < 1:
            continue
        found = script.proposed(text, token_ids[: now.start], wanted, rule)
        if index > 0 and found.num_tokens == now.num_proposed:
            yield found.num_steps, len(text.prompt_ids) + now.start, before, now


REACHED_MIN: Final = 50
"""Rounds that came to a depth, for what was accepted there to be compared."""
WARM_UP_TOKENS: Final = 4


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
            (ours, theirs)
            if number >= REACHED_MIN and ours is not None and theirs is not None
            else None
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

    @property
    def worst_error(self) -> float:
        """Of the tokens a second, over all K."""
        return max((abs(entry.error) for entry in self.by_k), default=0.0)

    @property
    def worst_position(self) -> float | None:
        """The largest difference in acceptance at a depth that enough rounds came to."""
        found = [pair for entry in self.by_k for pair in entry.positions if pair is not None]
        return max((abs(ours - theirs) for ours, theirs in found), default=None)

    @property
    def best(self) -> ValidatedK:
        """The fastest that was measured."""
        return max(self.by_k, key=lambda entry: entry.measured_tokens_per_second)

    @property
    def loss(self) -> float:
        """What the chosen K is slower than the best one, as a share of that."""
        chosen = next(e for e in self.by_k if e.num_draft_tokens == self.chosen_num_draft_tokens)
        return 1.0 - chosen.measured_tokens_per_second / self.best.measured_tokens_per_second

    def values(self) -> dict[str, object]:
        """All of it, by its names in JSON."""
        return asdict(self) | {
            "worst_error": self.worst_error,
            "worst_position": self.worst_position,
            "best_num_draft_tokens": self.best.num_draft_tokens,
            "chosen_loss": self.loss,
        }

    def tables(self) -> list[Table | Text]:
        """For people."""
        table = Table(
            title=f"Predicted and measured, temperature {self.temperature:g}, {self.rule.value}, "
            "prompts read before"
        )
        for heading in ("K", "predicted tokens/s", "measured", "error", "a round", "measured"):
            table.add_column(heading, justify="right")
        for entry in self.by_k:
            table.add_row(
                str(entry.num_draft_tokens), f"{entry.predicted_tokens_per_second:.1f}",
                f"{entry.measured_tokens_per_second:.1f}", f"{entry.error:+.1%}",
                f"{entry.predicted_tokens_per_round:.2f}",
                f"{entry.measured_tokens_per_round:.2f}",
            )  # fmt: skip
        worst = "-" if self.worst_position is None else f"{self.worst_position:.3f}"
        return [
            table,
            self._positions(),
            Text(
                f"tokens/s are off by {self.worst_error:.1%} at most, acceptance at a position by "
                f"{worst}; K = {self.chosen_num_draft_tokens} is {self.loss:.1%} slower than the "
                f"best, K = {self.best.num_draft_tokens}; {self.num_same} of {self.num_answers} "
                "answers are the ones that were read"
            ),
        ]

    def _positions(self) -> Table:
        table = Table(title=f"Accepted, predicted/measured, where {REACHED_MIN} rounds came")
        table.add_column("K", justify="right")
        for depth in range(1, NUM_DEPTHS + 1):
            table.add_column(str(depth), justify="right")
        for entry in self.by_k:
            cells = [
                "-" if pair is None else "{:.2f}/{:.2f}".format(*pair) for pair in entry.positions
            ]
            if entry.num_draft_tokens > 0:
                table.add_row(str(entry.num_draft_tokens), *cells[:NUM_DEPTHS])
        return table


class Trial:
    """Plays the prompts of one sample through deployments."""

    def __init__(self, sample: Sample, rule: Rule, progress: Progress) -> None:
        self._sample = sample
        self._rule = rule
        self._progress = progress
        self._sessions: dict[int, list[PlayedSession]] = {}

    async def run(self, client: Client, counts: Sequence[int]) -> None:
        """Every prompt at each K of `counts`, the order of which turns round with each prompt.
        Before, each prompt is read once: then all find it alike."""
        texts = self._sample.texts
        self._progress("warming up: every prompt is read")
        for index, _ in enumerate(texts):
            # Seeds that no prompt has, as the second session of a seed may be drafted otherwise.
            seed = (texts[0].seed - 1 - index) & SEED_MAX
            await self._play(client, index, max(counts), WARM_UP_TOKENS, seed)
        for index, text in enumerate(texts):
            self._progress(f"prompt {index + 1} of {len(texts)}: {text.category}")
            for k in counts if index % 2 == 0 else reversed(counts):
                self.note(await self._play(client, index, k, text.max_tokens))

    def note(self, session: PlayedSession) -> None:
        """The next text's session of its K has been played."""
        self._sessions.setdefault(session.num_draft_tokens, []).append(session)

    async def _play(self, client: Client, index: int, k: int, *others: int) -> PlayedSession:
        sampling = self._sample.temperature, self._rule
        return await play(client, self._sample.texts[index], sampling, k, *others)

    def compared(
        self, predicted: dict[int, tuple[Rounds, ...]], times: ServiceTimes, chosen: int
    ) -> Validation:
        """What was played beside what `predicted` [K][texts] says."""
        texts = self._sample.texts
        pairs = [
            (text, session)
            for sessions in self._sessions.values()
            for text, session in zip(texts, sessions, strict=True)
        ]
        return Validation(
            temperature=self._sample.temperature,
            rule=self._rule,
            chosen_num_draft_tokens=chosen,
            by_k=tuple(
                self._compare(k, total(predicted[k]), times) for k in sorted(self._sessions)
            ),
            num_same=sum(text.token_ids == session.token_ids for text, session in pairs),
            num_answers=len(pairs),
        )

    def _compare(self, k: int, predicted: Rounds, times: ServiceTimes) -> ValidatedK:
        sessions = self._sessions[k]
        rows = [unread_tokens(len(text.prompt_ids)) for text in self._sample.texts]
        timed = times.plain_seconds if k == 0 else times.drafted_seconds
        seconds = times.first_seconds(rows) + timed(predicted, Load())
        reached, accepted = _positions(sessions)
        num_tokens = sum(len(session.token_ids) for session in sessions)
        num_rounds = sum(len(session.rounds) for session in sessions)
        check(num_rounds > 0, "tokens were committed without a round")
        return ValidatedK(
            num_draft_tokens=k,
            predicted_tokens_per_second=predicted.num_tokens / seconds,
            measured_tokens_per_second=num_tokens / sum(s.seconds for s in sessions),
            predicted_tokens_per_round=predicted.tokens_per_round,
            measured_tokens_per_round=num_tokens / num_rounds,
            predicted_by_position=predicted.by_position(),
            measured_by_position=tuple(
                taken / came if came else None
                for taken, came in zip(accepted, reached, strict=True)
            ),
            reached=tuple(reached),
        )


def _positions(sessions: Sequence[PlayedSession]) -> tuple[list[int], list[int]]:
    """Of each depth, how often a round came to it and how often it was accepted. Behind the end of
    an answer nothing is reached."""
    reached, accepted = ([0] * NUM_DRAFT_TOKENS_MAX for _ in range(2))
    for session in sessions:
        left = len(session.token_ids)
        for entry in session.rounds:
            num_reached = min(entry.num_accepted + 1, entry.num_proposed, left)
            for depth in range(num_reached):
                reached[depth] += 1
                accepted[depth] += depth < entry.num_accepted
            left -= len(entry.token_ids)
    return reached, accepted
