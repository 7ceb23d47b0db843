"""The draft service in process: proposals, batches, and what is not drafted."""

from collections.abc import AsyncIterator, Sequence

import pytest

from outrider.errors import EngineLost, OutriderError
from outrider.interfaces.messages import DraftItem
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.draft_world import draft_over, expected_proposal
from tests.support.pages import check_pages
from tests.support.rounds import GREEDY, Replica, make_head, session_name
from tests.support.toy_engine import ToyEngine

PROMPT = (1, 2, 3)


@pytest.fixture
async def setting() -> AsyncIterator[Replica]:
    async with draft_over() as made:
        yield made


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("penalty", [0.0, 0.8])
async def test_a_proposal_is_the_pure_function_of_its_item(
    setting: Replica, rule: Rule, penalty: float
) -> None:
    """It equals drawing token by token from new logits; penalties count draft tokens; q is what
    each token was drawn from, under rules that use it."""
    sampling = SamplingParams(
        temperature=0.0 if rule is Rule.GREEDY else 0.8, top_k=5, frequency_penalty=penalty
    )
    head = make_head(PROMPT, rule=rule, sampling=sampling, prompt_length=2)
    reply = await setting.ask(DraftItem(head, 5))
    tokens, q = expected_proposal(PROMPT, 5, rule, sampling, 2)
    assert list(reply.proposal.token_ids) == tokens
    assert list(reply.proposal.decode().q) == (q if rule.needs_q else [])
    assert reply.base_length == len(PROMPT)
    assert reply.cached_length == len(PROMPT) + 4
    assert setting.engine.length(session_name(1)) == reply.cached_length


async def test_a_batch_proposes_what_each_session_would_alone(setting: Replica) -> None:
    kinds = [
        (Rule.TOKEN, 4, SamplingParams(temperature=0.7)),
        (Rule.TOKEN, 2, SamplingParams(temperature=0.7)),
        (Rule.COUPLED, 3, SamplingParams(presence_penalty=1.0)),
        (Rule.GREEDY, 1, GREEDY),
        (Rule.BLOCK, 0, SamplingParams()),
    ]
    for session, (rule, count, sampling) in enumerate(kinds, start=1):
        head = make_head(PROMPT, session=session, rule=rule, sampling=sampling)
        setting.link.send(DraftItem(head, count))
    answers = {answer.key.session_id: answer for answer in await setting.listener.wait(5)}
    assert [len(batch) for batch in setting.engine.batches] == [5, 3, 2, 1]
    for session, (rule, count, sampling) in enumerate(kinds, start=1):
        tokens, _ = expected_proposal(PROMPT, count, rule, sampling, 1)
        answer = answers[session_name(session)]
        assert list(answer.proposal.token_ids) == tokens
        assert answer.cached_length == 3 + max(0, count - 1)


async def test_a_prefix_outside_its_vocabulary_gets_an_empty_proposal(setting: Replica) -> None:
    """A target may have a wider vocabulary. Nothing is refused, and the other sessions get
    proposals."""
    wide, normal = await setting.send(
        DraftItem(make_head((1, 9, 2)), 3), DraftItem(make_head(PROMPT, session=2), 3)
    )
    assert (len(wide.proposal), wide.cached_length) == (0, 0)
    assert len(normal.proposal) == 3
    again = await setting.ask(DraftItem(make_head((1, 9, 2, 3), round_index=1), 3))
    assert len(again.proposal) == 0


@pytest.mark.parametrize(("length", "proposed"), [(5, 4), (6, 3), (8, 1), (9, 0), (20, 0)])
async def test_a_prefix_near_its_length_gets_a_shorter_proposal(length: int, proposed: int) -> None:
    """x_K needs no slot, so a prefix that fills the model still gets one token."""
    setting = draft_over(ToyEngine(salt=2, max_model_len=8))
    reply = await setting.ask(DraftItem(make_head([1] * length), 4))
    assert len(reply.proposal) == proposed
    await setting.close()


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.TOKEN])
async def test_a_pass_that_fails_behind_drawn_tokens_leaves_them_proposed(
    setting: Replica, rule: Rule
) -> None:
    """NaN logits after the second of four tokens: two are proposed, another session gets all of its
    own, and the next round continues from what is held."""
    sampling = GREEDY if rule is Rule.GREEDY else SamplingParams()
    tokens, q = expected_proposal(PROMPT, 4, rule, sampling, 1)
    setting.engine.breaks_after = lambda held: list(held) == [*PROMPT, *tokens[:2]]
    other = (*PROMPT, 4)
    short, whole = await setting.send(
        DraftItem(make_head(PROMPT, rule=rule), 4),
        DraftItem(make_head(other, session=2, rule=rule), 4),
    )
    assert list(short.proposal.token_ids) == tokens[:2]
    assert list(short.proposal.decode().q) == (q[:2] if rule.needs_q else [])
    assert short.cached_length == len(PROMPT) + 1
    assert list(whole.proposal.token_ids) == expected_proposal(other, 4, rule, sampling, 1)[0]
    assert [len(batch) for batch in setting.engine.batches] == [2, 2, 2, 1]
    check_pages(setting.engine)
    following = (*PROMPT, tokens[0], (tokens[1] + 1) % 8)
    more = await setting.ask(DraftItem(make_head(following, 4, rule=rule, round_index=1), 2))
    expected, _ = expected_proposal(following, 2, rule, sampling, 1)
    assert list(more.proposal.token_ids) == expected


async def test_a_sequence_that_a_failed_pass_forgot_is_drafted_anew(setting: Replica) -> None:
    prompts = {session: (*PROMPT, session) for session in (1, 2)}
    await setting.send(*(DraftItem(make_head(PROMPT, session=one), 2) for one in prompts))

    def forget(tokens: Sequence[int]) -> bool:
        if len(setting.engine.batches[-1]) == 2:
            setting.engine.release(session_name(1))
            setting.engine.crash = OutriderError("no memory")
        return False

    setting.engine.breaks_after = forget
    answers = await setting.send(
        *(
            DraftItem(make_head(tokens, 3, session=one, round_index=1), 1)
            for one, tokens in prompts.items()
        )
    )
    for tokens, answer in zip(prompts.values(), answers, strict=True):
        expected, _ = expected_proposal(tokens, 1, Rule.GREEDY, GREEDY, 1)
        assert (list(answer.proposal.token_ids), answer.cached_length) == (expected, 4)


async def test_a_lost_engine_is_no_items_own_error(setting: Replica) -> None:
    """The tokens that were drawn before the loss are proposed, and the next step reports the loss.
    The step is not repeated for each session, and the replica is unhealthy at once."""
    setting.engine.breaks_after = lambda held: lose(len(held) == len(PROMPT) + 1)

    def lose(now: bool) -> bool:
        setting.engine.crash = EngineLost("rank 1 is gone") if now else None
        return False

    assert len((await setting.ask(DraftItem(make_head(PROMPT), 3))).proposal) == 1
    assert setting.service.healthy
    num_steps = len(setting.engine.batches)
    setting.engine.breaks_after = lambda held: lose(True)
    refused = await setting.send(
        *(DraftItem(make_head(PROMPT, session=session), 3) for session in (2, 3))
    )
    assert [(answer.code, answer.message) for answer in refused] == [(14, "rank 1 is gone")] * 2
    assert len(setting.engine.batches) == num_steps + 1
    assert not setting.service.healthy
