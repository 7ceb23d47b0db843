"""Proposals that are trees, through the draft and the target service."""

import pytest
import torch
from rounds import GREEDY, Pair, Replica, make_head, session_name
from toy_engine import ToyEngine, toy_logits

from outrider.messages import DraftItem, ProposalReply, Refused, VerdictReply, VerifyItem
from outrider.speculation.logits_processing import raw_logprobs
from outrider.speculation.proposal import Proposal, SealedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams

PROMPT = (1, 2, 3)
SAMPLED = SamplingParams()


def running() -> Pair:
    return Pair(Replica("target", ToyEngine(salt=1)), Replica("draft", ToyEngine(salt=2)))


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
async def test_own_tokens_do_not_depend_on_siblings(rule: Rule) -> None:
    """Rounds with trees, some of whose siblings are accepted, write what plain decoding does: the
    slots of the accepted path are kept."""
    sampling = GREEDY if rule is Rule.GREEDY else SAMPLED
    taken = 0
    for seed in range(6):
        async with running() as pair:
            plain = pair.player(PROMPT, rule, sampling, drafts=False, seed=seed)
            for _ in range(24):
                await plain.play(0)
        async with running() as pair:
            player = pair.player(PROMPT, rule, sampling, seed=seed)
            while len(player.tokens) < len(plain.tokens):
                await player.play(3, (2, 1, 1))
                # The target holds the committed path, whatever siblings there were.
                assert pair.target.engine.held[session_name(1)] == player.tokens[:-1]
            assert player.tokens[: len(plain.tokens)] == plain.tokens
            taken += player.num_beside
    assert taken > 0


async def test_a_tree_of_candidates_is_drafted_and_judged() -> None:
    async with running() as pair:
        reply = await pair.draft.ask(
            DraftItem(make_head(PROMPT, rule=Rule.TOKEN, sampling=SAMPLED), 2, siblings=(2, 1))
        )
        assert isinstance(reply, ProposalReply)
        proposal = reply.proposal.open()
        assert proposal.parents == (-1, -1, -1, 0, 0)
        assert len(proposal.q) == 2
        assert reply.cached_length == len(PROMPT) + 1
    beside = 0
    for seed in range(8):
        async with running() as pair:
            player = pair.player(PROMPT, Rule.TOKEN, SAMPLED, seed=seed)
            for _ in range(8):
                await player.play(2, (2, 2))
            beside += player.num_beside
    assert beside > 0


async def test_logprobs_of_a_tree_are_from_the_rows_before_its_tokens() -> None:
    parents = (-1, -1, 1)
    proposal = SealedProposal.of(Proposal((4, 5, 6), (), parents))
    async with running() as pair:
        reply = await pair.target.ask(VerifyItem(make_head(PROMPT), proposal, num_logprobs=2))
    assert isinstance(reply, VerdictReply)
    prefixes = [PROMPT, (*PROMPT, 4), (*PROMPT, 5), (*PROMPT, 5, 6)]
    rows = [toy_logits(1, prefix, 8) for prefix in prefixes]
    chosen = (4, 5, 6, *reply.verdict.correction)
    wanted = raw_logprobs(torch.stack(rows), chosen, 2, rows=(0, 0, 2, 0, 1, 2, 3))
    assert tuple((entry.logprob, entry.top) for entry in reply.logprobs) == wanted


BAD = [
    ("proposal.parents", Rule.BLOCK, SAMPLED, Proposal((4, 5), (None,), (-1, -1))),
    ("proposal.token_ids", Rule.TOKEN, SAMPLED, Proposal((4, 4), (None,), (-1, -1))),
    ("proposal.parents", Rule.COUPLED, SAMPLED, Proposal((4, 5), (), (-1, 1))),
]


@pytest.mark.parametrize(("field", "rule", "sampling", "proposal"), BAD)
async def test_what_no_tree_may_be_is_refused(
    field: str, rule: Rule, sampling: SamplingParams, proposal: Proposal
) -> None:
    async with running() as pair:
        head = make_head(PROMPT, rule=rule, sampling=sampling)
        refused = await pair.target.ask(VerifyItem(head, SealedProposal.of(proposal)))
        assert isinstance(refused, Refused)
        assert refused.message.startswith(field)
        again = await pair.target.ask(VerifyItem(head))
        assert isinstance(again, VerdictReply)


@pytest.mark.parametrize(
    ("rule", "sampling", "look_ahead"),
    [
        (Rule.BLOCK, SAMPLED, 0),
        (Rule.TOKEN, SamplingParams(frequency_penalty=0.5), 0),
        (Rule.TOKEN, SAMPLED, 4),
    ],
)
async def test_a_draft_refuses_siblings_where_there_is_no_tree(
    rule: Rule, sampling: SamplingParams, look_ahead: int
) -> None:
    async with running() as pair:
        head = make_head(PROMPT, rule=rule, sampling=sampling)
        refused = await pair.draft.ask(DraftItem(head, 2, look_ahead, siblings=(1,)))
        assert isinstance(refused, Refused)
        assert refused.message.startswith("siblings")
