"""Which sessions continue when pages are short: the older ones first."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import Resync
from outrider.interfaces.step_costs import StepCosts
from outrider.replica.admission import Admission, Admitted, SlotDemand
from outrider.replica.step_request import Unfinished
from outrider.replica.token_budget import TokenBudget
from tests.support.pages import check_pages
from tests.support.rounds import make_head, session_name
from tests.support.toy_engine import ToyEngine

WAITS = Unfinished.WAITS


class Setting:
    """Sessions of 4-token pages on an engine that has few of them."""

    def __init__(
        self, num_pages: int, max_tokens: int = 512, costs: StepCosts | None = None
    ) -> None:
        self.engine = ToyEngine(num_pages=num_pages)
        self.admission = Admission(self.engine, TokenBudget(max_tokens, 64, costs))
        self.table = self.admission._table

    def demand(self, session: int, length: int, base: int = 0, extra: int = 0) -> SlotDemand:
        """Demand of a session whose tokens differ from those of all others."""
        tokens = [session % 8, session // 8] * length
        return SlotDemand(make_head(tokens[:length], base, session=session), extra)

    def step(self, *demands: SlotDemand) -> list[Any]:
        """Runs what is admitted; per demand its number of tokens run, or its answer."""
        admissions = self.admission.choose(demands)
        steps = {
            index: SequenceStep(
                demands[index].head.session_id, found.aligned.new_tokens[: found.num_granted], 0
            )
            for index, found in enumerate(admissions)
            if isinstance(found, Admitted)
        }
        self.engine.forward(list(steps.values()))
        check_pages(self.engine)
        return [
            len(steps[index].token_ids) if index in steps else found
            for index, found in enumerate(admissions)
        ]

    def held(self, *sessions: int) -> list[int]:
        return [self.engine.length(session_name(session)) for session in sessions]


def test_the_youngest_gives_way_and_no_more_than_needed() -> None:
    at = Setting(num_pages=4)
    assert at.step(at.demand(1, 8), at.demand(2, 4), at.demand(3, 4)) == [8, 4, 4]
    assert at.step(at.demand(3, 5, base=4), at.demand(1, 9, base=8)) == [WAITS, 1]
    assert at.held(1, 2, 3) == [9, 4, 0]
    assert at.admission.figures.num_preemptions == 1


def test_a_tenant_gets_pages_though_older_sessions_of_another_hold_all() -> None:
    """The sessions of the other tenant that are left run on."""
    at = Setting(num_pages=4)
    assert at.step(*(at.demand(session, 4) for session in (1, 2, 3, 4))) == [4] * 4
    own = SlotDemand(make_head([5] * 8, session=5, tenant="other"), 0)
    assert at.step(own, at.demand(1, 4, base=3)) == [8, 1]
    assert at.held(1, 2, 3, 4, 5) == [4, 4, 0, 0, 8]
    another = SlotDemand(make_head([6] * 4, session=6, tenant="other"), 0)
    assert at.step(another, at.demand(2, 5, base=4)) == [WAITS, WAITS]
    assert at.step(at.demand(1, 5, base=4)) == [1]
    assert at.held(1, 2, 5) == [5, 0, 8]


def test_a_length_that_is_only_claimed_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Setting(num_pages=4)
    lengths = []
    can_hold = at.engine.can_hold

    def watched(steps: Any, *rest: Any, **more: Any) -> bool:
        lengths.extend(len(step.token_ids) for step in steps)
        return can_hold(steps, *rest, **more)

    monkeypatch.setattr(at.engine, "can_hold", watched)
    far = replace(make_head([1, 2], session=1), base_length=2**32 - 1)
    assert at.step(SlotDemand(far, 0), at.demand(2, 4)) == [WAITS, 4]
    assert max(lengths) < 100


@pytest.mark.parametrize(("num_pages", "is_whole"), [(30, True), (25, True), (24, None)])
def test_an_item_takes_what_it_can_run(num_pages: int, is_whole: bool | None) -> None:
    at = Setting(num_pages, max_tokens=64)
    at.step(at.demand(1, 4), at.demand(2, 4))
    (found,) = at.admission.choose([at.demand(1, 100, base=4)._replace(reach=6)])
    assert found is WAITS if is_whole is None else found.is_whole
    assert at.held(1, 2) == [4, 4]
    assert at.admission.figures.num_prefill_chunks == 0


def test_a_lost_session_is_told_only_when_it_fits_again() -> None:
    """And then whole, with its draft. Resynchronising session 2 takes two of the four pages."""
    at = Setting(num_pages=4)
    at.step(at.demand(1, 8), at.demand(2, 4), at.demand(3, 4))
    at.step(at.demand(1, 13, base=8))
    assert at.held(1, 2, 3) == [13, 0, 0]
    again = at.demand(2, 5, base=4, extra=3)
    assert at.step(again) == [WAITS]
    at.table.release(session_name(1))
    (told,) = at.step(again)
    assert (type(told), told.cached_length) == (Resync, 0)
    assert at.step(at.demand(2, 5, extra=3)) == [5]


def test_a_prompt_is_looked_up_once_when_its_first_tokens_are_run() -> None:
    """The second starts from what the first has written meanwhile, 64 tokens a step."""
    at = Setting(num_pages=128, max_tokens=64)
    at.engine.info = ToyEngine(max_model_len=200).info
    first = at.demand(1, 150)
    second = SlotDemand(make_head(first.head.append, session=2), 0)
    for _ in range(2):
        assert at.step(first, second) == [64, Unfinished.CONTINUES]
        assert at.engine.page_counts().prefix_queries == 150
    assert at.step(first, second) == [22, 22]
    counts = at.engine.page_counts()
    assert (counts.prefix_queries, counts.prefix_hits) == (300, 128)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_prompt_is_chunked_only_if_sessions_decode(has_ended: bool) -> None:
    at = Setting(num_pages=64, costs=StepCosts((1, 512), (0.010, 0.260)))
    at.step(at.demand(1, 4))
    if has_ended:
        at.table.release(session_name(1))
    assert (at.step(at.demand(2, 60)) == [60]) is has_ended
