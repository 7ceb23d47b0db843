"""Length control with simulated drafters, costs and clock. The best constant K is computed."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.draft_length import controller
from coordinator.draft_length.controller import LengthControl, LengthControls
from coordinator.draft_length.policy import RoundLength, RoundResult
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.speculation.sampling_params import Rule
from tests.support.length_world import BOUND, ENDLESS, RUN_AHEAD, Run, World, controls, description


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("draft_s", [0.001, 0.004])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_the_best_length_is_found(acceptance: float, draft_s: float, tables: bool) -> None:
    """After some rounds, the most frequent K has a rate within 5 % of the best constant K's; the
    whole run, with all trials, is within 8 %."""
    world = World(acceptance, draft_s, tables=tables)
    control = world.open()
    world.play(control, 400)
    run = world.play(control, 1200, first_index=400)
    usual = max(set(run.asked), key=run.asked.count)
    best = world.rate(world.best)
    assert world.rate(usual) >= 0.95 * best, (usual, world.best)
    assert run.rate >= 0.92 * best


def test_drafting_ends_when_the_draft_is_always_late_and_comes_back() -> None:
    world = World(acceptance=0.8, draft_s=0.001, tables=False)
    control, stall = world.open(), world.stall
    world.play(control, 400)
    world.stall = lambda _: 1.0
    world.play(control, 200, first_index=400)
    run = world.play(control, 2000, first_index=600)
    assert run.plain_share > 0.9
    assert run.rate > 0.9 * world.rate(0)
    world.stall = stall
    world.play(control, 3000, first_index=2600)
    assert world.play(control, 400, first_index=5600).plain_share < 0.1


def test_a_late_proposal_counts_for_the_tokens_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near the end of a completion, these are fewer than the K that was planned."""
    world = World(acceptance=0.9)
    control, noted = world.open(), list[tuple[int, float]]()
    world.play(control, 400)
    monkeypatch.setattr(world.controls.costs, "note_late", lambda *late: noted.append(late))
    world.stall = lambda _: 1.0
    length = control.choose(2)
    world._round(control, length, is_first=False)
    assert length.num_draft_tokens == 1
    assert noted == [(1, length.draft_budget_s)]


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("draft_s", [0.0003, 0.004])
def test_the_cost_of_a_targets_own_drafts_is_learned(draft_s: float, acceptance: float) -> None:
    world = World(acceptance, draft_s, row_s=0.0015, drafts_itself=True)
    control = world.open()
    world.play(control, 400)
    run = world.play(control, 1200, first_index=400)
    assert run.rate > 0.9 * world.rate(world.best)
    assert run.rate > 0.96 * world.rate(0)


def test_plain_decoding_and_drafting_do_not_alternate() -> None:
    world = World(acceptance=0.40, draft_s=0.0036)
    assert world.rate(1) == pytest.approx(world.rate(0), rel=0.03)
    run = world.play(world.open(), 3000)
    changes = sum((a == 0) != (b == 0) for a, b in pairwise(run.asked))
    assert changes <= 3000 / 30
    assert run.rate > 0.97 * world.rate(0)


def test_a_lookup_that_rarely_finds_anything_is_kept_if_that_pays() -> None:
    world = World(0.9, 0.0, length=lambda rng: 8 if rng.random() < 0.2 else 0)
    run = world.play(world.open(), 2000)
    assert run.plain_share < 0.2
    assert run.rate > 1.25 * world.rate(0)
    assert run.asked.count(BOUND) > 0.9 * len(run.asked)


def test_plain_decoding_is_tried_if_only_a_table_says_its_time() -> None:
    """The table's time is 1.5 times too long, so drafting seems to pay."""
    world = World(acceptance=0.45, draft_s=0.004)
    world.controls = controls(StepCosts((1, 33), (0.024, 0.0496)), StepCosts((1,), (0.004,)))
    verify_s = world.verify_s
    control, asked = world.open(), []
    for _ in range(600):
        length = control.choose(ENDLESS)
        asked.append(length.num_draft_tokens)
        # With a draft, a step is as slow as the table says.
        world.verify_s = verify_s if length.num_draft_tokens == 0 else 0.024
        world._round(control, length, is_first=False)
    assert asked.index(0, 1) < 40
    assert asked[200:].count(0) > 300


def test_a_plain_phase_lets_the_target_run_ahead_to_its_end_and_no_further() -> None:
    world = World(acceptance=0.1, draft_s=0.3 * 0.016)
    lengths = world.play(world.open(), 1500).lengths
    phases = 0
    for index, length in enumerate(lengths[: 1500 - RUN_AHEAD]):
        ahead = lengths[index + 1 : index + 1 + length.run_ahead]
        assert length.num_draft_tokens == 0 or length.run_ahead == 0
        assert all(one.num_draft_tokens == 0 for one in ahead)
        if index > 0 and length.num_draft_tokens == 0 and length.run_ahead < RUN_AHEAD:
            following = lengths[index + 1 + length.run_ahead]
            assert following.num_draft_tokens > 0, "it could have run further"
            phases += length.run_ahead == 0
    assert phases >= 3


