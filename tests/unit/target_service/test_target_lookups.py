"""Look-ups in the target: rounds with drafts ahead of the coordinator are the rounds that the
coordinator would ask for."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.foundation.tokens import ContinuedTokens, TokenSequence
from outrider.interfaces.messages import Prefix, Resync, VerdictReply, VerifyItem
from outrider.replica.step_request import AnswerSender, StepRequest
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import EncodedProposal, Proposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service import lookups
from target_service.lookups import TargetLookups
from target_service.run_ahead import RunAhead
from tests.support.rounds import RULES, Replica, make_head, outcome_of, session_name
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.virtual

PROMPT = (1, 2, 3, 1, 2, 3, 1)
SEED = 7
NUM_DRAFTED = 3
RUN_AHEAD = 12
MANY = 1_000


def target(**options: Any) -> Replica:
    engine = {name: options.pop(name) for name in ("eos_token_ids",) if name in options}
    return Replica("target", ToyEngine(4, **engine), lookup=NgramDrafter(), **options)


def question(
    tokens: Sequence[int] = PROMPT,
    rule: Rule = Rule.TOKEN,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> VerifyItem:
    base, round_index = fields.pop("base", 0), fields.pop("round_index", 0)
    of = {name: fields.pop(name) for name in ("session", "prompt_length") if name in fields}
    of |= {"round_index": round_index, "seed": fields.pop("seed", SEED)}
    head = make_head(tokens, base, rule=rule, sampling=sampling, **of)
    given = {"run_ahead": RUN_AHEAD, "num_lookup_tokens": NUM_DRAFTED, "num_tokens_left": MANY}
    return VerifyItem(head, **({"indexes": True} | given | fields))


def looked_up(tokens: Sequence[int], rule: Rule, num: int = NUM_DRAFTED) -> tuple[int, ...]:
    head = make_head(tokens, rule=rule)
    request = DraftRequest("s", "", tokens, 1, num, head.params(), rule, head.noise)
    return NgramDrafter().guess(request).token_ids


def texts(answers: Sequence[Any], rule: Rule, tokens: Sequence[int] = PROMPT) -> list[list[int]]:
    """The committed tokens after each verdict, by the coordinator's decision. Each verdict must be
    on the tokens that the earlier ones commit."""
    text, found = [*tokens], []
    for reply in answers:
        sequence = TokenSequence(text)
        assert (reply.committed_length, reply.prefix_digest) == (len(text), sequence.digest())
        proposal = EncodedProposal(reply.looked_up)
        text += outcome_of(reply, proposal, rule, SEED, len(text)).token_ids
        found.append([*text])
    return found


@pytest.mark.parametrize(("rule", "sampling"), RULES)
async def test_rounds_ahead_are_those_that_a_coordinator_would_ask_for(
    rule: Rule, sampling: SamplingParams
) -> None:
    """Each verdict equals that of another target, which gets the proposal from a coordinator."""
    async with target() as setting, target() as other:
        answers = await setting.send(question(PROMPT, rule, sampling))
        assert [reply.key.round for reply in answers] == [*range(RUN_AHEAD + 1)]
        text: Sequence[int] = PROMPT
        for reply, after in zip(answers, texts(answers, rule), strict=True):
            assert reply.looked_up == looked_up(text, rule)
            head = make_head(text, 0, rule=rule, sampling=sampling, seed=SEED)
            head.round = reply.key.round
            proposal = EncodedProposal(reply.looked_up).without_q(rule)
            [asked] = await other.send(VerifyItem(head, proposal))
            assert asked.verdict == reply.verdict
            text = after
        assert any(reply.looked_up for reply in answers)
        sizes = {len(after) for after in texts(answers, rule)}
        assert max(sizes) > len(PROMPT) + RUN_AHEAD + 1  # Draft tokens were accepted.


@pytest.mark.parametrize("room", [1, 2, 5, 9])
async def test_rounds_end_when_the_completion_is_full(room: int) -> None:
    async with target() as setting:
        answers = await setting.send(question(num_tokens_left=room))
        text: Sequence[int] = PROMPT
        for reply, after in zip(answers, texts(answers, Rule.TOKEN), strict=True):
            left = room - (len(text) - len(PROMPT))
            assert left > 0
            assert reply.looked_up == looked_up(text, Rule.TOKEN, min(NUM_DRAFTED, left - 1))
            text = after
        assert len(text) == len(PROMPT) + room


@pytest.mark.parametrize("kind", ["eos", "stop", "ignored"])
async def test_rounds_end_with_the_text(kind: str) -> None:
    """EOS tokens end it unless they are ignored, stop tokens always do."""
    async with target() as setting:
        whole = texts(await setting.send(question()), Rule.TOKEN)
    new = whole[-1][len(PROMPT) :]
    end = next(token_id for token_id in new[3:] if token_id not in new[:3])
    last = next(i for i, text in enumerate(whole) if end in text[len(PROMPT) :])
    eos, stops = ((), (end,)) if kind == "stop" else ((end,), ())
    async with target(eos_token_ids=eos) as setting:
        sampling = SamplingParams(stop_token_ids=stops)
        item = question(sampling=sampling, ignores_eos=kind == "ignored")
        answers = await setting.send(item)
    assert len(answers) == (RUN_AHEAD + 1 if kind == "ignored" else last + 1)


async def test_a_long_prompt_is_indexed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, rounds have no proposals, and the coordinator learns nothing from them."""
    monkeypatch.setattr(lookups, "INDEXED_PER_STEP_MAX", 5)
    prompt = PROMPT * 5
    async with target() as setting:
        answers = await setting.send(question(prompt))
        first = next(i for i, reply in enumerate(answers) if reply.has_looked_up)
        assert first >= (len(prompt) - 17) // 5
        assert not any(reply.looked_up for reply in answers[:first])
        assert all(reply.has_looked_up for reply in answers[first:])
        assert any(reply.looked_up for reply in answers[first:])


