"""The target service in process: verdicts, refusals, and that errors affect only their own
session."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.foundation.tokens import EMPTY_DIGEST, TokenSequence
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import Refused, Resync, VerdictReply, VerifyItem
from outrider.speculation.logits_processing import raw_logprobs, target_probabilities
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, EncodedProposal, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from tests.support.rounds import Replica, make_head, outcome_of, session_name
from tests.support.toy_engine import ToyEngine, toy_logits
from tests.support.verdict_laws import score

PROMPT = (1, 2, 3)
HALVES = DraftDistribution((4, 5), (2**15, 2**15))


def target(engine: ToyEngine | None = None) -> Replica:
    return Replica("target", engine or ToyEngine())


@pytest.fixture
async def setting() -> AsyncIterator[Replica]:
    async with target() as made:
        yield made


@pytest.mark.parametrize(
    ("rule", "proposal"),
    [
        (Rule.GREEDY, Proposal((4, 5))),
        (Rule.COUPLED, Proposal((4, 5, 6))),
        (Rule.TOKEN, Proposal((4, 5), (HALVES, None))),
        (Rule.BLOCK, Proposal((4, 5), (HALVES, HALVES))),
        (Rule.TOKEN, Proposal()),
    ],
)
async def test_a_verdict_is_the_pure_function_of_its_item(
    setting: Replica, rule: Rule, proposal: Proposal
) -> None:
    """It equals `score` over the transformed logits, with penalties of committed and drafted
    tokens: the same tokens, and acceptance up to rounding."""
    sampling = SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 0.9, presence_penalty=0.7)
    head = make_head(PROMPT, rule=rule, sampling=sampling, prompt_length=2)
    reply = await setting.ask(VerifyItem(head, EncodedProposal.of(proposal)))
    tokens = (*PROMPT, *proposal.token_ids)
    ends = range(len(PROMPT), len(tokens) + 1)
    rows = torch.stack([toy_logits(1, tokens[:end], 8) for end in ends])
    history = TokenHistory(PROMPT[:2], PROMPT[2:], proposal.token_ids)
    p = target_probabilities(rows, sampling, history)
    expected = score(p, proposal, RoundNoise(7, rule, len(PROMPT)))
    assert reply.verdict.correction == expected.correction
    assert reply.verdict.accept_probability == pytest.approx(
        expected.accept_probability, rel=1e-6, abs=0.0
    )
    assert reply.cached_length == len(PROMPT) + len(proposal)
    assert setting.engine.length(session_name(1)) == reply.cached_length
    assert (setting.service.num_items, len(setting.service.sessions)) == (1, 1)
    assert setting.service.figures.kv_usage > 0
    setting.service.release(head.session_id, head.epoch)
    assert (setting.service.num_items, len(setting.service.sessions)) == (1, 0)
    await setting.settle()
    assert setting.service.figures.kv_usage == 0


async def test_logprobs_are_from_the_rows_before_their_tokens(setting: Replica) -> None:
    drafted = (4, 5)
    item = VerifyItem(make_head(PROMPT), EncodedProposal.of(Proposal(drafted)), num_logprobs=2)
    reply = await setting.ask(item)
    rows = torch.stack([toy_logits(1, (*PROMPT, *drafted[:n]), 8) for n in range(3)])
    chosen = (*drafted, *reply.verdict.correction)
    wanted = raw_logprobs(rows, chosen, 2, rows=(0, 1, 0, 1, 2))
    assert tuple((entry.logprob, entry.top) for entry in reply.logprobs) == wanted


class MaskedNaN(ToyEngine):
    """After a text of four tokens, the logit of token 7 is NaN."""

    def _run(self, step: SequenceStep) -> torch.Tensor:
        logits = super()._run(step)
        row = 3 - self.length(step.sequence_id) + len(logits)
        if 0 <= row < len(logits):
            logits[row, 7] = torch.nan
        return logits


async def test_logprobs_that_are_no_numbers_end_the_outcome_before_them() -> None:
    """A mask takes the NaN from the distribution, but not from the log-probabilities."""
    sampling = SamplingParams(min_tokens=9, stop_token_ids=(7,))
    async with target(MaskedNaN()) as setting:

        async def ask(session: int, *drafted: int, num_logprobs: int | None = 2) -> Any:
            head = make_head(PROMPT, session=session, rule=Rule.COUPLED, sampling=sampling)
            return await setting.ask(VerifyItem(head, EncodedProposal(drafted), 0, num_logprobs))

        [token] = (await ask(1)).verdict.correction
        bare = await ask(2, token, num_logprobs=None)
        assert bare.verdict.accept_probability == (1.0,)
        ended = await ask(3, token)
        assert ended.verdict.accept_probability == (0.0,)
        assert ended.verdict.correction[0] == token
        assert ended.logprobs[0] == ended.logprobs[1] != ended.logprobs[2]
        assert (ended.logprobs[2].logprob, ended.logprobs[2].top) == (-math.inf, ())
        head = make_head((*PROMPT, token), session=4, rule=Rule.COUPLED, sampling=sampling)
        refused = await setting.ask(VerifyItem(head, num_logprobs=2))
        assert isinstance(refused, Refused)
        assert "row 0" in refused.message


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_missing_logprobs_cut_the_outcome_and_change_no_test(rule: Rule) -> None:
    """All rows have distributions, so tests of draft tokens behind the cut still count. Under
    block, a later test that passes also accepts the tokens before it."""
    sampling = SamplingParams(min_tokens=9, stop_token_ids=(7,))
    q = DraftDistribution((1, 2, 3), (COUNT_TOTAL // 2, COUNT_TOTAL // 4, COUNT_TOTAL // 4))
    nums_accepted = set()
    async with target(MaskedNaN()) as setting:
        for seed in range(40):
            proposal = EncodedProposal.of(Proposal((1 + seed % 3, 2, 1), (q, q, q)))
            outcomes = []
            for session, num_logprobs in ((2 * seed + 1, None), (2 * seed + 2, 1)):
                head = make_head(PROMPT, session=session, rule=rule, sampling=sampling, seed=seed)
                reply = await setting.ask(VerifyItem(head, proposal, 0, num_logprobs))
                outcomes.append(outcome_of(reply, proposal, rule, seed, len(PROMPT)))
            bare, cut = outcomes
            nums_accepted.add(bare.num_accepted)
            reached = bare.num_accepted >= 1
            assert cut.token_ids == (proposal.token_ids[:1] if reached else bare.token_ids)
    assert {0, 1} < nums_accepted  # Some outcomes reach the row by a later test.


async def test_a_prefix_that_is_not_held_is_asked_for(setting: Replica) -> None:
    reply = await setting.ask(VerifyItem(make_head((*PROMPT, 4), 3)))
    assert reply == Resync(make_head(PROMPT).key, 0, EMPTY_DIGEST)
    full = await setting.ask(VerifyItem(make_head((*PROMPT, 4))))
    assert isinstance(full, VerdictReply)
    more = await setting.ask(VerifyItem(make_head((*PROMPT, 4, 5, 6, 7), 6, round_index=1)))
    assert more == Resync(
        make_head(PROMPT, round_index=1).key, 4, TokenSequence((*PROMPT, 4)).digest()
    )


def sampled(**params: Any) -> VerifyItem:
    return VerifyItem(make_head(PROMPT, rule=Rule.TOKEN, sampling=SamplingParams(**params)))


BAD_ITEMS = [
    ("head.append", VerifyItem(make_head((1, 8)))),
    ("proposal", VerifyItem(make_head(range(8)), EncodedProposal((1,)))),
    ("head.rule", sampled(temperature=0.0)),
    ("proposal.q", VerifyItem(make_head(PROMPT, rule=Rule.BLOCK), EncodedProposal((1,)))),
    ("proposal.q", VerifyItem(make_head(PROMPT, rule=Rule.BLOCK), EncodedProposal((1,), b"\1"))),
    ("head.sampling", VerifyItem(replace(make_head(PROMPT), sampling=None))),
    ("sampling.top_k", sampled(top_k=9)),
    ("sampling.logit_bias", sampled(logit_bias=((2, 1.0), (8, 1.0)))),
]


@pytest.mark.parametrize(("field", "bad"), BAD_ITEMS)
async def test_a_bad_item_is_refused_and_its_neighbours_are_answered(
    field: str, bad: VerifyItem
) -> None:
    setting = target(ToyEngine(max_model_len=8))
    others = [VerifyItem(make_head(PROMPT, session=session)) for session in (2, 3)]
    answers = await setting.send(others[0], bad, others[1])
    refused, *verdicts = sorted(answers, key=lambda answer: answer.key.session_id)
    assert refused.code == 3
    assert refused.message.startswith(f"{field}: ")
    assert [type(one) for one in verdicts] == [VerdictReply] * 2
    assert setting.engine.batches == [[session_name(2), session_name(3)]]
    await setting.close()


async def test_draft_tokens_outside_the_vocabulary_are_never_accepted(setting: Replica) -> None:
    for session, rule in enumerate(Rule, start=1):
        q = (None, None, None) if rule.needs_q else ()
        item = VerifyItem(
            make_head(PROMPT, session=session, rule=rule),
            EncodedProposal.of(Proposal((4, 99, 5), q)),
        )
        reply = await setting.ask(item)
        assert reply.verdict.accept_probability[1] == 0.0
        assert rule is not Rule.BLOCK or reply.verdict.accept_probability[2] == 0.0
        assert all(0 <= token_id < 8 for token_id in reply.verdict.correction)


async def test_logits_that_are_no_numbers_hurt_their_own_session_only(setting: Replica) -> None:
    setting.engine.poisoned.add(session_name(2))
    answers = await setting.send(
        *(VerifyItem(make_head(PROMPT, session=session)) for session in (1, 2, 3))
    )
    kinds = {answer.key.session_id: type(answer) for answer in answers}
    assert [kinds[session_name(n)] for n in (1, 2, 3)] == [VerdictReply, Refused, VerdictReply]
    assert setting.engine.length(session_name(2)) == 0


async def test_sessions_of_a_closed_stream_give_way_and_are_asked_for_again() -> None:
    """With room for two sequences, the third takes the pages of one whose stream has closed. A
    session that returns is resynchronised, and gets the same verdict with and without its pages."""
    roomy, tight = target(), target(ToyEngine(num_pages=2))
    for setting in (roomy, tight):
        for session in (1, 2):
            await setting.ask(VerifyItem(make_head(PROMPT, session=session)))
        setting.link.sever(ConnectionError("cut"))
        await setting.listener.wait(num_lost=1)
        await setting.ask(VerifyItem(make_head(PROMPT, session=3)))
    item = VerifyItem(make_head((*PROMPT, 4), 3, round_index=1))
    verdicts = []
    for setting in (roomy, tight):
        lost = await setting.ask(item)
        assert (type(lost), lost.cached_length) == (Resync, 0)
        full = await setting.ask(VerifyItem(make_head((*PROMPT, 4), round_index=1)))
        verdicts.append(full.verdict)
        await setting.close()
    assert verdicts[0] == verdicts[1]
