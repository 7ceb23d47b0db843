"""Drafts with a time limit decide before each draw, and answer with what they have. When the time
of one is over, a step may leave other drafts unfinished."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from draft_service.model_drafter import ModelDrafter
from draft_service.service import Proposer
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.foundation.clock import run_virtually
from outrider.interfaces.messages import DraftItem, ProposalReply, Refused
from outrider.replica.step_request import StepRequest, Unfinished
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink
from tests.support.draft_world import expected_proposal
from tests.support.pages import check_pages
from tests.support.rounds import Replica, make_head, run_step, session_name, step_request
from tests.support.toy_engine import ToyEngine

PROMPT = (1, 2, 3)
PASS_S = 0.010
K = 4
PLAIN = SamplingParams(temperature=0.9)
LATE_CODE = 4  # google.rpc.Code of an item whose time is over before its first draw


def item(budget_ms: float, *, look_ahead: int = 0, **head: Any) -> DraftItem:
    made = make_head(head.pop("tokens", PROMPT), rule=Rule.TOKEN, sampling=PLAIN, **head)
    return DraftItem(made, K, look_ahead, budget_us=round(budget_ms * 1e3))


@dataclass
class Heard:
    """An answer, and when it came."""

    answer: Any
    at: float


def answers_to(*sent: tuple[float, DraftItem], **options: Any) -> list[Heard]:
    """A draft's answers to items that are sent at these times; a pass takes 10 ms."""

    async def main() -> list[Heard]:
        loop = asyncio.get_running_loop()
        engine = ToyEngine(salt=2, max_model_len=256, pass_s=PASS_S)
        draft = Replica("draft", engine, max_num_seqs=4, **options)
        link = MemoryLink(draft.service)
        heard: list[Heard] = []
        link.listen(lambda answer: heard.append(Heard(answer, loop.time())), lambda error: None)
        for at, one in sent:
            loop.call_at(at, link.send, one)
        await asyncio.sleep(1.0)
        await draft.close()
        return heard

    return run_virtually(main())


@pytest.mark.parametrize("look_ahead", [0, 2])
@pytest.mark.parametrize("budget_ms", [1, 22, 0])
def test_a_proposal_has_the_tokens_that_there_was_time_for(
    budget_ms: float, look_ahead: int
) -> None:
    """A proposal has the first tokens of the unlimited one. A pass that has begun is not
    interrupted. The first draw is decided after the pass that reads the prefix; with look-ahead,
    where each step is one pass, before it. No answer is late by more than a pass."""
    heard = [
        one
        for one in answers_to((0.0, item(budget_ms, look_ahead=look_ahead)))
        if isinstance(one.answer, ProposalReply) and not one.answer.assumed
    ]
    [found] = heard
    num_expected = {1: 1 if look_ahead else 0, 22: 3}.get(int(budget_ms), K)
    whole, q = expected_proposal(PROMPT, K, Rule.TOKEN, PLAIN, 1)
    proposal = found.answer.proposal.decode()
    assert list(proposal.token_ids) == whole[:num_expected]
    assert list(proposal.q) == q[:num_expected]
    assert found.answer.out_of_time == (num_expected < K)
    if budget_ms:
        assert found.at <= budget_ms / 1e3 + PASS_S + 1e-6


def test_an_item_that_waits_for_a_step_is_answered_when_its_time_is_over() -> None:
    """Another session's step runs until 40 ms. The item is refused as late. Its prefix is read
    nevertheless, and an empty proposal reports this."""
    heard = answers_to((0.0, item(0)), (0.005, item(10, session=2)))
    of_two = [one for one in heard if one.answer.key.session_id == session_name(2)]
    assert [type(one.answer) for one in of_two] == [Refused, ProposalReply]
    refused, empty = of_two
    assert refused.answer.code == LATE_CODE
    assert refused.at == pytest.approx(0.015)
    assert (empty.answer.proposal, empty.answer.out_of_time) == (EMPTY_ENCODED_PROPOSAL, True)
    assert empty.answer.cached_length == len(PROMPT)
    assert empty.at == pytest.approx(0.050)


LONG_PROMPT = tuple(n % 7 for n in range(150))


@pytest.mark.parametrize("look_ahead", [0, 2])
def test_a_prefix_that_is_read_in_parts_costs_a_round_its_time_alone(look_ahead: int) -> None:
    """Three parts of at most 64 tokens, 10 ms each: the time is over before the second one ends."""
    asked = item(15, look_ahead=look_ahead, tokens=LONG_PROMPT)
    told, *later = answers_to((0.0, asked), max_num_batched_tokens=64)
    assert (told.answer.code, told.at <= 0.015 + PASS_S) == (LATE_CODE, True)
    ready = next(one.answer for one in later if not one.answer.assumed)
    assert (ready.proposal, ready.out_of_time) == (EMPTY_ENCODED_PROPOSAL, True)