def test_rounds_that_the_targets_look_up_drafts_for_run_ahead_too() -> None:
    """As far as their K is certain: the rounds that may run ahead all have it."""
    world = World(acceptance=0.8, draft_s=0.0, by_target=True)
    control = world.open()
    lengths = world.play(control, 600).lengths
    drafted = 0
    for index, length in enumerate(lengths[: 600 - RUN_AHEAD]):
        ahead = lengths[index + 1 : index + 1 + length.run_ahead]
        kinds = {(one.num_draft_tokens, one.min_chance) for one in ahead}
        assert kinds <= {(length.num_draft_tokens, length.min_chance)}
        drafted += length.num_draft_tokens > 0 and length.run_ahead > 0
    assert drafted > 200


def played_on_the_target(acceptance: float) -> tuple[World, LengthControl, Run]:
    """A session for which the target's look-up drafts, and its rounds 400 to 799."""
    world = World(acceptance=acceptance, draft_s=0.0, by_target=True)
    control = world.open()
    world.play(control, 400)
    return world, control, world.play(control, 400, first_index=400)


def test_a_choice_of_the_same_length_lets_the_target_run_on() -> None:
    """The target need not wait at each choice, so long as the length stays nearly the best."""
    world, control, run = played_on_the_target(acceptance=0.9)
    assert run.num_ahead > 0.9 * len(run.lengths)
    assert max(set(run.asked), key=run.asked.count) == BOUND
    world.acceptance = 0.2
    world.play(control, 400, first_index=800)
    assert world.play(control, 100, first_index=1200).asked.count(BOUND) <= 5