async def test_texts_are_indexed_while_the_engine_computes() -> None:
    """Before a step, only the tokens of the round before are, as the step waits for them."""
    drafter, engine, before = NgramDrafter(), ToyEngine(4), list[int]()
    name, launch = make_head(PROMPT).session_id, engine.launch
    engine.launch = lambda steps: (before.append(drafter.length(name)), launch(steps))[1]  # type: ignore[method-assign]
    async with Replica("target", engine, lookup=drafter) as setting:
        item = question(PROMPT * 3, num_lookup_tokens=0, run_ahead=0)
        [first] = await setting.send(item)
        assert not first.has_looked_up
        assert (before, drafter.length(name)) == ([0], 3 * len(PROMPT))
        [text] = texts([first], Rule.TOKEN, PROMPT * 3)
        again = await setting.send(question(text, base=len(text) - 1, round_index=1))
        assert all(reply.has_looked_up for reply in again)
        assert max(b - a for a, b in pairwise(before)) <= len(PROMPT) * 3 + NUM_DRAFTED + 1


async def test_the_text_that_lacks_the_fewest_tokens_is_indexed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "INDEXED_PER_STEP_MAX", 9)
    drafter = NgramDrafter()
    found = TargetLookups(drafter)
    heads = [make_head(tokens, session=i) for i, tokens in enumerate((PROMPT * 3, PROMPT))]
    engine = {head.session_id: TokenSequence(head.append) for head in heads}
    found.index([(head, SamplingParams()) for head in heads], engine.__getitem__)
    assert [drafter.length(head.session_id) for head in heads] == [9 - len(PROMPT), len(PROMPT)]


async def test_an_item_with_another_number_of_draft_tokens_ends_the_rounds_ahead() -> None:
    async with target() as setting:
        answers = await setting.send(question())
        text = texts(answers, Rule.TOKEN)[1]
        again = await setting.send(
            question(text, base=len(text) - 1, round_index=2, num_lookup_tokens=1, run_ahead=20)
        )
        assert [reply.key.round for reply in again] == [*range(2, 23)]
        assert max(len(reply.looked_up) for reply in again) == 1


async def test_a_repeated_item_gets_all_verdicts_again() -> None:
    async with target() as setting:
        answers = await setting.send(question())
        again = await setting.send(question())
        assert [(one.key, one.verdict) for one in again] == [
            (one.key, one.verdict) for one in answers
        ]


async def test_a_target_that_has_lost_the_session_asks_for_its_tokens() -> None:
    async with target() as setting:
        answers = await setting.send(question())
        text = texts(answers, Rule.TOKEN)[-1]
        setting.service.evict([answers[0].key.session_id])
        item = question(text, base=len(text) - 1, round_index=len(answers))
        [resync] = await setting.send(item)
        assert isinstance(resync, Resync)
        found = await setting.send(question(text, round_index=len(answers)))
        assert isinstance(found[0], VerdictReply)
        assert not found[0].has_looked_up  # Its step indexes the text.
        [after, *_] = texts(found, Rule.TOKEN, text)
        assert found[1].looked_up == looked_up(after, Rule.TOKEN)


