"""Costs of rounds: tables until something is measured, and measurements that correct a table."""

import random

import pytest

from coordinator.draft_length.policy import DraftedBeside, RoundResult
from coordinator.draft_length.round_cost import OUTLIER, CostLine, Load, RoundCosts
from outrider.interfaces.step_costs import StepCosts

TARGET = StepCosts((1, 9, 17), (0.016, 0.024, 0.032))
"""1 ms a row."""
DRAFT = StepCosts((1, 65), (0.003, 0.0094))


def costs(
    target: StepCosts = TARGET,
    draft: StepCosts | None = DRAFT,
    *,
    num_sessions: int = 1,
    **delays: bool,
) -> RoundCosts:
    delays = {"drafting_delays": False} | delays
    return RoundCosts(target, draft, 64, Load(num_sessions), **delays)


def note_load(
    one: RoundCosts, rows: int, num_tokens: int, round_s: float, target_s: float, context: int
) -> None:
    survival = (1.0,) * (rows - 1)
    one.note_load(RoundResult(0, survival, num_tokens, context, 0.0, target_s, 0.0), round_s)


def note_drafted(
    one: RoundCosts,
    num_proposed: int,
    draft_s: float,
    step_s: float,
    rest_s: float,
    *,
    queue_s: float = 0.0,
    work_s: float = 0.0,
) -> None:
    target_s = step_s + queue_s
    played = RoundResult(
        num_proposed, (1.0,) * num_proposed, 1, 0, draft_s, target_s, 0.0, queue_s, work_s=work_s
    )
    one.note_drafted(played, draft_s + target_s + rest_s)


def play(
    one: RoundCosts, num_proposed: int, draft_s: float, target_s: float, rest_s: float = 0.002
) -> None:
    round_s = draft_s + target_s + rest_s
    note_load(one, 1 + num_proposed, 1, round_s, target_s, 0)
    note_drafted(one, num_proposed, draft_s, target_s, rest_s)


def test_measured_times_correct_a_table() -> None:
    one, rng = costs(), random.Random(3)
    for _ in range(400):
        num = rng.randrange(9)
        play(one, num, num * 0.0045, 1.5 * TARGET.step_seconds(1 + num))
    found = one.forecast(8, context=0)
    assert found.round_s == pytest.approx(1.5 * 0.016 + 0.002, rel=0.02)
    assert found.token_s == pytest.approx([1.5 * 0.004] * 8, rel=0.05)


def test_a_table_gives_the_slope_while_only_one_length_was_seen() -> None:
    one = costs()
    for _ in range(200):
        play(one, 4, 0.012 + 0.001, TARGET.step_seconds(5) + 0.005)
    found = one.forecast(8, context=0)
    slower = (0.020 + 0.005) / 0.020
    assert found.token_s == pytest.approx([0.003 + slower * 0.001] * 8, rel=0.01)
    assert found.round_s == pytest.approx(slower * 0.016 + 0.001 + 0.002, rel=0.01)


def test_lookups_take_as_long_however_much_they_find() -> None:
    """There is no table. A longer proposal costs only rows of the target."""
    one, rng = costs(draft=None), random.Random(4)
    for _ in range(200):
        num = rng.choice((0, 0, 0, 8, 3))
        play(one, num, 0.0015, TARGET.step_seconds(1 + num))
    found = one.forecast(8, context=0)
    assert found.token_s == pytest.approx([0.001] * 8, rel=0.05)
    assert found.round_s == pytest.approx(0.016 + 0.0015 + 0.002, rel=0.02)


def test_rows_cost_other_sessions_tokens() -> None:
    """Each target has nine sessions. Of these, four others share a step. A millisecond of a row
    costs them its tokens."""
    one = costs()
    one.load.num_sessions, one.load.num_elsewhere, one.load.num_targets = 10, 8, 2
    for _ in range(2000):
        note_load(one, 1, 2, 0.040, 0.020, 0)
    found = one.forecast(2, context=0)
    assert found.plain_s == pytest.approx(TARGET.step_seconds(5))
    assert found.token_lost == pytest.approx([4 * 0.001 * 2 / 0.040] * 2, rel=0.01)


def test_the_contexts_of_others_count_by_their_own_lengths() -> None:
    """Eight others with 1,000 tokens each, whatever this session has."""
    one = costs(StepCosts((1, 9), (0.016, 0.024), slot_s=1e-6))
    one.load.num_sessions = 9
    for _ in range(2000):
        note_load(one, 1, 1, 0.040, 0.040, 1000)
    assert one.forecast(1, context=0).plain_s == pytest.approx(0.024 + 0.008)
    assert one.forecast(1, context=500).plain_s == pytest.approx(0.024 + 0.0085)


