"""What a coordinator says of its rounds."""

from __future__ import annotations

import pytest

from coordinator.decoding.loop import RoundMeter
from coordinator.routing.drafts import Drafted
from outrider.registry.registry import WINDOW_S, Figures
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal

TOKENS = SealedProposal((1, 2, 3, 4))


def drafted(queue_ms: float, compute_ms: float, *, ahead: bool = False) -> Drafted:
    return Drafted(TOKENS, "replica", 0.0, 4, queue_ms=queue_ms, compute_ms=compute_ms, ahead=ahead)


def test_shares_of_the_rounds_that_a_draft_took_part_in() -> None:
    """Of four proposals one was there before, and one waited for its turn."""
    now = 0.0
    meter = RoundMeter(lambda: now)
    assert meter.figures == Figures(tokens_per_second=0.0)
    for _ in range(500):
        for proposal in (
            drafted(0.0, 5.0), drafted(4.0, 5.0), drafted(6.0, 5.0), drafted(9.0, 5.0, ahead=True)
        ):  # fmt: skip
            meter.decided(proposal, num_accepted=2, num_tokens=3)
        meter.decided(Drafted(NOTHING_SEALED, "fallback", 0.0, 0), num_accepted=0, num_tokens=1)
        now += 0.1
    found = meter.figures
    assert found.draft_waits == pytest.approx(0.25)
    assert found.look_ahead_hits == pytest.approx(0.25)
    assert found.acceptance == pytest.approx(0.5)
    assert found.tokens_per_second == pytest.approx(130, rel=0.02)
    now += 40 * WINDOW_S
    assert meter.figures.tokens_per_second == pytest.approx(0, abs=1e-6)
    assert meter.figures.draft_waits is None


def test_no_replica_is_waited_for_where_look_ups_propose() -> None:
    """Their acceptance counts; of waits and look-ahead, they say nothing."""
    meter = RoundMeter(lambda: 0.0)
    meter.decided(Drafted(TOKENS, "local", 0.001, 4), num_accepted=2, num_tokens=3)
    found = meter.figures
    assert (found.draft_waits, found.look_ahead_hits) == (None, None)
    assert found.acceptance == pytest.approx(0.5)
