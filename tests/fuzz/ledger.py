"""Counts what was sent, and collects failures."""

import itertools
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

EXAMPLES: Final = 20
"""Number of inputs of a batch. All inputs of a batch come from one seed."""
FAILURES_MAX: Final = 20
SHOWN_CHARS_MAX: Final = 4000
REDIS_LATE: Final = "Redis does not answer (TimeoutError)"
"""Redis may answer late because other tests use the machine. So a request with this answer is made
once more, and only the second answer counts."""
REDIS_REST_S: Final = 1.0

T = TypeVar("T")


@dataclass
class Ledger:
    seed: int
    ends_at: float
    first_batch: int = 0
    least: int = 0
    """Least number of requests of each kind, even if the time is over."""
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        is_late = time.monotonic() >= self.ends_at
        is_enough = all(self.counts[kind] >= self.least for kind in ("http", "grpc", "frames"))
        return (is_late and is_enough) or len(self.failures) >= FAILURES_MAX

    def count(self, kind: str, status: object) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.statuses[f"{kind} {status}"] += 1

    def fail(self, where: str, what: str, given: object) -> None:
        with self._lock:
            self.failures.append(f"{where}: {what}\n    given {repr(given)[:SHOWN_CHARS_MAX]}")

    def run_batches(
        self, kind: str, inputs: SearchStrategy[T], feed: Callable[[str, T], Any]
    ) -> None:
        """Feeds batches of inputs until the time is over. Each batch has its own seed. `feed` gets
        a command that repeats the input."""
        batch_of = hypothesis.settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        for batch in itertools.count(self.first_batch):
            again = f"--seed {self.seed} --only {kind} --batch {batch}"

            @hypothesis.seed(zlib.crc32(f"{self.seed} {kind} {batch}".encode()))
            @batch_of
            @hypothesis.given(inputs)
            def feed_one(value: T) -> None:
                if not self.is_over:
                    self.feed_one(again, value, feed)  # noqa: B023 (it is called at once)

            try:
                feed_one()
            except Exception as error:  # noqa: BLE001 (the batch could not be generated)
                self.fail(again, f"no inputs: {error!r}", kind)
                return
            if self.is_over:
                return

    def feed_one(self, again: str, value: T, feed: Callable[[str, T], Any]) -> None:
        """Feeds one input. An exception of the client counts as a failure."""
        try:
            feed(again, value)
        except Exception as error:  # noqa: BLE001 (any error is a failure)
            self.fail(again, f"the client failed: {error!r}", value)