@pytest.mark.parametrize(
    ("used", "plain", "expected"),
    [
        (0.985, 0.9, 1),  # Near the best: the target runs on.
        (0.975, 0.9, 2),
        (0.985, 1.015, 2),  # 3 % behind plain decoding.
        (0.985, 1.025, 0),
        (0.999, 1.015, 1),
    ],
)
def test_a_length_is_kept_only_if_it_loses_little_against_all_others(
    used: float, plain: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`used` and `plain`: the speeds of the K that is used, and of K = 0, by that of K = 2."""
    control = World(acceptance=0.8, draft_s=0.0, by_target=True).open()
    monkeypatch.setattr(control, "_tries_plain", lambda *_: False)
    options = [controller._Option(1, used, 1.0), controller._Option(2, 1.0, 1.0)]
    control._planned = options[0]
    monkeypatch.setattr(control._experience, "spend", lambda _: False)
    found = control._after_drafts(options, controller._Option(0, plain, 1.0), keeps=True)
    assert found.option.num_draft_tokens == expected


def test_a_length_that_is_used_already_is_not_explored() -> None:
    """Each round of exploration would end the rounds that run ahead."""
    _, _, run = played_on_the_target(acceptance=0.75)
    assert run.num_ahead > 0.6 * len(run.lengths)


def test_a_round_that_ran_ahead_took_as_long_as_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts of several rounds arrive together, so their times of arrival say nothing."""
    world, noted = World(acceptance=0.9, draft_s=0.0, by_target=True), list[float]()
    control = world.open()
    world.play(control, 40)
    monkeypatch.setattr(
        world.controls.costs, "note_drafted", lambda _, round_s, **__: noted.append(round_s)
    )
    for is_late in (False, True):
        length = control.choose(ENDLESS, by_target=True)
        num, now = length.num_draft_tokens, world.now + is_late
        control.note(RoundResult(num, (0.0,) * num, 1, 100, 0.0, 0.03, now, ran_ahead=True))
    assert noted == [0.03, 0.03]


def test_no_round_with_drafts_runs_ahead_once_its_seed_is_repeated() -> None:
    world = World(acceptance=0.8, draft_s=0.0, by_target=True)
    control = world.open()
    world.play(control, 40)
    control.fix()
    lengths = world.play(control, 40, first_index=40).lengths
    assert not any(length.is_timed for length in lengths)
    assert any(length.num_draft_tokens for length in lengths)
    assert not any(length.run_ahead for length in lengths if length.num_draft_tokens)


def test_rounds_that_a_head_drafts_for_run_ahead_too() -> None:
    """As far as their K is certain, and that of the round after them, for which the head drafts
    with the last verdict. They run ahead also when their seed is repeated."""
    world, lengths = World(acceptance=0.8, draft_s=0.001, drafts_itself=True), list[RoundLength]()
    control, num_repeated = world.open(), 300

    def play() -> None:
        lengths.append(control.choose(ENDLESS, by_head=True))
        world._round(control, lengths[-1], is_first=len(lengths) == 1)

    def check(first: int, end: int) -> None:
        drafted = [n for n in range(first, end) if lengths[n].run_ahead and lengths[n].next_max]
        assert len(drafted) > (end - first) / 3
        for index in drafted:
            last = index + 1 + lengths[index].run_ahead
            following = lengths[index + 1 : last + 1]
            assert {one.num_draft_tokens for one in following} == {lengths[index].next_max}

    while len(lengths) < num_repeated:
        play()
    check(0, num_repeated - RUN_AHEAD - 1)
    control.fix()
    while len(lengths) < 2 * num_repeated:
        play()
    check(num_repeated, 2 * num_repeated - RUN_AHEAD - 1)
    assert {one.run_ahead for one in lengths[num_repeated + 2 :]} == {RUN_AHEAD}
    assert not lengths[-1].is_timed


def test_the_costs_of_a_draft_that_joins_later_start_from_its_table() -> None:
    """Not from earlier measurements; and they are kept as long as the draft is the same."""
    table = StepCosts((1, 65), (0.01, 0.02))
    late = LengthControls(description(StepCosts((1, 33), (0.016, 0.02))), None, RUN_AHEAD)
    before = late.costs.forecast(1, 10).token_s[0]
    late.update_load(2, 3, description(table))
    known = late.costs.forecast(1, 10).token_s[0]
    assert known - before == pytest.approx(0.01, rel=0.1)
    assert (late.load.num_targets, late.load.num_elsewhere) == (2, 3)
    for _ in range(200):
        late.costs.note_drafted(RoundResult(1, (1.0,), 1, 10, 0.03, 0.016, 0.0), 0.046)
    measured = late.costs.forecast(1, 10).token_s[0]
    late.update_load(1, 0, description(table))
    assert late.costs.forecast(1, 10).token_s[0] == measured
    assert late.costs.forecast(1, 10).draft_s[0] == pytest.approx(0.03)
    late.update_load(1, 0, replace(description(table), weights_fingerprint="upgraded"))
    assert late.costs.forecast(1, 10).draft_s[0] == pytest.approx(0.01)


def beginnings(world: World, num_sessions: int, first_seed: int = 1) -> list[bool]:
    """For sessions of 60 rounds, one after the other, whether each begins with a draft."""
    found = []
    for seed in range(first_seed, first_seed + num_sessions):
        control = world.open(seed)
        found.append(not control.plans_plain)
        world.play(control, 60)
        control.close()
    return found


def test_fewer_sessions_begin_with_a_draft_while_that_fails() -> None:
    world = World(acceptance=0.1, draft_s=0.3 * 0.016)
    found = beginnings(world, 100)
    assert all(found[:2])
    assert 3 <= sum(found[-64:]) <= 32
    world.acceptance = 0.95
    assert all(beginnings(world, 40, first_seed=1000)[-20:])


def test_sessions_with_more_acceptance_than_others_are_found() -> None:
    world = World(draft_s=0.2 * 0.016)
    shares = []
    for seed in range(1, 80):
        world.acceptance = 0.97 if seed % 4 == 0 else 0.05
        run = world.session(seed, 60)
        if seed % 4 == 0:
            shares.append(run.plain_share)
    assert sum(shares[5:]) / len(shares[5:]) < 0.4


def test_acceptance_is_learned_by_prompt_length() -> None:
    """Answers to long prompts copy from them, and are drafted from their first rounds on."""
    world = World(draft_s=0.2 * 0.016)
    shares: dict[int, list[float]] = {50: [], 900: []}
    for seed in range(1, 81):
        world.prompt_length = 900 if seed % 2 else 50
        world.acceptance = 0.95 if seed % 2 else 0.05
        shares[world.prompt_length].append(world.session(seed, 60).plain_share)
    assert max(shares[900][5:]) < 0.2
    assert sum(shares[50][-20:]) / 20 > 0.8


TIMES = st.sampled_from((0.0, 1e-9, 0.001, 0.02, 5.0, 1e6))


@given(
    bound=st.integers(0, NUM_DRAFT_TOKENS_MAX),
    max_tokens=st.integers(1, 400),
    tables=st.booleans(),
    data=st.data(),
)
def test_bounds_hold_for_any_history(
    bound: int, max_tokens: int, tables: bool, data: st.DataObject
) -> None:
    """K fits the request and the rest of the completion, and so does what the target drafts ahead.
    The target runs ahead neither over rounds with a proposal, nor beyond the end."""
    table = StepCosts((1, 2), (0.0, 0.01)) if tables else None
    control = controls(table, table).open(Rule.BLOCK, 1, bound, 10)
    left, index, now, sure = max_tokens, 0, 0.0, 0
    while left > 0 and index < 120:
        length = control.choose(left)
        num = length.num_draft_tokens
        assert 0 <= num <= min(bound, left - 1)
        assert 0 <= length.next_max <= min(bound, max(0, left - 2))
        assert length.next_max == 0 or length.run_ahead == 0
        assert 0 <= length.run_ahead <= min(RUN_AHEAD, left - 1)
        assert num == 0 or (index > 0 and length.run_ahead == 0 and sure == 0)
        sure = max(sure - 1, length.run_ahead)
        chances = data.draw(st.lists(st.floats(0, 1), max_size=num))
        survival = tuple(prod(chances[: n + 1]) for n in range(len(chances)))
        num_tokens = data.draw(st.integers(1, len(chances) + 1))
        draft_s, target_s, more_s = (data.draw(TIMES) for _ in range(3))
        now += more_s
        control.note(RoundResult(num, survival, num_tokens, 10, draft_s, target_s, now))
        left -= num_tokens
        index += 1
    control.close()


def test_the_wait_for_a_proposal_is_limited_by_what_its_tokens_are_worth() -> None:
    """The limit is its usual time, plus that of a plain round for each token accepted of K."""
    world = World(0.7, 0.002, noise=0.0)
    control = world.open()
    world.play(control, 400)
    length = control.choose(ENDLESS)
    num_accepted = sum(0.7**n for n in range(1, length.num_draft_tokens + 1))
    takes_s = world.wire_s + length.num_draft_tokens * world.draft_s
    expected_s = takes_s + num_accepted * world.verify_s
    assert length.draft_budget_s == pytest.approx(expected_s, rel=0.25)


@pytest.mark.parametrize(("delays", "num_sessions"), [(True, 1), (True, 16), (False, 16)])
def test_a_draft_that_delays_many_others_is_not_used(delays: bool, num_sessions: int) -> None:
    """One session gains by half from drafting. Fifteen others lose more if they wait for it."""
    world = World(acceptance=0.7, draft_s=0.15 * 0.016, row_s=0.0, delays=delays)
    world.controls.load.num_sessions = num_sessions - 1
    run = world.play(world.open(), 1000)
    if delays and num_sessions > 1:
        assert run.plain_share > 0.9
    else:
        assert run.plain_share < 0.2


@pytest.mark.parametrize(("prompt_length", "begins"), [(3000, True), (60_000, False)])
def test_a_draft_reads_a_prompt_only_if_drafting_will_pay_for_it(
    prompt_length: int, begins: bool
) -> None:
    """If the target waits meanwhile. What drafting brings is known from other sessions."""
    world = World(acceptance=0.7, draft_s=0.1 * 0.016, delays=True, prompt_length=3000)
    for seed in range(1, 4):
        world.session(seed, 100)
    world.prompt_length = prompt_length
    control = world.open(9)
    assert control.plans_plain is not begins


def fixed(num_draft_tokens: int) -> LengthControl:
    """The lengths of a session without length control."""
    one = LengthControls(description(None), None, RUN_AHEAD, adapts=False)
    return one.open(Rule.TOKEN, 1, num_draft_tokens, 10)


def test_a_fixed_length_is_what_the_request_asks_for() -> None:
    control = fixed(3)
    assert not control.adapts
    asked = [control.choose(left) for left in (99, 99, 3, 1)]
    assert asked == [RoundLength(k, 0, most) for k, most in ((0, 3), (3, 3), (2, 1), (0, 0))]
    plain = fixed(0)
    assert [plain.choose(5) for _ in range(2)] == [RoundLength(0, 4)] * 2


def test_a_draft_token_must_gain_more_than_its_row_costs_all_sessions() -> None:
    """A row delays this session and all others that share the step."""

    def last_of(num_sessions: int) -> tuple[RoundLength, float]:
        world = World(acceptance=0.8, draft_s=0.0, row_s=0.0004, noise=0.01)
        control = world.open()
        world.controls.load.num_sessions = num_sessions
        world.play(control, 400)
        run = world.play(control, 400, first_index=400)
        return run.lengths[-1], world.row_s * run.rate

    alone, lost = last_of(1)
    assert alone.num_draft_tokens > 0
    assert alone.min_chance == pytest.approx(lost, rel=0.5)
    crowded, _ = last_of(8)
    assert crowded.num_draft_tokens > 0
    assert crowded.min_chance > 2 * alone.min_chance
