"""Executors run the steps of a replica, one after another."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

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


class ThreadExecutor:
    """Runs steps on its own thread. After a step, `step_seconds` returns the duration that an
    emulated engine states for the step. If the step took less, the thread sleeps for the rest. So
    the stated time covers admission, forward pass and verdicts, but not the hand-over of the step
    to the thread and of its answers to the event loop. An idle Linux ends the sleep 0.03 to 0.06 ms
    late. The thread then also waits for the interpreter's lock."""

    def __init__(
        self,
        name: str,
        step_seconds: Callable[[], float],
        *,
        is_timed: bool = True,
        may_compile: bool = False,
    ) -> None:
        """`is_timed` states whether `step_seconds` may return more than 0. `may_compile` states
        whether the first step of each size may have to compile kernels."""
        self.is_timed = is_timed
        self.may_compile = may_compile
        begin = _sleep_exactly if is_timed else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)
        self._step_seconds = step_seconds
        sys.setswitchinterval(_SWITCH_S)

    def call(self, task: Callable[[], T]) -> T:
        """Runs `task` on the thread, and blocks until it ends. For tasks before the first step."""
        return self._pool.submit(with_frame_room, task).result()

    async def run(self, step: Callable[[], T]) -> T:
        """Runs `step` on the thread, to its end even if the caller is cancelled."""
        timed = partial(self._timed, step)
        return await asyncio.get_running_loop().run_in_executor(self._pool, with_frame_room, timed)

    def _timed(self, step: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = step()
        missing = self._step_seconds() - (time.perf_counter() - start)
        if missing > 0:
            time.sleep(missing)
        return result

    def close(self, *, wait: bool = True) -> None:
        """Accepts no more steps. With `wait`, waits for the running step."""
        self._pool.shutdown(wait=wait)


class InlineExecutor:
    """Runs steps on the event loop. For simulations with a virtual clock."""

    def __init__(self, step_seconds: Callable[[], float], *, is_timed: bool = True) -> None:
        """See `ThreadExecutor`. A simulation may pass False even if steps take time. A target may
        then run two steps in one `run`, which waits for the sum of their times."""
        self.is_timed = is_timed
        self.may_compile = False
        self._step_seconds = step_seconds

    async def run(self, step: Callable[[], T]) -> T:
        """Runs `step` at once, and then waits for `step_seconds`."""
        result = step()
        await asyncio.sleep(self._step_seconds())
        return result

    def close(self, *, wait: bool = True) -> None:
        """Nothing to close."""


StepExecutor = ThreadExecutor | InlineExecutor
