"""Plain decoding ahead of the coordinator: the same tokens, fewer questions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outrider.errors import Overloaded
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import Refused, ReplyKey, Resync, VerifyAnswer, VerifyItem
from outrider.replica.step_loop import StepLoop
from outrider.replica.step_request import CANCELLED_CODE, AnswerSender, StepRequest
from outrider.speculation.proposal import EncodedProposal, Proposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service.run_ahead import RunAheads
from tests.support.rounds import Player, Replica, make_head, session_name
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.virtual

PROMPT = (1, 2, 3)
RULE = Rule.TOKEN
HELD_S = 0.04


def target(**options: Any) -> Replica:
    return Replica("target", ToyEngine(**options))


async def frames_of(setting: Replica, item: VerifyItem) -> list[Sequence[VerifyAnswer]]:
    """The answers to an item on another connection."""
    frames: list[Sequence[VerifyAnswer]] = []
    connection = setting.service.connect(frames.append)
    connection.receive([item])
    await setting.settle()
    connection.close()
    return frames


async def answers_alone(item: VerifyItem) -> list[VerifyAnswer]:
    """The answers of a target that has seen nothing else."""
    alone = target()
    answers = await alone.send(item)
    await alone.close()
    return answers


@pytest.fixture
async def setting() -> AsyncIterator[Replica]:
    async with target() as made:
        yield made


async def plain_tokens(count: int) -> list[int]:
    """The target's tokens when each round is asked for."""
    other = target()
    player = Player(PROMPT, RULE, SamplingParams(), (other.link, other.listener))
    for _ in range(count):
        await player.play(0)
    await other.close()
    return player.tokens


def own_tokens(answers: Sequence[VerifyAnswer]) -> dict[int, int]:
    """Round -> token of the verdicts; repeated ones must agree."""
    tokens: dict[int, int] = {}
    for answer in answers:
        (token_id,) = answer.verdict.correction
        assert tokens.setdefault(answer.key.round, token_id) == token_id
    return tokens


def ask_round(tokens: Sequence[int], base: int, round_index: int, run_ahead: int) -> VerifyItem:
    head = make_head(tokens, base, rule=RULE, round_index=round_index)
    return VerifyItem(head, run_ahead=run_ahead)


async def test_it_goes_on_as_far_as_allowed_with_the_same_tokens(setting: Replica) -> None:
    """One question with an allowance of 5 gives 6 verdicts, equal to those of 6 questions. The
    first is sent at once. The third later one takes two along, so that the coordinator can ask for
    more before the target pauses. The others are sent with the last one of the allowance."""
    wanted = await plain_tokens(6)
    frames = await frames_of(setting, ask_round(PROMPT, 0, 0, 5))
    assert [[answer.key.round for answer in frame] for frame in frames] == [[0], [1, 2, 3], [4, 5]]
    answers = [answer for frame in frames for answer in frame]
    assert own_tokens(answers) == dict(enumerate(wanted[3:]))
    assert [answer.cached_length for answer in answers] == list(range(3, 9))


@pytest.mark.parametrize(
    ("interval_ms", "sizes"), [(0, [1] * 16), (25, [1, 3, 3, 2, 3, 3, 1]), (1000, [1, 8, 7])]
)
async def test_verdicts_wait_for_others_during_the_stream_interval(
    interval_ms: int, sizes: list[int]
) -> None:
    """A step takes 10 ms. The verdict of the eighth later round never waits."""
    setting = Replica("target", ToyEngine(), step_s=0.01, stream_interval_ms=interval_ms)
    frames = await frames_of(setting, ask_round(PROMPT, 0, 0, 15))
    assert [len(frame) for frame in frames] == sizes
    assert [answer.key.round for frame in frames for answer in frame] == list(range(16))
    await setting.close()


async def test_the_middle_verdict_waits_if_the_rounds_after_it_take_long_enough() -> None:
    """A step takes 10 ms, so the 15 rounds after the middle take more than four intervals."""
    setting = Replica("target", ToyEngine(), step_s=0.01, stream_interval_ms=25)
    frames = await frames_of(setting, ask_round(PROMPT, 0, 0, 31))
    assert [len(frame) for frame in frames] == [1] + [3] * 10 + [1]
    await setting.close()


