"""Both services on engines with few pages: long prompts run in parts, and no session waits for
ever."""

import asyncio

import pytest

from outrider.interfaces.messages import DraftItem, Resync, VerdictReply, VerifyItem
from outrider.limits import SILENT_SESSION_MS
from outrider.speculation.proposal import EncodedProposal
from tests.support.rounds import Replica, make_head, session_name
from tests.support.toy_engine import ToyEngine

STEP_S = 0.01
LONG_US = 60_000_000


@pytest.mark.virtual
async def test_a_silent_session_keeps_its_pages_only_for_a_while() -> None:
    """The session's release was lost. A session that needs its pages waits for the limit of silence
    and no longer. When the first one returns, it is asked for what it lacks."""
    at = Replica("target", ToyEngine(num_pages=4), STEP_S)
    await at.ask(VerifyItem(make_head([1] * 10)))
    start = asyncio.get_running_loop().time()
    answer = await at.ask(VerifyItem(make_head([2] * 10, session=2)))
    waited_s = asyncio.get_running_loop().time() - start
    assert isinstance(answer, VerdictReply)
    assert 1.0 <= waited_s / (SILENT_SESSION_MS / 1e3) < 1.2
    at.link.release(session_name(2), 1)
    back = await at.ask(VerifyItem(make_head([1] * 11, 10, round_index=1)))
    assert isinstance(back, Resync)
    await at.close()


async def test_a_draft_that_finds_no_pages_proposes_nothing_at_once() -> None:
    """The older session gets drafts. The younger session's rounds have none until the older one has
    gone."""
    at = Replica("draft", ToyEngine(num_pages=4), STEP_S)
    first = await at.ask(DraftItem(make_head([1] * 9), 3))
    assert len(first.proposal) == 3
    none = await at.ask(DraftItem(make_head([2] * 7, session=2), 3, budget_us=LONG_US))
    assert (none.proposal, none.base_length, none.cached_length) == (EncodedProposal(()), 7, 0)
    at.link.release(session_name(1), 1)
    again = await at.ask(DraftItem(make_head([2] * 8, session=2, round_index=1), 3))
    assert len(again.proposal) == 3
    await at.close()


@pytest.mark.virtual
async def test_a_repeated_seed_waits_until_a_draft_has_pages() -> None:
    """Without a time limit, a proposal is whole. Its session takes pages of an older one that
    rests. A draft with too few pages in all proposes nothing at once."""
    at = Replica("draft", ToyEngine(num_pages=4), STEP_S)
    await at.ask(DraftItem(make_head([1] * 9), 3))
    start = asyncio.get_running_loop().time()
    for number in (1, 2):
        at.link.send(DraftItem(make_head([number] * 9, session=number, round_index=1), 3))
    at.link.send(DraftItem(make_head([3] * 60, session=3), 6))
    answers = (await at.listener.wait(4))[1:]
    found = [(one.key.session_id, len(one.proposal)) for one in answers]
    assert sorted(found[:2]) == [(session_name(1), 3), (session_name(3), 0)]
    assert found[2] == (session_name(2), 3)
    assert asyncio.get_running_loop().time() - start < SILENT_SESSION_MS / 2e3
    await at.close()


async def test_a_drafts_long_prompt_is_run_in_parts_and_drafts_the_same() -> None:
    prompt = [(5 * i) % 8 for i in range(150)]
    replies = []
    for max_tokens in (512, 64):
        engine = ToyEngine(max_model_len=200)
        at = Replica("draft", engine, STEP_S, max_num_batched_tokens=max_tokens)
        replies.append(await at.ask(DraftItem(make_head(prompt), 4)))
        assert max(map(sum, at.engine.counts)) <= max_tokens
        await at.close()
    assert replies[0].proposal == replies[1].proposal
    assert len(replies[0].proposal) == 4
