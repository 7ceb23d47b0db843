"""Sessions that are really played, for the rehearsal and the validation of `outrider plan`."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass

from outrider.client import Client
from outrider.errors import Unavailable
from outrider.limits import DEADLINE_MS_MAX
from outrider.request import Finished, GenerateRequest, RoundReport, Tokens
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams

from .plan_reading import Text


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
    text: Text,
    *,
    temperature: float,
    rule: Rule,
    num_draft_tokens: int,
    max_tokens: int,
    seed: int,
) -> PlayedSession:
    """Lets the services answer the prompt of `text`. Raises what they refuse it with, and
    `Unavailable` where the answer was cut short."""
    request = GenerateRequest(
        prompt=text.prompt_ids,
        sampling=SamplingParams(temperature=temperature),
        max_tokens=max_tokens,
        seed=seed,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        deadline_ms=DEADLINE_MS_MAX,
        include_rounds=True,
    )
    rounds: list[PlayedRound] = []
    report: RoundReport | None = None
    num_tokens = 0
    sent_s = time.perf_counter()
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, RoundReport):
                report = event
            elif isinstance(event, Tokens) and report is not None and event.token_ids:
                arrived_s = time.perf_counter() - sent_s
                rounds.append(_round(num_tokens, event, report, arrived_s))
                num_tokens += len(event.token_ids)
            elif isinstance(event, Finished):
                reason = event.finish_reason
    seconds = time.perf_counter() - sent_s
    if not rounds or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise Unavailable(f"a measured request ended early: {reason.value}")
    return PlayedSession(num_draft_tokens, tuple(rounds), seconds)


def _round(start: int, event: Tokens, report: RoundReport, arrived_s: float) -> PlayedRound:
    return PlayedRound(
        start=start,
        token_ids=event.token_ids,
        num_proposed=len(report.proposed_token_ids),
        num_accepted=report.num_accepted,
        wait_s=report.draft_ms / 1e3,
        target_s=(report.queue_ms + report.verify_ms) / 1e3,
        arrived_s=arrived_s,
    )
