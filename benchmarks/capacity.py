"""`outrider bench capacity`: how many rounds one coordinator process plays for many sessions.

    client -> coordinator -> draft, target, Redis        a process each

Draft and target answer at the ends of steps of a stated time, which take no computing (see
`capacity_replicas`). First so many sessions share a step that the coordinator is what limits; then
so few that a stated part of that many rounds is played. What the coordinator adds to a round is the
time from the draft's request to the store's acknowledgement, less what the two replicas had it for:
its own work and queues, messages and the store.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from outrider.client import Client
from outrider.errors import SettingError, Unavailable
from outrider.limits import SESSIONS_PER_COORDINATOR_MAX
from outrider.sessions.embedded import EmbeddedRedis
from outrider.settings import check_range

from .figures import figures_table, percentile, to_json
from .measurement import Progress
from .overhead_canned import NUM_DRAFT_TOKENS, canned_request
from .role_process import RoleProcess

VERIFY_S: Final = 0.0183
"""Of a target's step; a 70B model's (`bench emulate`)."""
DRAFT_S: Final = NUM_DRAFT_TOKENS * 0.0013
"""Of all draft tokens of a step's sessions."""
STEP_SESSIONS: Final = 64
"""That share a step, where it is not the target that limits."""
MAX_TOKENS: Final = 2_048
"""Of a session; another one follows it."""
WARM_UP_S: Final = 3.0
ANSWER_TIMEOUT_S: Final = 60.0
SECONDS_MAX: Final = 600
LOAD_MIN: Final = 0.01
PROFILER: Final = "py-spy"
PROFILER_RATE: Final = 200
"""Samples a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What `bench capacity` is asked for. Wrong values raise `SettingError`."""

    sessions: int = 500
    """At a time."""
    seconds: float = 10.0
    """Of each of the two measurements."""
    load: float = 0.7
    """Part of the most rounds a second at which is measured what a round waits."""
    flame: Path | None = None
    """Where a flame graph of the coordinator at its limit goes; takes `py-spy` on the PATH."""

    def __post_init__(self) -> None:
        check_range("sessions", self.sessions, 1, SESSIONS_PER_COORDINATOR_MAX)
        check_range("seconds", self.seconds, 1, SECONDS_MAX)
        check_range("load", self.load, LOAD_MIN, 1)
        if self.flame is not None and shutil.which(PROFILER) is None:
            raise SettingError("flame", f"needs {PROFILER} on the PATH: pip install {PROFILER}")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> CapacityOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(
            sessions=arguments.sessions,
            seconds=arguments.seconds,
            load=arguments.load,
            flame=arguments.flame,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench capacity`."""
    defaults = CapacityOptions()
    parser.add_argument(
        "--sessions", type=int, default=defaults.sessions, metavar="N",
        help="sessions at a time [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, metavar="S",
        help="time of each measurement [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=float, default=defaults.load, metavar="SHARE",
        help="part of the most rounds a second at which waiting is measured [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--flame", type=Path, metavar="FILE",
        help=f"write a flame graph (SVG) of the coordinator at its limit; takes {PROFILER}",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What some time with all sessions came to."""

    rounds_per_second: float
    added_ms_p50: float
    added_ms_p99: float
    coordinator_cpu: float
    """Part of a core that its process computed on; 1 = it is what limits."""
    step_sessions: int
    """That could share a step of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """The result of one `bench capacity`."""

    sessions: int
    num_draft_tokens: int
    load: float
    most: Crowd
    at_load: Crowd

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


async def run(options: CapacityOptions, progress: Progress) -> CapacityReport:
    """Measures. Raises `Unavailable` where a process breaks off."""
    async with _Stage.set(progress) as stage:
        progress(f"starting {options.sessions} sessions")
        async with stage.busy(options.sessions):
            progress("as many rounds as it can")
            async with _profiled(stage.coordinator_pid, options):
                most = await stage.watch(options.seconds, STEP_SESSIONS)
            wanted = options.load * most.rounds_per_second
            step_sessions = max(1, round(wanted * VERIFY_S))
            progress(f"{wanted:.0f} rounds a second")
            at_load = await stage.watch(options.seconds, step_sessions)
    return CapacityReport(
        sessions=options.sessions,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        load=options.load,
        most=most,
        at_load=at_load,
    )


@asynccontextmanager
async def _profiled(pid: int, options: CapacityOptions) -> AsyncIterator[None]:
    """Draws a flame graph of what happens within it, if one is wanted."""
    if options.flame is None:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        PROFILER, "record", "--pid", str(pid), "--duration", str(round(options.seconds)),
        "--rate", str(PROFILER_RATE), "--output", str(options.flame),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        _, errors = await process.communicate()
    if process.returncode != 0:
        raise Unavailable(f"{PROFILER}: {errors.decode(errors='replace').strip()}")


class _Stage:
    """The processes, and sessions that keep them busy."""

    def __init__(
        self, draft: RoleProcess, target: RoleProcess, coordinator: RoleProcess, client: Client
    ) -> None:
        self._draft = draft
        self._target = target
        self._coordinator = coordinator
        self._client = client
        self._num_begun = 0

    @classmethod
    @asynccontextmanager
    async def set(cls, progress: Progress) -> AsyncIterator[_Stage]:
        """Starts all processes; ends them."""
        progress("starting")
        async with AsyncExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-"))
            redis = EmbeddedRedis(Path(directory))
            redis.start()
            stack.callback(redis.stop)
            draft, target = [
                await stack.enter_async_context(
                    RoleProcess(
                        "overhead_roles",
                        "stepping",
                        {"side": side, "step_s": step_s, "sessions_max": STEP_SESSIONS},
                    )
                )
                for side, step_s in (("draft", DRAFT_S), ("target", VERIFY_S))
            ]
            setup = {"draft": draft.address, "target": target.address, "redis_url": redis.url}
            coordinator = await stack.enter_async_context(
                RoleProcess("overhead_roles", "crowded", setup)
            )
            client = await stack.enter_async_context(Client(coordinator.address))
            yield cls(draft, target, coordinator, client)

    @property
    def coordinator_pid(self) -> int:
        """Of its process."""
        return int(self._coordinator.ready["pid"])

    @asynccontextmanager
    async def busy(self, num_sessions: int) -> AsyncIterator[None]:
        """Within it so many sessions decode, each followed by another. Raises what one of them
        does."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._decode()) for _ in range(num_sessions)]
                yield
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _decode(self) -> None:
        while True:
            self._num_begun += 1
            await self._client.complete(canned_request(self._num_begun, MAX_TOKENS))

    async def watch(self, seconds: float, step_sessions: int) -> Crowd:
        """What so many seconds come to, once the target's steps have room for so many sessions."""
        await self._target.ask(
            {"step_s": VERIFY_S, "sessions_max": step_sessions}, ANSWER_TIMEOUT_S
        )
        await asyncio.sleep(WARM_UP_S)
        before = await self._seen()
        began = time.monotonic()
        await asyncio.sleep(seconds)
        after = await self._seen()
        elapsed_s = time.monotonic() - began
        held: dict[tuple[str, int], float] = {}
        for seen in (before, after):  # Of a round that began before and ended after.
            for session_id, index, span in (*seen["draft"], *seen["target"]):
                held[session_id, index] = held.get((session_id, index), 0) + span
        spans = after["coordinator"]["spans_ns"]
        if not spans:
            raise Unavailable("no round was played")
        added = [1e3 * (span / 1e9 - held.get((name, index), 0.0)) for name, index, span in spans]
        cpu_s = after["coordinator"]["cpu_s"] - before["coordinator"]["cpu_s"]
        return Crowd(
            rounds_per_second=len(spans) / elapsed_s,
            added_ms_p50=percentile(added, 50),
            added_ms_p99=percentile(added, 99),
            coordinator_cpu=cpu_s / elapsed_s,
            step_sessions=step_sessions,
        )

    async def _seen(self) -> dict[str, Any]:
        """What each process has seen since it was last asked; the coordinator's rounds first, which
        the others then know all about."""
        coordinator = await self._coordinator.seen()
        draft, target = await self._draft.seen(), await self._target.seen()
        return {
            "coordinator": coordinator, "draft": draft["held_s"], "target": target["held_s"],
        }  # fmt: skip


def render(report: CapacityReport) -> Table:
    """The report for people."""

    def rows(crowd: Crowd) -> Mapping[str, str]:
        return {
            "rounds a second": f"{crowd.rounds_per_second:.0f}",
            "added to a round, p50 / p99": (
                f"{crowd.added_ms_p50:.1f} / {crowd.added_ms_p99:.1f} ms"
            ),
            "the coordinator's part of a core": f"{crowd.coordinator_cpu:.2f}",
        }

    shown = [(f"at most: {name}", value) for name, value in rows(report.most).items()]
    shown += [
        (f"at {report.load:.0%}: {name}", value) for name, value in rows(report.at_load).items()
    ]
    title = f"{report.sessions} sessions, K = {report.num_draft_tokens}, one coordinator process"
    return figures_table(title, shown)
