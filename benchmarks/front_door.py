"""`outrider bench front-door`: what gRPC and HTTP add to what a coordinator has ready.

One coordinator in this process, before a target on an emulated engine, is asked in turn through
each *door*: by the client in this process, by gRPC and by HTTP. A turn is one request through each
door, in an order that rotates, so that all of them see the same noise. The clients run on the
coordinator's event loop: what is added is all of the computing on both sides, and the kernel's
loopback between them.

`X_ttft_added_ms_p50` is the median of TTFT through X less that of the in-process request of the
same turn. `X_chunk_added_ms` is the median time from the coordinator's having a chunk to X's client
having read it, less the same median in-process. `front_door_turns` measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from outrider.settings import check_range

from .figures import figures_table, percentile, to_json

if TYPE_CHECKING:
    from rich.table import Table

MS: Final = 1e3
IN_PROCESS, GRPC, HTTP = "in_process", "grpc", "http"
TURNS_MAX: Final = 10_000
TOKENS_MAX: Final = 4_096
STEP_MS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoorOptions:
    """What `bench front-door` is asked for. Wrong values raise `SettingError`."""

    turns: int = 60
    """Requests through each door."""
    max_tokens: int = 32
    """Of each."""
    step_ms: float = 5.0
    """Of the emulated target: a chunk comes at the end of each of its steps."""

    def __post_init__(self) -> None:
        check_range("turns", self.turns, 1, TURNS_MAX)
        check_range("max_tokens", self.max_tokens, 2, TOKENS_MAX)
        check_range("step_ms", self.step_ms, 0, STEP_MS_MAX)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> FrontDoorOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(
            turns=arguments.turns, max_tokens=arguments.max_tokens, step_ms=arguments.step_ms
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench front-door`."""
    defaults = FrontDoorOptions()
    parser.add_argument(
        "--turns", type=int, default=defaults.turns, metavar="N",
        help="requests through each door [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N",
        help="tokens of each [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--step-ms", type=float, default=defaults.step_ms, metavar="MS",
        help="of the emulated target [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


@dataclass(frozen=True, slots=True)
class Passage:
    """One request through one door, s."""

    ttft_s: float
    deliveries_s: tuple[float, ...]
    """Of each chunk: from the coordinator's having it to its client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoorReport:
    """The result of one `bench front-door`."""

    turns: int
    max_tokens: int
    step_ms: float
    in_process_ttft_ms_p50: float
    in_process_chunk_ms: float
    grpc_ttft_added_ms_p50: float
    grpc_chunk_added_ms: float
    grpc_chunk_added_ms_p99: float
    http_ttft_added_ms_p50: float
    http_chunk_added_ms: float
    http_chunk_added_ms_p99: float

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


def summarise(
    options: FrontDoorOptions, passages: Mapping[str, Sequence[Passage]]
) -> FrontDoorReport:
    """The report on as many passages through each door; the k-th ones are of one turn."""
    base = passages[IN_PROCESS]
    base_chunks = [MS * value for entry in base for value in entry.deliveries_s]

    def added(name: str) -> tuple[float, float, float]:
        through = passages[name]
        firsts = [MS * (a.ttft_s - b.ttft_s) for a, b in zip(through, base, strict=True)]
        chunks = [MS * value for entry in through for value in entry.deliveries_s]
        least = median(base_chunks)
        return median(firsts), median(chunks) - least, percentile(chunks, 99) - least

    grpc, http = added(GRPC), added(HTTP)
    return FrontDoorReport(
        turns=options.turns,
        max_tokens=options.max_tokens,
        step_ms=options.step_ms,
        in_process_ttft_ms_p50=MS * median(entry.ttft_s for entry in base),
        in_process_chunk_ms=median(base_chunks),
        grpc_ttft_added_ms_p50=grpc[0],
        grpc_chunk_added_ms=grpc[1],
        grpc_chunk_added_ms_p99=grpc[2],
        http_ttft_added_ms_p50=http[0],
        http_chunk_added_ms=http[1],
        http_chunk_added_ms_p99=http[2],
    )


def render(report: FrontDoorReport) -> Table:
    """The report for people."""

    def shown(value: float) -> str:
        return f"{value:.3f} ms"

    rows = [
        ("in this process: to the first token, p50", shown(report.in_process_ttft_ms_p50)),
        ("gRPC adds to the first token, p50", shown(report.grpc_ttft_added_ms_p50)),
        ("gRPC adds to a chunk, p50", shown(report.grpc_chunk_added_ms)),
        ("gRPC adds to a chunk, p99", shown(report.grpc_chunk_added_ms_p99)),
        ("HTTP adds to the first token, p50", shown(report.http_ttft_added_ms_p50)),
        ("HTTP adds to a chunk, p50", shown(report.http_chunk_added_ms)),
        ("HTTP adds to a chunk, p99", shown(report.http_chunk_added_ms_p99)),
    ]
    title = (
        f"{report.turns} requests a door of {report.max_tokens} tokens, steps of "
        f"{report.step_ms:g} ms"
    )
    return figures_table(title, rows)
