"""Proposals that a coordinator looks up."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from coordinator.draft_length.policy import RoundLength
from coordinator.routing.drafts import (
    NO_NEXT_REQUEST,
    WATCH_ROUNDS_MAX,
    WATCH_ROUNDS_MIN,
    Drafts,
    LookupDrafts,
)
from outrider.drafters.suffix import SuffixDrafter
from outrider.sessions.state import Session
from outrider.sessions.store import Counters
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule
from tests.support.length_world import BOUND, World
from tests.support.session_links import asked, context_of, session

pytestmark = pytest.mark.virtual

PROMPT = (1, 2, 3, 1, 2, 3, 1)
"""Goes on with 2, 3, 1, ... as far as a look-up can tell."""


def opened(name: str, seed: int, prompt: tuple[int, ...] = PROMPT) -> Session:
    return session(prompt, Rule.BLOCK, name, seed)


async def proposed(drafts: Drafts, one: Session, num_tokens: int) -> tuple[int, ...]:
    noise = RoundNoise(one.record.seed, one.record.rule, one.length)
    drafted = await drafts.propose(1, asked(num_tokens), noise)
    assert (drafted.source != "fallback", drafted.num_asked) == (True, num_tokens)
    return drafted.proposal.token_ids


async def test_a_proposal_goes_on_from_the_committed_tokens() -> None:
    one = opened("0", 1)
    drafts = LookupDrafts(SuffixDrafter(), context_of(one))
    assert await proposed(drafts, one, 4) == (2, 3, 1, 2)
    one.decide((2,), Counters(1, 4, 0))
    assert await proposed(drafts, one, 2) == (3, 1)
    assert drafts.next_round_request(RoundLength(2, 0, next_max=2)) == NO_NEXT_REQUEST
    assert drafts.cache_state is None
    drafts.close()


async def test_a_token_that_costs_more_than_it_gains_is_not_proposed() -> None:
    """Neither in a round nor in a comparison, from which length control learns."""
    one = opened("0", 1)
    drafts = LookupDrafts(SuffixDrafter(), context_of(one, num_draft_tokens=4))
    noise = RoundNoise(1, Rule.BLOCK, one.length)
    lengths = [replace(asked(4), min_chance=chance) for chance in (0.0, 0.4, 0.9)]
    found = [(await drafts.propose(1, length, noise)).proposal.token_ids for length in lengths]
    assert found[0] == (2, 3, 1, 2)
    assert 0 < len(found[1]) < 4
    assert found[2] == ()
    for length, token_ids in zip(lengths, found, strict=True):
        told = Mock(min_chance=length.min_chance)
        drafts.probe(told).note(0, 9, partial(drafts.show, noise, length.min_chance))
        told.note_watched.assert_called_once_with(4, (0.0,) * len(token_ids))


async def test_what_a_session_wrote_is_looked_up_once_it_is_closed() -> None:
    lookup = SuffixDrafter()
    first, second = opened("0", 1, (5, 6, 7)), opened("1", 2, (8, 5, 6, 7))
    drafts = LookupDrafts(lookup, context_of(first))
    later = LookupDrafts(lookup, context_of(second))
    first.decide((9, 10, 11), Counters(1, 0, 0))
    await proposed(drafts, first, 4)
    assert await proposed(later, second, 4) == ()
    drafts.close()
    assert await proposed(later, second, 4) == (9, 10, 11)


def watched(prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> list[Any]:
    """What length control is told about a session that decodes these tokens without drafts."""
    session, lengths = opened("0", 1, prompt), Mock(min_chance=0.0)
    drafts = LookupDrafts(SuffixDrafter(), context_of(session, num_draft_tokens=4))
    watch = drafts.probe(lengths)
    for token_id in token_ids:
        noise = RoundNoise(session.record.seed, Rule.BLOCK, session.length)
        watch.note(0, token_id, partial(drafts.show, noise, 0.0))
        session.decide((token_id,), Counters(1, 0, 0))
    return [call.args for call in lengths.note_watched.mock_calls]


def test_looked_up_tokens_survive_if_the_session_decodes_them() -> None:
    assert watched(PROMPT, (2, 3, 1, 2)) == [(4, (1.0, 1.0, 1.0, 1.0))]
    assert watched(PROMPT, (2, 3, 9)) == [(4, (1.0, 1.0, 0.0, 0.0))]
    assert watched(PROMPT, (9,)) == [(4, (0.0, 0.0, 0.0, 0.0))]
    assert watched((1, 2, 3), (4,)) == [(4, ())]


def test_look_ups_get_rare_while_they_fail() -> None:
    told = watched((0,), tuple(range(100, 100 + 8 * WATCH_ROUNDS_MAX)))
    assert 8 <= len(told) <= 12
    again = watched((0,), tuple(range(100, 300)) + (1, 2, 3, 4) * 100)
    assert len(again) > 300 / WATCH_ROUNDS_MIN


def test_a_plain_session_drafts_once_look_ups_are_right() -> None:
    world = World(acceptance=0.0, draft_s=0.0)
    for seed in range(20):
        world.session(seed, 100)
    assert world.session(50, 200).plain_share > 0.9
    control = world.open(51)
    for _ in range(40):
        control.note_watched(BOUND, (1.0,) * BOUND)
    world.acceptance = 1.0
    assert world.play(control, 200).plain_share < 0.3
