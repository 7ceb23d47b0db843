"""One running session: decoding on one side, its client on the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Final

from coordinator.draft_length.policy import LengthPolicy
from coordinator.draft_length.round_meter import RoundMeter
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.drafts import Drafts
from coordinator.routing.target_client import TargetClient
from outrider.errors import DeadlineExceeded, OutriderError, StaleEpoch, StoreUnavailable
from outrider.request import Event, Finished, Metrics, Tokens, Usage
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, FinishReason
from outrider.telemetry.logs import about, identify
from outrider.telemetry.observer import SILENT, RequestObserver

from .committer import Committer
from .detokenizer import Completion
from .loop import Decoding
from .output_queue import Entry, OutputQueue
from .recovery import Replayed

_log = logging.getLogger(__name__)

COMMIT_GRACE_S: Final = 2.0
"""How long tokens that were decided before the deadline may take to be committed after it."""


class SessionRun:
    """One session from its opening to its last event."""

    def __init__(
        self,
        *,
        session: Session,
        parameters: GenerationParameters,
        completion: Completion,
        target: TargetClient,
        draft: Drafts | None,
        committer: Committer,
        lengths: LengthPolicy,
        length_max: int,
        meter: RoundMeter,
        arrived: float,
        deadline: float,
        reads_beside: bool = True,
        observer: RequestObserver = SILENT,
        replayed: Replayed | None = None,
    ) -> None:
        """Starts decoding a session that the committer knows. `length_max` is the target's,
        `arrived` and `deadline` are times of the event loop's clock; `reads_beside` as for
        `Decoding`; `replayed` is what a resumed
        session has, whose completion it is."""
        self._session = session
        self._parameters = parameters
        self._target = target
        self._draft = draft
        self._committer = committer
        self._lengths = lengths
        self._arrived = arrived
        self._deadline = deadline
        self._first_token_at: float | None = None
        self._ended = False
        self._observer = observer
        self._handed_over = False
        self._num_known = completion.num_tokens
        """Tokens that another stream may have told."""
        self._journal = OutputQueue(session, committer, observer)
        for tokens in () if replayed is None else replayed.events:
            self._journal.write(Entry(session.length, tokens, None, arrived))
        self._decoding = Decoding(
            session=session,
            parameters=parameters,
            completion=completion,
            target=target,
            draft=draft,
            committer=committer,
            journal=self._journal,
            lengths=lengths,
            length_max=length_max,
            meter=meter,
            reads_beside=reads_beside,
            observer=observer,
            ended=None if replayed is None else replayed.finish_reason,
        )
        self._task = asyncio.create_task(self._decoding.run(deadline))

    @property
    def session_id(self) -> str:
        """32 hexadecimal digits."""
        return self._session.session_id

    @property
    def session(self) -> Session:
        """What it runs, or ran."""
        return self._session

    @property
    def epoch(self) -> int:
        """Under which it runs."""
        return self._session.epoch

    @property
    def counters(self) -> Counters:
        """What its rounds came to."""
        return self._session.counters

    @property
    def is_unrecorded(self) -> bool:
        """Whether the store may still have the session as running here: it has not been told of
        the end, and the session is not another owner's."""
        return not self._ended and self._session.error is None

    @property
    def tenant(self) -> str:
        """Whose session it is."""
        return self._session.record.tenant

    def cancel(self) -> None:
        """Ends the session as cancelled; what is decided is still committed and shown."""
        self._decoding.cancel()

    async def events(self) -> AsyncGenerator[Event]:
        """Every event after `Started`."""
        loop = asyncio.get_running_loop()
        held_back: Tokens | None = None
        while True:
            try:
                async with asyncio.timeout_at(self._deadline + COMMIT_GRACE_S):
                    entry = await self._journal.read()
            except TimeoutError:
                raise self._late() from None
            except OutriderError:
                self._check_here()
                raise
            if entry is None:
                break
            tokens, report = entry
            if not tokens.token_ids:
                held_back = tokens  # If the session could still go on, it might come again.
                continue
            if self._first_token_at is None:
                self._first_token_at = loop.time()
            if report is not None:
                yield report
            yield tokens
        self._check_here()
        reason = await self._task
        await self._finish(reason, max(self._deadline, loop.time()) + COMMIT_GRACE_S)
        if held_back is not None:
            yield held_back
        finished = self._finished(reason, loop.time())
        self._observer.finished(finished)
        yield finished

    def _check_here(self) -> None:
        """Raises `StaleEpoch` where the session was handed over."""
        if self._handed_over:
            raise StaleEpoch(f"session {self.session_id} was resumed by another stream")

    async def hand_over(self) -> bool:
        """As `close`, but leaves the record to whoever goes on with the session, unless its end is
        decided."""
        self._handed_over = self._session.finish_reason is None
        return await self.close()

    async def close(self) -> bool:
        """Stops decoding and frees what the session holds everywhere. A session that has not
        ended is recorded as cancelled. Returns whether it had ended."""
        had_ended = self._ended
        identify(self.session_id, self._observer.trace_id)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lengths.close()
        self._target.close()
        if self._draft is not None:
            self._draft.close()
        try:
            if not (self._ended or self._handed_over):
                now = asyncio.get_running_loop().time()
                await self._finish(FinishReason.CANCELLED, now + COMMIT_GRACE_S)
        except OutriderError as error:
            _log.info("session %s was not closed: %r", self.session_id, error)
        finally:
            self._committer.remove(self._session)
            counters = self._session.counters
            fields = about(
                finish_reason=self._session.finish_reason,
                prompt_tokens=self._session.prompt_length,
                completion_tokens=self._session.length - self._session.prompt_length,
                num_rounds=counters.num_rounds,
                num_draft_tokens=counters.num_draft_tokens,
                num_accepted_draft_tokens=counters.num_accepted_draft_tokens,
            )
            _log.debug("the session ended", extra=fields)
        return had_ended

    def _late(self) -> OutriderError:
        if self._first_token_at is None:
            return DeadlineExceeded(
                f"deadline_ms: {self._parameters.deadline_ms} ms passed before the first token"
            )
        return StoreUnavailable("the session store did not commit in time; tokens are held back")

    async def _finish(self, reason: FinishReason, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._committer.finish(self._session, reason)
        except TimeoutError:
            raise StoreUnavailable("the session store did not take the session's end") from None
        self._ended = True

    def _finished(self, reason: FinishReason, now: float) -> Finished:
        first = now if self._first_token_at is None else self._first_token_at
        num_tokens = self._session.length - self._session.prompt_length
        seconds = now - self._arrived
        return Finished(
            finish_reason=reason,
            usage=Usage(self._session.prompt_length, num_tokens),
            metrics=Metrics.of(
                self._session.counters,
                time_to_first_token_ms=(first - self._arrived) * 1e3,
                tokens_per_second=(
                    (num_tokens - self._num_known) / seconds if seconds > 0 else 0.0
                ),
            ),
        )
