"""The control caller of the fuzz."""

from typing import Any

import pytest

from outrider.errors import Overloaded
from tests.fuzz.control import RETRY_S, Control
from tests.fuzz.ledger import Ledger

ADDRESSES = dict.fromkeys(("locked_coordinator", "locked_http", "gateway_http"), "127.0.0.1:1")
NUM_REFUSALS = 3


def test_a_refused_request_is_repeated_and_its_whole_wait_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = 0

    def answer(control: Control, turn: int) -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Overloaded("try again")
        return turn

    monkeypatch.setattr(Control, "_answer", answer)
    ledger = Ledger(seed=0, ends_at=0.0)
    control = Control(ADDRESSES, "key", ledger)
    left = NUM_REFUSALS
    control.run(lambda: True)
    assert not ledger.failures
    assert ledger.counts["control"] == NUM_REFUSALS
    assert max(control.waits_s) >= NUM_REFUSALS * RETRY_S


def test_a_request_that_is_refused_for_too_long_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.fuzz.control.WAIT_S", 0.1)
    monkeypatch.setattr(Control, "_answer", lambda control, turn: turn)
    ledger = Ledger(seed=0, ends_at=0.0)
    control = Control(ADDRESSES, "key", ledger)

    def refuse(turn: int) -> Any:
        raise Overloaded("try again")

    monkeypatch.setattr(control, "_answer", refuse)
    control.run(lambda: True)
    assert ledger.failures
