"""`bench overhead`: its figures by hand, its canned data, and one small run of each part."""

from __future__ import annotations

import asyncio
import json

import pytest
from rounds import make_head

from benchmarks.overhead import (
    CANNED,
    Q_ENTRIES,
    OverheadOptions,
    RoundClock,
    canned_replica,
    full_rounds,
    round_figures,
    take_turns,
    transport_figures,
)
from benchmarks.prompts import BenchPrompt
from benchmarks.serve_clients import Answer, StreamTimes
from deploy.cli.main import main
from outrider.clock import run_virtually
from outrider.errors import Unavailable
from outrider.messages import (
    DraftItem,
    ProposalReply,
    Refused,
    VerdictReply,
    VerifyItem,
)
from outrider.sessions.store import Append, CacheState, Counters
from outrider.speculation.sampling_params import Rule

MS = 1_000_000

STEP_MS = 20.0


def append(session: int, num_rounds: int) -> Append:
    cache = CacheState()
    counters = Counters(num_rounds, 0, 0)
    return Append(f"{session:032x}", 1, "c", 0, (1,), 0, cache, cache, counters)


def draft_item(session: int, round_index: int = 1, num_draft_tokens: int = 8) -> DraftItem:
    head = make_head((1, 2, 3), session=session, round_index=round_index, rule=Rule.TOKEN)
    return DraftItem(head, num_draft_tokens)


def test_steps_take_their_time_and_as_many_as_fit() -> None:
    """Five at once and one in between, two a step of 10 ms: they end at 10, 20 and 30 ms."""
    heard: list[tuple[float, int]] = []

    async def play() -> list[float]:
        replica = canned_replica("draft", CANNED, step_s=0.01, sessions_max=2)
        loop = asyncio.get_running_loop()
        connection = replica.connect(lambda answers: heard.append((loop.time(), len(answers))))
        connection.receive([draft_item(session) for session in range(1, 6)])
        await asyncio.sleep(0.015)
        connection.receive([draft_item(6)])
        await asyncio.sleep(0.1)
        connection.receive([draft_item(7)])
        await asyncio.sleep(0.1)
        return [seconds for _, _, seconds in replica.held]

    held = run_virtually(play())
    assert heard == [
        (pytest.approx(end), number)
        for end, number in ((0.01, 2), (0.02, 2), (0.03, 2), (0.125, 1))
    ]
    assert held == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.03, 0.015, 0.01])


def stamps(start_ms: float, round_ms: float = 10.0) -> dict[str, int]:
    """Parts of 1, 2, 3 and 1 ms, and the rest for the commit."""
    names = ("draft_sent", "draft_heard", "verify_sent", "verdict_heard", "commit_sent")
    times = dict(zip((*names, "committed"), (0, 1, 3, 6, 7, round_ms), strict=True))
    return {name: int(MS * (1 + start_ms + at)) for name, at in times.items()} | {
        "num_draft_tokens": 8
    }


def test_a_round_lasts_from_the_draft_request_to_the_acknowledged_commit() -> None:
    found = round_figures([stamps(20.0 * i, round_ms=10.0 + i) for i in range(5)])
    assert found["round_ms_p50"] == pytest.approx(12.0)
    assert found["round_ms_p99"] == pytest.approx(13.96)
    assert found["round_parts_ms"] == pytest.approx(
        {"draft": 1, "between": 2, "verify": 3, "decide": 1, "commit": 5, "cycle": 20}
    )


def test_rounds_at_a_sessions_end_do_not_count_and_broken_ones_do_not_hide() -> None:
    short = stamps(0.0) | {"num_draft_tokens": 3}
    assert full_rounds([stamps(0.0), short, stamps(9.0)]) == [stamps(0.0), stamps(9.0)]
    broken = stamps(0.0)
    del broken["verdict_heard"]
    with pytest.raises(Unavailable, match="not played to its end"):
        full_rounds([broken])


def test_one_append_may_commit_several_rounds_of_one_session() -> None:
    """A round is told once, when it is over."""
    clock = RoundClock()
    for session, index in ((1, 1), (1, 2), (2, 1), (1, 3)):
        clock.sent(draft_item(session, index))
    first = clock.commits([append(1, num_rounds=3)])
    assert len(first) == 2
    assert clock.commits([append(1, num_rounds=3)]) == []
    assert len(clock.commits([append(1, num_rounds=4), append(2, num_rounds=2)])) == 2
    clock.stamp(first, "committed")
    assert [index for _, index, _ in clock.take(everything=False)] == [1, 2]
    assert clock.take(everything=False) == []
    assert all("commit_sent" in found for _, _, found in clock.take(everything=True))


def test_the_prompt_alone_and_a_repeated_question_begin_no_round() -> None:
    """And only answers of the right kind are stamped."""
    clock = RoundClock()
    clock.sent(draft_item(1, 0, num_draft_tokens=0))
    item = draft_item(1, 1)
    clock.sent(item)
    clock.sent(item)
    clock.heard(Refused(item.head.key, 14, "busy"))
    [(_, index, found)] = clock.take(everything=True)
    assert index == 1
    assert set(found) == {"num_draft_tokens", "draft_sent"}


