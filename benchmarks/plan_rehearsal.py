"""The second part of `outrider plan`: short sessions tell what rounds take beside the steps.

A step's table is measured in a tight loop; in a round, draft and target take turns, each finds its
caches full of the other's weights, and messages, decisions and commits come between. So the
services run for a minute on this machine, in processes of their own and without Ray, and play a few
of the prompts at a few K. Only times are taken from this; acceptance is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any, Final

from outrider.client import Client
from outrider.config import DeploymentConfig
from outrider.engine.step_costs import StepCosts
from outrider.errors import Unavailable
from outrider.limits import PAGE_SIZE, SEED_MAX
from outrider.planning.fitting import MeasuredStep, fitted, rebased
from outrider.planning.round_times import ServiceTimes
from outrider.speculation.sampling_params import Rule
from outrider.transport.grpc_link import draft_link, target_link
from outrider.transport.link import Link

from .emulate_services import Replicas, running_pair
from .measurement import Progress
from .plan_reading import Sample, Text, rules_at
from .plan_script import DraftKind, Script
from .plan_sessions import PlayedRound, PlayedSession, play

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

    text: Text
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
    rule = rehearsed_rule(sample.temperature)
    texts = rehearsed_texts(sample)
    for warm_up in (0, REHEARSED_K[-1]):
        seed = (texts[0].seed - 1) & SEED_MAX
        await _play(client, texts[-1], sample.temperature, rule, warm_up, seed)
    played = []
    for index, text in enumerate(texts):
        progress(
            f"rehearsing temperature {sample.temperature:g}, prompt {index + 1} of {len(texts)}: "
            f"{text.category}"
        )
        first = index % len(REHEARSED_K)
        for place, k in enumerate((*REHEARSED_K[first:], *REHEARSED_K[:first])):
            session = await _play(client, text, sample.temperature, rule, k, text.seed)
            fresh = is_first and place == 0 and text is not texts[-1]
            played.append(Rehearsed(text, session, is_cached=not fresh))
    return played


async def _play(
    client: Client, text: Text, temperature: float, rule: Rule, k: int, seed: int
) -> PlayedSession:
    return await play(
        client,
        text,
        temperature=temperature,
        rule=rule,
        num_draft_tokens=k,
        max_tokens=min(TOKENS_MAX, text.max_tokens),
        seed=seed,
    )


def rehearsed_rule(temperature: float) -> Rule:
    """Coupled above 0, as its answers do not depend on K."""
    return rules_at(temperature)[-1]


def rehearsed_texts(sample: Sample) -> list[Text]:
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
