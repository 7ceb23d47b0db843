"""Drivers run a `StepLoop`: on a thread of its own in service, on the event loop in simulations."""

import asyncio
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from outrider.errors import EngineLost
from outrider.interfaces.messages import Item
from outrider.replica.step_loop import Message, Outcome, Prepared, Step, StepLoop

T = TypeVar("T")

_FRAME_SLOTS = 2**16 + 1
"""Size of the frame of `with_frame_room`, in pointers of 8 bytes: just over 512 KiB. CPython
allocates 1 MiB for such a frame, so nearly 512 KiB are left for other frames."""


def with_frame_room(task: Callable[[], T]) -> T:
    """Calls `task` with 512 KiB of room for the frames of its Python calls.

    CPython keeps the frames of a thread in chunks of 16 KiB, and unmaps a chunk when its first
    frame returns. With Python 3.11, a call whose frame began a chunk took 7 us instead of 0.03 us.
    Such calls took a tenth of the time of steps on vLLM."""
    return task()


with_frame_room.__code__ = with_frame_room.__code__.replace(co_stacksize=_FRAME_SLOTS)


_SWITCH_S = 0.0005
"""How long a busy event loop keeps the interpreter when a step wants it back. A step gives it up
hundreds of times, at calls of torch. With Python's default (5 ms), a step whose CPU time was 0.15 s
took seconds while many items arrived."""


def _sleep_exactly() -> None:
    """Lets Linux end this thread's sleeps on time. By default, they may end 0.05 ms late."""
    with suppress(OSError):
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1")


class ThreadDriver:
    """Runs steps on its own thread, one after another, and never waits for the event loop. After a
    step, `stated_seconds` returns the duration that an emulated engine states for the step. If less
    time has passed since the launch, the thread sleeps for the rest. So the stated time covers
    forward pass and verdicts, and all that a GPU would not wait for. An idle Linux ends the sleep
    0.03 to 0.06 ms late. The thread then also waits for the interpreter's lock."""

    def __init__(
        self,
        name: str,
        stated_seconds: Callable[[], float],
        *,
        is_timed: bool = True,
        may_compile: bool = False,
    ) -> None:
        """`is_timed` states whether `stated_seconds` may return more than 0. `may_compile` states
        whether the first step of each size may have to compile kernels."""
        self.may_compile = may_compile
        self._is_timed = is_timed
        self.running_since: float | None = None
        """When the running step began, on the event loop's clock; None between two steps. Any
        thread may read this."""
        self._stated_seconds = stated_seconds
        self._is_stopping = False
        self._tasks = SimpleQueue[Callable[[], object] | None]()
        self._wake = partial(self._tasks.put, None)
        # A daemon, because a step that hangs must not keep the process from its end.
        threading.Thread(target=self._run_tasks, name=name, daemon=True).start()
        sys.setswitchinterval(_SWITCH_S)

    def _run_tasks(self) -> None:
        if self._is_timed:
            _sleep_exactly()
        while (task := self._tasks.get()) is not None:
            with_frame_room(task)

    def call(self, task: Callable[[], T]) -> T:
        """Runs `task` on the thread, and blocks until it ends. For tasks before the first step."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                future.set_exception(error)

        self._tasks.put(run)
        return future.result()

    def start(
        self,
        steps: StepLoop[Item, Prepared],
        hear: Callable[[Outcome[Item]], None],
        ended: Callable[[Exception | None], None],
    ) -> Callable[[Message[Item]], None]:
        """Begins to run steps. Returns the function that sends them a message. Calls `hear` on the
        event loop with what comes of them, and at the end `ended`, with the error that ended them,
        if any (`SteppedService._hear`, `_steps_ended`). Must be called once, on the event loop."""
        loop = asyncio.get_running_loop()
        inbox = SimpleQueue[Message[Item] | None]()
        outcomes = deque[Outcome[Item]]()

        def hear_all() -> None:
            while outcomes:
                hear(outcomes.popleft())

        def end(failure: Exception | None) -> None:
            hear_all()
            ended(failure)

        def tell() -> None:
            outcome = steps.report()
            if outcome is not None:
                outcomes.append(outcome)
                loop.call_soon_threadsafe(hear_all)

        def run() -> None:
            failure = None
            try:
                while not self._is_stopping:
                    _receive(inbox, steps, steps.due_at - loop.time())
                    if not self._is_stopping:
                        self._turn(steps, inbox, tell, loop.time)
                tell()
            except Exception as error:  # noqa: BLE001 - the event loop handles it
                failure = error
            with suppress(RuntimeError):  # The event loop may be closed by now.
                loop.call_soon_threadsafe(end, failure)

        self._tasks.put(run)
        self._wake = partial(inbox.put, None)
        return inbox.put

    def _turn(
        self,
        steps: StepLoop[Item, Prepared],
        inbox: SimpleQueue[Message[Item] | None],
        tell: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Runs one turn of the loop. `tell` reports the step before. If it can, it does so after
        the launch, because event loop and thread contend for the interpreter while the engine
        stands still."""
        self.running_since = now = clock()
        step = steps.schedule(now)
        if steps.is_awaited or not step.works:
            tell()
        if step.works:
            launched_at = time.perf_counter()
            steps.launch(step)
            tell()
            _receive(inbox, steps, 0.0)
            steps.wait(step)
            missing = launched_at + self._stated_seconds() - time.perf_counter()
            if missing > 0:
                time.sleep(missing)
        steps.postprocess(step, clock())
        self.running_since = None
        self._is_stopping |= isinstance(step.failure, EngineLost)
        if steps.due_at > clock():
            tell()

    def stop(self, *, at_once: bool = False) -> None:
        """Runs no step after the running one. A step that hangs is left to itself (`at_once`)."""
        self._is_stopping = True
        self._wake()
        self._tasks.put(None)


