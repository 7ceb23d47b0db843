"""The load of `tests.chaos` on clients that are none: what is not answered in order must count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import httpx
import openai
import pytest

from outrider.client import Event, GenerateRequest, Tokens
from outrider.errors import Overloaded
from tests.chaos import load
from tests.chaos.faults import Adversary, Fault
from tests.chaos.load import Load, Work

FATES = ("right", "wrong", "refused", "broken", "cancelled", "silent")
"""What becomes of the request for each of as many streams."""
NUM_ASKED = 100
WORK = Work(num_tokens=1, num_seeds=len(FATES), num_clients=1)


class _Client:
    """Answers as `fate` says."""

    fate: Callable[[int], str] = staticmethod(lambda seed: "right")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def describe(self) -> Any:
        return SimpleNamespace(num_running=0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        assert request.seed is not None
        match self.fate(request.seed):
            case "right":
                yield Tokens(0, (request.seed,), "", (), ())
            case "wrong":
                yield Tokens(0, (request.seed + 1,), "", (), ())
            case "refused":
                raise Overloaded("full", 1)
            case "broken":
                raise ValueError("broken")
            case "cancelled":
                raise asyncio.CancelledError
            case "silent":
                await asyncio.Event().wait()


@pytest.fixture
async def prepared(monkeypatch: pytest.MonkeyPatch) -> Load:
    """It knows its streams, and each request meets its fate."""
    monkeypatch.setattr(load, "Client", _Client)
    monkeypatch.setattr(load, "END_S", 0.05)
    monkeypatch.setattr(load, "PEAK_S", 0.0)
    found = Load(lambda: "", WORK, seed=1)
    await found.prepare()
    monkeypatch.setattr(_Client, "fate", staticmethod(lambda seed: FATES[seed]))
    return found


async def test_whatever_a_request_dies_of_is_its_failure(prepared: Load) -> None:
    """And what has not ended, or was cancelled by nobody, is stuck."""
    asking = asyncio.create_task(prepared.run(1e6))
    while len(prepared.asked) < NUM_ASKED:
        await asyncio.sleep(0)
    asking.cancel()
    await prepared.finish()
    report = prepared.report()
    assert report["errors"] == ["Overloaded: full", "ValueError: broken"]
    assert report["num_failed"] > len(report["errors"])
    assert report["num_wrong"] > 1
    assert report["num_stuck"] > 1
    right = [one for one in prepared.asked if one.ended and not (one.error or one.is_wrong)]
    others = report["num_failed"] + report["num_wrong"] + report["num_stuck"]
    assert len(right) + others == report["num_requests"] == len(prepared.asked)


@pytest.mark.parametrize(
    ("end", "died_at", "num_broken"),
    [(httpx.ReadError("reset"), 0.0, 1), (httpx.ReadError("reset"), -60.0, 0),
     (openai.OpenAIError("500"), 0.0, 0)],
)  # fmt: skip
async def test_what_a_coordinators_death_breaks_by_http_is_counted_apart(
    prepared: Load, monkeypatch: pytest.MonkeyPatch, end: Exception, died_at: float, num_broken: int
) -> None:
    """Its own death, at that time, and only what looks like one; anything else is a failure."""

    async def streamed(*arguments: object) -> AsyncIterator[list[int]]:
        yield [0]
        raise end

    monkeypatch.setattr(load, "streamed", streamed)
    monkeypatch.setattr(load, "HTTP_SHARE", 1.0)
    prepared._http = lambda: ["h:1"]
    prepared.deaths = {"h:1": asyncio.get_running_loop().time() + died_at}
    await prepared._ask(0)
    report = prepared.report()
    assert (report["num_http_broken_by_a_death"], report["num_failed"]) == (
        num_broken,
        1 - num_broken,
    )


async def test_what_fails_during_a_pair_of_faults_is_counted_apart(prepared: Load) -> None:
    """But tokens that are wrong are wrong in any case, and so is what never ends."""
    for seed, _ in enumerate(FATES[:4]):
        await prepared._ask(seed)
    adversary = Adversary(cast("Any", None), cast("Any", None), prepared, seed=1)
    end = asyncio.get_running_loop().time() + 1
    await adversary._see(Fault("kill", "target", 0.0), 0.0, end)
    assert prepared.report()["num_failed"] == 2
    await adversary._see(Fault("pair", "redis+coordinator", 0.0), 0.0, end)
    report = prepared.report()
    assert (report["num_failed"], report["num_wrong"], report["num_stuck"]) == (0, 1, 0)
    assert (report["num_during_pairs"], report["num_failed_during_pairs"]) == (4, 2)
    assert report["errors_during_pairs"] == ["Overloaded: full", "ValueError: broken"]
