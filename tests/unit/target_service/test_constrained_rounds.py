"""Rounds of sessions with a constraint, with target and draft in process. What is committed meets
the constraint, whatever was drafted, discarded or forgotten."""

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError, OutriderError
from outrider.grammar.compiler import Grammar, Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import PrefixMatcher
from outrider.interfaces.messages import (
    DraftItem,
    ProposalReply,
    Refused,
    RoundHead,
    VerdictReply,
    VerifyItem,
)
from outrider.limits import GRAMMARS_MAX
from outrider.replica.drivers import InlineDriver
from outrider.replica.step_request import StepRequest
from outrider.speculation.proposal import (
    EMPTY_ENCODED_PROPOSAL,
    DraftDistribution,
    EncodedProposal,
    Proposal,
)
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from tests.support.constrained import (
    CONSTRAINTS,
    allowed_ids,
    eos,
    fresh_mask,
    grammar,
    grammars,
    hf_tokenizer,
)
from tests.support.rounds import (
    GREEDY,
    PATIENCE_S,
    Pair,
    Player,
    Replica,
    make_head,
    outcome_of,
    session_name,
)
from tests.support.toy_engine import ToyEngine, toy_logits
from tests.support.verdict_laws import verdict_from_logits

VOCAB = 320
PROMPT = tuple(range(60, 68))
ROUNDS_MAX = 60
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def head_of(tokens: Sequence[int], **more: Any) -> RoundHead:
    more = {"rule": Rule.TOKEN, "sampling": SAMPLED, "prompt_length": len(PROMPT)} | more
    return make_head(tokens, **more)


def engine(salt: int) -> ToyEngine:
    return ToyEngine(VOCAB, salt, max_model_len=256, num_pages=4096)


def running(target_grammars: Grammars | None, draft_grammars: Grammars | None) -> Pair:
    return Pair(
        Replica("target", engine(1), 0.0, max_num_seqs=8, grammars=target_grammars),
        Replica("draft", engine(2), 0.0, max_num_seqs=8, grammars=draft_grammars),
    )


def player_of(pair: Pair, name: str, rule: Rule, **more: Any) -> Player:
    sampling = GREEDY if rule is Rule.GREEDY else SAMPLED
    return pair.player(PROMPT, rule, sampling, constraint=CONSTRAINTS[name], **more)


async def ended(player: Player, num_draft_tokens: int) -> list[int]:
    """The completion up to its end."""
    for _ in range(ROUNDS_MAX):
        await player.play(num_draft_tokens)
        completion = player.tokens[len(PROMPT) :]
        if eos() in completion:
            return completion[: completion.index(eos()) + 1]
    raise AssertionError(f"no end in {completion}")


def check_meets(name: str, completion: Sequence[int]) -> None:
    """Each token is in the mask of those before it."""
    matcher = PrefixMatcher(grammar(name), grammars())
    for index, token_id in enumerate(completion):
        assert token_id in allowed_ids(matcher), hf_tokenizer().decode(completion)
        matcher.replace_from(index, [token_id])


BOUNDED = ("schema", "regex", "choice")


@pytest.mark.parametrize("draft_masks", [True, False])
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("rule", list(Rule))
async def test_completions_meet_their_constraint_and_end(
    rule: Rule, name: str, draft_masks: bool
) -> None:
    async with running(grammars(), grammars() if draft_masks else None) as pair:
        for seed in range(3):
            texts = []
            for session, k in ((1, 0), (2, 4)):
                player = player_of(pair, name, rule, seed=seed, session=10 * seed + session)
                texts.append(await ended(player, k))
                check_meets(name, texts[-1])
            assert rule.needs_q or texts[0] == texts[1]


async def test_rounds_that_run_ahead_meet_the_constraint() -> None:
    """Also those that a later item of the session allows."""
    async with running(grammars(), None) as pair:
        completion: list[int] = []
        for index, num_known in ((0, 0), (3, 3)):
            tokens = (*PROMPT, *completion[:num_known])
            head = head_of(tokens, constraint=CONSTRAINTS["schema"], round_index=index)
            replies = await pair.target.send(VerifyItem(head, run_ahead=4))
            completion += [reply.verdict.correction[0] for reply in replies]
            check_meets("schema", completion)
        assert len(completion) == 8


