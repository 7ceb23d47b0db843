"""The coordinator's service, which admits requests and runs their sessions."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from coordinator.decoding.committer import Committer
from coordinator.decoding.detokenizer import Completion
from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.loop import SessionRun
from coordinator.decoding.resumption import Replayed, replay, replayed_events, started
from coordinator.decoding.sessions import KeyTaken, OwnedSessions, RequestKey
from coordinator.decoding.trial import TrialMeter, TrialSums
from coordinator.draft_length.controller import LengthControls
from coordinator.requests.validation import (
    GenerationParameters,
    PromptEncoder,
    check_fields,
    check_ids,
    resolve,
)
from coordinator.routing.discovery import Discovery
from coordinator.routing.draft_client import open_drafts
from coordinator.routing.drafts import NoDrafts
from coordinator.routing.replica_pool import ReplicaPool, SessionContext
from coordinator.routing.target_client import TargetClient
from outrider import errors
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.lookup import LookupDrafter
from outrider.foundation.fair_turns import FairQueue
from outrider.foundation.refusals import REFUSALS
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.request import Event, GenerateRequest, PromptTokens, ResumeRequest
from outrider.limits import SEED_BITS, SESSION_LEASE_MS, SESSION_LEASE_RENEWAL_MS, STARTS_MAX
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import Figures, Role
from outrider.sessions.state import Session
from outrider.sessions.store import SessionRecord, SessionStore, contended, not_found
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import UNOBSERVED, Observation, RequestObserver
from outrider.transport.link import Link

from .audit import Auditor

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText

_log = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
TROUBLE_S = 3.0
"""`trouble` reports a target or store that has not answered for this time. Shorter pauses are
normal, for example while a replica on the same cores loads a model."""
CANCEL_ELSEWHERE_S = 2 * SESSION_LEASE_MS / 1e3
"""Time limit for cancelling a session of another coordinator. The lease of a dead owner runs out
within this time."""
CANCEL_LOOK_S = SESSION_LEASE_RENEWAL_MS / 2e3
"""Pause between two checks of whether the owner has ended the session."""
KEY_TRIES = 3
"""Attempts to serve a request with an idempotency key. An attempt fails if the key's session has
expired, or if a simultaneous request takes the key."""
DETOKENIZED_BYTES = 4
"""Bytes of text whose tokenizing takes about as long as the detokenizing of one token."""
NO_SESSION = "0" * 32
"""An id that no session has. To check whether the store answers, the service loads this id."""


class CoordinatorService:
    """Serves requests. Independent of gRPC and Ray."""

    def __init__(
        self,
        config: CoordinatorConfig,
        owner: str,
        *,
        store: SessionStore,
        targets: Mapping[str, Link] | None = None,
        drafts: Mapping[str, Link] | None = None,
        fallback: LookupDrafter,
        text: TokenizerText | None = None,
        random_bits: Callable[[int], int] = secrets.randbits,
        observation: Observation = UNOBSERVED,
        registry: RedisRegistry | None = None,
        link: Callable[[Role, str], Link] | None = None,
    ) -> None:
        """`owner` is the coordinator's name in the session store. No other process has this name.

        `targets` and `drafts` map names to links, for a fixed set of replicas. With a `registry`,
        the coordinator uses the registry's replicas, to which `link(role, address)` creates links.

        `fallback` is the look-up that proposes if no model drafts, or if the model has no
        proposal. `random_bits(n)` returns n random bits, for session ids and, if no seed is
        configured, the seeds of requests."""
        self.config = config
        self._store = store
        self._links = targets or {}, drafts or {}
        self._follows = registry is not None
        self.targets = ReplicaPool("target")
        self.drafts = ReplicaPool("draft", self.targets)
        name = owner if config.membership is None else config.membership.name
        self.fleet = Discovery(name, self.targets, self.drafts, registry, link)
        self._fallback = fallback
        self.text = text
        """The target's tokenizer. Without it, requests must contain token ids."""
        self._prompts = PromptEncoder(text)
        self._seed_bits = random_bits
        if config.seed is not None:
            # Each coordinator draws its own series, because it knows only the seeds of its own
            # sessions. The replacement of a coordinator has another name, so another series.
            self._seed_bits = Random(f"{config.seed} {name}").getrandbits  # noqa: S311
        self._sessions = OwnedSessions(store, owner, self.targets, random_bits, config)
        self._committer = Committer(store, owner, self._sessions.random, self._end_elsewhere)
        self._commit_task: asyncio.Task[None] | None = None
        self._num_admitted = 0
        self._starts = FairQueue(range(STARTS_MAX))
        """Places for new requests. A request of many sessions begins in several steps of the event
        loop, between which other tenants' requests continue."""
        self._found_trouble = ""
        self._watching: list[asyncio.Task[None]] = []
        self._served: ReplicaDescription
        self._lengths: LengthControls
        self._meter = LoadMeter()
        self._trial = TrialMeter()
        self._observation = observation
        self._known: dict[str, Mapping[str, float]] = {}
        """Metric -> label -> number, from the newest check of targets and store."""
        observation.watch(self._readings)
        self._auditor = Auditor(config, self._sessions, observation)

    async def start(self) -> None:
        """Gets the descriptions of the replicas, and starts the commits. Raises `Unavailable` if no
        target is known, or if a replica of a fixed set does not answer. Raises `Incompatible` if a
        replica of a fixed set does not fit the others, or if the registry has replicas of a role,
        but none of them fits the pool."""
        config = self.config
        for pool, links in zip((self.targets, self.drafts), self._links, strict=True):
            for name, link in links.items():
                await pool.join(name, link)
        if self._follows:
            await self.fleet.begin()
        target = self.targets.first
        if target is None:
            raise errors.TargetUnavailable("no target is known")
        self._lengths = LengthControls(
            self.targets.first_kept or target,
            self.drafts.first_kept,
            config.run_ahead_rounds,
            delays=config.drafting_delays,
            adapts=config.length_control,
        )
        self._served = replace(target, model=config.served_model_name or target.model)
        self._commit_task = asyncio.create_task(self._committer.run())
        watching = [self.targets.watch(), self.drafts.watch(), self._meter.watch(), self._look()]
        if self._follows:
            watching.append(self.fleet.run())
        self._watching = [asyncio.create_task(one) for one in watching]

    @property
    def served(self) -> ReplicaDescription:
        """The first target's description, but with the model name that requests use, and with
        `max_model_len` of the newest target. Must not be read before `start`."""
        newest = self.targets.newest() or self._served
        return replace(self._served, max_model_len=newest.max_model_len)

    @property
    def num_running(self) -> int:
        return len(self._sessions.running)

    @property
    def figures(self) -> Figures:
        return self._meter.figures

    @property
    def trial_sums(self) -> TrialSums:
        return self._trial.sums

    async def generate(
        self,
        request: GenerateRequest,
        tenant: str = "",
        traceparent: str = "",
        *,
        resumable: bool = True,
        key: RequestKey | None = None,
    ) -> AsyncGenerator[Event]:
        """Validates a request, runs its session, and yields the events. If the iterator is closed
        early, the session is cancelled. A `resumable` session is cancelled only after
        `resume_grace_ms`, and can be resumed until then. A session with a `key` can also be
        resumed for this time after an error. `traceparent` is the caller's trace context or empty.

        Raises `BadRequest`, `NotFound` (unknown model), `KeyTaken` (another session has the key),
        `Overloaded`, `DeadlineExceeded` (before the first token), `Unavailable`, and the store's
        error that ended the session (`StaleEpoch`, `DataLoss`)."""
        arrived = asyncio.get_running_loop().time()
        observer = self._observation.begin(request, self._served.model, traceparent)
        with _observing(observer), self._admitted():
            async with self._starts.turn(tenant):
                self._check(request)
                await asyncio.sleep(0)
            run = await self._open(request, tenant, arrived, observer, key)
            with self._serving(run, resumable, outlasts_errors=key is not None):
                yield started(run.session.record, self.served.model)
                async for part in self._prompt_tokens(tenant, run.parameters, run.context.deadline):
                    yield part
                while events := await run.next_events():
                    for event in events:
                        yield event

    async def tokenize(
        self, request: GenerateRequest, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """Returns the tokens of a request's prompt, which may be longer than `max_model_len`.
        Raises `BadRequest`, `NotFound` and `Overloaded`."""
        with self._admitted():
            self._check(request)
            _, token_ids = await self._prompts.encode(
                request, self.served.max_model_len, tenant, add_special_tokens=add_special_tokens
            )
        return token_ids

    async def detokenize(self, token_ids: Sequence[int], model: str = "", tenant: str = "") -> str:
        """Returns the text of tokens, including special tokens. Raises the errors of `tokenize`."""
        with self._admitted():
            self._check(GenerateRequest("", model))
            if self.text is None:
                raise errors.BadRequest(
                    "tokens", "the model has no tokenizer, so tokens have no text"
                )
            check_ids(token_ids, "tokens", self.served.vocab_size)
            decode = partial(self.text.decode, token_ids, True)
            size = DETOKENIZED_BYTES * len(token_ids)
            return await self._prompts.threads.run(tenant, decode, size)

    async def _prompt_tokens(
        self, tenant: str, asked: GenerationParameters, deadline: float
    ) -> AsyncGenerator[PromptTokens]:
        """If the request asks for the prompt's log-probabilities, yields the prompt's tokens with
        their log-probabilities. To get these, a second session sends the tokens to the target as
        proposals. Raises `DeadlineExceeded`, the target's error, and `InvariantError` if the logits
        of a position give no log-probabilities."""
        if asked.prompt_logprobs is None:
            return
        greedy = SamplingParams(temperature=0.0)
        parameters = replace(
            asked,
            sampling=greedy,
            rule=Rule.GREEDY,
            logprobs=max(1, asked.prompt_logprobs),
            constraint=None,
        )
        first, rest = asked.prompt[:1], asked.prompt[1:]
        try:
            yield PromptTokens(first, (None,))
            scored = self._sessions.score(tenant, parameters, first, rest, deadline)
            async with aclosing(scored) as parts:
                async for token_ids, reply in parts:
                    entries = reply.logprobs[: len(token_ids)]
                    reason = "the logits of a token of the prompt cannot be sampled from"
                    errors.check(all(entry.top for entry in entries), reason)
                    if asked.prompt_logprobs == 0:
                        entries = tuple(replace(entry, top=()) for entry in entries)
                    yield PromptTokens(token_ids, entries)
        except TimeoutError:
            reason = f"deadline_ms: {asked.deadline_ms} ms passed before the prompt was scored"
            raise errors.DeadlineExceeded(reason) from None

    async def known(self, key: RequestKey) -> RequestKey:
        """Returns the key, with its session's id if the key has a session. Raises `BadRequest` if
        the key was used for a different request."""
        return key.found(await self._store.claim_key(key.name))

    async def generate_once(
        self,
        request: GenerateRequest,
        key: RequestKey,
        resume: ResumeRequest,
        tenant: str = "",
        traceparent: str = "",
    ) -> AsyncGenerator[Event]:
        """Resumes the session of a `key` that `known` returned. If the key has no session, or the
        session has expired, runs the request. Raises `SessionNotFound` if the client already has
        tokens of the expired session (`resume.num_tokens`)."""
        is_gone = False
        for _ in range(KEY_TRIES):
            try:
                if key.session_id and not is_gone:
                    asked = replace(resume, session_id=key.session_id)
                    running = self.resume(asked, tenant, traceparent, outlasts_errors=True)
                elif resume.num_tokens:
                    raise errors.SessionNotFound("the request with this key is not stored any more")
                else:
                    running = self.generate(request, tenant, traceparent, key=key)
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

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        self._num_admitted += 1
        try:
            if self._committer.closing:
                raise errors.Unavailable("this coordinator is shutting down")
            if self._num_admitted > self.config.max_sessions:  # Includes this request.
                raise errors.Overloaded(
                    f"{self.config.max_sessions} sessions run already (--max-sessions); try again "
                    "later",
                    limit="max_sessions",
                    of_server=True,
                )
            self._meter.check()
            yield
        finally:
            self._num_admitted -= 1

    @contextmanager
    def _serving(
        self, run: SessionRun, resumable: bool = True, *, outlasts_errors: bool = False
    ) -> Iterator[None]:
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

    async def _open(
        self,
        request: GenerateRequest,
        tenant: str,
        arrived: float,
        observer: RequestObserver,
        key: RequestKey | None,
    ) -> SessionRun:
        deadline_ms = request.deadline_ms or self.config.deadline_ms
        deadline = arrived + deadline_ms / 1e3
        try:
            async with asyncio.timeout_at(deadline):
                parameters = await self._resolve(request, tenant)
                session = await self._sessions.open(tenant, parameters, key)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"deadline_ms: {deadline_ms} ms passed before the session was open"
            ) from None
        try:
            context = SessionContext(session, parameters, deadline, observer)
            completion = self._completion(parameters)
            begun = Replayed(completion, finish_reason=completion.push(()).finish_reason)
            return self._begin(context, arrived, begun)
        except BaseException:
            if key is None:
                self._sessions.give_up(session.record)
            else:
                self._sessions.wait_for_client(session.record)
            raise

    async def resume(
        self,
        request: ResumeRequest,
        tenant: str = "",
        traceparent: str = "",
        *,
        outlasts_errors: bool = False,
    ) -> AsyncGenerator[Event]:
        """Continues a session whose stream broke, at this or another coordinator. Yields `Started`,
        the stored tokens that the client lacks, and then the same events as `generate`. An older
        stream of the session ends with `StaleEpoch`. With `outlasts_errors`, the session can be
        resumed again after an error.

        Raises `SessionNotFound`, `Overloaded`, `DataLoss` (the store lacks tokens that the client
        has), `Incompatible` (no known target has the session's weights), and `Unavailable` (another
        coordinator may own the session, or this coordinator takes over too many sessions)."""
        arrived = asyncio.get_running_loop().time()
        with self._admitted(), ExitStack() as taking_over:
            taking_over.enter_context(self._sessions.taking_over(request.session_id, tenant))
            await self._sessions.told(request.session_id)
            record = await self.session(request.session_id, tenant)
            record, parameters = await self._sessions.claim(record, request)
            # A client that wants all tokens again also gets the prompt's tokens again.
            shown = parameters if request.cuts else replace(parameters, prompt_logprobs=None)
            completion = self._completion(parameters)
            left_ms = min(parameters.deadline_ms, request.deadline_ms or math.inf)
            deadline = arrived + left_ms / 1e3
            if record.finish_reason is not None:
                replayed = await self._sessions.replay(
                    record, lambda: replay(record, parameters, completion, request)
                )
                taking_over.close()  # Other take-overs do not wait for this client to read.
                yield started(record, self.served.model)
                async for part in self._prompt_tokens(tenant, shown, deadline):
                    yield part
                for event in replayed_events(record, replayed):
                    yield event
                return
            observer = self._observation.begin(parameters, self.served.model, traceparent)
            with _observing(observer):
                try:
                    session, replayed = await self._sessions.replay(
                        record,
                        lambda: (Session(record), replay(record, parameters, completion, request)),
                    )
                    await self._sessions.vacate(record)
                    context = SessionContext(session, parameters, deadline, observer)
                    run = self._begin(context, arrived, replayed)
                except BaseException:
                    self._sessions.wait_for_client(record)
                    raise
                taking_over.close()
                with self._serving(run, outlasts_errors=outlasts_errors):
                    yield started(record, self.served.model)
                    async for part in self._prompt_tokens(tenant, shown, deadline):
                        yield part
                    while events := await run.next_events():
                        for event in events:
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
            await self._sessions.told(session_id)
            record = await self.session(session_id, tenant)
            try:
                await self._sessions.cancel(record)
                return
            except errors.Unavailable as error:
                if isinstance(error, errors.StoreUnavailable) or loop.time() >= until:
                    raise
            await asyncio.sleep(CANCEL_LOOK_S)

    async def stored_parameters(self, session_id: str, tenant: str) -> GenerationParameters:
        """Returns the parameters of a stored session. The call counts as a take-over. Raises the
        errors of `session`, and `Unavailable` if too many take-overs run."""
        with self._sessions.taking_over(session_id, tenant):
            record = await self.session(session_id, tenant)
        return GenerationParameters.of(record)

    async def session(self, session_id: str, tenant: str | None = "") -> SessionRecord:
        """Returns the stored record of a session. Raises `NotFound` if the session does not exist,
        or belongs to another tenant (any tenant is allowed if `tenant` is None)."""
        record = await self._store.load(session_id)
        if tenant not in (record.tenant, None):
            raise not_found(session_id)  # The same error as for a session that does not exist.
        return record

    def hand_over(self) -> None:
        """Lets other coordinators take over the sessions, which run here until taken over."""
        self._committer.hand_over()

    async def close(self) -> None:
        """Cancels all sessions, commits their last tokens, and closes links and store."""
        self._sessions.close()
        self._auditor.close()
        async with AsyncExitStack() as ending:  # The stack calls these in reverse order.
            for close in (
                self._store.close,
                self.drafts.close,
                self.targets.close,
                self._end_tasks,
                self._sessions.end_background,
                self._prompts.close,
            ):
                ending.push_async_callback(close)

    def _end_elsewhere(self, wanted: Mapping[str, bool]) -> None:
        """Handles other coordinators' requests to cancel (True) or release (False) sessions."""
        for session_id, cancels in wanted.items():
            run = self._sessions.running.get(session_id)
            if cancels and run is not None:
                run.cancel()
            else:
                self._sessions.in_background(self._sessions.release_wanted(session_id))

    async def _end_tasks(self) -> None:
        self._committer.close()
        if self._commit_task is not None:
            await asyncio.gather(self._commit_task, return_exceptions=True)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    @property
    def trouble(self) -> str:
        """Why requests cannot make progress; empty if they can. Drafts are not checked, because
        requests can run without them."""
        if self._committer.closing:
            return "the coordinator is shutting down"
        return self._found_trouble

    async def _found(self) -> str:
        async def store_trouble() -> str:
            try:
                memory = await self._store.memory()
                self._sessions.stored.learn(memory, 1 + len(self.fleet.peers))
                await self._store.load(NO_SESSION)
            except errors.OutriderError as error:
                if not isinstance(error, errors.NotFound):
                    return f"the session store does not answer: {error.message}"
            return ""

        has_target, trouble = await asyncio.gather(self.targets.healthy(), store_trouble())
        available = {"target_available": has_target, "store_available": not trouble}
        self._known = {name: {"": float(is_there)} for name, is_there in available.items()}
        return trouble or ("" if has_target else "no target answers")

    async def _look(self) -> None:
        now, failing_since = asyncio.get_running_loop().time, math.inf
        while True:
            began = now()  # Not after `_found`, which takes some seconds if nothing answers.
            try:
                found = await self._found()
            except Exception as error:  # noqa: BLE001 (the checks must go on)
                _log.exception("the check of targets and store failed")
                found = str(error)
            failing_since = min(failing_since, began) if found else math.inf
            self._found_trouble = found if now() >= failing_since + TROUBLE_S else ""
            await asyncio.sleep(LOOK_PERIOD_S)

    def _readings(self) -> dict[str, Mapping[Any, float]]:
        """Returns metric -> label -> number. Any thread may call this method."""
        pools = (self.targets, self.drafts)
        return self._known | {
            "wire_bytes_sent": {pool.role: pool.num_bytes["sent"] for pool in pools},
            "wire_bytes_received": {pool.role: pool.num_bytes["received"] for pool in pools},
            "refusals": dict(REFUSALS),
            "stale_answers": {pool.role: pool.num_stale for pool in pools},
            "num_requests_running": {"": self.num_running},
            "num_requests_waiting": {"": self._num_admitted - self.num_running},
            "loop_lag_seconds": {"": self._meter.lag_ms / 1e3},
            "replicas_wanted": self.fleet.wanted,
            "replicas_present": self.fleet.present,
        }

    @property
    def failed(self) -> bool:
        """Whether a bug has ended the commits."""
        return self._commit_task is not None and self._commit_task.done()

    def check_integrity(self) -> None:
        """Raises `InvariantError` if sessions, routes and commits of the idle coordinator do not
        match."""
        sessions = set(self._sessions.running)
        self.targets.check_integrity(sessions | self._sessions.scored_ids)
        self.drafts.check_integrity(sessions, every=False)
        self._committer.check_integrity()

    def _check(self, request: GenerateRequest) -> None:
        if request.model not in ("", self.served.model):
            raise errors.NotFound(
                f"model {request.model!r} does not exist; this server serves {self.served.model!r}"
            )
        if request.stop and self.text is None:
            raise errors.BadRequest(
                "stop", "the model has no tokenizer, so there is no text to search"
            )
        check_fields(request, self.served)

    async def _resolve(self, request: GenerateRequest, tenant: str) -> GenerationParameters:
        field, prompt_ids = await self._prompts.encode(request, self.served.max_model_len, tenant)
        if request.constraint is not None:
            ends = self.served.eos_token_ids
            await self._prompts.check_constraint(request.constraint, ends, tenant)
        # The session's parameters name the target's weights, so a target must be known.
        target = await self.targets.wait_for_one(self.config)
        parameters = resolve(
            request, field, prompt_ids, self.served, self.config, self._seed_bits(SEED_BITS)
        )
        return replace(parameters, weights=target.weights)

    def _begin(self, context: SessionContext, arrived: float, replayed: Replayed) -> SessionRun:
        session, parameters = context.session, context.parameters
        context.observer.opened(session.session_id, session.prompt_length, parameters.seed)
        commits = self._committer.add(session)
        try:
            target = TargetClient(self.targets, context, self.config)
            draft = open_drafts(self.drafts, target, self._fallback, self.config)
            trial = drafter = None
            num_elsewhere = sum(peer.load for peer in self.fleet.peers)
            self._lengths.hear_load(
                len(self.targets.present), num_elsewhere, self.drafts.first_kept
            )
            tried = self.targets.on_trial or self.drafts.on_trial
            # If only a look-up drafts for the session, `draft.on_trial` is None.
            if tried is not None and (is_new := draft.on_trial) is not None:
                trial = self._trial.begin(tried.name, is_new)
                drafter = tried.description if is_new else None
            record = session.record
            lengths = self._lengths.open(
                record.rule,
                record.seed,
                0 if isinstance(draft, NoDrafts) else parameters.num_draft_tokens,
                record.prompt_length,
                drafter,
            )
            run = SessionRun(
                context,
                replayed,
                target,
                draft,
                commits=commits,
                stored=self._sessions.stored,
                lengths=lengths,
                meter=self._meter,
                arrived=arrived,
                reads_beside=not self.config.drafting_delays,
                trial=trial,
            )
            self._sessions.running[session.session_id] = run
        except BaseException:
            commits.remove()
            raise
        return run

    def _completion(self, parameters: GenerationParameters) -> Completion:
        stream = None if self.text is None else self.text.stream(parameters.shown_tokens)
        return Completion(parameters, self.served.eos_token_ids, stream)


@contextmanager
def _observing(observer: RequestObserver) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        observer.failed(error)
        raise
