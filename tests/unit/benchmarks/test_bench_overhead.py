"""`bench overhead`: its statistics by hand, its canned data, and one small run of everything."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rounds import make_head

from benchmarks.overhead import full_rounds, render, summarise
from benchmarks.overhead_canned import (
    Q_ENTRIES,
    VOCAB_SIZE,
    canned_draft,
    canned_proposal,
    canned_target,
    canned_verdict,
)
from benchmarks.overhead_clocks import ClockedExecutor, RoundClock, RoundStamps, counted, now_ns
from benchmarks.overhead_load import QueueTimes
from benchmarks.role_process import RoleProcess
from deploy.cli.main import main
from outrider.errors import ConfigError, Unavailable
from outrider.messages import (
    DraftAnswer,
    DraftItem,
    ProposalReply,
    Refused,
    ReplyKey,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.sessions.store import Append, CacheState, Counters
from outrider.speculation.sampling_params import Rule
from outrider.transport import codec as codecs

MS = 1_000_000
STEP_MS = 20.0


def stamps(start_ms: float, round_ms: float = 10.0, num_bytes: int = 100) -> RoundStamps:
    """Parts of 1, 2, 3 and 1 ms, and the rest for the commit."""
    times = [start_ms + part for part in (0, 1, 3, 6, 7, round_ms)]
    ns = [int(MS * (1 + time)) for time in times]
    return RoundStamps(8, *ns, num_bytes=num_bytes)


def append(session: int, num_rounds: int) -> Append:
    cache = CacheState()
    counters = Counters(num_rounds, 0, 0)
    return Append(f"{session:032x}", 1, "c", 0, (1,), 0, cache, cache, counters)


def draft_item(session: int, round_index: int, num_draft_tokens: int = 8) -> DraftItem:
    head = make_head((1, 2, 3), session=session, round_index=round_index, rule=Rule.TOKEN)
    return DraftItem(head, num_draft_tokens)


def test_a_round_lasts_from_the_draft_request_to_the_acknowledged_commit() -> None:
    rounds = [stamps(20.0 * i, round_ms=10.0 + i, num_bytes=100 + i) for i in range(5)]
    report = summarise(rounds, None, "demo")
    assert report.round_ms_p50 == pytest.approx(12.0)
    assert report.round_ms_p99 == pytest.approx(13.96)
    assert report.bytes_per_round == 102
    assert report.round_parts_ms.draft == pytest.approx(1.0)
    assert report.round_parts_ms.between == pytest.approx(2.0)
    assert report.round_parts_ms.verify == pytest.approx(3.0)
    assert report.round_parts_ms.decide == pytest.approx(1.0)
    assert report.round_parts_ms.commit == pytest.approx(5.0)
    assert report.round_parts_ms.cycle == pytest.approx(20.0)
    assert report.model is None
    assert report.receive_to_queue_ms_p99 is None


def test_queueing_is_reported_beside_the_rounds() -> None:
    times = QueueTimes((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (20.0, 30.0, 40.0))
    report = summarise([stamps(0.0)], times, "demo")
    value = json.loads(report.to_json())
    assert value["receive_to_queue_ms_p50"] == 2.0
    assert value["receive_to_queue_ms_p99"] == 2.98
    assert value["verdict_to_wire_ms_p50"] == 5.0
    assert value["verdict_to_wire_ms_p99"] == 5.98
    assert value["step_ms_p50"] == 30.0
    assert (value["model"], value["num_probes"]) == ("demo", 3)


def test_rounds_at_a_sessions_end_do_not_count_and_broken_ones_do_not_hide() -> None:
    short = replace(stamps(0.0), num_draft_tokens=3)
    assert full_rounds([stamps(0.0), short, stamps(9.0)]) == [stamps(0.0), stamps(9.0)]
    with pytest.raises(Unavailable, match="not played to its end"):
        full_rounds([replace(stamps(0.0), verdict_heard=0)])


def test_one_append_may_commit_several_rounds_of_one_session() -> None:
    clock = RoundClock()
    for session, index in ((1, 1), (1, 2), (2, 1), (1, 3)):
        clock.draft_sent(draft_item(session, index))
    first = clock.commit_sent([append(1, num_rounds=3)])
    assert len(first) == 2
    assert clock.commit_sent([append(1, num_rounds=3)]) == []
    assert len(clock.commit_sent([append(1, num_rounds=4), append(2, num_rounds=2)])) == 2
    clock.committed(first)
    assert [entry.committed > 0 for entry in clock.rounds] == [True, True, False, False]
    assert all(entry.commit_sent for entry in clock.rounds)


def test_the_prompt_alone_and_a_repeated_question_begin_no_round() -> None:
    clock = RoundClock()
    clock.draft_sent(draft_item(1, 0, num_draft_tokens=0))
    assert clock.rounds == []
    clock.draft_sent(draft_item(1, 1))
    first = clock.rounds
    clock.draft_sent(draft_item(1, 1))
    assert clock.rounds == first
    assert first[0].draft_sent > 0


def test_only_answers_of_the_right_kind_are_stamped() -> None:
    clock = RoundClock()
    item = draft_item(1, 1)
    clock.draft_sent(item)
    clock.draft_heard(Refused(item.head.key, 14, "busy"))
    assert clock.rounds[0].draft_heard == 0
    clock.draft_heard(canned_draft().answer(item))
    [found] = clock.rounds
    assert found.draft_heard >= found.draft_sent > 0


def test_bytes_are_those_of_the_serialised_frames() -> None:
    clock = RoundClock()
    item = draft_item(1, 1)
    clock.draft_sent(item)
    codec = counted(codecs.DRAFT, clock)
    request = codec.request_frame([codec.item_to_proto(item)]).SerializeToString()
    answer = codec.answer_to_proto(canned_draft().answer(item))
    reply = codec.reply_frame([answer]).SerializeToString()
    assert codec.parse_reply(reply).items[0] == answer
    [found] = clock.rounds
    assert found.num_bytes == len(request) + len(reply) > 8 * Q_ENTRIES * 6


def test_canned_proposals_are_well_formed() -> None:
    proposal = canned_proposal(8)
    assert proposal == canned_proposal(8)
    q = proposal.open().q
    assert [len(entry.token_ids) for entry in q if entry] == [Q_ENTRIES] * 8
    assert max(max(entry.token_ids) for entry in q if entry) < VOCAB_SIZE
    assert len(set(proposal.token_ids)) == 8


def test_canned_verdicts_fit_their_proposals() -> None:
    verdict = canned_verdict(8)
    assert len(verdict.accept_probability) == 8
    assert len(verdict.correction) == 9
    assert 0 < max(verdict.accept_probability) < 1


def test_canned_replicas_answer_within_the_call() -> None:
    drafted: list[DraftAnswer] = []
    item = draft_item(1, 1)
    canned_draft().connect(drafted.extend).receive([item])
    [proposed] = drafted
    assert isinstance(proposed, ProposalReply)
    assert (proposed.base_length, proposed.cached_length) == (3, 11)
    judged: list[VerifyAnswer] = []
    connection = canned_target().connect(judged.extend)
    connection.receive([VerifyItem(item.head, proposed.proposal)])
    [verdict] = judged
    assert isinstance(verdict, VerdictReply)
    assert verdict.cached_length == 11
    assert verdict.key == item.head.key


async def test_a_verdict_is_stamped_at_the_end_of_its_step() -> None:
    """Of the time that the step is said to take, too; what the event loop does is measured."""
    executor = ClockedExecutor("test", lambda: STEP_MS / 1e3)
    key = ReplyKey("1", 1, 1)
    ended = 0

    def step() -> Sequence[Refused]:
        nonlocal ended
        ended = now_ns()
        return [Refused(key, 1, "")]

    await executor.run(step)
    returned = now_ns()
    executor.close()
    assert ended + STEP_MS * MS <= executor.judged[key] <= returned


@pytest.mark.xdist_group("redis")
def test_the_command_measures_everything_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps of a stated time: a message does not wait for the step that runs when it comes."""
    flags = ("--rounds", "20", "--probes", "10", "--engine", f"emulated:verify_ms={STEP_MS}")
    assert main(["bench", "overhead", *flags, "--target-num-threads", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    value = json.loads(shown.out)
    assert value["num_rounds"] == 20
    assert 0 < value["round_ms_p50"] <= value["round_ms_p99"]
    # The draft's answer and the target's question carry q; nothing else is large.
    assert 2 * 8 * Q_ENTRIES * 6 < value["bytes_per_round"] < 8_192
    assert value["num_probes"] == 10
    assert value["step_ms_p50"] >= STEP_MS
    assert 0 < value["receive_to_queue_ms_p50"] < STEP_MS
    assert 0 < value["verdict_to_wire_ms_p50"] < STEP_MS
    assert "probe 0" not in shown.err


def test_the_table_has_a_row_for_every_figure() -> None:
    times = QueueTimes((1.0,), (2.0,), (3.0,))
    assert render(summarise([stamps(0.0)], times, "demo")).row_count == 10
    assert render(summarise([stamps(0.0)], None, "demo")).row_count == 8


async def test_a_process_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"the model process: engine: 'no such' is wrong"):
        async with RoleProcess("overhead_roles", "model", {"config": {"engine": "no such"}}):
            pass


async def test_a_process_that_is_not_there_is_not_asked() -> None:
    with pytest.raises(Unavailable, match="has not been started"):
        await RoleProcess("overhead_roles", "draft", {}).seen()


@pytest.mark.parametrize("flag", ["rounds", "probes"])
def test_wrong_numbers_end_the_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overhead", f"--{flag}", "-1"]) == 2
    shown = capsys.readouterr()
    assert f"{flag}: -1 is wrong" in shown.err
    assert shown.out == ""
