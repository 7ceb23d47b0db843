"""What both sides of a session (`target_client.py`, `draft_client.py`) ask a replica with."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from outrider.grammar.constraint import Constraint
from outrider.limits import DRAFT_DEADLINE_MS_MAX
from outrider.messages import Resync, RoundHead
from outrider.sessions.state import Session
from outrider.speculation.sampling_params import SamplingParams
from outrider.telemetry.observer import SILENT, RequestObserver, Side

if TYPE_CHECKING:
    from outrider.config import CoordinatorConfig


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a side waits, and for how long it tries. All in seconds."""

    target_answer_s: float
    """A target's answer not here by then is asked for again; doubled at each repetition."""
    target_gone_s: float
    """A target that cannot be reached for so long ends the request with `Unavailable`."""
    target_retry_s: float
    """First rest before a target is asked again; doubled at each repetition."""
    draft_answer_s: float
    """A draft has so long to draw; it then answers with what it has."""
    draft_retry_s: float
    """Rest between two questions to an absent draft."""

    @classmethod
    def of(cls, config: CoordinatorConfig) -> Self:
        """That of these settings."""
        return cls(
            target_answer_s=config.target_timeout_ms / 1e3,
            target_gone_s=config.target_gone_ms / 1e3,
            target_retry_s=config.target_retry_ms / 1e3,
            draft_answer_s=config.draft_timeout_ms / 1e3,
            draft_retry_s=config.draft_retry_ms / 1e3,
        )

    def with_draft_deadline(self, draft_deadline_ms: int | None) -> Timeouts:
        """This one, for a session that says how much time a round gives its draft, if that is
        less."""
        if draft_deadline_ms is None:
            return self
        return replace(self, draft_answer_s=min(self.draft_answer_s, draft_deadline_ms / 1e3))


def budget_us(seconds: float) -> int:
    """Time that is left to draft, as a message says it: 0 for infinity, else at least 1."""
    if seconds == math.inf:
        return 0
    return max(1, min(round(seconds * 1e6), DRAFT_DEADLINE_MS_MAX * 1000))


class HeadWriter:
    """Writes the head of each message of one session."""

    def __init__(
        self,
        session: Session,
        sampling: SamplingParams,
        deadline: float,
        observer: RequestObserver = SILENT,
        constraint: Constraint | None = None,
    ) -> None:
        self.session = session
        self.observer = observer
        self.sampling = sampling
        self.constraint = constraint
        self._constraint_hash = b"" if constraint is None else constraint.digest()
        self._sampling_hash = sampling.hash()
        self._deadline = deadline

    def write(self, side: Side, round_index: int, base_length: int) -> RoundHead:
        """The head of a message to a side that states the first `base_length` committed tokens."""
        session = self.session
        left = self._deadline - asyncio.get_running_loop().time()
        return RoundHead(
            session_id=session.session_id,
            tenant=session.record.tenant,
            epoch=session.epoch,
            round=round_index,
            base_length=base_length,
            prefix_digest=session.tokens.digest(base_length),
            append=session.tokens.since(base_length),
            prompt_length=session.prompt_length,
            rule=session.record.rule,
            seed=session.record.seed,
            sampling=self.sampling,
            sampling_hash=self._sampling_hash,
            deadline_ms=max(1, math.ceil(left * 1e3)),
            traceparent=self.observer.context(side),
            constraint=self.constraint,
            constraint_hash=self._constraint_hash,
        )

    def held(self, resync: Resync) -> int:
        """How many tokens a replica that asked for a resync can keep."""
        tokens = self.session.tokens
        known = tokens.holds(resync.cached_length, resync.prefix_digest)
        return min(resync.cached_length, len(tokens) - 1) if known else 0
