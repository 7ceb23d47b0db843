"""Work ahead of what has happened that fails, or that nobody needs any more: what is left of it,
and what others notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from looking_ahead import PLAIN, PROMPT, Draft, check_pushed, item
from rounds import session_name
from test_draft_service import expected_proposal
from toy_engine import ToyEngine

from draft_service import worker as proposing
from outrider.engine.interface import SequenceStep
from outrider.errors import BadRequest, OutOfPages
from outrider.messages import Refused, Resync
from outrider.speculation.sampling_params import Rule


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    made = Draft()
    yield made
    made.service.check_integrity()
    await made.service.close()


async def test_nothing_is_left_of_a_session_that_is_over(draft: Draft) -> None:
    free = draft.engine.page_counts().num_free
    draft.link.send(item(PROMPT, count=6))
    await draft.listener.wait(1)
    draft.link.release(session_name(1), 1)
    await draft.settled()
    counts = draft.engine.page_counts()
    assert counts.num_free + counts.num_evictable == free
    assert not any(draft.engine.length(name) for name in draft.engine.held)


async def test_pages_that_are_needed_are_there() -> None:
    """Outcomes take what is free and give way to sessions that come, however many there are."""
    draft = Draft(ToyEngine(salt=2, max_model_len=64, num_pages=24))
    for session in range(1, 6):
        [answer, *_] = await draft.send(item([1] * 13, session=session, look_ahead=16))
        assert len(answer.proposal) == 3
    draft.service.check_integrity()
    await draft.service.close()


@pytest.mark.parametrize("num_passes", [0, 2])
async def test_a_session_that_loses_its_pages_is_answered_what_it_has(
    draft: Draft, num_passes: int
) -> None:
    """As when an older one takes them while its proposal grows."""
    draft.link.send(item(PROMPT, count=6))
    while len(draft.engine.batches) <= num_passes:
        await asyncio.sleep(0)
    num_drawn = len(draft.engine.batches)
    draft.engine.release(session_name(1))
    await draft.settled()
    [answer] = draft.listener.answers
    expected, _ = expected_proposal(PROMPT, num_drawn, Rule.TOKEN, PLAIN, 1)
    assert list(answer.proposal.token_ids) == expected
    assert answer.cached_length == 0
    await check_begins_anew(draft, (*PROMPT, 7), len(PROMPT))


async def check_begins_anew(draft: Draft, committed: tuple[int, ...], length: int) -> None:
    """The draft has lost a session's pages: a round that builds on what it held is told so, and
    one that states all tokens is drafted."""
    [again] = await draft.send(item(committed, length, round_index=2))
    assert isinstance(again, Resync)
    assert again.cached_length == 0
    late = (await draft.send(item(committed, round_index=3)))[0]
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected


@pytest.mark.parametrize("crash", [RuntimeError("out of memory"), BadRequest("token_ids", "no")])
async def test_a_failure_while_looking_ahead_harms_nobody(draft: Draft, crash: Exception) -> None:
    """It comes after the answer, or beside somebody's drawn tokens, which are proposed then."""
    draft.link.send(item(PROMPT))
    await draft.listener.wait(1)
    draft.engine.crash = crash
    await draft.settled()
    committed = (*PROMPT, 7)
    draft.engine.crash = None
    answer, *pushed = [
        answer
        for answer in await draft.send(item(committed, round_index=1))
        if not isinstance(answer, Refused)
    ]
    expected, _ = expected_proposal(committed, 3, Rule.TOKEN, PLAIN, 1)
    assert list(answer.proposal.token_ids) == expected
    check_pushed(pushed, committed, Rule.TOKEN)


class ForgetfulEngine(ToyEngine):
    """Can fail a pass of several sequences, and has forgotten the last of them then."""

    is_forgetful = False

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        if self.is_forgetful and len(steps) > 1:
            self.release(steps[-1].sequence_id)
            raise OutOfPages("the machine has failed")
        return super().forward(steps)


async def test_a_sequence_that_a_failed_pass_has_lost_is_not_gone_on_with() -> None:
    """Its session is answered nothing, and told later what is missing; the other is drafted."""
    engine = ForgetfulEngine(salt=2, max_model_len=256)
    draft = Draft(engine)
    for number in (1, 2):
        await draft.send(item(PROMPT, session=number, look_ahead=1))
    engine.is_forgetful = True
    num_heard = len(draft.listener.answers)
    for number in (1, 2):
        draft.link.send(item((*PROMPT, 7), len(PROMPT), session=number, round_index=1))
    await draft.settled()
    drafted, lost = sorted(
        (answer for answer in draft.listener.answers[num_heard:] if not answer.assumed),
        key=lambda answer: answer.key.session_id,
    )
    assert (len(lost.proposal), lost.cached_length) == (0, 0)
    expected, _ = expected_proposal((*PROMPT, 7), 3, Rule.TOKEN, PLAIN, 1)
    assert list(drafted.proposal.token_ids) == expected[: len(drafted.proposal)] != []
    engine.is_forgetful = False
    again = await draft.send(item((*PROMPT, 7, 6), 4, session=2, round_index=2))
    assert isinstance(again[0], Resync)
    draft.service.check_integrity()
    await draft.service.close()


async def test_an_outcome_that_comes_true_and_fails_is_proposed_as_far_as_it_was_drawn(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives its pages back, those of the session excepted."""
    monkeypatch.setattr(proposing, "PASSES_MAX", 1)
    free = draft.engine.page_counts().num_free
    draft.link.send(item(PROMPT, count=6))
    await draft.listener.wait(1)
    while len(draft.engine.batches[-1]) < 8:  # until the outcomes have had their first pass
        await asyncio.sleep(0)
    [begun] = [name for name in draft.engine.batches[-1] if name.endswith("/0")]
    committed = draft.engine.held[begun]
    draft.engine.crash = OutOfPages("the machine has failed")
    draft.link.send(item(committed, len(PROMPT), round_index=1, count=6))
    late = (await draft.listener.wait(2))[1]
    expected, _ = expected_proposal(committed, 6, Rule.TOKEN, PLAIN, 1)
    assert list(late.proposal.token_ids) == expected[:1]
    draft.engine.crash = None
    await draft.settled()
    draft.service.check_integrity()
    draft.link.release(session_name(1), 1)
    await draft.settled()
    counts = draft.engine.page_counts()
    assert counts.num_free + counts.num_evictable == free
