"""A target that drafts itself: its proposals, which do not affect its verdicts, and the rounds with
them that it runs ahead."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.drafters.drafter import DraftRequest
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.interfaces.messages import VerdictReply, VerifyItem
from outrider.limits import PAGE_SIZE
from outrider.replica.step_request import AnswerSender, StepRequest
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service.actor import self_drafter_of
from target_service.run_ahead import RunAhead
from target_service.verifier import SelfDrafter
from tests.support.models import flat_module, tiny_eagle3, twin
from tests.support.paged_engines import shorten_pages
from tests.support.rounds import (
    RULES,
    Replica,
    make_head,
    outcome_of,
    proposal_of_head,
    session_name,
)

VOCAB, LENGTH = 24, 40
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
HEAD_IDS = tuple(range(0, VOCAB, 2))
SEED = 11


class Target(Replica):
    """A target that drafts itself, a copy of its module, and a link to it."""

    def __init__(
        self,
        drafter: Callable[[Any], Any] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        **options: Any,
    ) -> None:
        self.module, engine = tiny_engine(**options)
        super().__init__(
            "target",
            engine,
            max_num_seqs=8,
            self_drafter=(drafter or drafter_of)(engine),
            clock=clock,
        )

    async def verify(
        self, tokens: Sequence[int], proposal: EncodedProposal, num_next: int, **head: Any
    ) -> VerdictReply:
        made = make_head(tokens, seed=SEED, prompt_length=len(PROMPT), **head)
        reply = await self.ask(VerifyItem(made, proposal, num_next_draft_tokens=num_next))
        assert isinstance(reply, VerdictReply), reply
        return reply

    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """The logits after the newest of `tokens` and the drafted ones, `drafted`."""
        layer = self.engine.draft_layer
        states = self.module(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        taps = [states.hidden_states[index] for index in layer.module.layer_ids]
        pairs = layer.module.fuse(torch.cat(taps, -1))
        text = torch.tensor([[*tokens[1:], *drafted[1:]]])
        return layer.module.logits([*layer.module.unroll(pairs, text, len(drafted))][-1][0, -1:])

    def expected(
        self, tokens: Sequence[int], rule: Rule, sampling: SamplingParams, num: int
    ) -> Proposal:
        """The proposal by the library's own pass over all committed tokens."""
        return proposal_of_head(
            lambda text: self.logits(tokens, text[len(tokens) - 1 :]),
            tokens,
            len(PROMPT),
            RoundNoise(SEED, rule, len(tokens)),
            sampling,
            num,
            HEAD_IDS,
        )


def drafter_of(engine: PagedEngine) -> SelfDrafter:
    drafter = self_drafter_of(engine)
    assert drafter is not None
    return drafter


def tiny_engine(**options: Any) -> tuple[Any, PagedEngine]:
    """The engine of a target that drafts itself, and a copy of its module."""
    module = flat_module(VOCAB, LENGTH)
    original = twin(module)
    info = ModelInfo("tiny", VOCAB, LENGTH, "float64", (), "w", "t")
    layer = options["draft_layer"] = tiny_eagle3(module, HEAD_IDS)
    layer.module.lm_head.weight.mul_(0.1)
    return original, PagedEngine(module, info, **options)