async def test_a_draft_with_masks_proposes_what_is_allowed_and_stops_at_the_end() -> None:
    async with running(grammars(), grammars()) as pair:
        whole = hf_tokenizer().encode("brown fox")
        for num_written in (0, 1, len(whole)):
            tokens = (*PROMPT, *whole[:num_written])
            head = head_of(tokens, session=1 + num_written, constraint=CONSTRAINTS["choice"])
            reply = await pair.draft.ask(DraftItem(head, 8, look_ahead=4))
            drafted = list(reply.proposal.token_ids)
            check_meets("choice", [*whole[:num_written], *drafted])
            assert drafted.count(eos()) == (drafted[-1:] == [eos()])
        assert drafted == [eos()]
        done = head_of((*tokens, eos()), session=9, constraint=CONSTRAINTS["choice"])
        reply = await pair.draft.ask(DraftItem(done, 8))
        assert reply.proposal.token_ids == ()


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
async def test_a_verdict_is_that_of_the_masked_logits(rule: Rule) -> None:
    """Rows after a forbidden draft token, or one outside the vocabulary, do not count;
    log-probabilities are those of the raw logits."""
    written = hf_tokenizer().encode('{"')
    committed = (*PROMPT, *written)
    legal = fresh_mask("schema", written)[0]
    for drafted in ((legal,), (legal, 3, 5), (3, legal), (1000, legal)):
        proposal = Proposal(drafted, (None,) * len(drafted) * rule.needs_q)
        head = head_of(committed, rule=rule, constraint=CONSTRAINTS["schema"])
        async with running(grammars(), None) as pair:
            item = VerifyItem(head, EncodedProposal.of(proposal), num_logprobs=2)
            reply = await pair.target.ask(item)
        tokens = [*committed, *(v if v < VOCAB else 0 for v in drafted)]
        rows = torch.stack(
            [toy_logits(1, tokens[:n], VOCAB) for n in range(len(committed), len(tokens) + 1)]
        )
        path = list(written)
        for row, token_id in enumerate((*drafted, None)):
            allowed = fresh_mask("schema", path)
            mask = torch.full((VOCAB,), -torch.inf)
            mask[allowed] = 0.0
            rows[row] += mask
            if token_id not in allowed:
                break
            path.append(token_id)
        expected = verdict_from_logits(
            rows, SAMPLED, TokenHistory(), proposal, RoundNoise(7, rule, len(committed))
        )
        assert reply.verdict == expected
        top = toy_logits(1, committed, VOCAB).double().log_softmax(0).max()
        assert reply.logprobs[len(drafted)].top[0][1] == pytest.approx(float(top))


@pytest.mark.parametrize("before", ["", "["])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
async def test_a_constraint_too_hard_behind_a_draft_token_ends_a_session_only_if_it_is_accepted(
    rule: Rule, before: str
) -> None:
    """What follows a quote takes more than a step may. If accepted, the quote is committed and the
    next round fails, as in plain decoding; if rejected, it has no effect."""
    strings = [{"type": "string", "pattern": f"^.{{0,{i}}}[a-x].{{0,{i}}}$"} for i in range(256)]
    schema: dict[str, Any] = {"anyOf": [*strings, {"type": "integer"}]}
    constraint = Constraint.of_schema({"type": "array", "items": schema} if before else schema)
    first = tuple(hf_tokenizer().encode(before))
    quote, digit = (hf_tokenizer().encode(text)[0] for text in '"1')
    group = DraftDistribution((quote, digit), (2**15, 2**15))
    q = (*[None] * len(first), group, None) if rule.needs_q else ()
    proposal = EncodedProposal.of(Proposal((*first, quote, digit), q))
    bias = tuple((token_id, 2.0) for token_id in (*first, quote))  # Both outcomes occur.
    likely_quote, ends = SamplingParams(logit_bias=bias), set()
    async with running(grammars(), None) as pair:

        async def asked(
            session: int, seed: int, proposal: EncodedProposal, tokens: tuple[int, ...] = ()
        ) -> Any:
            head = head_of(
                (*PROMPT, *tokens),
                rule=rule,
                sampling=likely_quote,
                session=session,
                seed=seed,
                constraint=constraint,
                round_index=len(tokens),
            )
            return await pair.target.ask(VerifyItem(head, proposal))

        for seed in range(24):
            reply = await asked(2 * seed, seed, proposal)
            tokens = outcome_of(reply, proposal, rule, seed, len(PROMPT)).token_ids
            ends.add(tokens[-1] == quote)
            if quote in tokens:
                assert tokens[-1] == quote
                failed = await asked(2 * seed, seed, EMPTY_ENCODED_PROPOSAL, tokens)
                words = f"json_schema: cannot be applied after {len(tokens)} token"
                assert words in failed.message
            if rule is Rule.COUPLED:
                plain = await asked(2 * seed + 1, seed, EMPTY_ENCODED_PROPOSAL)
                assert plain.verdict.correction == tokens[:1]
    assert ends == {True, False}