def _receive(
    inbox: SimpleQueue[Message[Item] | None], steps: StepLoop[Item, Prepared], seconds: float
) -> None:
    """Passes on all messages. If there is none, waits for one, at most `seconds`."""
    with suppress(Empty):
        message = inbox.get(seconds > 0, min(seconds, threading.TIMEOUT_MAX))
        while True:
            if message is not None:
                steps.receive(message)
            message = inbox.get_nowait()


class InlineDriver:
    """Runs steps on the event loop, for simulations with a virtual clock."""

    may_compile = False

    def __init__(self, stated_seconds: Callable[[], float]) -> None:
        self.running_since: float | None = None
        self._stated_seconds = stated_seconds
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(
        self,
        steps: StepLoop[Item, Prepared],
        hear: Callable[[Outcome[Item]], None],
        ended: Callable[[Exception | None], None],
    ) -> Callable[[Message[Item]], None]:
        """See `ThreadDriver.start`."""
        inbox = deque[Message[Item]]()

        def post(message: Message[Item]) -> None:
            inbox.append(message)
            self._wake.set()

        def tell() -> None:
            outcome = steps.report()
            if outcome is not None:
                hear(outcome)

        def receive() -> None:
            self._wake.clear()
            while inbox:
                steps.receive(inbox.popleft())

        async def run() -> None:
            failure = None
            try:
                while not self._is_stopping:
                    await self._turn(steps, receive, tell)
                tell()
            except Exception as error:  # noqa: BLE001 - the service handles it
                failure = error
            ended(failure)

        self._task = asyncio.get_running_loop().create_task(run(), name="steps")
        return post

    async def _turn(
        self, steps: StepLoop[Item, Prepared], receive: Callable[[], None], tell: Callable[[], None]
    ) -> None:
        """See `ThreadDriver._turn`."""
        clock = asyncio.get_running_loop().time
        if steps.due_at > clock():
            await self._wait(steps.due_at)
        if self._is_stopping:
            return
        receive()
        self.running_since = now = clock()
        step = steps.schedule(now)
        if steps.is_awaited or not step.works:
            tell()
        if step.works:
            steps.launch(step)
            tell()
            await self.run(steps, step, receive)
        steps.postprocess(step, clock())
        self.running_since = None
        self._is_stopping |= isinstance(step.failure, EngineLost)
        if steps.due_at > clock():
            tell()

    async def _wait(self, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if until == math.inf else until):
                await self._wake.wait()

    async def run(
        self,
        steps: StepLoop[Item, Prepared],
        step: Step[Item, Prepared],
        receive: Callable[[], None],
    ) -> None:
        """Waits for the stated time of a launched step. Messages that arrive in this time are
        received before the step ends. An engine may state more time at the end."""
        await asyncio.sleep(self._stated_seconds())
        receive()
        steps.wait(step)
        await asyncio.sleep(self._stated_seconds())

    def stop(self, *, at_once: bool = False) -> None:
        """Runs no step after the running one. With `at_once`, gives up the running step."""
        self._is_stopping = True
        self._wake.set()
        if at_once and self._task is not None:
            self._task.cancel()


StepDriver = ThreadDriver | InlineDriver