async def test_a_target_without_a_look_up_proposes_nothing() -> None:
    async with Replica("target", ToyEngine(4)) as setting:
        answers = await setting.send(question())
        assert not any(reply.looked_up for reply in answers)
        assert len(answers) == RUN_AHEAD + 1


def test_tokens_that_a_session_has_lost_are_forgotten() -> None:
    """Another run of the session decides them anew, from the same random numbers."""
    found = TargetLookups(NgramDrafter())
    lost, kept = (1, 2, 3, 1, 2, 0, 1, 2), (1, 2, 3, 1, 2)
    held = TokenSequence(lost)
    params = SamplingParams()
    assert found.propose(make_head(lost, 7), params, held, 1) == Proposal((0,))
    assert found.propose(make_head(kept, 4), params, held, 1) == Proposal((3,))
    assert found.propose(make_head((2, 2, 3, 1, 2), 4), params, held, 1) is None


def test_continued_tokens_are_read_like_a_tuple() -> None:
    tokens = ContinuedTokens([1, 2, 3, 9, 9], 3, (4, 5))
    assert len(tokens) == 5
    assert [*tokens] == [1, 2, 3, 4, 5]
    whole = (1, 2, 3, 4, 5)
    for start in range(7):
        for stop in (*range(7), None):
            assert tokens[start:stop] == [*whole[start:stop]]
    assert (tokens[-1], tokens[0]) == (5, 1)
    with pytest.raises(IndexError):
        tokens[5]


async def test_a_prompt_that_runs_in_parts_is_indexed_once() -> None:
    """Each step validates the item again."""
    drafter, begun = NgramDrafter(), list[str]()
    begin = drafter._begin
    drafter._begin = lambda request: (begun.append(request.session_id), begin(request))[1]
    engine = ToyEngine(4, max_model_len=256)
    prompt = PROMPT * 20
    options: dict[str, Any] = {"lookup": drafter, "max_num_batched_tokens": 16}
    async with Replica("target", engine, **options) as setting:
        answers = await setting.send(question(prompt, run_ahead=2))
        assert len(engine.counts) > 8
        assert answers[0].looked_up == looked_up(prompt, Rule.TOKEN)
        assert begun == [answers[0].key.session_id]


async def test_a_plain_round_may_show_what_its_look_up_would_propose() -> None:
    """One round of those that run ahead, because the coordinator compares its tokens with several
    rounds."""
    plain: dict[str, Any] = {"num_lookup_tokens": 0, "run_ahead": 4}
    async with target() as setting, target() as other:
        answers = await setting.send(question(num_probe_tokens=NUM_DRAFTED, **plain))
        usual = await other.send(question(**plain))
        assert [one.verdict for one in answers] == [one.verdict for one in usual]
        assert not any(one.looked_up for one in answers)
        assert [one.has_looked_up for one in answers] == [True, *[False] * 4]
        assert answers[0].probed == looked_up(PROMPT, Rule.TOKEN)
        found = texts(answers, Rule.TOKEN)
        asked = {"base": len(found[2]) - 1, "round_index": 3, "num_probe_tokens": 2, "run_ahead": 5}
        asked["num_tokens_left"] = MANY - 3
        more = await setting.send(question(found[2], **plain | asked))
        assert [one.key.round for one in more] == [5, 6, 7, 8]  # Others have run already.
        assert [one.has_looked_up for one in more] == [True, *[False] * 3]
        assert more[0].probed == looked_up(found[4], Rule.TOKEN, 2)


async def test_a_round_that_continues_a_run_ahead_shows_it_once() -> None:
    """The run-ahead has used all its rounds, so the coordinator's item is the next round."""
    plain: dict[str, Any] = {"num_lookup_tokens": 0, "run_ahead": 2}
    async with target() as setting:
        found = texts(await setting.send(question(**plain)), Rule.TOKEN)[-1]
        asked = {"base": len(found) - 1, "round_index": 3, "num_probe_tokens": 2}
        asked["num_tokens_left"] = MANY - 3
        more = await setting.send(question(found, **plain | asked))
        assert [(one.key.round, one.has_looked_up) for one in more] == [
            (3, True),
            (4, False),
            (5, False),
        ]


