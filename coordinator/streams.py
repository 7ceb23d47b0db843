"""The streams of sessions: runs, resumes and cancels sessions, and commits their tokens."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import replace

from coordinator.admission import Admission
from coordinator.audit import Auditor
from coordinator.decoding.committer import Committer
from coordinator.decoding.loop import SessionRun
from coordinator.decoding.resumption import Replayed, replay, replayed_events, started
from coordinator.decoding.runs import RunStarter
from coordinator.decoding.sessions import KeyTaken, OwnedSessions, RequestKey
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import SessionContext
from coordinator.served_model import ServedModel
from outrider import errors
from outrider.config.deployment import CoordinatorConfig
from outrider.interfaces.request import Event, GenerateRequest, PromptTokens, ResumeRequest
from outrider.limits import SESSION_LEASE_MS, SESSION_LEASE_RENEWAL_MS
from outrider.sessions.state import Session
from outrider.sessions.store import SessionRecord, SessionStore, contended, not_found
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import Observation, RequestObserver

CANCEL_ELSEWHERE_S = 2 * SESSION_LEASE_MS / 1e3
"""Time limit for cancelling a session of another coordinator. The lease of a dead owner runs out
within this time."""
CANCEL_CHECK_S = SESSION_LEASE_RENEWAL_MS / 2e3
"""Pause between two checks of whether the owner has ended the session."""
KEY_TRIES = 3
"""Attempts to serve a request with an idempotency key. An attempt fails if the key's session has
expired, or if a simultaneous request takes the key."""


class Streams:
    """The streams of one coordinator. Each yields the events of one session."""

    def __init__(
        self,
        config: CoordinatorConfig,
        model: ServedModel,
        store: SessionStore,
        admission: Admission,
        sessions: OwnedSessions,
        committer: Committer,
        runs: RunStarter,
        observation: Observation,
    ) -> None:
        self._config = config
        self._model = model
        self._store = store
        self._admission = admission
        self._sessions = sessions
        self._committer = committer
        self._runs = runs
        self._observation = observation
        self._auditor = Auditor(config, sessions, observation)
        self._commit_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the commits."""
        self._commit_task = asyncio.create_task(self._committer.run())

    @property
    def failed(self) -> bool:
        """Whether a bug has ended the commits."""
        return self._commit_task is not None and self._commit_task.done()

    async def generate(
        self,
        request: GenerateRequest,
        tenant: str = "",
        traceparent: str = "",
        *,
        resumable: bool = True,
        key: RequestKey | None = None,
        is_admitted: bool = False,
    ) -> AsyncGenerator[Event]:
        """Validates a request, runs its session, and yields the events. If the iterator is closed
        early, the session is cancelled. A `resumable` session is cancelled only after
        `resume_grace_ms`, and can be resumed until then. A session with a `key` can also be
        resumed for this time after an error. `traceparent` is the caller's trace context or empty.
        `is_admitted` states whether the caller holds `Admission.admitted`.

        Raises `BadRequest`, `NotFound` (unknown model), `KeyTaken` (another session has the key),
        `Overloaded`, `DeadlineExceeded` (before the first token), `Unavailable`, and the store's
        error that ended the session (`StaleEpoch`, `DataLoss`)."""
        arrived = asyncio.get_running_loop().time()
        observer = self._observation.begin(request, self._model.name, traceparent)
        with _observing(observer), nullcontext() if is_admitted else self._admission.admitted():
            await self._admission.take_turn(request, tenant)
            run = await self._open(request, tenant, arrived, observer, key)
            parameters, has_key = run.parameters, key is not None
            events = self._events(run, parameters, resumable, outlasts_errors=has_key)
            async with aclosing(events):
                async for event in events:
                    yield event

    async def generate_once(
        self,
        request: GenerateRequest,
        key: RequestKey,
        resume: ResumeRequest,
        tenant: str = "",
        traceparent: str = "",
        *,
        is_admitted: bool = False,
    ) -> AsyncGenerator[Event]:
        """Resumes the session of a `key` that `Admission.known` returned. If the key has no
        session, or the session has expired, runs the request. Raises `SessionNotFound` if the
        client already has tokens of the expired session (`resume.num_tokens`)."""
        is_gone = False
        for _ in range(KEY_TRIES):
            try:
                if key.session_id and not is_gone:
                    resume_request = replace(resume, session_id=key.session_id)
                    running = self.resume(
                        resume_request,
                        tenant,
                        traceparent,
                        outlasts_errors=True,
                        is_admitted=is_admitted,
                    )
                elif resume.num_tokens:
                    raise errors.SessionNotFound("the request with this key is not stored any more")
                else:
                    running = self.generate(
                        request, tenant, traceparent, key=key, is_admitted=is_admitted
                    )
                async with aclosing(running) as events:
                    async for event in events:
                        yield event
                return
            except errors.SessionNotFound:
                if is_gone or not key.session_id:
                    raise
                is_gone = True
            except KeyTaken as taken:
                key, is_gone = taken.key, False
        raise contended(key.session_id)

    async def resume(
        self,
        request: ResumeRequest,
        tenant: str = "",
        traceparent: str = "",
        *,
        outlasts_errors: bool = False,
        is_admitted: bool = False,
    ) -> AsyncGenerator[Event]:
        """Continues a session whose stream broke, at this or another coordinator. Yields `Started`,
        the stored tokens that the client lacks, and then the same events as `generate`. An older
        stream of the session ends with `StaleEpoch`. With `outlasts_errors`, the session can be
        resumed again after an error.

        Raises `SessionNotFound`, `Overloaded`, `DataLoss` (the store lacks tokens that the client
        has), `Incompatible` (no known target has the session's weights), and `Unavailable` (another
        coordinator may own the session, or this coordinator takes over too many sessions)."""
        arrived = asyncio.get_running_loop().time()
        admitted = nullcontext() if is_admitted else self._admission.admitted()
        with admitted, ExitStack() as taking_over:
            taking_over.enter_context(self._sessions.taking_over(request.session_id, tenant))
            await self._sessions.wait_for_store(request.session_id)
            record = await self.session(request.session_id, tenant)
            record, parameters = await self._sessions.claim(record, request)
            # A client that wants all tokens again also gets the prompt's tokens again.
            stream_parameters = (
                parameters if request.cuts else replace(parameters, prompt_logprobs=None)
            )
            completion = self._model.completion(parameters)
            left_ms = min(parameters.deadline_ms, request.deadline_ms or math.inf)
            deadline = arrived + left_ms / 1e3
            if record.finish_reason is not None:
                replayed = await self._sessions.replay(
                    record, lambda: replay(record, parameters, completion, request)
                )
                taking_over.close()  # Other take-overs do not wait for this client to read.
                async with aclosing(
                    self._first_events(record, stream_parameters, deadline)
                ) as first_events:
                    async for event in first_events:
                        yield event
                for event in replayed_events(record, replayed):
                    yield event
                return
            observer = self._observation.begin(parameters, self._model.name, traceparent)
            with _observing(observer):
                try:
                    session, replayed = await self._sessions.replay(
                        record,
                        lambda: (Session(record), replay(record, parameters, completion, request)),
                    )
                    await self._sessions.end_earlier_runs(record)
                    context = SessionContext(session, parameters, deadline, observer)
                    run = self._runs.start(context, arrived, replayed)
                except BaseException:
                    self._sessions.wait_for_client(record)
                    raise
                taking_over.close()
                events = self._events(run, stream_parameters, outlasts_errors=outlasts_errors)
                async with aclosing(events):
                    async for event in events:
                        yield event

    async def cancel(self, session_id: str, tenant: str | None = "") -> None:
        """Cancels a session, unless it is finished. If another coordinator owns the session,
        that owner cancels the session when it renews its lease. If the owner's lease has run out,
        this coordinator cancels the session. Raises the errors of `session`, and `Unavailable` if
        the session has not ended within `CANCEL_ELSEWHERE_S`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CANCEL_ELSEWHERE_S
        while True:
            run = self._sessions.running.get(session_id)
            if run is not None and tenant in (run.session.record.tenant, None):
                run.cancel()
                return
            await self._sessions.wait_for_store(session_id)
            record = await self.session(session_id, tenant)
            try:
                await self._sessions.cancel(record)
                return
            except errors.Unavailable as error:
                if isinstance(error, errors.StoreUnavailable) or loop.time() >= until:
                    raise
            await asyncio.sleep(CANCEL_CHECK_S)

    async def session(self, session_id: str, tenant: str | None = "") -> SessionRecord:
        """Returns the stored record of a session. Raises `NotFound` if the session does not exist,
        or belongs to another tenant (any tenant is allowed if `tenant` is None)."""
        record = await self._store.load(session_id)
        if tenant not in (record.tenant, None):
            raise not_found(session_id)  # The same error as for a session that does not exist.
        return record

    async def stored_parameters(self, session_id: str, tenant: str) -> GenerationParameters:
        """Returns the parameters of a stored session. The call counts as a take-over. Raises the
        errors of `session`, and `Unavailable` if too many take-overs run."""
        with self._sessions.taking_over(session_id, tenant):
            record = await self.session(session_id, tenant)
        return GenerationParameters.of(record)

    def hand_over(self) -> None:
        """Lets other coordinators take over the sessions, which run here until taken over."""
        self._committer.hand_over()

    def cancel_all(self) -> None:
        """Cancels all sessions and audits."""
        self._sessions.close()
        self._auditor.close()

    async def close(self) -> None:
        """Waits until the sessions that were cancelled have ended, and commits their last
        tokens."""
        try:
            await self._sessions.end_background()
        finally:
            self._committer.close()
            if self._commit_task is not None:
                await asyncio.gather(self._commit_task, return_exceptions=True)

    async def _open(
        self,
        request: GenerateRequest,
        tenant: str,
        arrived: float,
        observer: RequestObserver,
        key: RequestKey | None,
    ) -> SessionRun:
        deadline_ms = request.deadline_ms or self._config.deadline_ms
        deadline = arrived + deadline_ms / 1e3
        try:
            async with asyncio.timeout_at(deadline):
                parameters = await self._admission.resolve(request, tenant)
                session = await self._sessions.open(tenant, parameters, key)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"deadline_ms: {deadline_ms} ms passed before the session was open"
            ) from None
        try:
            context = SessionContext(session, parameters, deadline, observer)
            completion = self._model.completion(parameters)
            begun = Replayed(completion, finish_reason=completion.push(()).finish_reason)
            return self._runs.start(context, arrived, begun)
        except BaseException:
            if key is None:
                self._sessions.store_cancellation(session.record)
            else:
                self._sessions.wait_for_client(session.record)
            raise

    async def _events(
        self,
        run: SessionRun,
        stream_parameters: GenerationParameters,
        resumable: bool = True,
        *,
        outlasts_errors: bool,
    ) -> AsyncGenerator[Event]:
        """Yields all events of a run, and ends the run when its stream ends."""
        record, deadline = run.session.record, run.context.deadline
        with self._serving(run, resumable, outlasts_errors):
            async with aclosing(
                self._first_events(record, stream_parameters, deadline)
            ) as first_events:
                async for event in first_events:
                    yield event
            async with aclosing(run.events()) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _serving(self, run: SessionRun, resumable: bool, outlasts_errors: bool) -> Iterator[None]:
        """Ends the run when its stream ends. If an error ends the stream, and `outlasts_errors` is
        true, the session can be resumed for some time. The same holds if the client disconnects
        from a `resumable` session, or from a coordinator that is leaving."""
        chosen, is_gone = self._auditor.choose(run.session, run.parameters), False
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            is_gone = resumable or self._committer.leaving
            raise
        except errors.OutriderError:
            is_gone = outlasts_errors
            raise
        finally:
            self._sessions.end(run, resumable=resumable, is_gone=is_gone)
            if chosen:
                self._auditor.take(run.session, run.parameters)

    async def _first_events(
        self, record: SessionRecord, stream_parameters: GenerationParameters, deadline: float
    ) -> AsyncGenerator[Event]:
        """Yields `Started`. If `stream_parameters` ask for the prompt's log-probabilities, then
        yields the prompt's tokens with them. To get these, a second session sends the tokens to the
        target as proposals. Raises `DeadlineExceeded`, the target's error, and `InvariantError` if
        the logits of a position give no log-probabilities."""
        yield started(record, self._model.name)
        if stream_parameters.prompt_logprobs is None:
            return
        greedy = SamplingParams(temperature=0.0)
        parameters = replace(
            stream_parameters,
            sampling=greedy,
            rule=Rule.GREEDY,
            logprobs=max(1, stream_parameters.prompt_logprobs),
            constraint=None,
        )
        first, rest = stream_parameters.prompt[:1], stream_parameters.prompt[1:]
        try:
            yield PromptTokens(first, (None,))
            scored = self._sessions.score(record.tenant, parameters, first, rest, deadline)
            async with aclosing(scored) as parts:
                async for token_ids, reply in parts:
                    entries = reply.logprobs[: len(token_ids)]
                    reason = "the logits of a token of the prompt cannot be sampled from"
                    errors.check(all(entry.top for entry in entries), reason)
                    if stream_parameters.prompt_logprobs == 0:
                        entries = tuple(replace(entry, top=()) for entry in entries)
                    yield PromptTokens(token_ids, entries)
        except TimeoutError:
            deadline_ms = stream_parameters.deadline_ms
            reason = f"deadline_ms: {deadline_ms} ms passed before the prompt was scored"
            raise errors.DeadlineExceeded(reason) from None


@contextmanager
def _observing(observer: RequestObserver) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        observer.failed(error)
        raise