async def test_no_verdict_waits_after_a_step_that_is_longer_than_the_stream_interval() -> None:
    """A prompt of 200 tokens takes four steps of 64 tokens, each of 50 ms. Later steps take 10."""

    class Uneven(ToyEngine):
        def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
            is_prompt = session_name(2) in [step.sequence_id for step in steps]
            self._pass_s = 0.05 if is_prompt else 0.01
            return super().forward(steps)

    setting = Replica(
        "target", Uneven(max_model_len=256), stream_interval_ms=40, max_num_batched_tokens=64
    )
    setting.link.send(VerifyItem(make_head((1,) * 200, 0, session=2)))
    frames = await frames_of(setting, ask_round(PROMPT, 0, 0, 15))
    assert [len(frame) for frame in frames][:4] == [1, 1, 1, 1]
    assert max(map(len, frames)) > 1
    await setting.close()


async def test_a_verdict_that_ends_the_text_takes_held_ones_along() -> None:
    wanted = await plain_tokens(6)
    setting = target(eos_token_ids=(wanted[5],))
    frames = await frames_of(setting, ask_round(PROMPT, 0, 0, 5))
    assert wanted[5] not in wanted[3:5]
    assert [answer.key.round for answer in frames[1]] == [1, 2]
    await setting.close()


async def test_a_refusal_takes_held_verdicts_along_at_once() -> None:
    """The coordinator waits for the refusal. A step takes 10 ms, and the fourth round fails."""
    setting = Replica("target", ToyEngine(), step_s=0.01, stream_interval_ms=1000)
    setting.engine.breaks_after = lambda tokens: len(tokens) == 6
    setting.link.send(ask_round(PROMPT, 0, 0, 15))
    async with asyncio.timeout(0.5):
        await setting.listener.wait(4)
    assert isinstance(setting.listener.answers[-1], Refused)
    await setting.close()


def refused(session: int, message: str) -> Refused:
    """An answer identified by its message."""
    return Refused(ReplyKey(session_name(session), 1, 0), 13, message)


async def test_a_held_answer_leaves_in_time_or_with_a_later_one_of_its_session() -> None:
    sent: list[tuple[float, list[str]]] = []

    def note(answers: Sequence[Refused]) -> None:
        sent.append((asyncio.get_running_loop().time(), [one.message for one in answers]))

    outlet = AnswerSender(note)
    outlet.hold([refused(1, "first")], HELD_S)
    await asyncio.sleep(0.01)
    outlet.hold([refused(1, "second"), refused(2, "second's")], HELD_S)
    outlet.send([refused(2, "last")])
    await asyncio.sleep(0.99)
    outlet.hold([refused(1, "third"), refused(2, "third's")], HELD_S)
    outlet.send([refused(1, "fourth")])
    again = refused(1, "fifth")
    outlet.hold([again], HELD_S)
    outlet.send([again])
    await asyncio.sleep(1)
    assert sent == [
        (0.01, ["second's", "last"]),
        (HELD_S, ["first", "second"]),
        (1.0, ["third", "fourth"]),
        (1.0, ["fifth"]),
        (1.0 + HELD_S, ["third's"]),
    ]


async def test_held_answers_leave_with_a_step_if_the_next_one_would_end_too_late() -> None:
    sent: list[tuple[float, int]] = []
    outlet = AnswerSender(
        lambda answers: sent.append((asyncio.get_running_loop().time(), len(answers)))
    )
    await asyncio.sleep(1)
    for _ in range(5):
        outlet.hold([refused(1, "a step of 15 ms")], HELD_S)
        await asyncio.sleep(0.015)
    await asyncio.sleep(1)
    assert sent == [(pytest.approx(1.03), 3), (pytest.approx(1.045 + HELD_S), 2)]