SHORT, LONG, FRESH = 1, 2, 3  # Sessions.
NUM_DRAWN = 3  # Tokens that a step draws in the time of the short one.


def unbounded(
    session: int, num_tokens: int, deadline: DraftDeadline | None = None
) -> StepRequest[DraftItem]:
    """An item whose time limit never ends. (An item without a limit would have to be whole.)"""
    item = DraftItem(make_head(PROMPT, session=session, rule=Rule.TOKEN), num_tokens)
    return step_request(item, DraftDeadline() if deadline is None else deadline)


class Interrupted:
    """A draft after a step that ended for one of two sessions."""

    def __init__(self, max_num_seqs: int = 8) -> None:
        self.engine = ToyEngine(pass_s=PASS_S)
        self.proposer = Proposer(ModelDrafter(self.engine), TokenBudget(512, max_num_seqs))
        deadline = DraftDeadline(2.5 * PASS_S, lambda: self.engine.stated_seconds)
        self.long = unbounded(LONG, 16)
        short, unfinished = self.step(unbounded(SHORT, 8, deadline=deadline), self.long)
        assert (len(short.proposal), short.out_of_time) == (NUM_DRAWN, True)
        assert unfinished is Unfinished.CONTINUES

    def step(self, *items: StepRequest[DraftItem]) -> list[Any]:
        found = run_step(self.proposer, items)
        check_pages(self.engine)
        return found


def undisturbed() -> tuple[int, ...]:
    """The long proposal without another session."""
    proposer = Proposer(ModelDrafter(ToyEngine()), TokenBudget(512, 8))
    [reply] = run_step(proposer, [unbounded(LONG, 16)])
    return reply.proposal.token_ids


def test_a_draft_that_must_be_whole_ends_in_its_step() -> None:
    """In a later step it might lack pages. The other session is answered late."""
    engine = ToyEngine(pass_s=PASS_S)
    proposer = Proposer(ModelDrafter(engine), TokenBudget(512, 8))
    over = DraftDeadline(2.5 * PASS_S, lambda: engine.stated_seconds)
    items = (unbounded(LONG, 16, deadline=NO_DEADLINE), unbounded(SHORT, 8, deadline=over))
    whole, hurried = run_step(proposer, items)
    assert len(whole.proposal) == 16
    assert hurried.out_of_time


def test_an_unended_draft_goes_on_with_what_it_has_drawn() -> None:
    """It continues beside new drafts, although it is interrupted again. No token is run twice, and
    all tokens that were run are held."""
    draft = Interrupted()
    engine = draft.engine
    over = DraftDeadline(engine.stated_seconds + PASS_S, lambda: engine.stated_seconds)
    found = draft.step(draft.long, unbounded(SHORT, 8, deadline=over))
    assert found[0] is Unfinished.CONTINUES
    reply, fresh = draft.step(draft.long, unbounded(FRESH, 2))
    assert reply.proposal.token_ids == undisturbed()
    assert reply.cached_length == len(PROMPT) + 15
    assert fresh.proposal.token_ids == undisturbed()[:2]
    num_run = sum(
        count
        for names, counts in zip(draft.engine.batches, draft.engine.counts, strict=True)
        for name, count in zip(names, counts, strict=True)
        if name == session_name(LONG)
    )
    assert num_run == len(PROMPT) + 15


def test_an_unended_draft_keeps_its_seat_in_the_next_step() -> None:
    """Engines refuse a pass with more than `max_num_seqs` sequences. The item without a seat has
    its turn later."""
    draft = Interrupted(max_num_seqs=2)
    fresh = [unbounded(FRESH, 2), unbounded(4, 2)]
    reply, first, second = draft.step(draft.long, *fresh)
    assert reply.proposal.token_ids == undisturbed()
    assert first.proposal.token_ids == undisturbed()[:2]
    assert second is Unfinished.CONTINUES
    assert max(map(len, draft.engine.batches)) == 2
    [second] = draft.step(fresh[1])
    assert second.proposal.token_ids == undisturbed()[:2]


def test_a_crash_leaves_what_an_unended_draft_has_drawn_proposed() -> None:
    """The first pass of the next step fails, perhaps because of the last token."""
    draft = Interrupted()
    draft.engine.crash = RuntimeError("no memory")
    reply, fresh = draft.step(draft.long, unbounded(FRESH, 2))
    assert reply.proposal.token_ids == undisturbed()[:NUM_DRAWN]
    assert isinstance(fresh, Refused)
    [again] = draft.step(unbounded(FRESH, 2))
    assert again.proposal.token_ids == undisturbed()[:2]
