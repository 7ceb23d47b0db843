"""The figures of `bench serve` from its records: pure, and defined as `vllm bench serve` does.

| figure | of each request that did not fail |
| --- | --- |
| TTFT | from sending to the first chunk with tokens |
| E2EL | from sending to the last chunk |
| TPOT | (E2EL - TTFT) / (output tokens - 1); requests of one token have none |
| ITL | each gap between two chunks that follow each other, of all requests together |

A chunk may hold several tokens, and with speculative decoding most do: ITL is of chunks, TPOT of
tokens. A request is good where it meets every goal; its TPOT counts as 0 where it has none. Failed
requests count in `failed` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from .figures import percentile
from .serving_records import Record, RoundTimes

MS: Final = 1e3
PER_CENT: Final = 100.0
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is spread over requests or chunks, ms; None where there were none."""

    mean: float | None
    median: float | None
    std: float | None
    """Of the population, as numpy's."""
    percentiles: tuple[tuple[float, float | None], ...]
    """Each share in per cent, with the value that so many do not exceed, interpolated."""

    @classmethod
    def of(cls, values_s: Sequence[float], shares: Iterable[float]) -> Spread:
        """Of values in seconds."""
        if not values_s:
            return cls(None, None, None, tuple((share, None) for share in shares))
        values = MS * np.asarray(values_s, dtype=np.float64)
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            tuple((share, percentile(values.tolist(), share)) for share in shares),
        )

    def named(self, metric: str) -> dict[str, float | None]:
        """By vLLM's names, such as `p99_ttft_ms`."""
        found = {"mean": self.mean, "median": self.median, "std": self.std}
        found |= {f"p{share:g}": value for share, value in self.percentiles}
        return {f"{name}_{metric}_ms": value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Samples:
    """The figures of the requests that did not fail, s."""

    ttft: list[float]
    tpot: list[float]
    itl: list[float]
    e2el: list[float]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Samples:
        """Of records without failed ones."""
        found = cls([], [], [], [])
        for record in records:
            found.ttft.append(record.ttft_s)
            found.e2el.append(record.latency_s)
            found.itl.extend(record.itl_s)
            if record.tpot_s is not None:
                found.tpot.append(record.tpot_s)
        return found


def is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request that did not fail meets every goal, by name, ms."""
    measured = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s or 0.0,
        "e2el": record.latency_s,
    }
    return all(MS * measured[name] <= bound for name, bound in goals.items())


def tokens_by_chunk(record: Record) -> list[float]:
    """Tokens of each chunk; shared out evenly where only their sum is known."""
    if record.chunk_tokens is not None:
        return [float(number) for number in record.chunk_tokens]
    chunks = len(record.chunk_s)
    return [record.num_tokens / chunks] * chunks if chunks else []


def tokens_by_time(records: Sequence[Record], bin_s: float = 1.0) -> Numbers:
    """Tokens that were read in each `bin_s` seconds since the first of these requests was sent.
    vLLM counts a chunk as one token here."""
    if not records:
        return np.zeros(0)
    first = min(record.started_s for record in records)
    last = max(record.ended_s for record in records)
    counts = np.zeros(ceil((last - first) / bin_s) + 1)
    for record in records:
        for at_s, tokens in zip(record.chunk_s, tokens_by_chunk(record), strict=True):
            counts[int((at_s - first) / bin_s)] += tokens
    return counts


def running(records: Iterable[Record]) -> list[tuple[float, int]]:
    """How many requests run from each time on at which that changes, ascending. One that ends when
    another is sent does not meet it."""
    changes: Counter[float] = Counter()
    for record in records:
        changes[record.started_s] += 1
        changes[record.ended_s] -= 1
    number, found = 0, []
    for at_s in sorted(changes):
        number += changes[at_s]
        found.append((at_s, number))
    return found


def speculation_values(records: Iterable[Record]) -> dict[str, float | None]:
    """By vLLM's names, with its units: a rate in per cent, and 1 + accepted / steps. None where no
    server said anything of it."""
    told = [record.speculation for record in records if record.speculation is not None]
    steps = sum(entry.num_rounds for entry in told)
    drafted = sum(entry.num_draft_tokens for entry in told)
    accepted = sum(entry.num_accepted for entry in told)
    return {
        "spec_decode_acceptance_rate": PER_CENT * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / steps if steps else None,
        "spec_decode_num_drafts": steps if told else None,
        "spec_decode_draft_tokens": drafted if told else None,
        "spec_decode_accepted_tokens": accepted if told else None,
    }


def round_values(records: Iterable[Record]) -> dict[str, float | None]:
    """The part of rounds that look-ahead was ready for, and the means of what a round takes, ms;
    None where rounds were not reported."""
    told = [record.rounds for record in records if record.rounds is not None]
    rounds = sum(entry.num_rounds for entry in told)

    def mean(name: str) -> float | None:
        return sum(getattr(entry, name) for entry in told) / rounds if rounds else None

    spent = [field.name for field in fields(RoundTimes) if field.name.endswith("_ms")]
    return {"look_ahead_hit_rate": mean("num_hits")} | {
        f"mean_round_{name}": mean(name) for name in spent
    }


def first_errors(records: Iterable[Record], most: int) -> list[tuple[str, int]]:
    """The errors that came first, each with how many requests had it."""
    return list(Counter(record.error for record in records if record.error).items())[:most]