def known(tokens: Sequence[int], length: int | None = None) -> Prefix:
    length = len(tokens) if length is None else length
    return Prefix(length, TokenSequence(tokens).digest(length))


ANSWER = (5, 6, 7, 8, 9)


async def lesson(learned: Prefix | None, *, evicted: bool = False) -> int:
    """Whether another session of the tenant gets a proposal from the session's answer, after the
    session has ended at the target. Returns the number of steps until then; 0 = not in 9."""
    drafter, engine = SuffixDrafter(), ToyEngine(20)
    async with Replica("target", engine, lookup=drafter) as setting:
        text = (1, 2, *ANSWER)
        await setting.send(question(text, prompt_length=2, run_ahead=0, num_lookup_tokens=1))
        name = session_name(1)
        if evicted:
            setting.service.evict([name])
            await setting.settle()
        setting.service.release(name, 1, learned)
        await setting.settle()
        for step in range(1, 10):
            item = question((9, 5, 6), session=1 + step, seed=step, run_ahead=0)
            [reply] = await setting.send(item)
            if reply.looked_up:
                assert reply.looked_up[0] == 7
                return step
    return 0


async def test_an_answer_is_learned_as_far_as_its_coordinator_says() -> None:
    text = (1, 2, *ANSWER)
    assert await lesson(known(text)) == 2  # The first step after the release learns it.
    assert await lesson(known(text, 5)) == 2
    assert await lesson(known(text, 4)) == 0


@pytest.mark.parametrize(
    ("learned", "evicted"),
    [
        (None, False),
        (known((1, 2, *ANSWER)), True),
        (known((1, 2, 5, 6, 7, 8, 8)), False),  # The target has decided otherwise.
        (known((1, 2, *ANSWER, 1, 1, 1)), False),  # The target has never held so much.
    ],
)
async def test_nothing_else_of_a_session_is_learned(learned: Prefix | None, evicted: bool) -> None:
    assert await lesson(learned, evicted=evicted) == 0


def test_what_is_to_learn_waits_for_texts_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it waited longer, it could wait for ever."""
    monkeypatch.setattr(lookups, "INDEXED_PER_STEP_MAX", 9)
    drafter = SuffixDrafter()
    found, old, new = TargetLookups(drafter), make_head(PROMPT), make_head(PROMPT * 3, session=2)
    held = {head.session_id: TokenSequence(head.append) for head in (old, new)}
    assert found.propose(old, SamplingParams(), TokenSequence(), 1) is not None
    found.learn(old.session_id, held[old.session_id], known(PROMPT))
    for least, most, has_learned in ((9, 9, False), (10, 17, True), (19, 21, True)):
        found.index([(new, SamplingParams())], held.__getitem__)
        assert least <= drafter.length(new.session_id) <= most
        assert (drafter._history.of("") is not None) is has_learned


@pytest.mark.parametrize(("run_ahead", "continues"), [(1, False), (2, True), (4, True)])
def test_an_item_must_allow_only_the_rounds_ahead_that_have_room(
    run_ahead: int, continues: bool
) -> None:
    """Draft tokens were accepted, so fewer rounds have room than were allowed. If the target began
    again with the coordinator's item, it would answer some rounds twice, perhaps differently."""
    first = question(PROMPT, num_lookup_tokens=1, num_tokens_left=5, run_ahead=4)
    ahead = RunAhead(StepRequest(first, AnswerSender(lambda _: None), 0.0, 1.0), ())
    accepted = Verdict((1.0,), (2, 3))
    reply = VerdictReply(first.head.key, accepted, len(PROMPT) + 1, looked_up=(2,))
    ahead.add(reply, 0.0, 0.0)
    text = (*PROMPT, 2, 3)
    asked = question(text, base=len(text) - 1, round_index=1)
    asked = replace(asked, num_lookup_tokens=1, num_tokens_left=3, run_ahead=run_ahead)
    assert ahead.continues(asked) is continues


async def test_a_round_after_what_the_target_takes_for_the_end_is_answered() -> None:
    """The coordinator decides where a completion ends."""
    async with target(eos_token_ids=(0, 1, 2, 3)) as setting:
        [first] = await setting.send(question())
        [text] = texts([first], Rule.TOKEN)
        [second] = await setting.send(question(text, base=len(text) - 1, round_index=1))
        assert second.key.round == 1
        [_, _] = texts([first, second], Rule.TOKEN)
