"""Proposals of targets that draft for themselves, which come with verdicts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.draft_length.policy import DraftedBeside, RoundLength
from coordinator.routing.draft_client import SelfDraftClient
from coordinator.routing.drafts import NextRoundRequest
from outrider.config.deployment import DraftConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.foundation.clock import run_virtually
from outrider.interfaces.messages import ReplyKey, VerdictReply
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import DraftDistribution, EncodedProposal, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule
from tests.support.session_links import CONFIG, asked, context_of, session

NAME = "0" * 31 + "1"
PROMPT = (1, 2, 3, 1, 2, 3, 1)
NOISE = RoundNoise(1, Rule.TOKEN, 6)
Q = DraftDistribution((4, 5), (2**15, 2**15))
FEW = {"confident": 0.6, "model_tokens": 2}


def self_drafts(
    confident: float | None = None, model_tokens: int = 8, **fields: Any
) -> SelfDraftClient:
    """Those of a session whose look-up proposes the tokens 2, 3, 1, 2, ..."""
    one = session(PROMPT, Rule.TOKEN, NAME, seed=1)
    config = CONFIG
    if confident is not None:
        hybrid = DraftConfig(
            model="hybrid:ngram,eagle3:heads",
            hybrid_min_score=confident,
            hybrid_model_tokens=model_tokens,
        )
        config = replace(CONFIG, lookup=hybrid)
    target: Any = SimpleNamespace(context=context_of(one, **fields), on_trial=None)
    return SelfDraftClient(target, NgramDrafter(), config)


def verdict(proposal: EncodedProposal, base_length: int = len(PROMPT)) -> VerdictReply:
    key = ReplyKey(NAME, 1, 0)
    return VerdictReply(
        key,
        Verdict((), (1,)),
        6,
        next_proposal=proposal,
        next_base_length=base_length,
        next_draft_ms=250.0,
        next_work_ms=125.0,
    )


def encoded(num_tokens: int) -> EncodedProposal:
    return EncodedProposal.of(Proposal((4, 5, 4)[:num_tokens], (Q,) * num_tokens))


def heard(
    proposal: EncodedProposal, next_max: int = 3, base_length: int = len(PROMPT)
) -> SelfDraftClient:
    """Those of a session that asked for this many tokens and got a proposal."""
    drafts = self_drafts()
    drafts.next_round_request(RoundLength(3, 0, next_max=next_max))
    drafts.on_verdict(verdict(proposal, base_length))
    return drafts


@pytest.mark.parametrize(
    ("hybrid", "length", "wanted"),
    [
        ({}, RoundLength(1, 0, next_max=3), NextRoundRequest(3)),
        ({}, RoundLength(3, 0, next_max=1), NextRoundRequest(1)),
        ({}, RoundLength(0, 5), NextRoundRequest()),  # The target runs ahead.
        (FEW, RoundLength(8, 0, next_max=8), NextRoundRequest(2)),
        (FEW, RoundLength(8, 0, next_max=1), NextRoundRequest(1)),
    ],
)
def test_how_much_of_the_next_round_is_asked_for(
    hybrid: dict[str, Any], length: RoundLength, wanted: NextRoundRequest
) -> None:
    """Of a hybrid's target, few tokens, however many the look-up may propose."""
    assert replace(self_drafts(**hybrid).next_round_request(length), budget_us=0) == wanted


async def test_a_proposal_that_came_with_a_verdict_is_used_once() -> None:
    drafts = heard(encoded(3))
    drafted = await drafts.propose(1, asked(2), NOISE)
    assert (drafted.proposal, drafted.num_asked) == (encoded(2), 2)
    assert (drafted.seconds, drafted.beside) == (0.0, DraftedBeside(3, 0.25, 0.125))
    again = await drafts.propose(2, asked(2), NOISE)
    assert (again.proposal.token_ids, again.num_asked) == ((2, 3), 0)


