"""What the length of a round may depend on, and what it must not.

Each test plays the same session several times, with differences that must not matter, and compares
all lengths. `docs/exactness.md` says why this makes the choice exact."""

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from coordinator.draft_length import controller
from coordinator.draft_length.controller import LengthControl, LengthControls
from coordinator.draft_length.policy import RoundLength, RoundResult
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.sampling_params import Rule
from tests.support.length_world import BOUND, ENDLESS, RUN_AHEAD, World, controls, description

TARGET = StepCosts((1, 33), (0.02, 0.034))
DRAFT = StepCosts((1, 65), (0.002, 0.004))
EAGER = {
    "MEMORY_ROUNDS": 2.0,
    "SHARED_MEMORY_ROUNDS": 4.0,
    "PRIOR_ROUNDS": 0.5,
    "CHOICE_ROUNDS": 1,
    "PLAIN_ROUNDS": 2,
    "PLAIN_ROUNDS_MAX": 4,
}
"""With these, lengths change within a few rounds, so an influence that must not exist is seen."""
SHARED_NOISE = [Rule.TOKEN, Rule.BLOCK]
Notes = Callable[[int, RoundLength], RoundResult]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setattr(controller, name, value)


def made(adapts: bool = True) -> LengthControls:
    return LengthControls(description(TARGET), description(DRAFT), RUN_AHEAD, adapts=adapts)


def at_random(seed: int) -> Notes:
    """Rounds of random length, acceptance and times."""
    rng, now = random.Random(seed), 0.0
    acceptance, draft_s = rng.random(), rng.choice((0.0005, 0.004, 0.02))

    def note(index: int, length: RoundLength) -> RoundResult:
        nonlocal now
        num = length.num_draft_tokens
        accepted = 0
        while accepted < num and rng.random() < acceptance:
            accepted += 1
        target_s = rng.uniform(0.01, 0.1)
        now += num * draft_s + target_s
        return RoundResult(
            num,
            tuple(float(depth < accepted) for depth in range(num)),
            1 + accepted,
            10 + index,
            num * draft_s,
            target_s,
            now,
            work_s=num * draft_s,
        )

    return note


def play(
    control: LengthControl,
    notes: Notes,
    num_rounds: int,
    first: int = 0,
    *,
    by_target: bool = False,
) -> list[tuple[int, float]]:
    """K and the least chance of a look-up's token, of each round."""
    asked = []
    for index in range(first, first + num_rounds):
        length = control.choose(ENDLESS, by_target=by_target)
        asked.append((length.num_draft_tokens, length.min_chance))
        control.note(notes(index, length))
    return asked


@pytest.mark.parametrize("rule", SHARED_NOISE)
@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("seed", [7, 8])
def test_a_repeated_seed_has_lengths_that_no_session_changes(
    rule: Rule, has_ended: bool, seed: int
) -> None:
    """What other sessions and its own rounds show follows from random numbers that it has, too. The
    same histories do change the lengths of another seed."""
    found = set()
    for history in range(12):
        one = made()
        first = one.open(rule, 7, BOUND, 10)
        play(first, at_random(history), 20)
        for other in range(100, 100 + history % 4):
            play(one.open(rule, other, BOUND, 10), at_random(50 + history), 10)
        if has_ended:
            first.close()
        again = one.open(rule, seed, BOUND, 10)
        found.add((again.plans_plain, *play(again, at_random(80 + history), 30)))
    assert len(found) == 1 if seed == 7 else len(found) > 3