async def test_a_question_on_the_way_extends_and_repeats_nothing(setting: Replica) -> None:
    """Round 2 is asked for after rounds 0..3 were answered. This extends the allowance to round 6,
    and seven rounds take seven forward passes. Asked for again, it returns the verdicts from 2
    on."""
    wanted = await plain_tokens(7)
    await setting.send(ask_round(PROMPT, 0, 0, 3))
    assert sum(session_name(1) in batch for batch in setting.engine.batches) == 4
    setting.link.send(ask_round(wanted[:5], 4, 2, 4))
    answers = await setting.settle()
    assert [answer.key.round for answer in answers] == [0, 1, 2, 3, 4, 5, 6]
    assert own_tokens(answers) == dict(enumerate(wanted[3:]))
    again = await setting.send(ask_round(wanted[:5], 4, 2, 4))
    assert [answer.key.round for answer in again] == [2, 3, 4, 5, 6]
    assert sum(session_name(1) in batch for batch in setting.engine.batches) == 7


async def test_too_many_sessions_drop_the_one_asked_for_least_recently(
    setting: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("target_service.run_ahead.SEQUENCES_PER_REPLICA_MAX", 2)

    async def ask(session: int) -> int:
        """How many rounds the target runs for this question."""
        before = sum(map(len, setting.engine.batches))
        head = make_head(PROMPT, rule=RULE, session=session)
        await setting.send(VerifyItem(head, run_ahead=2))
        return sum(map(len, setting.engine.batches)) - before

    assert [await ask(session) for session in (1, 2, 1, 3)] == [3, 3, 0, 3]
    assert [await ask(session) for session in (1, 2)] == [0, 3]


async def test_one_that_allows_fewer_rounds_gets_no_more_than_those(setting: Replica) -> None:
    """A session resumed with an epoch that was given twice: over another connection, known verdicts
    come again. Its coordinator may draft in a round that was run ahead for the first one, so it
    gets no verdict of that round."""
    wanted = await plain_tokens(3)
    await setting.send(ask_round(PROMPT, 0, 0, 4))
    frames = await frames_of(setting, ask_round(PROMPT, 0, 0, 1))
    assert own_tokens([answer for frame in frames for answer in frame]) == {
        0: wanted[3],
        1: wanted[4],
    }


async def test_a_proposal_takes_over(setting: Replica) -> None:
    """A question with a proposal comes for a round that was run ahead. The target restarts from the
    question's prefix, and the verdict is that of the question alone."""
    wanted = await plain_tokens(2)
    head = make_head(wanted[:4], 3, rule=RULE, round_index=1)
    item = VerifyItem(head, EncodedProposal.of(Proposal((4, 5), (None, None))))
    setting.link.send(ask_round(PROMPT, 0, 0, 8))
    await setting.listener.wait(3)
    setting.link.send(item)
    answers = await setting.settle()
    full = make_head(wanted[:4], rule=RULE, round_index=1)
    [expected] = await answers_alone(VerifyItem(full, item.proposal))
    assert answers[-1].verdict == expected.verdict
    assert answers[-1].key.round == 1
    assert setting.engine.length(session_name(1)) == 6


async def test_other_tokens_than_its_own_restart_it(setting: Replica) -> None:
    wanted = await plain_tokens(1)
    other = (wanted[3] + 1) % 8
    await setting.send(ask_round(PROMPT, 0, 0, 4))
    answers = await setting.send(ask_round((*PROMPT, other), 3, 1, 3))
    alone = await answers_alone(ask_round((*PROMPT, other), 0, 1, 3))
    assert own_tokens(answers) == own_tokens(alone)


async def test_a_release_refuses_the_round_that_waits(setting: Replica) -> None:
    answers: list[VerifyAnswer] = []
    connection = setting.service.connect(answers.extend)
    connection.receive([ask_round(PROMPT, 0, 0, 4)])
    setting.service.release(session_name(1), 1)
    assert [answer.code for answer in answers] == [CANCELLED_CODE]
    await setting.settle()
    assert not setting.engine.batches
    connection.close()


@pytest.mark.parametrize("is_released", [True, False])
async def test_a_session_that_stops_during_its_step_is_refused_its_round(
    setting: Replica, monkeypatch: pytest.MonkeyPatch, is_released: bool
) -> None:
    """Because it is released, or because it has run ahead the longest and others run ahead, too.
    The running step does not count. In the second case, its coordinator asks again."""
    monkeypatch.setattr("target_service.run_ahead.SEQUENCES_PER_REPLICA_MAX", 2)
    frames: list[VerifyAnswer] = []
    connection = setting.service.connect(frames.extend)

    def ask(session: int) -> None:
        head = make_head(PROMPT, rule=RULE, session=session)
        connection.receive([VerifyItem(head, run_ahead=2)])

    def stop(tokens: Sequence[int]) -> bool:
        if len(setting.engine.batches) == 2:
            loop.call_soon(end)  # between launch and end of the second step
        return False

    def end() -> None:
        if is_released:
            setting.service.release(session_name(1), 1)
        else:
            ask(2)
            ask(3)

    loop = asyncio.get_running_loop()
    setting.engine.breaks_after = stop
    ask(1)
    await setting.settle()
    mine = [answer for answer in frames if answer.key.session_id == session_name(1)]
    assert [answer.key.round for answer in mine] == [0, 1]
    assert mine[-1].code == (CANCELLED_CODE if is_released else Overloaded.grpc_code)
    connection.close()


@pytest.mark.parametrize(("length_max", "last"), [(64, 3), (5, 2)])
async def test_a_round_is_formed_and_validated_while_the_round_before_runs(
    length_max: int, last: int
) -> None:
    """It gets its token when that round has ended. No round is formed that may not run."""
    expected: list[VerifyItem] = []
    setting, num_checks = target(max_model_len=length_max), 0
    verifier = setting.service._worker
    expect, check = verifier.expect, verifier._validate

    def note(item: VerifyItem) -> None:
        assert item.head.append == (0,)
        expected.append(item)
        expect(item)

    def count(work: Any) -> None:
        nonlocal num_checks
        num_checks += 1
        check(work)

    verifier.expect, verifier._validate = note, count
    wanted = await plain_tokens(last + 1)
    answers = await setting.send(ask_round(PROMPT, 0, 0, 3))
    assert own_tokens(answers) == dict(enumerate(wanted[3:]))
    assert [item.head.round for item in expected] == [*range(1, last + 1)]
    assert [item.head.append for item in expected] == [(token,) for token in wanted[3 : 3 + last]]
    assert num_checks == 1 + last
    await setting.close()


def test_a_round_that_waits_is_answered_over_the_newest_connection() -> None:
    old, new = AnswerSender(lambda _: None), AnswerSender(lambda _: None)
    first = StepRequest(ask_round(PROMPT, 0, 0, 4), old, 0.0, 1.0)
    again = StepRequest(ask_round(PROMPT, 0, 0, 4), new, 0.5, 2.0)
    steps = StepLoop[VerifyItem, Any](Mock(), 8)
    runs = RunAheads(64, (), HELD_S)
    for work in (first, again):
        runs.arrived(work, steps)
    assert steps.queue.waiting == [first]
    assert first.sender is new


async def test_it_stops_at_the_models_length() -> None:
    """There is room for 6 tokens. Rounds end when the prefix is full, without a refusal; the next
    one is refused when it is asked for."""
    setting = target(max_model_len=6)
    tokens = own_tokens(await setting.send(ask_round(PROMPT, 0, 0, 10)))
    assert list(tokens) == [0, 1, 2, 3]
    [answer] = await setting.send(ask_round((*PROMPT, *tokens.values()), 6, 4, 0))
    assert isinstance(answer, Refused)
    await setting.close()


async def test_a_broken_stream_stops_it_and_a_new_one_picks_it_up(setting: Replica) -> None:
    wanted = await plain_tokens(6)
    setting.link.send(ask_round(PROMPT, 0, 0, 16))
    await setting.listener.wait(1)
    setting.link.sever(ConnectionError("cut"))
    await setting.listener.wait(num_lost=1)
    assert len(await setting.settle()) < 17
    assert [type(one) for one in await setting.send(ask_round(wanted[:5], 4, 2, 3))] == [Resync]
    answers = await setting.send(ask_round(wanted[:5], 0, 2, 3))
    assert own_tokens(answers) == dict(list(enumerate(wanted[3:]))[2:6])
