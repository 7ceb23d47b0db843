"""Audits committed tokens against the target's distribution (docs/operations.md).

Sessions are chosen when they begin. A choice among ended sessions would prefer short answers,
which end sooner. When a chosen session has ended, a second session sends the same tokens to the
target as proposals. Each verdict contains the result of an audit (`outrider/speculation/audit.py`).
Tenants share no cached pages, and the second session has its own tenant. So the target computes all
keys and values again, and the audit also detects tokens decoded from wrong keys and values."""

import asyncio
import logging
from contextlib import aclosing

from coordinator.decoding.sessions import OwnedSessions
from coordinator.requests.validation import GenerationParameters
from outrider.config.deployment import CoordinatorConfig
from outrider.errors import OutriderError, Unavailable
from outrider.foundation.bounded_dict import BoundedDict
from outrider.limits import AUDITED_SEEDS_MAX, AUDITS_CHOSEN_MAX
from outrider.sessions.state import Session
from outrider.telemetry.observer import AuditOutcome, Observation

_log = logging.getLogger(__name__)

AUDIT_TIMEOUT_S = 60.0
SEATS_CHECKS = 600
"""If the targets are full in this many checks in a row, the audit is dropped."""
SEATS_PERIOD_S = 0.1


class Auditor:
    def __init__(
        self, config: CoordinatorConfig, sessions: OwnedSessions, observation: Observation
    ) -> None:
        self._share = config.audit_share if config.telemetry else 0.0
        self._sessions = sessions
        self._observation = observation
        self._seeds: BoundedDict[int, None] = BoundedDict(AUDITED_SEEDS_MAX)
        """Seeds of chosen sessions. Sessions with the same seed use the same random numbers, so
        only the first of them is audited."""
        self._num_chosen = 0
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()

    def choose(self, session: Session, parameters: GenerationParameters) -> bool:
        """Returns whether a new session will be audited. If so, the caller must call `take` when
        the session has ended."""
        if self._share <= 0.0 or self._sessions.random() >= self._share:
            return False
        greedy = parameters.sampling.greedy
        if self._num_chosen >= AUDITS_CHOSEN_MAX:
            self._observation.audit_ended("busy")
        elif not greedy and session.record.seed in self._seeds:
            self._observation.audit_ended("repeated")
        else:
            if not greedy:
                self._seeds[session.record.seed] = None
            self._num_chosen += 1
            return True
        return False

    def take(self, session: Session, parameters: GenerationParameters) -> None:
        """Queues the audit of a chosen session that has ended."""
        if self._share <= 0.0 or session.length == session.prompt_length:
            self._num_chosen -= 1
            return
        task = self._sessions.in_background(self._run(session, parameters))
        self._tasks.add(task)
        # If a task is cancelled before it starts, its callback runs, but `_run` does not.
        task.add_done_callback(self._ended)

    def close(self) -> None:
        self._share = 0.0
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        self._num_chosen -= 1

    async def _run(self, session: Session, parameters: GenerationParameters) -> None:
        async with self._turn:
            outcome = await self._outcome(session, parameters)
        self._observation.audit_ended(outcome)

    async def _outcome(self, session: Session, parameters: GenerationParameters) -> AuditOutcome:
        for _ in range(SEATS_CHECKS):
            if not self._sessions.targets.is_full:
                break
            await asyncio.sleep(SEATS_PERIOD_S)
        else:
            return "busy"
        prompt = session.tokens.since(0, session.prompt_length)
        answer = session.tokens.since(session.prompt_length)
        tenant = f"audit {session.session_id}"
        deadline = asyncio.get_running_loop().time() + AUDIT_TIMEOUT_S
        try:
            scored = self._sessions.score(tenant, parameters, prompt, answer, deadline, audits=True)
            async with aclosing(scored) as parts:
                async for _, reply in parts:
                    if reply.audit is None:
                        raise Unavailable("the target does not audit")
                    self._observation.audited(session.record.rule.value, reply.audit)
        except (OutriderError, TimeoutError) as error:
            _log.info("session %s was not audited: %r", session.session_id, error)
            return "failed"
        return "audited"