async def test_a_target_has_the_time_of_the_session_to_draft() -> None:
    """If the time runs out, nothing is learned about tokens beyond those that it drew."""
    drafts = self_drafts(draft_deadline_ms=25)
    untimed = RoundLength(3, 0, next_max=3, is_timed=False)
    assert drafts.next_round_request(untimed).budget_us == 0
    assert drafts.next_round_request(RoundLength(3, 0, next_max=3)).budget_us == 25_000
    drafts.on_verdict(replace(verdict(encoded(2)), next_out_of_time=True))
    drafted = await drafts.propose(1, asked(3), NOISE)
    assert (drafted.proposal, drafted.num_asked) == (encoded(2), 2)


@pytest.mark.parametrize(("confident", "by_look_up"), [(0.5, True), (4.0, False)])
async def test_which_side_proposes_does_not_depend_on_what_the_target_drew(
    confident: float, by_look_up: bool
) -> None:
    for token_ids in [(4, 5), (5, 4), (4, 4), (2, 3), (5,)]:
        drafts = self_drafts(confident=confident)
        drafts.next_round_request(RoundLength(2, 0, next_max=2))
        q = DraftDistribution((2, 3, 4, 5), (2**14,) * 4)
        drafts.on_verdict(verdict(EncodedProposal.of(Proposal(token_ids, (q,) * len(token_ids)))))
        drafted = await drafts.propose(1, asked(2), NOISE)
        assert (drafted.beside is None) is by_look_up
        assert drafted.num_asked == 2
        assert drafted.proposal.token_ids == ((2, 3) if by_look_up else token_ids)


async def test_the_first_tokens_of_a_proposal_keep_their_distributions() -> None:
    other = DraftDistribution((1, 2, 3), (2**15, 2**14, 2**14))
    drafts = heard(EncodedProposal.of(Proposal((4, 1, 5), (Q, other, None))))
    drafted = await drafts.propose(1, asked(2), NOISE)
    assert drafted.proposal.decode() == Proposal((4, 1), (Q, other))
    assert drafted.num_asked == 2
    drafts.on_verdict(verdict(EncodedProposal.of(Proposal((4, 1), (None, other)))))
    again = await drafts.propose(1, asked(1), NOISE)
    assert again.proposal == EncodedProposal.of(Proposal((4,), (None,)))


async def test_a_missing_proposal_counts_as_fallback_if_one_was_wanted() -> None:
    """As with a target whose heads fail, but not with one that ran ahead."""
    drafts = self_drafts()
    for wanted, length in ((True, RoundLength(3, 0, next_max=3)), (False, RoundLength(0, 5))):
        drafts.next_round_request(length)
        drafts.on_verdict(verdict(EncodedProposal()))
        assert ((await drafts.propose(1, asked(2), NOISE)).source == "fallback") is wanted


async def test_a_proposal_for_another_prefix_is_not_used() -> None:
    drafts = heard(encoded(3), base_length=len(PROMPT) + 1)
    assert (await drafts.propose(1, asked(2), NOISE)).proposal.token_ids == (2, 3)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [(encoded(3), "the proposal has 3 tokens; 2 are allowed"), (EncodedProposal((4, 5)), "q")],
)
async def test_tokens_that_were_not_asked_for_are_not_used(
    proposal: EncodedProposal, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = heard(proposal, next_max=2)
    assert message in caplog.text
    assert (await drafts.propose(1, asked(2), NOISE)).num_asked == 0


def test_a_target_whose_own_proposals_cannot_be_read_is_asked_for_none() -> None:
    drafts = heard(encoded(3))
    drafts.reject()
    assert drafts.next_round_request(RoundLength(1, 0, next_max=3)) == NextRoundRequest()
    drafts.on_verdict(verdict(encoded(3)))
    drafted = run_virtually(drafts.propose(1, asked(3), NOISE))
    assert drafted.proposal.token_ids == (2, 3, 1)
