"""Proposals that a coordinator looks up itself."""

from __future__ import annotations

from session_links import asked, session
from virtual_time import virtually

from coordinator.draft_length.policy import RoundLength
from coordinator.routing.drafts import NOTHING_WANTED, Drafts, SessionLookup
from outrider.drafters.suffix import SuffixDrafter
from outrider.sessions.state import Session
from outrider.sessions.store import Counters
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

PROMPT = (1, 2, 3, 1, 2, 3, 1)


def opened(name: str, seed: int, prompt: tuple[int, ...] = PROMPT) -> Session:
    return session(prompt, Rule.BLOCK, name, seed)


async def proposed(drafts: Drafts, one: Session, num_tokens: int) -> tuple[int, ...]:
    noise = RoundNoise(one.record.seed, one.record.rule, one.length)
    drafted = await drafts.propose(1, asked(num_tokens, siblings=(2,)), noise)
    assert (drafted.source != "fallback", drafted.num_asked) == (True, num_tokens)
    assert not drafted.proposal.parents
    return drafted.proposal.token_ids


@virtually
async def test_a_proposal_goes_on_from_the_committed_tokens() -> None:
    """With no more tokens than were asked for; the target is asked for none."""
    one = opened("0", 1)
    drafts = Drafts(SessionLookup(SuffixDrafter(), one, SamplingParams()))
    assert await proposed(drafts, one, 4) == (2, 3, 1, 2)
    one.decide((2,), Counters(1, 4, 0))
    assert await proposed(drafts, one, 2) == (3, 1)
    assert drafts.next_wanted(RoundLength(2, 0, next_max=2), 99) == NOTHING_WANTED
    assert drafts.cache_state is None
    drafts.close()


@virtually
async def test_what_a_session_wrote_is_looked_up_once_it_is_closed() -> None:
    lookup = SuffixDrafter()
    first, second = opened("0", 1, (5, 6, 7)), opened("1", 2, (8, 5, 6, 7))
    drafts = Drafts(SessionLookup(lookup, first, SamplingParams()))
    later = Drafts(SessionLookup(lookup, second, SamplingParams()))
    first.decide((9, 10, 11), Counters(1, 0, 0))
    await proposed(drafts, first, 4)
    assert await proposed(later, second, 4) == ()
    drafts.close()
    assert await proposed(later, second, 4) == (9, 10, 11)