@pytest.mark.parametrize("trial_is_first", [True, False])
def test_a_seed_is_known_to_the_sessions_of_a_draft_on_trial(
    trial_is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round, until it is forgotten, with everything that both have learned."""
    monkeypatch.setattr(controller, "DRAFTED_SEEDS_MAX", 2)
    one = made()
    drafters = [None, description(StepCosts((1,), (0.001,)))]
    if trial_is_first:
        drafters.reverse()
    first, second = [one.open(Rule.TOKEN, 7, BOUND, 10, drafter) for drafter in drafters]
    assert not any(control.choose(ENDLESS).is_timed for control in (first, second))
    told = [one.learned(drafter) for drafter in drafters]
    assert told[0] is not told[1]
    first.close()
    one.open(Rule.TOKEN, 8, BOUND, 10, drafters[0]).close()
    one.open(Rule.TOKEN, 9, BOUND, 10, drafters[0])
    assert not any(one.learned(drafter) in told for drafter in drafters)
    assert one.open(Rule.TOKEN, 7, BOUND, 10, drafters[1]).choose(ENDLESS).is_timed


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("rule", SHARED_NOISE)
def test_drafts_of_sessions_with_the_same_seed_have_no_time_limit(rule: Rule, adapts: bool) -> None:
    """The first session's drafts have one until the second session begins."""
    one = made(adapts)
    first = one.open(rule, 7, BOUND, 10)
    assert all(first.choose(ENDLESS).is_timed for _ in range(8))
    again = one.open(rule, 7, BOUND, 10)
    for control in (first, again):
        lengths = [control.choose(ENDLESS) for _ in range(8)]
        assert not any(length.is_timed for length in lengths)
        assert adapts or lengths[-1].num_draft_tokens == BOUND
    assert one.open(rule, 8, BOUND, 10).choose(ENDLESS).is_timed


@pytest.mark.parametrize("rule", SHARED_NOISE)
def test_the_first_session_of_a_seed_is_fixed_once_a_second_one_begins(rule: Rule) -> None:
    """Except for the next length, which is planned already. The second may overtake the first."""
    lengths = set()
    for before in range(4):
        found = set()
        for history in range(8):
            one = made()
            first = one.open(rule, 7, BOUND, 10)
            play(first, at_random(before), 20)
            second = one.open(rule, 7, BOUND, 10)
            play(second, at_random(history), 30)
            for seed in range(100, 100 + history % 4):
                play(one.open(rule, seed, BOUND, 10), at_random(50 + history), 10)
            found.add(tuple(play(first, at_random(80 + history), 40, first=20)))
        [asked] = found
        [fixed] = set(asked[1 + RUN_AHEAD :])
        lengths.add(fixed)
    assert len(lengths) > 1


def test_a_session_that_is_fixed_in_a_plain_phase_keeps_its_certain_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # Plain phases of the usual length.
    world = World(acceptance=0.1, draft_s=0.3 * 0.016)
    control = world.open(seed=7)
    for index in range(400):
        length = control.choose(ENDLESS)
        world._round(control, length, is_first=index == 0)
        if length.run_ahead == RUN_AHEAD // 2:
            break
    else:
        pytest.fail("no plain phase")
    world.open(seed=7)
    following = play(control, at_random(1), RUN_AHEAD, first=index + 1)
    assert not any(num_asked for num_asked, _ in following[: length.run_ahead])


@pytest.mark.parametrize(("draft_s", "drafts"), [(0.001, True), (0.05, False)])
def test_a_repeated_seed_drafts_if_the_tables_say_that_it_pays(
    draft_s: float, drafts: bool
) -> None:
    one = controls(TARGET, StepCosts((1,), (draft_s,)))
    one.open(Rule.TOKEN, 7, BOUND, 10)
    again = one.open(Rule.TOKEN, 7, BOUND, 10)
    assert again.plans_plain is not drafts
    lengths = [again.choose(ENDLESS) for _ in range(4)]
    assert [length.num_draft_tokens > 0 for length in lengths] == [False] + [drafts] * 3
    assert all(length.run_ahead == (0 if drafts else RUN_AHEAD) for length in lengths)


@pytest.mark.parametrize(
    ("rule", "bound", "learns"),
    [(Rule.COUPLED, BOUND, True), (Rule.GREEDY, BOUND, True), (Rule.TOKEN, 0, False)],
)
def test_a_repeated_seed_learns_under_rules_whose_tokens_do_not_depend_on_k(
    rule: Rule, bound: int, learns: bool
) -> None:
    """Also the times and the load of a first session without drafts follow from its tokens."""
    one = made()
    one.open(rule, 7, bound, 10)
    again = one.open(rule, 7, BOUND, 10)
    assert (len(set(play(again, at_random(3), 60)[1:])) > 1) is learns


def test_with_forgotten_seeds_the_round_costs_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A running session keeps the costs it had, and adds to those."""
    monkeypatch.setattr(controller, "DRAFTED_SEEDS_MAX", 2)
    one = made()
    running = one.open(Rule.TOKEN, 1, BOUND, 10)
    play(running, at_random(1), 20)
    ended = one.open(Rule.TOKEN, 2, BOUND, 10)
    play(ended, at_random(2), 20)
    ended.close()
    one.open(Rule.TOKEN, 3, BOUND, 10)
    before = one.costs.forecast(BOUND, 10)
    np.testing.assert_equal(asdict(before), asdict(made().costs.forecast(BOUND, 10)))
    assert one.open(Rule.TOKEN, 2, BOUND, 10).choose(ENDLESS).is_timed
    assert not one.open(Rule.TOKEN, 3, BOUND, 10).choose(ENDLESS).is_timed
    play(running, at_random(3), 20, first=20)
    np.testing.assert_equal(asdict(one.costs.forecast(BOUND, 10)), asdict(before))


@pytest.mark.parametrize("by_target", [False, True])
@pytest.mark.parametrize("rule", Rule)
def test_a_length_is_planned_before_the_round_before_it_is_played(
    rule: Rule, by_target: bool
) -> None:
    """A target that drafts for itself, or a draft that looks ahead, may draw its tokens during that
    round. So the length does not depend on what that round shows."""
    for history in range(6):
        asked = set()
        for last in range(8):
            one, notes = made(), at_random(history)
            control = one.open(rule, 7, BOUND, 10)
            play(control, notes, 12, by_target=by_target)
            length = control.choose(ENDLESS, by_target=by_target)
            control.note(replace(at_random(last)(12, length), next_draft_s=10.0**-last))
            following = control.choose(ENDLESS, by_target=by_target)
            assert length.next_max == following.num_draft_tokens
            asked.add((following.num_draft_tokens, following.min_chance))
        assert len(asked) == 1
