"""Drafts that are given a time: they decide before each draw, and answer with what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import test_eagle_rounds
from rounds import make_head, session_name
from test_draft_service import expected_proposal
from test_drafts_at_once import Pair, make_engine, pair, request  # noqa: F401
from test_eagle_rounds import EagleDrafter
from toy_engine import ToyEngine

from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.clock import run_virtually
from outrider.drafters.drafter import DraftDeadline, DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.messages import DraftItem, ProposalReply, Refused
from outrider.replica.scheduler import InlineExecutor
from outrider.speculation.proposal import NOTHING_SEALED
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink

PROMPT = (1, 2, 3)
PASS_S = 0.010
K = 4
PLAIN = SamplingParams(temperature=0.9)
LATE_CODE = 4
"""google.rpc.Code of an item whose time ran out before its first draw."""


def item(budget_ms: float, *, look_ahead: int = 0, wanted: int = K, **head: Any) -> DraftItem:
    made = make_head(head.pop("tokens", PROMPT), rule=Rule.TOKEN, sampling=PLAIN, **head)
    return DraftItem(made, wanted, look_ahead, budget_us=round(budget_ms * 1e3))


@dataclass
class Heard:
    """An answer, and when it came."""

    answer: Any
    at: float


def answers_to(
    *sent: tuple[float, DraftItem], release_at: float | None = None, **options: Any
) -> list[Heard]:
    """What a draft whose passes take 10 ms answers to items that are sent at these times."""

    async def main() -> list[Heard]:
        loop = asyncio.get_running_loop()
        engine = ToyEngine(salt=2, max_model_len=256, pass_s=PASS_S)
        executor = InlineExecutor(engine.take_step_seconds)
        service = DraftService.with_model(engine, executor, max_num_seqs=4, **options)
        link: MemoryLink[Any, Any] = MemoryLink(service)
        heard: list[Heard] = []
        link.listen(lambda answer: heard.append(Heard(answer, loop.time())), lambda error: None)
        for at, one in sent:
            loop.call_at(at, link.send, one)
        if release_at is not None:
            loop.call_at(release_at, service.release, session_name(2), 1)
        await asyncio.sleep(1.0)
        await service.drain()
        service.check_integrity()
        await service.close()
        return heard

    return run_virtually(main())


@pytest.mark.parametrize("look_ahead", [0, 2])
@pytest.mark.parametrize("budget_ms", [1, 12, 22, 32, 60, 0])
def test_a_proposal_has_the_tokens_that_there_was_time_for(
    budget_ms: float, look_ahead: int
) -> None:
    """They are the first ones of the proposal without a bound. The pass of a draw that was allowed
    is not broken off; the first draw is decided on behind the pass that reads the prefix, or with
    look-ahead, of whose steps each is a pass, before it. None is too late by more than a pass."""
    heard = [
        one
        for one in answers_to((0.0, item(budget_ms, look_ahead=look_ahead)))
        if isinstance(one.answer, ProposalReply) and not one.answer.assumed
    ]
    [found] = heard
    num_expected = {1: 1 if look_ahead else 0, 12: 2, 22: 3, 32: 4}.get(int(budget_ms), K)
    whole, q = expected_proposal(PROMPT, K, Rule.TOKEN, PLAIN, 1)
    proposal = found.answer.proposal.open()
    assert list(proposal.token_ids) == whole[:num_expected]
    assert list(proposal.q) == q[:num_expected]
    assert found.answer.out_of_time == (num_expected < K)
    if budget_ms:
        assert found.at <= budget_ms / 1e3 + PASS_S + 1e-6


def test_who_waits_for_a_step_is_told_when_the_time_is_over() -> None:
    """Another session's step runs until 40 ms. The answer says that nothing was drawn; the prefix
    is read all the same, and an empty proposal says so."""
    heard = answers_to((0.0, item(0)), (0.005, item(10, session=2)))
    of_two = [one for one in heard if one.answer.key.session_id == session_name(2)]
    assert [type(one.answer) for one in of_two] == [Refused, ProposalReply]
    refused, empty = of_two
    assert refused.answer.code == LATE_CODE
    assert refused.at == pytest.approx(0.015)
    assert (empty.answer.proposal, empty.answer.out_of_time) == (NOTHING_SEALED, True)
    assert empty.answer.cached_length == len(PROMPT)
    assert empty.at == pytest.approx(0.050)


LONG = tuple(n % 7 for n in range(150))


@pytest.mark.parametrize("look_ahead", [0, 2])
def test_a_prefix_that_is_read_in_parts_costs_a_round_its_time_alone(look_ahead: int) -> None:
    """Three parts of 64 tokens at most, 10 ms each: before the second one ends the time is over."""
    asked = item(15, look_ahead=look_ahead, tokens=LONG)
    told, *later = answers_to((0.0, asked), max_num_batched_tokens=64)
    assert (told.answer.code, told.at <= 0.015 + PASS_S) == (LATE_CODE, True)
    ready = next(one.answer for one in later if not one.answer.assumed)
    assert (ready.proposal, ready.out_of_time) == (NOTHING_SEALED, True)


def test_a_round_does_not_wait_until_a_prompt_is_read_ahead() -> None:
    """A session that looks ahead asks for its first round while its prompt is read in parts."""
    read = replace(item(0, look_ahead=2, tokens=LONG), held=())
    asked = item(15, look_ahead=2, tokens=(*LONG, 1), round_index=1)
    told = answers_to((0.0, read), (0.001, asked), max_num_batched_tokens=64)[0]
    assert (told.answer.key.round, told.answer.code) == (1, LATE_CODE)
    assert told.at <= 0.001 + 0.015 + PASS_S


def test_a_proposal_that_came_true_half_drafted_has_no_more_than_its_time_allows() -> None:
    """Its tokens were drawn before it was asked for; what there is no time for is not drawn."""
    first = item(0, look_ahead=2, wanted=6)
    heard = answers_to((0.0, first))
    answered_at = next(one.at for one in heard if not one.answer.assumed)
    assumed = next(one.answer.assumed for one in heard if one.answer.assumed)
    tokens = (*PROMPT, *assumed)
    asked = item(1, look_ahead=2, wanted=6, tokens=tokens, round_index=1)
    # Two passes of each outcome have been run by then: less than half of its tokens.
    again = answers_to((0.0, first), (answered_at + 1.5 * PASS_S, asked))
    [found] = [one.answer for one in again if one.answer.key.round == 1 and not one.answer.assumed]
    whole, _ = expected_proposal(tokens, 6, Rule.TOKEN, PLAIN, 1)
    assert isinstance(found, ProposalReply)
    assert list(found.proposal.token_ids) == whole[:2]
    assert found.out_of_time


def ticking() -> Callable[[], float]:
    """A clock that shows a second more each time it is looked at."""
    seconds = count(1)
    return lambda: float(next(seconds))


@pytest.mark.parametrize("siblings", [(), (1, 1, 1)])
async def test_an_eagle_head_answers_with_what_it_has(siblings: tuple[int, ...]) -> None:
    async with test_eagle_rounds.running() as eagle:
        text = [*test_eagle_rounds.PROMPT, 7]
        features = eagle.features(text, 0)
        whole = await eagle.propose(text, features, 3, rule=Rule.TOKEN, siblings=siblings)
        drafter = EagleDrafter(eagle.eagle, NgramDrafter(), sessions_max=1)
        noise = RoundNoise(test_eagle_rounds.SEED, Rule.TOKEN, len(text))
        asked = DraftRequest(
            "a", "", text, len(text) - 1, 3, SamplingParams(), Rule.TOKEN, noise, siblings,
            features, deadline=DraftDeadline(2.5, ticking()),
        )  # fmt: skip
        [found] = drafter.propose([asked])
    assert found.tree.num_depths == 2
    assert found.token_ids == whole.proposal.cut(2).token_ids
    assert asked.deadline.has_cut


def test_draws_of_one_call_are_as_many_as_there_is_time_for(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By how long earlier ones took; at least one, where one is allowed, and none else."""
    drafter = ModelDrafter(pair.at_once, 8)
    asked = request("a", (3, 1, 4), 5, Rule.TOKEN, SamplingParams())
    [whole] = ModelDrafter(pair.by_step, 8).propose([asked])
    monkeypatch.setattr(drafter, "_draw_s", 1.0)
    for name, left_s, num_expected in (("b", 3.5, 3), ("c", 0.5, 1), ("d", -1.0, 0)):
        deadline = DraftDeadline(left_s, lambda: 0.0)
        one = replace(asked, session_id=name, deadline=deadline)
        pair.calls.clear()
        [found] = drafter.propose([one])
        assert found.token_ids == whole.token_ids[:num_expected]
        assert pair.calls[0] == ("run_multi_step" if num_expected else "forward")
        assert deadline.has_cut
        monkeypatch.setattr(drafter, "_draw_s", 1.0)
