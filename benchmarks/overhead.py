"""`outrider bench overhead`: what a round costs beside the models.

Two measurements, one after the other, with every part in a process of its own:

    rounds    client -> coordinator -> canned draft, canned target, Redis
    queueing  load generator -> target with a model whose steps follow each other without a pause

A round lasts from the `DraftRequest`'s sending to the store's acknowledgement of its tokens. The
queueing half asks how long a message waits for its receiver while that one's steps run: from its
sending to its place in the target's queue, and from the end of the step that made a verdict to the
verdict's arrival.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from rich.table import Table

from outrider.client import Client
from outrider.config import TargetConfig
from outrider.errors import Unavailable
from outrider.sessions.embedded import EmbeddedRedis
from outrider.settings import check_range

from .figures import figures_table, percentile, to_json
from .measurement import Progress
from .overhead_canned import NUM_DRAFT_TOKENS, Q_ENTRIES, VOCAB_SIZE, canned_request
from .overhead_clocks import RoundStamps
from .overhead_load import QueueTimes, generate_load
from .role_process import RoleProcess

WARM_UP_ROUNDS: Final = 200
MAX_TOKENS: Final = 512
"""Of a session; one follows the other until there are enough rounds."""
ROUNDS_MAX: Final = 100_000
PROBES_MAX: Final = 100_000
NS_PER_MS: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOptions:
    """What `bench overhead` is asked for. Wrong values raise `SettingError`."""

    rounds: int = 2_000
    """Measured, after `WARM_UP_ROUNDS`."""
    probes: int = 400
    """Messages whose waiting is measured while a model's steps run; 0 leaves that half out."""

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("rounds", self.rounds, 1, ROUNDS_MAX),
            ("probes", self.probes, 0, PROBES_MAX),
        ):
            check_range(name, value, low, high)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> OverheadOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(rounds=arguments.rounds, probes=arguments.probes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench overhead`, but for those that describe the target."""
    defaults = OverheadOptions()
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, metavar="N",
        help="rounds to measure [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--probes", type=int, default=defaults.probes, metavar="N",
        help="messages to measure while the target's steps run; 0 = none [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundParts:
    """Where a round's time goes, ms; medians, which need not add up to the round's."""

    draft: float
    """From a `DraftRequest`'s sending to its decoded answer."""
    between: float
    """From there to the `VerifyRequest`'s sending."""
    verify: float
    """From there to the decoded verdict."""
    decide: float
    """From there to the store's call."""
    commit: float
    """The store's call."""
    cycle: float
    """From one `DraftRequest` to the next, less than a round: a commit and the next round's draft
    overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadReport:
    """The result of one `bench overhead`; the queueing half is None where it was left out."""

    num_rounds: int
    num_draft_tokens: int
    vocab_size: int
    q_entries: int
    round_ms_p50: float
    round_ms_p99: float
    bytes_per_round: float
    """Mean of the serialised frames of a round: both requests, both replies."""
    round_parts_ms: RoundParts
    model: str | None
    num_probes: int
    step_ms_p50: float | None
    receive_to_queue_ms_p50: float | None
    receive_to_queue_ms_p99: float | None
    verdict_to_wire_ms_p50: float | None
    verdict_to_wire_ms_p99: float | None

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


async def run(options: OverheadOptions, target: TargetConfig, progress: Progress) -> OverheadReport:
    """Measures; `target` is what the queueing half's target runs. Raises `Unavailable` where a
    process breaks off, and `ConfigError`."""
    rounds = await measure_rounds(options.rounds, progress)
    times = await measure_queueing(options.probes, target, progress) if options.probes else None
    return summarise(rounds, times, target.model)


async def measure_rounds(num_rounds: int, progress: Progress) -> list[RoundStamps]:
    """The stamps of `num_rounds` rounds of the full length that follow the warm-up."""
    wanted = WARM_UP_ROUNDS + num_rounds
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-"))
        redis = EmbeddedRedis(Path(directory))
        redis.start()
        stack.callback(redis.stop)
        draft = await stack.enter_async_context(RoleProcess("overhead_roles", "draft", {}))
        target = await stack.enter_async_context(RoleProcess("overhead_roles", "target", {}))
        setup = {"draft": draft.address, "target": target.address, "redis_url": redis.url}
        coordinator = await stack.enter_async_context(
            RoleProcess("overhead_roles", "coordinator", setup)
        )
        client = await stack.enter_async_context(Client(coordinator.address))
        num_done = seed = 0
        while num_done < wanted:
            progress(f"round {num_done} of {wanted}")
            found = await client.complete(canned_request(seed, MAX_TOKENS))
            # The last rounds of a session draft less than K: their number is bounded by K.
            num_done += max(0, found.metrics.num_rounds - 1 - NUM_DRAFT_TOKENS)
            seed += 1
        answer = await coordinator.seen()
    stamps = [RoundStamps(**values) for values in answer["rounds"]]
    return full_rounds(stamps)[WARM_UP_ROUNDS:wanted]


def full_rounds(stamps: Sequence[RoundStamps]) -> list[RoundStamps]:
    """The rounds that drafted K tokens. Raises `Unavailable` where one of them did not pass every
    place: one that went on without its draft must not count as a quick one."""
    full = [entry for entry in stamps if entry.num_draft_tokens == NUM_DRAFT_TOKENS]
    for entry in full:
        if not all(getattr(entry, field.name) for field in fields(entry)):
            raise Unavailable(f"a round was not played to its end: {entry}")
    return full


async def measure_queueing(num_probes: int, target: TargetConfig, progress: Progress) -> QueueTimes:
    """How long messages wait while the target's steps run back to back."""
    progress("loading the target")
    async with RoleProcess("overhead_roles", "model", {"config": asdict(target)}) as process:
        return await generate_load(process, num_probes, progress)


def summarise(
    rounds: Sequence[RoundStamps], times: QueueTimes | None, model: str
) -> OverheadReport:
    """The report on both halves."""
    round_ms = [(entry.committed - entry.draft_sent) / NS_PER_MS for entry in rounds]
    received = None if times is None else times.receive_to_queue_ms
    answered = None if times is None else times.verdict_to_wire_ms
    return OverheadReport(
        num_rounds=len(rounds),
        num_draft_tokens=NUM_DRAFT_TOKENS,
        vocab_size=VOCAB_SIZE,
        q_entries=Q_ENTRIES,
        round_ms_p50=percentile(round_ms, 50),
        round_ms_p99=percentile(round_ms, 99),
        bytes_per_round=sum(entry.num_bytes for entry in rounds) / len(rounds),
        round_parts_ms=_parts(rounds),
        model=None if times is None else model,
        num_probes=0 if times is None else len(times.receive_to_queue_ms),
        step_ms_p50=None if times is None else percentile(times.step_ms, 50),
        receive_to_queue_ms_p50=None if received is None else percentile(received, 50),
        receive_to_queue_ms_p99=None if received is None else percentile(received, 99),
        verdict_to_wire_ms_p50=None if answered is None else percentile(answered, 50),
        verdict_to_wire_ms_p99=None if answered is None else percentile(answered, 99),
    )


def _parts(rounds: Sequence[RoundStamps]) -> RoundParts:
    def middle(spans: Iterable[int]) -> float:
        return float(median(spans)) / NS_PER_MS

    cycles = [after.draft_sent - before.draft_sent for before, after in pairwise(rounds)]
    return RoundParts(
        draft=middle(r.draft_heard - r.draft_sent for r in rounds),
        between=middle(r.verify_sent - r.draft_heard for r in rounds),
        verify=middle(r.verdict_heard - r.verify_sent for r in rounds),
        decide=middle(r.commit_sent - r.verdict_heard for r in rounds),
        commit=middle(r.committed - r.commit_sent for r in rounds),
        cycle=middle(cycles) if cycles else 0.0,
    )


def render(report: OverheadReport) -> Table:
    """The report for people."""
    found: Mapping[str, object] = asdict(report)
    shown = (
        ("round", "round_ms"),
        ("sent to queued, while steps run", "receive_to_queue_ms"),
        ("verdict to receiver, while steps run", "verdict_to_wire_ms"),
    )
    rows = [
        (f"{name}, p50 / p99", f"{found[key + '_p50']:.2f} / {found[key + '_p99']:.2f} ms")
        for name, key in shown
        if found[key + "_p50"] is not None
    ]
    rows.append(("bytes of a round's messages", f"{report.bytes_per_round:.0f}"))
    rows += [
        (f"round: {name}, p50", f"{value:.2f} ms")
        for name, value in asdict(report.round_parts_ms).items()
    ]
    title = (
        f"{report.num_rounds} rounds, K = {report.num_draft_tokens}, V = {report.vocab_size}, "
        f"{report.q_entries} entries of q"
    )
    return figures_table(title, rows)