def test_a_round_waits_for_the_steps_of_others() -> None:
    """Half a step while others use the target, and not at all once a session is alone."""
    one = costs(draft=None)
    one.load.num_sessions = 9
    step_s = TARGET.step_seconds(9)
    for _ in range(2000):
        note_load(one, 1, 1, 0.040, 0.040, 0)
        note_drafted(one, 0, 0.0, step_s, 0.002, queue_s=step_s / 2)
    assert one.forecast(1, 0).round_s == pytest.approx(1.5 * step_s + 0.002)
    one.load.num_sessions = 1
    assert one.forecast(1, 0).round_s == pytest.approx(0.016 + 0.002)


@pytest.mark.parametrize(("num_drafting", "num_plain"), [(0, 8), (4, 4), (8, 0)])
def test_a_step_waits_once_for_the_messages_of_all_sessions_that_draft(
    num_drafting: int, num_plain: int
) -> None:
    """Eight others with a token per 40 ms, some of which draft; a round's messages take 2 ms."""
    one = costs(draft=None, num_sessions=9)
    for index in range(4000):
        drafts = index % 8 < num_drafting
        one.note_load(RoundResult(int(drafts), (), 1, 0, 0.0, 0.040, 0.0), 0.040)
        note_drafted(one, 0, 0.0, TARGET.step_seconds(9), 0.002)
    lost = num_plain / (1 + num_drafting) * 0.002 / 0.040
    found = one.forecast(2, 0)
    assert found.round_lost == pytest.approx(lost, rel=0.05)
    assert found.token_lost == pytest.approx([8 * 0.001 / 0.040] * 2, rel=0.01)


@pytest.mark.parametrize("delays", [False, True])
def test_reading_missed_tokens_costs_sessions_that_wait_for_the_draft(delays: bool) -> None:
    """Eight others use the target, with a token per 40 ms."""
    one = costs(num_sessions=9, drafting_delays=delays)
    for _ in range(2000):
        note_load(one, 1, 1, 0.040, 0.040, 0)
    reading_s = DRAFT.step_seconds(65)
    own, others = reading_s / 0.016, 8 * reading_s / 0.040
    assert one.reading_lost(0.016, 65) == pytest.approx(own + delays * others, rel=0.01)


@pytest.mark.parametrize(
    ("delays", "draft_s", "work_s", "lost"),
    [
        (False, 0.004, 0.004, 0.0),
        (True, 0.004, 0.004, 8 * 0.1),  # Alone: it waits for its work, and so do eight others.
        (True, 0.036, 0.004, 0.0),  # All draft in one step: each waits for the work of nine.
        (True, 0.0, 0.004, 9 * 0.1),  # Drafted ahead: its own round does not wait.
        (True, 0.0, 0.0, 0.0),
    ],
)
def test_drafting_costs_other_sessions_tokens(
    delays: bool, draft_s: float, work_s: float, lost: float
) -> None:
    """Eight others use the target, with a token per 40 ms."""
    one = costs(draft=None, num_sessions=9, drafting_delays=delays)
    for num_drafted in (1, 2, 3) * 700:
        note_load(one, 1, 1, 0.040, 0.040, 0)
        beside = DraftedBeside(num_drafted, num_drafted * draft_s, num_drafted * work_s)
        played = RoundResult(num_drafted, (), 1, 0, 0.0, 0.040, 0.0, beside=beside)
        one.note_drafted(played, 0.040)
    found = one.forecast(3, 0)
    row_s = 0.001 * 0.040 / TARGET.step_seconds(9)
    assert found.round_lost == pytest.approx(0.0, abs=0.02)
    assert found.token_lost == pytest.approx([8 * row_s / 0.040 + lost] * 3, abs=0.02)


def test_a_stall_counts_as_a_few_rounds_and_no_more() -> None:
    one = costs()
    for _ in range(200):
        play(one, 2, 0.006, TARGET.step_seconds(3))
    before = one.forecast(2, 0).round_s
    play(one, 2, 60.0, TARGET.step_seconds(3))
    mean_round_s = 0.006 + TARGET.step_seconds(3) + 0.002
    assert before < one.forecast(2, 0).round_s < before + OUTLIER * mean_round_s / 30


@pytest.mark.parametrize("relative", [False, True])
def test_a_line_never_falls_and_is_never_negative(relative: bool) -> None:
    for slope in (-0.5, 0.0, 3.0):
        line = CostLine(1.0, relative=relative)
        for x in (1.0, 2.0, 3.0) * 50:
            line.note(x, max(0.0, 2.0 + slope * (x - 2.0)))
        assert 0.0 <= line.at(0.0) <= line.at(1.0) <= line.at(10.0)
