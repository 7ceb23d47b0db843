"""A control caller, which repeats its requests and must always get the same answers, in time."""

import math
import time
from typing import Any, Final

import httpx

from outrider.client import ChatMessage, Constraint, GenerateRequest, SamplingParams, SyncClient
from outrider.errors import Overloaded
from tests.fuzz.ledger import Ledger
from tests.fuzz.started import Started

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

    def __init__(self, started: Started, ledger: Ledger) -> None:
        self._ledger = ledger
        key = started.keys["control"]
        address = started.addresses["locked_coordinator"]
        self._grpc = SyncClient(address, api_key=key, resume_timeout_s=0)
        headers = {"authorization": f"Bearer {key}"}
        self._http = [
            httpx.Client(
                base_url=f"http://{started.addresses[place]}", headers=headers, timeout=WAIT_S
            )
            for place in ("locked_http", "gateway_http")
        ]
        num_turns = len(_REQUESTS) + len(self._http)
        self._expected = [self._answer(turn) for turn in range(num_turns)]
        self.waits_s: list[float] = []

    def run(self) -> None:
        """Repeats the requests until the time is over, and then once more. Each answer must equal
        the first."""
        is_last = False
        while not is_last:
            is_last = self._ledger.is_over
            for turn, expected in enumerate(self._expected):
                self._once(turn, expected)
            time.sleep(PAUSE_S)
        self._grpc.close()
        for client in self._http:
            client.close()

    @property
    def number(self) -> int:
        """Number of answers."""
        return len(self.waits_s)

    @property
    def late_s(self) -> float:
        """The 99th percentile of the time of an answer."""
        waits = sorted(self.waits_s)
        return waits[math.ceil((1 - LATE_SHARE) * len(waits)) - 1] if waits else math.inf

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