@pytest.mark.parametrize(("rule", "sampling"), RULES)
async def test_what_is_proposed_behind_each_outcome(rule: Rule, sampling: SamplingParams) -> None:
    """After a rejected draft the engine holds all committed tokens but the newest, and no other
    page."""
    async with Target() as target:
        tokens, proposal = list(PROMPT), EMPTY_ENCODED_PROPOSAL
        accepted = []
        for index in range(9):
            reply = await target.verify(
                tokens, proposal, num_next=4, rule=rule, sampling=sampling, round_index=index
            )
            outcome = outcome_of(reply, proposal, rule, SEED, len(tokens))
            accepted.append(outcome.num_accepted)
            tokens += outcome.token_ids
            proposal = reply.next_proposal
            assert proposal.decode() == target.expected(tokens, rule, sampling, 4)
            assert 0 < len(proposal) == 4
            assert reply.cached_length == target.engine.length(session_name(1)) == len(tokens) - 1
            pages = target.engine.page_counts()
            assert pages.num_pages - pages.num_free == -(-(len(tokens) - 1) // PAGE_SIZE)
        # Two random heads seldom find the same token likeliest.
        assert rule is Rule.GREEDY or len(set(accepted)) > 1


async def test_a_proposal_follows_what_is_committed_before_logits_that_are_no_numbers() -> None:
    async with Target() as target:
        accepted: tuple[int, ...] = ()
        for _ in range(2):
            reply = await target.verify(PROMPT, EncodedProposal(accepted), 0, rule=Rule.COUPLED)
            accepted = (*accepted, reply.verdict.correction[-1])
        forward = target.engine.forward

        def broken(steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
            [logits] = forward(steps)
            logits[-1] = torch.nan
            return [logits]

        target.engine.forward = broken  # type: ignore[method-assign]
        proposal = EncodedProposal(accepted)
        reply = await target.verify(PROMPT, proposal, 3, rule=Rule.COUPLED, session=2)
        outcome = outcome_of(reply, proposal, Rule.COUPLED, SEED, len(PROMPT))
        assert outcome.token_ids == accepted
        tokens = [*PROMPT, *accepted]
        expected = target.expected(tokens, Rule.COUPLED, SamplingParams(), 3)
        assert reply.next_proposal.decode() == expected


async def test_rounds_of_several_sessions_are_drafted_for_together() -> None:
    wants = {1: (Rule.TOKEN, 2), 2: (Rule.COUPLED, 0), 3: (Rule.COUPLED, 3), 4: (Rule.TOKEN, 1)}
    async with Target() as target:
        options: dict[str, Any] = {"seed": SEED, "prompt_length": len(PROMPT)}
        for n, (rule, num_next) in wants.items():
            head = make_head([*PROMPT, n], session=n, rule=rule, **options)
            target.link.send(VerifyItem(head, num_next_draft_tokens=num_next))
        replies = {int(r.key.session_id, 16): r for r in await target.listener.wait(len(wants))}
        for number, (rule, num_next) in wants.items():
            tokens = [*PROMPT, number, *replies[number].verdict.correction]
            expected = target.expected(tokens, rule, SamplingParams(), num_next)
            assert replies[number].next_proposal.decode() == expected


async def test_no_end_is_proposed_before_min_tokens() -> None:
    """The committed token and two drafted ones come before. All tokens of the heads but 0 are
    ends."""
    late = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=HEAD_IDS[1:])
    async with Target() as target:
        reply = await target.verify(
            PROMPT, EMPTY_ENCODED_PROPOSAL, 3, rule=Rule.GREEDY, sampling=late
        )
    *early, first_free = reply.next_proposal.token_ids
    assert early == [0, 0]
    assert first_free in HEAD_IDS[1:]


async def test_no_more_is_proposed_than_fits() -> None:
    async with Target() as target:
        for room, expected in ((3, 2), (2, 1), (1, 0)):
            tokens = [*PROMPT, *[5] * (LENGTH - len(PROMPT) - room)]
            reply = await target.verify(tokens, EMPTY_ENCODED_PROPOSAL, num_next=3, session=room)
            assert len(reply.next_proposal) == expected


async def test_a_verdict_stands_without_a_proposal_and_the_target_says_that_it_drafts() -> None:
    class Broken:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def propose(
            self, requests: Sequence[DraftRequest], features: Sequence[torch.Tensor]
        ) -> list[Proposal]:
            raise RuntimeError("no memory")

    async with Target() as target:
        expected = await target.verify(PROMPT, EMPTY_ENCODED_PROPOSAL, num_next=3)
        assert (await target.link.describe(1.0)).drafts_itself
    async with Target(Broken) as target:
        reply = await target.verify(PROMPT, EMPTY_ENCODED_PROPOSAL, num_next=3)
    assert reply.verdict == expected.verdict
    assert reply.next_proposal == EMPTY_ENCODED_PROPOSAL


async def test_no_more_is_proposed_than_there_are_pages_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sessions are at the ends of their pages, and one page is left. One session continues, the
    other proposes what fitted. Both get their verdicts."""
    shorten_pages(monkeypatch, 4)
    slot_numbers = (
        2 * 2 * 2 * 8 + 2 * 2 * 8 + 24
    )  # Keys and values of 2 layers and of pairs, and g.
    async with Target(kv_cache_memory_bytes=7 * 4 * 8 * slot_numbers) as target:
        texts = {1: [*PROMPT, 1, 2], 2: [*PROMPT, 3, 4]}
        for number, text in texts.items():
            head = make_head(
                text, session=number, seed=SEED, prompt_length=len(PROMPT), rule=Rule.TOKEN
            )
            target.link.send(VerifyItem(head, num_next_draft_tokens=4, next_budget_us=60_000_000))
        replies = {int(r.key.session_id, 16): r for r in await target.listener.wait(2)}
        assert sorted(len(reply.next_proposal) for reply in replies.values()) == [2, 4]
        for number, reply in replies.items():
            tokens = [*texts[number], *reply.verdict.correction]
            expected = target.expected(
                tokens, Rule.TOKEN, SamplingParams(), len(reply.next_proposal)
            )
            assert reply.next_proposal.decode() == expected
        assert target.engine.page_counts().num_free == 1


@pytest.mark.parametrize(("first_budget_us", "num_first"), [(60_000_000, 6), (0, 8)])
async def test_a_repeated_seed_keeps_the_pages_for_its_proposal(
    first_budget_us: int, num_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but session 2 has no time limit, so its proposal must be whole. If the older
    session drafts beside it with a time limit, it gives up pages that it has taken. Two sessions
    without a limit draft one after the other, as both need all free pages."""
    shorten_pages(monkeypatch, 4)
    slot_numbers = 2 * 2 * 2 * 8 + 2 * 2 * 8 + 24
    async with Target(kv_cache_memory_bytes=8 * 4 * 8 * slot_numbers) as target:
        for number, budget_us in ((1, first_budget_us), (2, 0)):
            head = make_head(
                [*PROMPT, number, 2],
                session=number,
                seed=SEED,
                prompt_length=len(PROMPT),
                rule=Rule.TOKEN,
            )
            item = VerifyItem(head, num_next_draft_tokens=8, next_budget_us=budget_us)
            target.link.send(item)
        replies = {int(r.key.session_id, 16): r for r in await target.listener.wait(2)}
        lengths = {number: len(reply.next_proposal) for number, reply in replies.items()}
        assert lengths == {1: num_first, 2: 8}


@pytest.mark.parametrize("depth", [0, 2])
async def test_what_is_drawn_is_proposed_where_steps_fail(depth: int) -> None:
    async with Target() as target:
        steps, whole = 0, target.engine.forward_draft

        def failing(*given: Any) -> list[torch.Tensor]:
            nonlocal steps
            steps += 1
            if steps > depth:
                raise RuntimeError("no memory")
            return whole(*given)

        target.engine.forward_draft = failing
        reply = await target.verify(PROMPT, EMPTY_ENCODED_PROPOSAL, 4, rule=Rule.TOKEN)
        tokens = [*PROMPT, *reply.verdict.correction]
        expected = target.expected(tokens, Rule.TOKEN, SamplingParams(), depth)
        assert reply.next_proposal.decode().token_ids == expected.token_ids
        assert target.engine.length(make_head(tokens).session_id) == len(PROMPT)
        delattr(target.engine, "forward_draft")
        reply = await target.verify(tokens, reply.next_proposal, 4, rule=Rule.TOKEN, round_index=1)
        assert len(reply.next_proposal) == 4


async def test_nothing_is_drafted_behind_what_is_not_committed() -> None:
    _, engine = tiny_engine()
    drafter = drafter_of(engine)
    noise = RoundNoise(1, Rule.COUPLED, len(PROMPT) + 1)
    with torch.inference_mode():
        for name, tokens in (("right", PROMPT), ("less", PROMPT[1:]), ("more", (*PROMPT, 1))):
            engine.forward([SequenceStep(name, tokens, 1)])
            request = DraftRequest(name, "", (3,), 0, 2, SamplingParams(), Rule.COUPLED, noise)
            [found] = drafter.propose([request], [torch.zeros(24, dtype=torch.float64)])
            assert len(found) == (2 if name == "right" else 0)
            assert engine.length(name) == len(tokens)


@pytest.mark.parametrize("budget_s", [3.5, 60.0, 0.0])
async def test_a_target_that_drafts_itself_answers_with_what_it_has(budget_s: float) -> None:
    """The deadline is set at 1 s, drafting begins at 2 s, and each check takes a second."""
    seconds = itertools.count(1)
    async with Target(clock=lambda: float(next(seconds))) as target:
        text = list(PROMPT)
        head = make_head(text, seed=SEED, prompt_length=len(text), rule=Rule.TOKEN)
        budget_us = round(budget_s * 1e6)
        asked = VerifyItem(head, num_next_draft_tokens=3, next_budget_us=budget_us)
        reply = await target.ask(asked)
        text += reply.verdict.correction
        num = 2 if budget_s == 3.5 else 3
        expected = target.expected(text, Rule.TOKEN, SamplingParams(), num)
    assert reply.next_proposal.decode() == expected
    assert reply.next_out_of_time == (budget_s == 3.5)


NUM_NEXT, RUN_AHEAD, MANY = 4, 6, 1_000


def question(
    tokens: Sequence[int] = PROMPT, base: int = 0, round_index: int = 0, **fields: Any
) -> VerifyItem:
    """Allows rounds ahead whose proposals the head drafts."""
    rule, sampling = fields.pop("rule", Rule.TOKEN), fields.pop("sampling", None)
    head = make_head(
        tokens,
        base,
        seed=SEED,
        prompt_length=len(PROMPT),
        rule=rule,
        sampling=sampling,
        round_index=round_index,
    )
    given = {"run_ahead": RUN_AHEAD, "num_next_draft_tokens": NUM_NEXT, "num_tokens_left": MANY}
    return VerifyItem(head, **(given | fields))


async def asked_alone(first: VerifyItem, num_rounds: int) -> list[tuple[VerifyItem, VerdictReply]]:
    """The rounds as a coordinator asks for them, one after the other: each with the proposal that
    the verdict before has brought. Ends when the completion is full."""
    played: list[tuple[VerifyItem, VerdictReply]] = []
    head, tokens, proposal = first.head, [*first.head.append], first.proposal
    end = len(tokens) + first.num_tokens_left
    async with Target() as target:
        for index in range(num_rounds):
            if not (left := end - len(tokens)):
                break
            item = question(
                tokens,
                round_index=head.round + index,
                rule=head.rule,
                sampling=head.sampling,
                proposal=proposal.cut(left - 1),
                run_ahead=0,
                num_next_draft_tokens=max(0, min(first.num_next_draft_tokens, left - 2)),
                num_tokens_left=left,
            )
            reply = await target.ask(item)
            outcome = outcome_of(reply, item.proposal, head.rule, SEED, len(tokens))
            played.append((item, reply))
            tokens += outcome.token_ids
            proposal = reply.next_proposal
    return played


def facts(reply: VerdictReply) -> tuple[Any, ...]:
    return (
        reply.key,
        reply.verdict,
        reply.next_proposal,
        reply.next_base_length,
        reply.cached_length,
        (reply.committed_length, reply.prefix_digest, reply.proposal_digest),
    )


@pytest.mark.parametrize(("rule", "sampling"), RULES)
@pytest.mark.parametrize("drafted", [False, True])
async def test_rounds_ahead_are_those_that_a_coordinator_would_ask_for(
    rule: Rule, sampling: SamplingParams, drafted: bool
) -> None:
    """From a first round without a proposal, or with one."""
    proposal = EncodedProposal((4, 6)).without_q(rule) if drafted else EMPTY_ENCODED_PROPOSAL
    first = question(rule=rule, sampling=sampling, proposal=proposal)
    expected = await asked_alone(first, RUN_AHEAD + 1)
    async with Target() as target:
        answers = await target.send(first)
        num_passes = target.engine.length(session_name(1))
    assert [facts(reply) for reply in answers] == [facts(reply) for _, reply in expected]
    assert [len(item.proposal) for item, _ in expected[1:]] == [NUM_NEXT] * RUN_AHEAD
    assert (
        num_passes
        == len(PROMPT)
        + sum(
            len(outcome_of(reply, item.proposal, rule, SEED, reply.committed_length).token_ids)
            for item, reply in expected
        )
        - 1
    )


@pytest.mark.parametrize("room", [1, 2, 3, 5, 9])
async def test_rounds_ahead_end_where_the_completion_is_full(room: int) -> None:
    """Or where no next proposal has room, so that the coordinator asks for the last round."""
    num_next = max(0, min(NUM_NEXT, room - 2))
    first = question(num_tokens_left=room, num_next_draft_tokens=num_next)
    expected = await asked_alone(first, RUN_AHEAD + 1)
    without = [not reply.next_proposal for _, reply in expected].index(True)
    async with Target() as target:
        answers = await target.send(first)
        num = without + 1 if room > 2 else len(expected)
        assert [facts(reply) for reply in answers] == [facts(one) for _, one in expected][:num]
        for item, reply in expected[num:]:
            [last] = await target.send(item)
            assert facts(last) == facts(reply)


async def test_a_round_without_a_next_proposal_is_the_last_one_ahead() -> None:
    """The coordinator then proposes, here with a look-up, and rounds run ahead again."""
    async with Target() as target:
        whole, num_calls = target.engine.forward_draft, 0

        def failing(*given: Any) -> list[torch.Tensor]:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2 * NUM_NEXT + 1:
                raise RuntimeError("no memory")
            return whole(*given)

        target.engine.forward_draft = failing
        answers = await target.send(question())
        assert [len(reply.next_proposal) for reply in answers] == [NUM_NEXT, NUM_NEXT, 0]
        rounds = await asked_alone(question(), 3)
        item, reply = rounds[-1]
        tokens = [*item.head.append]
        tokens += outcome_of(reply, item.proposal, Rule.TOKEN, SEED, len(tokens)).token_ids
        proposal = EncodedProposal((1,)).without_q(Rule.TOKEN)
        again = await target.send(
            question(tokens, len(tokens) - 1, 3, proposal=proposal, num_tokens_left=MANY - 9)
        )
        assert [reply.key.round for reply in again] == [*range(3, 4 + RUN_AHEAD)]
        assert len(again[0].verdict.accept_probability) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_next_draft_tokens": 3},
        {"next_budget_us": 60_000_000},
        {"num_tokens_left": MANY - 1},
        {"ignores_eos": True},
        {"proposal": EncodedProposal((2,))},
    ],
)
def test_rounds_ahead_answer_no_item_with_other_settings(changes: dict[str, Any]) -> None:
    first = question(proposal=EncodedProposal((4,)))
    ahead = RunAhead(StepRequest(first, AnswerSender(lambda _: None), 0.0, 1.0), ())
    assert ahead.continues(first)
    assert not ahead.continues(replace(first, **changes))


async def test_an_item_with_the_proposal_that_was_drafted_allows_more_rounds() -> None:
    """With another proposal, the target begins again with it."""
    expected = await asked_alone(question(), 2 * RUN_AHEAD)
    item, _ = expected[4]
    more = question(
        item.head.append,
        item.head.committed_length - 1,
        4,
        proposal=item.proposal,
        num_tokens_left=item.num_tokens_left,
    )
    async with Target() as target:
        answers = await target.send(question())
        answers += await target.send(more)
        assert [facts(reply) for reply in answers] == [
            facts(reply) for _, reply in expected[: 4 + RUN_AHEAD + 1]
        ]
        repeated = await target.send(more)
        assert [facts(reply) for reply in repeated] == [
            facts(reply) for _, reply in expected[4 : 4 + RUN_AHEAD + 1]
        ]
        [begun, *others] = await target.send(replace(more, proposal=item.proposal.cut(1)))
        assert [reply.key.round for reply in others] == [*range(5, 5 + RUN_AHEAD)]
        assert len(begun.verdict.accept_probability) == 1