def failing() -> Any:
    raise ConfigError("the model has no tokenizer")


@pytest.mark.parametrize(
    ("make", "constraint", "said"),
    [
        (lambda: None, CONSTRAINTS["regex"], "regex: this target has no tokenizer"),
        (lambda: Grammars(failing), CONSTRAINTS["regex"], "regex: the model has no tokenizer"),
        (
            grammars,
            Constraint.of_schema({"type": "nonsense"}),
            "json_schema: cannot be compiled: Invalid type: nonsense",
        ),
    ],
)
async def test_what_a_target_cannot_hold_to_is_refused_alone(
    make: Callable[[], Grammars | None], constraint: Constraint, said: str
) -> None:
    async with running(make(), None) as pair:
        bad, plain = head_of(PROMPT, constraint=constraint), head_of(PROMPT, session=2)
        heard = await pair.target.send(VerifyItem(bad), VerifyItem(plain))
        answers = {answer.key.session_id: answer for answer in heard}
        refused = answers[session_name(1)]
        assert (refused.code, refused.message) == (9, said)
        assert isinstance(answers[session_name(2)], VerdictReply)


async def test_a_refusal_that_is_remembered_keeps_no_request() -> None:
    """It also does not keep the time limit of a draft whose stream closes during the
    compilation."""
    head = head_of(PROMPT, constraint=Constraint.of_regex("(a"))
    before = [one for one in gc.get_objects() if type(one) is StepRequest]
    async with running(grammars(), grammars()) as pair:
        assert isinstance(await pair.target.ask(VerifyItem(head)), Refused)
        pair.draft.service.connect(lambda _: None).receive([DraftItem(head, 2)])
        await pair.draft.settle()
        other = head_of(PROMPT, constraint=CONSTRAINTS["regex"], session=2)
        connection = pair.draft.service.connect(lambda _: None)
        connection.receive([DraftItem(other, 2, budget_us=10**9)])
        connection.close()
        await pair.draft.settle()
        gc.collect()
        after = [one for one in gc.get_objects() if type(one) is StepRequest]
        assert len(after) <= len(before)


async def test_a_completion_that_breaks_its_constraint_is_refused() -> None:
    head = head_of((*PROMPT, *hf_tokenizer().encode("fox")), constraint=CONSTRAINTS["schema"])
    async with running(grammars(), grammars()) as pair:
        refused = await pair.target.ask(VerifyItem(head))
        assert refused.message == "json_schema: does not allow token 0 of the completion"
        drafted = await pair.draft.ask(DraftItem(head, 2))
        assert isinstance(drafted, ProposalReply)


async def test_a_step_compiles_nothing_however_many_constraints_are_in_flight() -> None:
    """More constraints than a process keeps wait for one step. Each is compiled once, on a thread
    of its own, and not again for the next rounds."""
    names: list[str] = []
    free = asyncio.Event()

    class Noting(GrammarTokenizer):
        def compile(self, constraint: Constraint) -> Grammar:
            names.append(threading.current_thread().name)
            return super().compile(constraint)

    class Held(InlineDriver):
        async def run(self, *step: Any) -> None:
            await free.wait()
            await super().run(*step)

    known = Grammars(lambda: Noting(hf_tokenizer(), (eos(),)))
    target = Replica("target", engine(1), max_num_seqs=8, grammars=known, driver=Held(lambda: 0.0))
    number = GRAMMARS_MAX + 6
    heads = [
        head_of(PROMPT, session=session, constraint=Constraint.of_regex(f"[a-z]{{{session + 2}}}"))
        for session in range(number)
    ]
    for head in heads:
        target.link.send(VerifyItem(head))
    async with asyncio.timeout(PATIENCE_S):
        while len(names) < number:
            await asyncio.sleep(0.01)
    free.set()
    await target.listener.wait(number)
    answers = await target.send(*(VerifyItem(replace(head, round=1)) for head in heads))
    assert [type(answer) for answer in answers] == [VerdictReply] * number
    assert len(names) == number
    assert all(name.startswith("grammar") for name in names)
    await target.close()


async def test_a_bug_in_a_compilation_refuses_its_item() -> None:
    class Buggy(GrammarTokenizer):
        def compile(self, constraint: Constraint) -> Grammar:
            raise RecursionError

    known = Grammars(lambda: Buggy(hf_tokenizer(), (eos(),)))
    async with running(known, None) as pair:
        refused = await pair.target.ask(
            VerifyItem(head_of(PROMPT, constraint=CONSTRAINTS["regex"]))
        )
        assert refused.code == OutriderError.grpc_code
        assert "could not be compiled" in refused.message
