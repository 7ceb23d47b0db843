"""A replica service whose work is done in steps: what draft and target share."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from outrider.engine.interface import ModelInfo
from outrider.engine.step_costs import StepCosts
from outrider.errors import OutriderError, Overloaded, StaleEpoch
from outrider.grammar.compiler import Grammar, Grammars
from outrider.grammar.constraint import Constraint
from outrider.limits import (
    RELEASES_REMEMBERED_MAX,
    SEQUENCES_PER_REPLICA_MAX,
    SILENT_SESSION_MS,
)
from outrider.messages import Refused, ReplicaDescription, RoundHead, RoundItem
from outrider.replica.batching_delay import BatchingDelay
from outrider.replica.scheduler import StepExecutor, StepScheduler
from outrider.replica.step_request import (
    CANCELLED_CODE,
    AnswerSender,
    StepRequest,
    refusal,
)
from outrider.replica.worker import StepWorker
from outrider.transport.link import Connection

logger = logging.getLogger(__name__)
Item = TypeVar("Item", bound=RoundItem)
Answer = TypeVar("Answer")


class SteppedService(StepScheduler):
    """Serves any number of streams with one worker. Every method is for the event loop's thread;
    the worker is touched on the executor alone.

    A role that does more than queue its items overrides `submit` and `_forget`.
    """

    def __init__(
        self,
        worker: StepWorker,
        executor: StepExecutor,
        description: ReplicaDescription,
        note_seconds: Callable[[float], None] | None = None,
        batching_delay: BatchingDelay | None = None,
    ) -> None:
        """`description.max_num_seqs` sessions share a step at most. An item whose constraint is new
        waits until it is among the worker's grammars; it then has the grammar with it, so that no
        step compiles one."""
        super().__init__(
            executor, worker, max_batch=description.max_num_seqs,
            note_seconds=note_seconds, batching_delay=batching_delay,
        )  # fmt: skip
        self._description = description
        self.num_items = 0
        """That its streams have received."""
        self._filter = StaleRoundFilter()
        self.sessions = SessionTracker()
        self._grammars = worker.grammars
        self._compiling: set[asyncio.Task[None]] = set()

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Connection[Any]:

        def note_and_send(answers: Sequence[Any]) -> None:
            now = asyncio.get_running_loop().time()
            for answer in answers:
                self.sessions.answer(answer.key.session_id, now)
            send(answers)

        return _Connection(self, note_and_send)

    def describe(self) -> ReplicaDescription:
        return self._description

    def release(self, session_id: str, epoch: int) -> None:
        if self._filter.release(session_id, epoch):
            self._forget(session_id)
            self.sessions.forget(session_id)
            super().release(session_id, epoch)

    async def drain(self) -> None:
        while self._compiling:
            await asyncio.wait(self._compiling)
        await super().drain()

    async def close(self) -> None:
        for task in self._compiling:
            task.cancel()
        if self._grammars is not None:
            self._grammars.close()
        await super().close()

    def check_integrity(self) -> None:
        self._worker.check_integrity()

    def take(self, item: Any, sender: AnswerSender) -> None:
        """Takes an item of a stream, or refuses it where its round is over; never waits."""
        self.num_items += 1
        work = self._work(item, sender)
        if self._is_stale(work):
            return
        loop = asyncio.get_running_loop()
        self.sessions.hear(item.head.session_id, sender, loop.time())
        if work.deadline is not None:
            work.timer = loop.call_at(work.deadline.ends_at, self._tell_undrawn, work)
        constraint = item.head.constraint
        if constraint is None or self._grammars is None:
            self.submit(work)
            return
        compiled = self._grammars.find(item.head.constraint_hash, item.head.tenant)
        if compiled is not None:
            self.submit(work.compiled(compiled))
            return
        task = asyncio.create_task(self._compile(self._grammars, constraint, work))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def _is_stale(self, work: StepRequest) -> bool:
        """Whether a round is over, which is then told; else it is noted."""
        stale = self._filter.admit(work.item.head)
        if stale is not None:
            if self._observer is not None:
                self._observer.stale()
            work.tell(stale)
            self._done(work, stale)
        return stale is not None

    async def _compile(self, grammars: Grammars, constraint: Constraint, work: StepRequest) -> None:
        """Accepts work once its constraint is compiled, or known not to be possible, unless its
        round is over by then."""
        compiled: Grammar | OutriderError
        try:
            compiled = await grammars.prepare(constraint, work.item.head.tenant)
        except Overloaded as error:
            self._refuse(work, error)
            return
        except OutriderError as error:
            logger.info("a constraint is of no use here: %s", error)
            compiled = error
        except Exception:
            logger.exception("a constraint could not be compiled")
            self._refuse(work, OutriderError("its constraint broke down here"))
            return
        if not self._is_stale(work) and work.wanted:
            self.submit(work.compiled(compiled))

    def leave(self, sender: AnswerSender) -> None:
        self.park(self.sessions.leave(sender))

    def _starved(self, waiting: Collection[str]) -> None:
        """Parks sessions whose coordinator has long said nothing although it was answered: it may
        have gone, and its release been lost."""
        since = asyncio.get_running_loop().time() - SILENT_SESSION_MS / 1e3
        self.park(self.sessions.fall_silent(since, waiting))

    def _forget(self, session_id: str) -> None:
        """A session ends: drops what a role keeps of it on this side of the worker; here nothing
        is kept."""

    def _work(self, item: Any, sender: AnswerSender) -> StepRequest:
        now, left_ms = asyncio.get_running_loop().time(), item.head.deadline_ms
        return StepRequest(item, [sender], now, now + left_ms / 1e3 if left_ms else math.inf)


class _Connection(AnswerSender):
    def __init__(self, service: SteppedService, send: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(send)
        self._service = service

    def receive(self, items: Sequence[Any]) -> None:
        for item in items:
            self._service.take(item, self)

    def close(self) -> None:
        """What waits for this stream alone is dropped before its step, and its sessions' pages are
        there for others until they come back on another stream."""
        self.closed = True
        self._service.leave(self)


def describe_model(
    info: ModelInfo, max_num_seqs: int, costs: StepCosts | None
) -> ReplicaDescription:
    """The description of a replica that runs a model, `max_num_seqs` sessions a step at most."""
    return ReplicaDescription(
        model=info.name,
        weights_fingerprint=info.weights_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        max_num_seqs=max_num_seqs,
        step_costs=costs,
        numerics=info.numerics,
    )


class SessionTracker:
    """Through which connection each session was heard last, and when it last spoke or was answered.

    Remembers `SEQUENCES_PER_REPLICA_MAX` sessions, those heard last.
    """

    def __init__(self) -> None:
        self._heard: OrderedDict[str, tuple[AnswerSender, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, session_id: str, sender: AnswerSender, now: float) -> None:
        """An item of the session has come."""
        self._heard[session_id] = (sender, now)
        self._heard.move_to_end(session_id)
        if len(self._heard) > SEQUENCES_PER_REPLICA_MAX:
            self._heard.popitem(last=False)

    def answer(self, session_id: str, now: float) -> None:
        """The session has been answered: its silence begins now. Unknown ones are ignored."""
        if session_id in self._heard:
            self._heard[session_id] = (self._heard[session_id][0], now)
            self._heard.move_to_end(session_id)

    def forget(self, session_id: str) -> None:
        """The session has ended; unknown ones are ignored."""
        self._heard.pop(session_id, None)

    def leave(self, sender: AnswerSender) -> list[str]:
        """The connection has closed: forgets and returns the sessions that it was last heard of
        for; those heard on another one since are still there."""
        gone = [name for name, (last, _) in self._heard.items() if last is sender]
        for name in gone:
            del self._heard[name]
        return gone

    def fall_silent(self, since: float, waiting: Collection[str]) -> list[str]:
        """Forgets and returns the sessions that have neither spoken nor been answered since then,
        except those that wait for us."""
        silent: list[str] = []
        for name, (_, active_at) in self._heard.items():
            if active_at > since:
                break
            if name not in waiting:
                silent.append(name)
        for name in silent:
            del self._heard[name]
        return silent


_RELEASED = 2**64
"""In place of the newest round of a session that was released: no round has this number."""


class StaleRoundFilter:
    """Knows the newest round that was asked of each session, and holds back older ones: they come
    late or twice, and would only throw away what newer rounds have cached, or bring back a session
    that was released.

    Remembers `RELEASES_REMEMBERED_MAX` sessions; one that it has forgotten may pass again.
    """

    def __init__(self) -> None:
        self._asked: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def admit(self, head: RoundHead) -> Refused | None:
        """Notes the round; or returns why it is refused: ABORTED for an epoch that is over,
        CANCELLED for a round behind one of the same epoch."""
        asked = self._asked.get(head.session_id)
        if asked is not None:
            epoch, latest = asked
            if head.epoch < epoch:
                over = StaleEpoch(f"epoch {head.epoch} is over, {epoch} was seen")
                return refusal(head.key, over)
            if head.epoch == epoch and head.round < latest:
                over_by = "it was released" if latest == _RELEASED else f"{latest} was asked for"
                return Refused(head.key, CANCELLED_CODE, f"round {head.round} is over, {over_by}")
        self._note(head.session_id, head.epoch, head.round)
        return None

    def release(self, session_id: str, epoch: int) -> bool:
        """Ends all rounds of the epoch, also those that are still to come; False, and nothing
        ended, if a newer epoch was seen."""
        asked = self._asked.get(session_id)
        if asked is not None and asked[0] > epoch:
            return False
        self._note(session_id, epoch, _RELEASED)
        return True

    def _note(self, session_id: str, epoch: int, latest: int) -> None:
        self._asked[session_id] = (epoch, latest)
        self._asked.move_to_end(session_id)
        if len(self._asked) > RELEASES_REMEMBERED_MAX:
            self._asked.popitem(last=False)
