"""Proposals that a coordinator looks up itself."""

from __future__ import annotations

from virtual_time import virtually

from coordinator.draft_length.policy import RoundLength
from coordinator.routing.drafts import NOTHING_WANTED, LookupDrafts, SessionLookup
from outrider.drafters.suffix import SuffixDrafter
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, SessionRecord
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

PROMPT = (1, 2, 3, 1, 2, 3, 1)


def opened(name: str, seed: int, prompt: tuple[int, ...] = PROMPT) -> Session:
    return Session(
        SessionRecord.new(
            session_id=name * 32, tenant="", owner="", seed=seed, rule=Rule.BLOCK,
            parameters="{}", prompt_ids=prompt,
        )
    )  # fmt: skip


async def proposed(drafts: LookupDrafts, session: Session, num_tokens: int) -> tuple[int, ...]:
    noise = RoundNoise(session.record.seed, session.record.rule, session.length)
    drafted = await drafts.propose(1, num_tokens, noise, siblings=(2,))
    assert (drafted.source != "fallback", drafted.num_asked) == (True, num_tokens)
    assert not drafted.proposal.parents
    return drafted.proposal.token_ids


@virtually
async def test_a_proposal_goes_on_from_the_committed_tokens() -> None:
    """With no more tokens than were asked for; the target is asked for none."""
    session = opened("0", 1)
    drafts = LookupDrafts(SessionLookup(SuffixDrafter(), session, SamplingParams()))
    assert await proposed(drafts, session, 4) == (2, 3, 1, 2)
    session.decide((2,), Counters(1, 4, 0))
    assert await proposed(drafts, session, 2) == (3, 1)
    assert drafts.next_wanted(RoundLength(2, 0, next_max=2), 99) == NOTHING_WANTED
    assert drafts.cache_state is None
    drafts.close()


@virtually
async def test_what_a_session_wrote_is_looked_up_once_it_is_closed() -> None:
    lookup = SuffixDrafter()
    first, second = opened("0", 1, (5, 6, 7)), opened("1", 2, (8, 5, 6, 7))
    drafts = LookupDrafts(SessionLookup(lookup, first, SamplingParams()))
    later = LookupDrafts(SessionLookup(lookup, second, SamplingParams()))
    first.decide((9, 10, 11), Counters(1, 0, 0))
    await proposed(drafts, first, 4)
    assert await proposed(later, second, 4) == ()
    drafts.close()
    assert await proposed(later, second, 4) == (9, 10, 11)
