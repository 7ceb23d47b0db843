"""Holds committed tokens against the target's law, while the coordinator serves.

A share of the sessions is scored once more when they are over: a session's tokens go to a target as
proposals of a session of its own, a few each round, and each verdict says how they look
(`speculation/audit.py`). Sessions are chosen when they begin, and counted however they end: were
those that end at a good moment preferred, short answers would be, and with them surprising ends.
The audit's session has a salt of its own, so that nothing is taken from pages that others have
written: keys and values are audited too. It does the work of reading prompt and answer once, as a
prompt, one session at a time, and waits while the targets' seats are taken.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from coordinator.decoding.sessions import OwnedSessions
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import SessionContext
from coordinator.routing.target_client import TargetClient
from outrider.config import CoordinatorConfig
from outrider.errors import OutriderError, Unavailable
from outrider.limits import AUDITED_SEEDS_MAX, AUDITS_CHOSEN_MAX
from outrider.newest import Newest
from outrider.sessions.state import Session
from outrider.telemetry.observer import AuditOutcome, Observation

_log = logging.getLogger(__name__)

AUDIT_TIMEOUT_S = 60.0
"""An audit that takes longer is given up; what it has found counts."""
SEATS_LOOKS = 600
"""One that finds all seats taken so many times is not begun."""
SEATS_PERIOD_S = 0.1
"""Between two of those looks."""


class Auditor:
    """Chooses sessions, and audits them one at a time."""

    def __init__(
        self, config: CoordinatorConfig, sessions: OwnedSessions, observation: Observation
    ) -> None:
        self._share = config.audit_share if config.telemetry and observation.listens else 0.0
        self._config = config
        self._sessions = sessions
        self._observation = observation
        self._seeds: Newest[int, None] = Newest(AUDITED_SEEDS_MAX)
        """Of sessions that were chosen: others of the same seed have the same noise."""
        self._num_chosen = 0
        """Sessions that run, wait to be audited, or are being audited."""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.session_ids = set[str]()
        """Of the audit that runs."""

    def choose(self, session: Session, parameters: GenerationParameters) -> bool:
        """Whether a session that begins is to be audited; `take` must then hear of its end."""
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
        """A chosen session is over here, however it was ended. Waits for nothing."""
        if self._share <= 0.0 or session.length == session.prompt_length:
            self._num_chosen -= 1
            return
        task = self._sessions.in_background(self._run(session, parameters))
        self._tasks.add(task)
        # Not at the end of `_run`, which a task that is cancelled at once never begins.
        task.add_done_callback(self._ended)

    def close(self) -> None:
        self._share = 0.0
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._num_chosen -= 1

    async def _run(self, session: Session, parameters: GenerationParameters) -> None:
        async with self._turn:
            outcome = await self._outcome(session, parameters)
        self._observation.audit_ended(outcome)

    async def _outcome(self, session: Session, parameters: GenerationParameters) -> AuditOutcome:
        for _ in range(SEATS_LOOKS):
            if not self._sessions.targets.is_full:
                break
            await asyncio.sleep(SEATS_PERIOD_S)
        else:
            return "busy"
        try:
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                await self._audit(session, parameters)
        except (OutriderError, TimeoutError) as error:
            _log.info("session %s was not audited: %r", session.session_id, error)
            return "failed"
        return "audited"

    async def _audit(self, session: Session, parameters: GenerationParameters) -> None:
        """All tokens behind the prompt. What is found is told at once: also of an audit that is
        given up, tokens are counted whatever they are."""
        prompt = session.tokens.since(0, session.prompt_length)
        again = self._sessions.unstored(f"audit {session.session_id}", parameters, prompt)
        self.session_ids.add(again.session_id)
        deadline = asyncio.get_running_loop().time() + AUDIT_TIMEOUT_S
        context = SessionContext(again, parameters, deadline)
        target = TargetClient(self._sessions.targets, context, self._config, audits=True)
        try:
            async for reply in target.judge(session.tokens.since(session.prompt_length)):
                if reply.audit is None:
                    raise Unavailable("the target does not audit")
                self._observation.audited(session.record.rule.value, reply.audit)
        finally:
            target.close()
            self.session_ids.clear()
