"""`outrider bench scaling`: what more replicas bring, by real services on emulated engines.

| part | replicas | load | what is measured |
| --- | --- | --- | --- |
| targets | 1, 2, 4 and 8, a draft for each eight | two sessions a target: full steps | tokens/s |
| drafts | 1, 2 and 4, of four targets | eight sessions | what a round waits for its proposal |

Replicas come while the deployment serves. A step of a target takes 75 ms, as a large model's;
emulated engines take next to no computing, so two cores have room for many.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final, Protocol

from rich.table import Table

from outrider.client import Client
from outrider.errors import SettingError
from outrider.registry.registry import Role
from outrider.request import GenerateRequest, RoundReport, Tokens
from outrider.settings import check_range
from outrider.speculation.sampling_params import SamplingParams

from .figures import to_json
from .measurement import Progress
from .number_options import whole_numbers

STEP_SESSIONS: Final = 2
"""That share a step of a target, and of a slow draft; all of its targets' share a quick one's."""
TARGETS_PER_DRAFT: Final = 8
"""With quick drafts more of them bring nothing, says `outrider plan --simulate --from-numbers
verify_ms=75,draft_ms=2,num_draft_tokens=4,look_ahead=0 --max-num-seqs 2 --draft-max-num-seqs 16
--sessions 16 --targets 8 --drafts 1,2,4 --coordinators 1`."""
NUM_TARGETS_OF_DRAFTS: Final = 4
NUM_DRAFT_TOKENS: Final = 4
QUICK_DRAFT_MS, SLOW_DRAFT_MS = 2, 10
"""Of a draft token: the second keeps one draft busier than it can be."""
WARM_UP_S: Final = 3.0
"""Until all sessions have begun at replicas that coordinators know."""
REPLICAS_MAX: Final = 64
SECONDS_MAX: Final = 600
MAX_TOKENS: Final = 4_096


class Scalable(Protocol):
    """A deployment whose replicas can be more or fewer."""

    @property
    def address(self) -> str:
        """HOST:PORT of its coordinators."""
        ...

    async def scale(self, counts: Mapping[Role, int]) -> None:
        """Returns once there are as many."""
        ...


class Starts(Protocol):
    """Who starts deployments."""

    def __call__(
        self, engine: str, step_sessions: int, draft_step_sessions: int, num_draft_tokens: int
    ) -> AbstractAsyncContextManager[Scalable]:
        """One of emulated engines, of which so many sessions share a step of a target, and of a
        draft, and which drafts so many tokens a round."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What `bench scaling` is asked for. Wrong values raise `SettingError`."""

    targets: tuple[int, ...] = (1, 2, 4, 8)
    drafts: tuple[int, ...] = (1, 2, 4)
    seconds: float = 8.0
    """Of each measurement."""

    def __post_init__(self) -> None:
        for key, counts in (("targets", self.targets), ("drafts", self.drafts)):
            if not counts or list(counts) != sorted(set(counts)):
                raise SettingError(key, f"{counts} must ascend")
            for one in counts:
                check_range(key, one, 1, REPLICAS_MAX)
        check_range("seconds", self.seconds, 1, SECONDS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """What one number of replicas came to."""

    targets: int
    drafts: int
    sessions: int
    tokens_per_second: float
    draft_ms: float
    """What a round waited for its proposal, mean."""
    share_of_linear: float
    """Of as many times the tokens a second of the fewest targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """The result of one `bench scaling`."""

    by_targets: tuple[Scaled, ...]
    by_drafts: tuple[Scaled, ...]

    def to_json(self) -> str:
        """One object."""
        return to_json(asdict(self))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The numbers of replicas, and for how long."""
    default = ScalingOptions()
    for key in ("targets", "drafts"):
        counts: tuple[int, ...] = getattr(default, key)
        parser.add_argument(
            f"--{key}", type=whole_numbers, default=counts, metavar="N[,N..]",
            help=f"numbers of {key} to measure [{','.join(map(str, counts))}]",
        )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=default.seconds, metavar="S",
        help=f"of each measurement [{default.seconds:g}]",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


def options_of(arguments: argparse.Namespace) -> ScalingOptions:
    """From what a parser with `add_arguments` returned. Raises `SettingError`."""
    return ScalingOptions(
        targets=arguments.targets,
        drafts=arguments.drafts,
        seconds=arguments.seconds,
    )


async def run(options: ScalingOptions, starts: Starts, progress: Progress) -> ScalingReport:
    """Both parts, one after the other."""
    of_draft = STEP_SESSIONS * TARGETS_PER_DRAFT
    async with starts(_engine(QUICK_DRAFT_MS), STEP_SESSIONS, of_draft, NUM_DRAFT_TOKENS) as fleet:
        by_targets: list[Scaled] = []
        for targets in options.targets:
            drafts = -(-targets // TARGETS_PER_DRAFT)
            progress(f"{targets} targets, {drafts} drafts")
            found = await _measure(fleet, targets, drafts, options.seconds, by_targets[:1])
            by_targets.append(found)
    slow = _engine(SLOW_DRAFT_MS)
    async with starts(slow, STEP_SESSIONS, STEP_SESSIONS, NUM_DRAFT_TOKENS) as fleet:
        by_drafts: list[Scaled] = []
        for drafts in options.drafts:
            progress(f"{NUM_TARGETS_OF_DRAFTS} targets, {drafts} slow drafts")
            found = await _measure(fleet, NUM_TARGETS_OF_DRAFTS, drafts, options.seconds, ())
            by_drafts.append(found)
    return ScalingReport(by_targets=tuple(by_targets), by_drafts=tuple(by_drafts))


def _engine(draft_ms: float) -> str:
    return f"emulated:vocab_size=1000,verify_ms=75,draft_ms={draft_ms}"


async def _measure(
    fleet: Scalable, targets: int, drafts: int, seconds: float, first: Sequence[Scaled]
) -> Scaled:
    await fleet.scale({"target": targets, "draft": drafts})
    # Coordinators look for who is new twice a second.
    await asyncio.sleep(WARM_UP_S / 2)
    sessions = STEP_SESSIONS * targets
    crowd = _Crowd(fleet.address)
    tasks = [asyncio.create_task(crowd.stream(index, sessions)) for index in range(sessions)]
    try:
        await asyncio.sleep(WARM_UP_S)
        crowd.begin()
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rate = crowd.num_tokens / seconds
    linear = rate if not first else first[0].tokens_per_second * targets / first[0].targets
    return Scaled(
        targets=targets,
        drafts=drafts,
        sessions=sessions,
        tokens_per_second=rate,
        draft_ms=crowd.draft_ms / max(1, crowd.num_rounds),
        share_of_linear=rate / linear,
    )


class _Crowd:
    """Sessions that go on until they are cancelled, and what came of them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.begin()

    def begin(self) -> None:
        """Counts from now on."""
        self.num_tokens = self.num_rounds = 0
        self.draft_ms = 0.0

    async def stream(self, first: int, step: int) -> None:
        """Sessions with prompts of their own, one after the other."""
        async with Client(self._address) as client:
            for index in count(first, step):
                request = GenerateRequest(
                    tuple(1 + (index * 37 + place) % 900 for place in range(64)),
                    sampling=SamplingParams(temperature=1.0),
                    max_tokens=MAX_TOKENS, seed=index, ignore_eos=True, include_rounds=True,
                )  # fmt: skip
                async for event in client.generate(request):
                    if isinstance(event, Tokens):
                        self.num_tokens += len(event.token_ids)
                    elif isinstance(event, RoundReport):
                        self.num_rounds += 1
                        self.draft_ms += event.draft_ms


def render(report: ScalingReport) -> Table:
    """For people."""
    table = Table(title="Replicas, and what they bring")
    for heading in ("targets", "drafts", "sessions", "tokens/s", "of linear", "draft, ms a round"):
        table.add_column(heading, justify="right")
    for entry in (*report.by_targets, *report.by_drafts):
        of_linear = f"{entry.share_of_linear:.2f}" if entry in report.by_targets else ""
        table.add_row(
            str(entry.targets), str(entry.drafts), str(entry.sessions),
            f"{entry.tokens_per_second:.1f}", of_linear, f"{entry.draft_ms:.1f}",
        )  # fmt: skip
    return table
