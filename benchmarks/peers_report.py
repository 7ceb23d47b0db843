"""What `bench peers` says: statistics over finished completions, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outrider.errors import check
from outrider.speculation.sampling import Rule

from .figures import to_json
from .measurement import Side, SideResult
from .prompts import BenchPrompt
from .report import compare, part, places_by_category

PEERS: Final = {
    Side.ASSISTED: "transformers_assisted",
    Side.PROMPT_LOOKUP: "transformers_prompt_lookup",
    Side.LLAMA_CPP: "llama_cpp_plain",
    Side.LLAMA_CPP_LOOKUP: "llama_cpp_prompt_lookup",
}
"""Every peer, by its key in the JSON report."""
_HEADINGS: Final = {
    Side.ASSISTED: "assisted generation",
    Side.PROMPT_LOOKUP: "prompt lookup",
    Side.LLAMA_CPP: "llama.cpp plain",
    Side.LLAMA_CPP_LOOKUP: "llama.cpp prompt lookup",
}
"""Of words so short that the table fits a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSetup:
    """What was measured."""

    model: str
    draft_model: str
    dtype: str
    num_draft_tokens: int
    """The bound K of the services."""
    max_tokens: int
    temperature: float
    rule: str
    threads: int
    """Of each peer, and those that the services have in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Speculative decoding through the services on some of the prompts."""

    tokens_per_second: float
    """All tokens / all wall time, prefill included."""
    num_tokens: int
    acceptance_rate: float | None
    """Accepted / proposed draft tokens; None where none were proposed."""
    tokens_per_round: float
    """Committed tokens / rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another system on the same prompts; None throughout where it was not measured."""

    tokens_per_second: float | None = None
    """As ours."""
    num_tokens: int | None = None
    ratio: float | None = None
    """Median over the prompts of the ratio of our tokens/s to its."""
    ratio_of_totals: float | None = None
    """Our `tokens_per_second` over its."""
    same_tokens: int | None = None
    """Prompts on which it wrote the tokens that we wrote: at temperature 0 all, but for near ties,
    which bfloat16 may break either way. None above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersComparison:
    """All systems on some of the prompts."""

    num_prompts: int
    ours: Ours
    peers: Mapping[Side, Peer]
    """Of all `PEERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReport:
    """The result of one `bench peers`."""

    setup: PeersSetup
    overall: PeersComparison
    categories: Mapping[str, PeersComparison]
    """In the order of the prompts."""
    notes: Mapping[Side, str]
    """Of all `PEERS`: how a peer is set up, or why it was not measured."""

    def to_json(self) -> str:
        """One JSON object on one line."""
        setup, overall = asdict(self.setup), _figures(self.overall)
        overall["ours"] |= {"num_draft_tokens": setup.pop("num_draft_tokens")}
        for side, key in PEERS.items():
            overall[key] |= {"note": self.notes[side]}
        categories = {name: _figures(found) for name, found in self.categories.items()}
        return to_json({**setup, **overall, "categories": categories})


def summarise(
    setup: PeersSetup,
    prompts: Sequence[BenchPrompt],
    results: Mapping[Side, SideResult],
    notes: Mapping[Side, str],
) -> PeersReport:
    """The report on the results of all sides over the same prompts. `notes` are on every peer."""
    check(notes.keys() == PEERS.keys(), "there is a note on every peer")
    check(
        all(len(found.completions) == len(prompts) > 0 for found in results.values()),
        "every side must have decoded every prompt",
    )
    exact = setup.rule == Rule.GREEDY.value
    categories = {
        name: _compare_all({side: part(found, chosen) for side, found in results.items()}, exact)
        for name, chosen in places_by_category(prompts).items()
    }
    return PeersReport(
        setup=setup, overall=_compare_all(results, exact), categories=categories, notes=notes
    )


def _compare_all(results: Mapping[Side, SideResult], exact: bool) -> PeersComparison:
    ours = results[Side.SPECULATIVE]
    alone = compare(ours, ours, several=False)
    return PeersComparison(
        num_prompts=alone.num_prompts,
        ours=Ours(
            tokens_per_second=alone.speculative_tokens_per_second,
            num_tokens=alone.num_tokens_speculative,
            acceptance_rate=alone.acceptance_rate,
            tokens_per_round=alone.tokens_per_round,
        ),
        peers={side: _compare(results.get(side), ours, exact) for side in PEERS},
    )


def _compare(theirs: SideResult | None, ours: SideResult, exact: bool) -> Peer:
    if theirs is None:
        return Peer()
    found = compare(theirs, ours, several=False)
    return Peer(
        tokens_per_second=found.plain_tokens_per_second,
        num_tokens=found.num_tokens_plain,
        ratio=found.speedup,
        ratio_of_totals=found.speculative_tokens_per_second / found.plain_tokens_per_second,
        same_tokens=found.num_identical if exact else None,
    )


def _figures(found: PeersComparison) -> dict[str, Any]:
    peers = {key: asdict(found.peers[side]) for side, key in PEERS.items()}
    return {"num_prompts": found.num_prompts, "ours": asdict(found.ours), **peers}


def render(report: PeersReport) -> Group:
    """The report for people."""
    setup = report.setup
    table = Table(
        title=f"{setup.model} with {setup.draft_model}, K <= {setup.num_draft_tokens}, "
        f"{setup.dtype}, temperature {setup.temperature:g}, rule {setup.rule}, at most "
        f"{setup.max_tokens} tokens, {setup.threads} threads; tokens/s, and ours over it"
    )
    table.add_column("prompts")
    table.add_column("number", justify="right")
    table.add_column("ours", justify="right", style="bold")
    for heading in _HEADINGS.values():
        table.add_column(heading, justify="right")
    for name, found in report.categories.items():
        table.add_row(*_row(name, found))
    table.add_section()
    table.add_row(*_row("all", report.overall))
    return Group(table, *(Text(line) for line in _note_lines(report)))


def _row(name: str, found: PeersComparison) -> tuple[str, ...]:
    cells = (name, str(found.num_prompts), f"{found.ours.tokens_per_second:.1f}")
    return (*cells, *(_cell(found.peers[side]) for side in PEERS))


def _cell(peer: Peer) -> str:
    if peer.ratio is None:
        return "-"
    return f"{peer.tokens_per_second:.1f} {peer.ratio:.2f}x"


def _note_lines(report: PeersReport) -> list[str]:
    lines = []
    for side in PEERS:
        same = report.overall.peers[side].same_tokens
        alike = (
            ""
            if same is None
            else f"; our tokens on {same} of {report.overall.num_prompts} prompts"
        )
        lines.append(f"{side.value}: {report.notes[side]}{alike}")
    return lines
