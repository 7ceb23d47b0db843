"""What more replicas bring, told of a deployment that is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import STEP_SESSIONS, ScalingOptions
from outrider.clock import run_virtually
from outrider.errors import SettingError, Unavailable
from outrider.registry.registry import Role
from outrider.request import RoundReport, Tokens

ROUND_S = 0.1


class Sessions:
    """A deployment whose targets serve two sessions at a time, two tokens a round, and whose drafts
    keep a round waiting the longer the fewer there are."""

    address = "nowhere"

    def __init__(self) -> None:
        self.counts: dict[Role, int] = {"target": 1, "draft": 1}
        self.scaled: list[tuple[int, int]] = []
        self.running = 0
        self.fails = False

    async def scale(self, counts: Mapping[Role, int]) -> None:
        self.counts |= counts
        self.scaled.append((self.counts["target"], self.counts["draft"]))

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        self.running += 1
        try:
            while True:
                crowded = max(1.0, self.running / (STEP_SESSIONS * self.counts["target"]))
                await asyncio.sleep(ROUND_S * crowded)
                if self.fails:
                    raise Unavailable("gone")
                yield Tokens(0, (1, 2), "", (), ())
                draft_ms = 40 / self.counts["draft"]
                yield RoundReport(0, (), 0, draft_ms, 0.0, 0.0, 0.0, 0.0, False)
        finally:
            self.running -= 1


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    found = Sessions()

    @asynccontextmanager
    async def client(address: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(generate=found.generate)

    monkeypatch.setattr(scaling, "Client", client)
    return found


def measured(sessions: Sessions, options: ScalingOptions) -> scaling.ScalingReport:
    engines, shared = [], []

    @asynccontextmanager
    async def starts(
        engine: str, step_sessions: int, draft_step_sessions: int, num_draft_tokens: int
    ) -> AsyncIterator[Any]:
        engines.append(engine)
        shared.append((step_sessions, draft_step_sessions))
        yield sessions

    async def main() -> scaling.ScalingReport:
        return await scaling.run(options, starts, lambda line: None)

    report = run_virtually(main())
    assert len(set(engines)) == 2, "quick drafts, and slow ones"
    assert shared == [(2, 16), (2, 2)]
    return report


def test_each_number_of_replicas_has_its_own_load_and_figures(sessions: Sessions) -> None:
    report = measured(sessions, ScalingOptions(targets=(1, 2, 8), drafts=(1, 4), seconds=4.0))
    assert sessions.scaled == [(1, 1), (2, 1), (8, 1), (4, 1), (4, 4)]
    assert [entry.sessions for entry in report.by_targets] == [2, 4, 16]
    for entry in report.by_targets:
        expected = 2 * entry.sessions / ROUND_S
        assert entry.tokens_per_second == pytest.approx(expected, rel=0.1)
        assert entry.share_of_linear == pytest.approx(1.0, rel=0.1)
    assert [entry.draft_ms for entry in report.by_drafts] == pytest.approx([40.0, 10.0])
    assert sessions.running == 0
    values = json.loads(report.to_json())
    assert values["by_targets"][1]["targets"] == 2
    assert scaling.render(report).row_count == 5


def test_a_request_that_fails_ends_the_measurement(sessions: Sessions) -> None:
    sessions.fails = True
    with pytest.raises(Unavailable, match="gone"):
        measured(sessions, ScalingOptions(targets=(1,), drafts=(1,), seconds=2.0))


@pytest.mark.parametrize(
    ("key", "value"), [("targets", ()), ("targets", (2, 1)), ("drafts", (0,)), ("seconds", 0.5)]
)
def test_numbers_that_mean_nothing_are_refused(key: str, value: object) -> None:
    with pytest.raises(SettingError) as bad:
        ScalingOptions(**{key: value})  # type: ignore[arg-type]
    assert bad.value.key == key
