"""A control caller, which repeats its requests and must always get the same answers, in time."""

import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, Final

import httpx

from outrider.client import ChatMessage, Constraint, GenerateRequest, SamplingParams, SyncClient
from outrider.errors import Overloaded
from tests.fuzz.ledger import Ledger

WAIT_S: Final = 60.0
LATE_S: Final = 0.5
"""99 % of the answers must take at most this time, or the time that `--control-s` gives."""
LATE_SHARE: Final = 0.01
PAUSE_S: Final = 0.05
RETRY_S: Final = 0.02
_REQUESTS: Final = (
    GenerateRequest((1, 2, 3), max_tokens=24, seed=11, num_draft_tokens=4),
    GenerateRequest("The quick brown fox", max_tokens=16, sampling=SamplingParams(temperature=0.0)),
    GenerateRequest(
        (ChatMessage("user", "Hello"),), max_tokens=12, seed=3, logprobs=2, stop=("zz",)
    ),
    GenerateRequest("A", max_tokens=12, seed=5, constraint=Constraint.of_regex("[a-z]{3,9}")),
)
_BODY: Final[dict[str, Any]] = {
    "prompt": [1, 2, 3],
    "max_tokens": 24,
    "seed": 11,
    "n": 2,
    "return_token_ids": True,
}


class Control:
    """Calls by gRPC, by HTTP and through the gateway in turn."""

    def __init__(self, addresses: dict[str, str], key: str, ledger: Ledger) -> None:
        self._ledger = ledger
        self._grpc = SyncClient(addresses["locked_coordinator"], api_key=key, resume_timeout_s=0)
        headers = {"authorization": f"Bearer {key}"}
        self._http = [
            httpx.Client(base_url=f"http://{addresses[place]}", headers=headers, timeout=WAIT_S)
            for place in ("locked_http", "gateway_http")
        ]
        num_turns = len(_REQUESTS) + len(self._http)
        self._expected = [self._answer(turn) for turn in range(num_turns)]
        self.waits_s: list[float] = []

    def run(self, is_over: Callable[[], bool]) -> None:
        """Repeats the requests until the time is over, and then once more. Each answer must equal
        the first."""
        is_last = False
        while not is_last:
            is_last = is_over() or self._ledger.is_over
            for turn, expected in enumerate(self._expected):
                self._once(turn, expected)
            time.sleep(PAUSE_S)
        self._grpc.close()
        for client in self._http:
            client.close()

    def _once(self, turn: int, expected: Any) -> None:
        """Makes a request. A refused request is repeated, and the time until its answer counts."""
        begun = time.monotonic()
        try:
            found = self._answered(turn, begun + WAIT_S)
        except Exception as error:  # noqa: BLE001 (any error is a failure)
            self._ledger.fail("control", f"failed: {error!r}", turn)
            return
        self.waits_s.append(time.monotonic() - begun)
        if found != expected:
            self._ledger.fail("control", f"changed: {found} is not {expected}", turn)

    def _answered(self, turn: int, until: float) -> Any:
        while True:
            try:
                return self._answer(turn)
            except Overloaded:
                self._ledger.count("control", "overloaded")
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)

    def _answer(self, turn: int) -> Any:
        if turn < len(_REQUESTS):
            found = self._grpc.complete(_REQUESTS[turn])
            return found.text, found.token_ids
        response = self._http[turn - len(_REQUESTS)].post("/v1/completions", json=_BODY)
        if response.status_code == 429:
            raise Overloaded("by HTTP")
        return response.status_code, [
            (choice["text"], choice["token_ids"]) for choice in response.json()["choices"]
        ]


class ControlProcess:
    """A control caller in a process of its own, where the threads that make hostile input do not
    delay it. After `finish`, `waits_s` are the times of its answers."""

    def __init__(self, addresses: dict[str, str], key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._results, results = context.Pipe(duplex=False)
        self._is_over = context.Event()
        self._process = context.Process(
            target=_run, args=(addresses, key, self._is_over, results), daemon=True
        )
        self.waits_s: list[float] = []
        self._process.start()
        results.close()
        self._results.recv()  # It has the answers that it compares others with.

    def finish(self, ledger: Ledger) -> None:
        """Waits for the last answers, and adds what the caller found to the ledger."""
        self._is_over.set()
        self.waits_s, statuses, failures = self._results.recv()
        ledger.statuses.update(statuses)
        ledger.failures.extend(failures)
        self._process.join()

    @property
    def late_s(self) -> float:
        """The 99th percentile of the time of an answer."""
        waits = sorted(self.waits_s)
        return waits[math.ceil((1 - LATE_SHARE) * len(waits)) - 1] if waits else math.inf


def _run(addresses: dict[str, str], key: str, is_over: Event, results: Connection) -> None:
    ledger = Ledger(seed=0, ends_at=math.inf)
    control = Control(addresses, key, ledger)
    results.send(None)
    control.run(is_over.is_set)
    results.send((control.waits_s, ledger.statuses, ledger.failures))
