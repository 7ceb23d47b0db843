"""`outrider bench device`, or `python -m benchmarks.device` where neither Ray nor gRPC is: how near
a step at batch 1 comes to what the device's memory allows, and what recorded steps are worth."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TextIO

from outrider.errors import ConfigError
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.settings import check_range

from .figures import figures_table, to_json

if TYPE_CHECKING:
    from rich.table import Table

RANDOM_MODEL: Final = "random-7b"
"""A Llama of 6.7 billion random parameters, made on the device."""
CONTEXT_TOKENS: Final = 256
NUM_DRAFT_TOKENS: Final = 8
REPETITIONS: Final = 50
_CONTEXT_MAX: Final = 1_000_000
_REPETITIONS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """What `bench device` is asked for. Wrong values raise `SettingError`."""

    model: str = RANDOM_MODEL
    device: str = "auto"
    dtype: str = "bfloat16"
    context_tokens: int = CONTEXT_TOKENS
    num_draft_tokens: int = NUM_DRAFT_TOKENS
    repetitions: int = REPETITIONS

    def __post_init__(self) -> None:
        for name, value, high in (
            ("context_tokens", self.context_tokens, _CONTEXT_MAX),
            ("num_draft_tokens", self.num_draft_tokens, NUM_DRAFT_TOKENS_MAX),
            ("repetitions", self.repetitions, _REPETITIONS_MAX),
        ):
            check_range(name, value, 1, high)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> DeviceOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            context_tokens=arguments.context_tokens,
            num_draft_tokens=arguments.num_draft_tokens,
            repetitions=arguments.repetitions,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench device`."""
    defaults = DeviceOptions()
    for name, text, purpose in (
        ("--model", defaults.model, f"a model, or {RANDOM_MODEL}: random numbers of that size"),
        ("--device", defaults.device, "auto, cpu or cuda[:N]"),
        ("--dtype", defaults.dtype, "of weights and keys and values"),
    ):
        parser.add_argument(
            name, default=text, metavar=name[2:].upper(), help=f"{purpose} [%(default)s]"
        )
    for name, value, purpose in (
        ("--context-tokens", defaults.context_tokens, "tokens before the steps"),
        ("--num-draft-tokens", defaults.num_draft_tokens, "tokens of a draft and a verification"),
        ("--repetitions", defaults.repetitions, "of each step, of which medians are taken"),
    ):
        parser.add_argument(
            name, type=int, default=value, metavar="N", help=f"{purpose} [%(default)s]"
        )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Times of one way to run steps, ms."""

    decode_step_ms: float
    """One token of one session, until its likeliest successor is known."""
    decode_over_ideal: float
    """That over `ideal_step_ms` (goal 1.25)."""
    verify_step_ms: float
    """K + 1 tokens of one session."""
    draft_steps_ms: float
    """K draft tokens at temperature 1, a step and a draw each."""
    draft_replay_ms: float | None
    """The same in one replay; null where that is not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The result of one `bench device`; medians over `repetitions`."""

    model: str
    device: str
    dtype: str
    torch_version: str
    context_tokens: int
    num_draft_tokens: int
    repetitions: int
    weight_bytes: int
    """That a step reads: all but an embedding that is not the head as well."""
    copy_gb_per_s: float
    """Bytes read and written by a copy of a large tensor, 10^9 a second."""
    ideal_step_ms: float
    """`weight_bytes` at that speed."""
    graphs_on: StepFigures | None
    """Null where no step is recorded."""
    graphs_off: StepFigures

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


def render(report: DeviceReport) -> Table:
    """The report for people."""
    rows = [
        ("weights", f"{report.weight_bytes / 1e9:.2f} GB"),
        ("copy", f"{report.copy_gb_per_s:.0f} GB/s"),
        ("a step at that speed", f"{report.ideal_step_ms:.3f} ms"),
    ]
    for name, side in (("graphs", report.graphs_on), ("no graphs", report.graphs_off)):
        if side is None:
            rows.append((name, "not available"))
            continue
        decode = f"{side.decode_step_ms:.3f} ms ({side.decode_over_ideal:.2f} of the ideal)"
        rows += [
            (f"{name}: decode", decode),
            (f"{name}: verify", f"{side.verify_step_ms:.3f} ms"),
            (f"{name}: draft, by steps", f"{side.draft_steps_ms:.3f} ms"),
        ]
        if side.draft_replay_ms is not None:
            rows.append((f"{name}: draft, one replay", f"{side.draft_replay_ms:.3f} ms"))
    title = f"{report.model}, {report.dtype}, {report.device}; K = {report.num_draft_tokens}"
    return figures_table(title, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    add_arguments(parser)
    from . import device_steps

    try:
        options = DeviceOptions.from_arguments(parser.parse_args(argv))
        report = device_steps.run(options, lambda line: _say(sys.stderr, line))
    except ConfigError as error:
        _say(sys.stderr, str(error))
        return 2
    _say(sys.stdout, report.to_json())
    return 0


def _say(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
