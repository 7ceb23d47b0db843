"""Look-ups in rounds of plain decoding: what is told of them, and how often they are made."""

from __future__ import annotations

from length_world import BOUND, ENDLESS, RUN_AHEAD, World, description
from test_lookup_drafts import opened

from coordinator.draft_length.controller import TIMES_KNOWN_ROUNDS, LengthControls
from coordinator.routing.drafts import (
    WATCH_ROUNDS_MAX,
    WATCH_ROUNDS_MIN,
    LookupProbe,
    SessionLookup,
)
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.step_costs import StepCosts
from outrider.sessions.state import Session
from outrider.sessions.store import Counters
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

REPEATED = (1, 2, 3, 1, 2, 3, 1)
"""Goes on with 2, 3, 1, ... as far as a look-up can tell."""


class Told:
    """A length policy that keeps what it is told."""

    def __init__(self) -> None:
        self.watched: list[tuple[int, tuple[float, ...]]] = []

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        self.watched.append((num_asked, survival))


def watched(prompt: tuple[int, ...], token_ids: tuple[int, ...], num_draft_tokens: int = 4) -> Told:
    """What is told of a session that decodes these tokens plainly."""
    session, told = opened("0", 1, prompt), Told()
    lookup = SessionLookup(SuffixDrafter(), session, SamplingParams())
    watch = LookupProbe(lookup, told, num_draft_tokens)  # type: ignore[arg-type]
    for token_id in token_ids:
        commit(watch, session, token_id)
    return told


def commit(watch: LookupProbe, session: Session, token_id: int) -> None:
    watch.committed(RoundNoise(session.record.seed, Rule.BLOCK, session.length), token_id)
    session.decide((token_id,), Counters(1, 0, 0))


def test_as_many_survive_as_were_written() -> None:
    assert watched(REPEATED, (2, 3, 1, 2)).watched == [(4, (1.0, 1.0, 1.0, 1.0))]
    assert watched(REPEATED, (2, 3, 9)).watched == [(4, (1.0, 1.0, 0.0, 0.0))]
    assert watched(REPEATED, (9,)).watched == [(4, (0.0, 0.0, 0.0, 0.0))]
    assert watched((1, 2, 3), (4,)).watched == [(4, ())]


def test_what_a_draft_interrupts_is_not_told() -> None:
    session, told = opened("0", 1, REPEATED), Told()
    lookup = SessionLookup(SuffixDrafter(), session, SamplingParams())
    watch = LookupProbe(lookup, told, 4)  # type: ignore[arg-type]
    commit(watch, session, 2)
    watch.interrupted()
    for token_id in (7, 8, 9):
        commit(watch, session, token_id)
    assert told.watched == []


def test_hopeless_texts_are_looked_at_seldom() -> None:
    """Tokens that never came before; later, a text that repeats itself is looked at again."""
    told = watched((0,), tuple(range(100, 100 + 8 * WATCH_ROUNDS_MAX)))
    assert 8 <= len(told.watched) <= 12
    again = watched((0,), tuple(range(100, 300)) + (1, 2, 3, 4) * 100)
    assert len(again.watched) > 300 / WATCH_ROUNDS_MIN


def controls(*, watches: bool) -> LengthControls:
    table = StepCosts((1, 33), (0.016, 0.016 + 32 * 0.0008))
    return LengthControls(description(table), description(None), RUN_AHEAD, watches=watches)


def test_a_plain_session_drafts_once_its_text_is_what_a_look_up_says() -> None:
    """Its sessions have learned that drafting loses; nothing but look-ups says otherwise."""
    world = World(acceptance=0.0, draft_s=0.0)
    world.controls = controls(watches=True)
    for seed in range(20):
        world.session(seed, 100)
    assert world.session(50, 200).plain_share > 0.9
    control = world.open(51)
    for _ in range(40):
        control.note_watched(BOUND, (1.0,) * BOUND)
    world.acceptance = 1.0
    assert world.play(control, 200).plain_share < 0.3


def test_times_alone_are_no_reason_to_draft_often() -> None:
    """Sessions whose look-ups find nothing: without look-ups in plain rounds, drafting has to be
    tried again and again to know that."""
    shares = {}
    for watches in (False, True):
        world = World(acceptance=0.0, draft_s=0.0)
        world.controls = controls(watches=watches)
        num_drafted = 0
        for seed in range(60):
            control = world.open(seed)
            for index in range(100):
                length = control.choose(index, ENDLESS)
                num_drafted += length.num_draft_tokens > 0
                world._round(control, length, is_first=index == 0)
                if watches and length.num_draft_tokens == 0:
                    control.note_watched(BOUND, ())
            control.close()
        shares[watches] = num_drafted
    assert TIMES_KNOWN_ROUNDS <= shares[True] < shares[False] / 2
