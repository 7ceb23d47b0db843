"""A session's decode loop, and the queue that passes committed tokens to the client's stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain

from coordinator.decoding.committer import SessionCommits
from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.resumption import Replayed, write_logprobs
from coordinator.decoding.stored_bytes import StoredBytes
from coordinator.decoding.trial import SessionTrial
from coordinator.draft_length.controller import LengthControl
from coordinator.draft_length.policy import RoundLength, RoundResult
from coordinator.routing.drafts import (
    NO_LOOKUP,
    Drafted,
    Drafts,
    LookupProbe,
    LookupRequest,
    drafted_by_target,
)
from coordinator.routing.replica_pool import SessionContext
from coordinator.routing.target_client import TargetClient
from outrider.errors import (
    DeadlineExceeded,
    InvariantError,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
)
from outrider.foundation.logs import about, identify
from outrider.foundation.values import replaced, value
from outrider.interfaces.messages import PositionLogprobs, Prefix, VerdictReply
from outrider.interfaces.request import Event, Finished, Metrics, RoundReport, Tokens, Usage
from outrider.sessions.store import Counters, FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin, Outcome, decide, survival
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL
from outrider.speculation.random_streams import RoundNoise
from outrider.telemetry.observer import SILENT, RequestObserver

_log = logging.getLogger(__name__)

_NOT_DRAFTED = Drafted(EMPTY_ENCODED_PROPOSAL, "fallback", seconds=0.0, num_asked=0)
COMMIT_GRACE_S = 2.0
"""Time after the deadline for committing the tokens that were decided before the deadline."""


class SessionRun:
    """Runs one session. A task decodes, and the client's stream reads events from a queue."""

    def __init__(
        self,
        context: SessionContext,
        replayed: Replayed,
        target: TargetClient,
        draft: Drafts,
        *,
        commits: SessionCommits,
        stored: StoredBytes,
        lengths: LengthControl,
        meter: LoadMeter,
        arrived: float,
        reads_beside: bool = True,
        trial: SessionTrial | None = None,
    ) -> None:
        """Starts decoding after the `replayed` tokens. `arrived` is the time of the request on the
        event loop's clock. With `reads_beside`, draft and target prefill at the same time.
        Otherwise the draft prefills when it is first asked for a proposal."""
        self.context = context
        self._clock = asyncio.get_running_loop().time
        self.session = context.session
        self.session_id = self.session.session_id
        self.parameters = context.parameters
        self._deadline = context.deadline
        self._observer = context.observer
        self._completion = replayed.completion
        self._ended = replayed.finish_reason
        self._num_replayed = replayed.completion.num_tokens
        self._commits, self._stored = commits, stored
        self._output = OutputQueue(commits, self._deadline + COMMIT_GRACE_S, self._observer)
        for tokens in replayed.events:
            self._write(tokens)
        self._target = target
        self._draft = draft
        self._lengths = lengths
        self._meter = meter
        self._arrived = arrived
        self._reads_beside = reads_beside
        self._trial = trial
        self._probe = draft.probe(lengths) if lengths.adapts else None
        self._timeout: asyncio.Timeout | None = None
        self._cancelled = False
        self._first_token_at: float | None = None
        self.is_recorded = False
        """Whether the store has the session's end."""
        self._handed_over = False
        self._is_timed = True
        """`RoundLength.is_timed` of the newest round."""
        self._held_back = ""
        """Text that the completion held back when decoding stopped early. It is sent together with
        `Finished`. If the stream broke between the two, a resumed stream would repeat the text."""
        self._task = asyncio.create_task(self._decode())

    @property
    def record(self) -> SessionRecord:
        """The session's record as of the start of the run, but with current counters."""
        return replace(self.session.record, counters=self.session.counters)

    def cancel(self) -> None:
        """Cancels the session. Decided tokens are still committed and sent."""
        self._cancelled = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._clock())

    async def events(self) -> AsyncGenerator[Event]:
        """Yields the events after `Started`, up to `Finished`. Must be called once. Raises the
        error that ended the session, or `StaleEpoch` after the session was handed over. If the
        deadline passes, and the store has taken no token, raises `DeadlineExceeded`; if it lacks
        only later tokens, raises `StoreUnavailable`."""
        while events := await self._next_events():
            for event in events:
                yield event
        for event in await self._last_events():
            yield event

    async def _next_events(self) -> Sequence[Event]:
        """Returns an empty sequence if only the last events are left."""
        try:
            events = await self._output.read()
        except TimeoutError:
            if self._first_token_at is None:
                raise self._late() from None
            raise StoreUnavailable(
                "the session store did not commit the last tokens in time, so they are not sent"
            ) from None
        except OutriderError:
            self._check_here()
            raise
        if events and self._first_token_at is None:
            self._first_token_at = self._clock()
        return events

    async def _last_events(self) -> Sequence[Event]:
        self._check_here()
        reason = await self._task
        session, now = self.session, self._clock
        await self._finish(reason, max(self._deadline, now()) + COMMIT_GRACE_S)
        num_tokens, seconds = session.length - session.prompt_length, now() - self._arrived
        first = now() if self._first_token_at is None else self._first_token_at
        finished = Finished(
            finish_reason=reason,
            usage=Usage(session.prompt_length, num_tokens),
            metrics=Metrics.of(
                session.counters,
                time_to_first_token_ms=(first - self._arrived) * 1e3,
                tokens_per_second=(num_tokens - self._num_replayed) / seconds
                if seconds > 0
                else 0.0,
            ),
            stop_string=self._completion.stop_string,
            stop_token_id=self._completion.stop_token_id,
        )
        self._observer.finished(finished)
        if not self._held_back:
            return (finished,)
        return Tokens(self._completion.num_tokens, (), self._held_back, (), ()), finished

    def _check_here(self) -> None:
        if self._handed_over:
            raise StaleEpoch(f"session {self.session_id} was resumed by another stream")

    async def stop(self, *, hands_over: bool) -> None:
        """Stops decoding, and releases the session on target and draft. Must be called before
        `close`. With `hands_over`, `close` leaves an unfinished session to its next owner."""
        self._handed_over = hands_over and self.session.finish_reason is None
        identify(self.session_id, self._observer.trace_id)
        self._task.cancel()
        await asyncio.wait([self._task])
        # Takes the error out of the task. Its traceback refers to this run, so the run would be
        # garbage until a collection, which takes 0.8 s after some thousand runs.
        with suppress(asyncio.CancelledError, Exception):
            self._task.result()
        self._output.end()
        self._lengths.close()
        self._target.close(self._learned())
        self._draft.close()
        if self._trial is not None:
            self._trial.end()

    def _learned(self) -> Prefix | None:
        """Returns what the target's look-up may learn: the tokens that the target holds, if the
        store has them and the session's end. None if nothing may be learned, for example because
        another session has this session's seed."""
        session = self.session
        if not (self.is_recorded and self._draft.by_target):
            return None
        length = min(self._target.cached_length, session.length)
        return Prefix(length, session.tokens.digest(length))

    async def close(self) -> None:
        """Commits the last tokens, and cancels an unfinished session unless it is handed over."""
        session = self.session
        try:
            if not (self.is_recorded or self._handed_over):
                now = self._clock()
                await self._finish(FinishReason.CANCELLED, now + COMMIT_GRACE_S)
        except OutriderError as error:
            _log.info("the end of session %s was not stored: %r", self.session_id, error)
        finally:
            self._commits.remove()
            fields = about(
                finish_reason=session.finish_reason,
                prompt_tokens=session.prompt_length,
                completion_tokens=session.length - session.prompt_length,
                **asdict(session.counters),
            )
            _log.debug("the session ended", extra=fields)

    async def _finish(self, reason: FinishReason, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._commits.finish(reason)
        except TimeoutError:
            raise StoreUnavailable("the session's end was not stored in time") from None
        self.is_recorded = True

    async def _decode(self) -> FinishReason:
        identify(self.session_id, self._observer.trace_id)
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                if self._ended is not None:
                    return self._ended
                if not self._cancelled:
                    return await self._rounds()
        except TimeoutError:
            if not self._cancelled:
                if self._completion.num_tokens == 0:
                    raise self._late() from None
                return self._interrupted(FinishReason.DEADLINE)
        finally:
            self._timeout = None
            self._output.close()
        return self._interrupted(FinishReason.CANCELLED)

    def _late(self) -> DeadlineExceeded:
        deadline_ms = self.parameters.deadline_ms
        return DeadlineExceeded(f"deadline_ms: {deadline_ms} ms passed before the first token")

    async def _rounds(self) -> FinishReason:
        if self._reads_beside and not self._lengths.plans_plain:
            self._draft.prefill(self.parameters.num_draft_tokens)
        reason, index = None, 0
        while reason is None:
            await self._commits.room(self.parameters.num_draft_tokens + 1)
            await self._output.room()
            await self._stored.room(self.session.record.tenant)
            decided = _Decided(index, self._completion.num_tokens)
            try:
                reason = await self._round(decided)
                while reason is None and (reply := self._next_verdict()) is not None:
                    reason = self._round_ahead(decided, reply)
            finally:
                self._show(decided)
            index = decided.next_round
        return reason

    def _next_verdict(self) -> VerdictReply | None:
        """Returns the next round's verdict if the target ran this round ahead, and the verdict has
        arrived. With reports, each round has an event of its own."""
        num_tokens = self.parameters.num_draft_tokens + 1
        if self.parameters.include_rounds or not self._commits.has_room(num_tokens):
            return None
        if self._is_timed and not self._lengths.is_timed:
            return None  # `_end_timing` may recall these rounds.
        return self._target.take_ahead(self._completion.remaining)

    async def _round(self, decided: _Decided) -> FinishReason | None:
        """Runs a round, and adds its outcome to `decided`. Returns why the session ends; None if it
        continues."""
        index, began_at = decided.next_round, self._clock()
        length, noise = self._begin(index)
        lookup = NO_LOOKUP
        if self._target_drafts:
            lookup = self._lookup_request(length)
        drafted = await self._propose(index, length, noise, lookup)
        wanted = self._draft.next_round_request(length)
        self._observer.asked("target")
        asked = _AskedRound(index, length, noise, drafted, began_at, self._clock())
        reply = await self._target.verify(
            index,
            drafted.proposal,
            length.run_ahead,
            wanted,
            num_tokens_left=self._completion.remaining,
            lookup=lookup,
        )
        return self._decide(decided, asked, reply)

    def _round_ahead(self, decided: _Decided, reply: VerdictReply) -> FinishReason | None:
        """Like `_round`, for a round whose verdict has arrived."""
        index, now = decided.next_round, self._clock()
        length, noise = self._begin(index)
        drafted: Drafted | None = _NOT_DRAFTED
        if length.num_draft_tokens:
            by_target = self._draft.by_target
            drafted = drafted_by_target(length) if by_target else self._draft.take_next(length)
        if drafted is None:
            raise InvariantError("a target ran a round ahead that another drafts for")
        self._draft.next_round_request(length)  # What it returns was sent with an earlier round.
        self._observer.asked("target")
        asked = _AskedRound(index, length, noise, drafted, now, now)
        return self._decide(decided, asked, reply)

    @property
    def _target_drafts(self) -> bool:
        """Whether the look-up of the session's present target drafts for a timed round."""
        return self._draft.by_target and self._target.looks_up

    def _begin(self, index: int) -> tuple[RoundLength, RoundNoise]:
        self._observer.round_began(index)
        length = self._lengths.choose(
            self._completion.remaining, by_target=self._target_drafts, by_head=self._draft.by_head
        )
        if self._is_timed and not length.is_timed:
            self._end_timing()
        if index > 0:
            self._observer.count("rounds_by_num_draft_tokens", str(length.num_draft_tokens))
        record = self.session.record
        return length, RoundNoise(record.seed, record.rule, self.session.length)

    def _end_timing(self) -> None:
        """Recalls the rounds that the target runs ahead with drafts. Their drafts may have ended
        for lack of time or pages, or because a text was not indexed. This may depend on the other
        session with this seed. Later rounds of a head run ahead again."""
        self._is_timed = False
        if self._draft.by_target or self._draft.by_head:
            self._target.recall()
        self._draft.by_target = False

    def _decide(
        self, decided: _Decided, asked: _AskedRound, reply: VerdictReply
    ) -> FinishReason | None:
        """Computes the outcome of a round, learns from it, and adds it to `decided`."""
        now, session, noise = self._clock(), self.session, asked.noise
        verify_s = now - asked.asked_at
        self._observer.answered(
            "target", verify_s, reply.queue_ms, reply.compute_ms, asked=self._target.was_asked
        )
        if not self._draft.on_verdict(reply):
            self._target.recall()  # The target may go on with this proposal.
        proposal_ids = self._target.verified.token_ids
        if asked.drafted.by_target:
            num_asked = asked.drafted.num_asked if reply.has_looked_up else 0
            drafted = replaced(asked.drafted, proposal=self._target.verified, num_asked=num_asked)
            asked = replaced(asked, drafted=drafted)
        drafted = asked.drafted
        if len(proposal_ids) < len(drafted.proposal.token_ids):
            self._draft.reject()
        if session.error is not None:
            raise session.error  # The store has refused the session during the round.
        uniforms = noise.accept_uniforms(len(proposal_ids))
        outcome = decide(reply.verdict, proposal_ids, session.record.rule, uniforms)
        common_length = noise.committed_length + outcome.num_accepted
        self._target.settle(reply, common_length)
        self._draft.settle(common_length)
        if self._lengths.adapts:
            self._note(drafted, reply, outcome, now)
        if self._probe is not None:
            self._compare(self._probe, asked, reply, outcome.token_ids[0])
        if not asked.length.is_timed:
            self._trial = None  # See `DrafterSums`.
        if self._trial is not None and asked.index > 0:
            self._trial.note(outcome.num_accepted, len(outcome.token_ids), now - asked.began_at)
        return self._add(decided, asked, reply, verify_s, outcome)

    def _lookup_request(self, length: RoundLength) -> LookupRequest:
        """Returns what the target's look-up should propose or show."""
        num, least = length.num_draft_tokens, length.min_chance
        num_probed = 0 if num or self._probe is None else self._probe.num_wanted
        if num_probed:
            least = self._lengths.min_chance
        return LookupRequest(num, least, True, num_probed)

    def _compare(
        self, probe: LookupProbe, asked: _AskedRound, reply: VerdictReply, token_id: int
    ) -> None:
        """Compares a token with the look-up of whoever drafts."""

        def look_up() -> tuple[int, ...] | None:
            if self._target_drafts:
                return reply.probed if reply.has_looked_up else None
            return self._draft.show(asked.noise, self._lengths.min_chance)

        probe.note(asked.length.num_draft_tokens, token_id, look_up)

    async def _propose(
        self, index: int, length: RoundLength, noise: RoundNoise, lookup: LookupRequest
    ) -> Drafted:
        if length.num_draft_tokens == 0:
            return _NOT_DRAFTED
        if lookup.num_tokens:
            return drafted_by_target(length)
        self._observer.asked("draft")
        drafted = await self._draft.propose(index, length, noise)
        if drafted.ahead:
            self._observer.count("look_ahead_hits")
        if drafted.source == "fallback":
            self._observer.count("fallback_rounds")
        self._observer.answered("draft", drafted.seconds, drafted.queue_ms, drafted.compute_ms)
        return drafted

    def _note(self, drafted: Drafted, reply: VerdictReply, outcome: Outcome, now: float) -> None:
        result = RoundResult(
            num_asked=drafted.num_asked,
            survival=survival(self.session.record.rule, reply.verdict.accept_probability),
            num_tokens=len(outcome.token_ids),
            context=self.session.length,
            draft_s=drafted.seconds,
            target_s=(reply.queue_ms + reply.compute_ms - reply.next_draft_ms) / 1e3,
            ended_at=now,
            queue_s=reply.queue_ms / 1e3,
            beside=drafted.beside,
            next_draft_s=reply.next_draft_ms / 1e3,
            work_s=drafted.work_ms / 1e3,
            ran_ahead=not self._target.was_asked,
        )
        self._lengths.note(result)

    def _add(
        self,
        decided: _Decided,
        asked: _AskedRound,
        reply: VerdictReply,
        verify_s: float,
        outcome: Outcome,
    ) -> FinishReason | None:
        """Adds a round's tokens to the session and to `decided`."""
        piece, drafted = self._completion.push(outcome.token_ids), asked.drafted
        num_tokens, num_drafted = piece.num_tokens, len(drafted.proposal.token_ids)
        num_accepted = min(outcome.num_accepted, num_tokens)
        token_ids = outcome.token_ids[:num_tokens]
        logprobs: Sequence[PositionLogprobs] = ()
        if self.parameters.logprobs is not None:
            num = outcome.num_accepted
            places = (*range(num), len(reply.verdict.accept_probability) + num)
            logprobs = [reply.logprobs[place] for place in places[:num_tokens]]
        counters = self.session.counters
        self.session.decide(
            token_ids,
            Counters(
                counters.num_rounds + 1,
                counters.num_draft_tokens + num_drafted,
                counters.num_accepted_draft_tokens + num_accepted,
                counters.num_drafts + (num_drafted > 0),
            ),
            draft=self._draft.cache_state,
            target=self._target.cache_state,
            logprobs=[write_logprobs(entry) for entry in logprobs],
        )
        self._observer.decided(drafted.proposal, num_accepted, num_tokens, self.session.length)
        self._meter.decided(drafted, num_accepted, num_tokens)
        report = None
        if self.parameters.include_rounds:
            report = RoundReport(
                index=asked.index,
                proposed_token_ids=drafted.proposal.token_ids,
                num_accepted=num_accepted,
                draft_ms=drafted.seconds * 1e3,
                wire_ms=max(0.0, verify_s * 1e3 - reply.queue_ms - reply.compute_ms),
                queue_ms=reply.queue_ms,
                verify_ms=reply.compute_ms,
                commit_ms=0.0,
                look_ahead_hit=drafted.ahead,
            )
        decided.add(token_ids, piece.text, outcome.origins[:num_tokens], logprobs, report)
        return piece.finish_reason

    def _show(self, decided: _Decided) -> None:
        """Lets the committer commit decided tokens, and the client get them afterwards."""
        if decided.rounds:
            self._commits.notify()
            self._write(decided.tokens, decided.report, decided.rounds)

    def _interrupted(self, reason: FinishReason) -> FinishReason:
        self._held_back = self._completion.finish()
        return reason

    def _write(
        self, tokens: Tokens, report: RoundReport | None = None, rounds: range | None = None
    ) -> None:
        now = self._clock()
        self._output.write(Entry(self.session.length, tokens, report, now, rounds))


@value(frozen=True, slots=True)
class _AskedRound:
    """A round whose verdict was asked for."""

    index: int
    length: RoundLength
    noise: RoundNoise
    drafted: Drafted
    began_at: float
    asked_at: float


class _Decided:
    """The output of rounds that were decided one right after the other."""

    def __init__(self, first_round: int, first_index: int) -> None:
        """`first_index` is the index of the first token in the completion."""
        self._first_round = self.next_round = first_round
        self._first_index = first_index
        self._token_ids: list[int] = []
        self._text = ""
        self._origins: list[Origin] = []
        self._logprobs: list[PositionLogprobs] = []
        self.report: RoundReport | None = None
        """The last round's report, if the request asked for reports."""

    @property
    def rounds(self) -> range:
        return range(self._first_round, self.next_round)

    @property
    def tokens(self) -> Tokens:
        return Tokens(
            self._first_index,
            tuple(self._token_ids),
            self._text,
            tuple(self._origins),
            tuple(self._logprobs),
        )

    def add(
        self,
        token_ids: Sequence[int],
        text: str,
        origins: Sequence[Origin],
        logprobs: Sequence[PositionLogprobs],
        report: RoundReport | None,
    ) -> None:
        """Adds the output of the next round."""
        self.next_round += 1
        self._token_ids += token_ids
        self._text += text
        self._origins += origins
        self._logprobs += logprobs
        self.report = report


ROUNDS_UNREAD_MAX = 256
"""Decoding pauses while the queue holds the output of this many rounds, which Redis lacks or the
client has not taken."""


@value(frozen=True, slots=True)
class Entry:
    """The output of some rounds. The client gets it when `end_length` tokens are committed."""

    end_length: int
    tokens: Tokens
    report: RoundReport | None
    decided_at: float
    rounds: range | None = None
    """Indices of the rounds. None for replayed tokens."""


class OutputQueue:
    """Passes a session's committed output from the decode loop to the client's stream."""

    def __init__(
        self, commits: SessionCommits, until: float, observer: RequestObserver = SILENT
    ) -> None:
        """After the time `until` (on the event loop's clock), `read` raises `TimeoutError` instead
        of waiting."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._observer = observer
        self._session = commits.session
        self._commits = commits
        self._is_late = False
        self._timer = loop.call_at(until, self._expire)
        self._entries: deque[Entry] = deque()
        self._num_rounds = 0
        """Number of rounds in `_entries`."""
        self._closed = False
        self._taken = asyncio.Event()

    async def room(self) -> None:
        while self._num_rounds >= ROUNDS_UNREAD_MAX:
            self._taken.clear()
            await self._taken.wait()

    def write(self, entry: Entry) -> None:
        """Adds an entry. The commit of its tokens wakes the reader."""
        self._entries.append(entry)
        self._num_rounds += len(entry.rounds or ())

    def close(self) -> None:
        """Must be called when no more entries will be written."""
        self._closed = True
        self._commits.wake()

    def end(self) -> None:
        """Must be called when no more entries will be read."""
        self._timer.cancel()

    async def read(self) -> Sequence[Event]:
        """Waits until the next entry is committed. Returns the entry's report, if it has one, and
        its tokens. Without reports, joins the tokens of all committed entries. Never joins replayed
        tokens. Returns an empty sequence after the last entry. Raises `TimeoutError` after the time
        `until`. If the store has refused the session, raises the store's error."""
        while not self._is_ready:
            if self._closed and not self._entries:
                return ()
            if self._is_late:
                raise TimeoutError
            await self._commits.change()
        entries = [first := self._take()]
        if first.report is not None:
            return replace(first.report, commit_ms=self._tell(entries) * 1e3), first.tokens
        if first.rounds is None:
            return (first.tokens,)
        while self._is_ready:
            entries.append(self._take())
        self._tell(entries)
        return (_joined([entry.tokens for entry in entries]),)

    def _take(self) -> Entry:
        entry = self._entries.popleft()
        self._num_rounds -= len(entry.rounds or ())
        self._taken.set()
        return entry

    @property
    def _is_ready(self) -> bool:
        entries = self._entries
        return bool(entries) and entries[0].end_length <= self._session.showable_length

    def _expire(self) -> None:
        self._is_late = True
        self._commits.wake()

    def _tell(self, entries: Sequence[Entry]) -> float:
        """Reports rounds to the observer. Returns the time since the first round was decided, s."""
        now = self._clock()
        decided_s = {
            index: now - entry.decided_at for entry in entries for index in entry.rounds or ()
        }
        self._observer.shown(decided_s, sum(len(entry.tokens.token_ids) for entry in entries))
        return now - entries[0].decided_at


def _joined(parts: list[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    return Tokens(
        parts[0].first_index,
        tuple(chain.from_iterable(part.token_ids for part in parts)),
        "".join(part.text_delta for part in parts),
        tuple(chain.from_iterable(part.origins for part in parts)),
        tuple(chain.from_iterable(part.logprobs for part in parts)),
    )