def test_canned_replicas_answer_within_the_call() -> None:
    """With well-formed proposals and verdicts, always the same."""
    item, heard = draft_item(1, 1), list[ProposalReply | VerdictReply]()
    canned_replica("draft", CANNED).connect(heard.extend).receive([item])
    proposed = heard.pop()
    assert isinstance(proposed, ProposalReply)
    assert (proposed.base_length, proposed.cached_length) == (3, 11)
    q = proposed.proposal.open().q
    assert [len(entry.token_ids) for entry in q if entry] == [Q_ENTRIES] * 8
    assert max(max(entry.token_ids) for entry in q if entry) < CANNED.vocab_size
    question = VerifyItem(item.head, proposed.proposal)
    canned_replica("target", CANNED).connect(heard.extend).receive([question])
    verdict = heard.pop()
    assert isinstance(verdict, VerdictReply)
    assert (verdict.key, verdict.cached_length) == (item.head.key, 11)
    assert len(verdict.verdict.accept_probability) == 8
    assert len(verdict.verdict.correction) == 9


def passed(firsts: list[float], delivery: float) -> list[list[float]]:
    return [[first, delivery, delivery, delivery * 3] for first in firsts]


def test_what_a_transport_adds_is_a_median_of_pairs_and_a_difference_of_medians() -> None:
    """Pairs, so that a slow turn is slow by every transport."""
    found = transport_figures(
        OverheadOptions(),
        {
            "in_process": passed([0.010, 0.050, 0.020], 0.0001),
            "grpc": passed([0.011, 0.052, 0.020], 0.0003),
            "http": passed([0.013, 0.053, 0.029], 0.0007),
        },
    )
    assert found["in_process_ttft_ms_p50"] == pytest.approx(20)
    assert found["grpc_ttft_added_ms_p50"] == pytest.approx(1)
    assert found["http_ttft_added_ms_p50"] == pytest.approx(3)
    assert found["grpc_chunk_added_ms"] == pytest.approx(0.2)
    assert found["http_chunk_added_ms"] == pytest.approx(0.6)
    assert found["http_chunk_added_ms_p99"] == pytest.approx(2.0)


async def test_a_transport_that_loses_chunks_is_no_measurement() -> None:
    had: list[float] = []

    class Losing:
        async def answer(self, prompt: BenchPrompt, max_tokens: int, times: StreamTimes) -> Answer:
            had.extend((0.0, 0.0))
            times.chunk(1)
            return Answer()

    with pytest.raises(Unavailable, match="by http came 1 chunks where the coordinator had 2"):
        await take_turns(OverheadOptions(turns=1), {"http": Losing()}, had, lambda line: None)


@pytest.mark.xdist_group("redis")
def test_the_command_measures_every_part_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps of a stated time: a message does not wait for the step that runs when it comes. Three
    sessions whose rounds take 28.7 ms and more cannot have more than 104 a second. A chunk is there
    in this process almost as soon as the coordinator has it; a socket takes longer."""
    flags = (
        "--parts", "rounds,queueing,capacity,transports", "--rounds", "20", "--probes", "10",
        "--engine", f"emulated:verify_ms={STEP_MS}", "--target-num-threads", "1", "--sessions", "3",
        "--seconds", "1", "--load", "0.5", "--turns", "3", "--max-tokens", "8", "--step-ms", "4",
    )  # fmt: skip
    assert main(["bench", "overhead", *flags, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    value = json.loads(shown.out)
    assert value["num_rounds"] == 20
    assert 0 < value["round_ms_p50"] <= value["round_ms_p99"]
    # The draft's answer and the target's question carry q; nothing else is large.
    assert 2 * 8 * Q_ENTRIES * 5 < value["bytes_per_round"] < 8_192
    assert value["num_probes"] == 10
    assert value["step_ms_p50"] >= STEP_MS
    assert 0 < value["receive_to_queue_ms_p50"] < STEP_MS
    assert 0 < value["verdict_to_wire_ms_p50"] < STEP_MS
    most, at_load = value["capacity"]["most"], value["capacity"]["at_load"]
    assert 3 < most["rounds_per_second"] < 105
    assert at_load["step_sessions"] >= 1
    for found in (most, at_load):
        assert 0 < found["added_ms_p50"] <= found["added_ms_p99"]
        assert 0 < found["coordinator_cpu"] <= 1.5
    added = value["transports"]
    assert 0 < added["in_process_chunk_ms"] < 4
    assert added["in_process_ttft_ms_p50"] > 4
    for name in ("grpc", "http"):
        assert 0 < added[f"{name}_chunk_added_ms"] < 500
        assert added[f"{name}_chunk_added_ms_p99"] >= added[f"{name}_chunk_added_ms"]
    assert "probe 0" not in shown.err


@pytest.mark.parametrize(
    ("flag", "value"), [("rounds", "-1"), ("probes", "-1"), ("load", "1.5"), ("parts", "all")]
)
def test_wrong_options_end_the_command(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "overhead", f"--{flag}", value]) == 2
    shown = capsys.readouterr()
    assert f"--{flag}: " in shown.err
    assert shown.out == ""
