"""`bench overhead`: its figures by hand, its canned data, and one small run of each part."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from bench_sides import ProcessHere
from rounds import make_head

from benchmarks.measurement import BenchClient, Completion, Decoding
from benchmarks.overhead import (
    CANNED,
    Q_ENTRIES,
    STEP_SESSIONS,
    CannedReplica,
    bytes_per_round,
    propose,
    round_figures,
    take_turns,
    transport_figures,
    verify,
)
from benchmarks.prompts import BenchPrompt
from deploy.cli.main import main
from outrider.clock import run_virtually
from outrider.errors import Unavailable
from outrider.messages import DraftItem, ProposalReply, VerdictReply, VerifyItem
from outrider.request import RoundReport
from outrider.speculation.sampling_params import Rule


def draft_item(session: int) -> DraftItem:
    return DraftItem(make_head((1, 2, 3), session=session, round_index=1, rule=Rule.TOKEN), 8)


def test_steps_take_their_time_and_as_many_as_fit() -> None:
    """65 at once and one in between, in steps of 10 ms: they end at 10 and 20 ms."""
    heard: list[tuple[float, int]] = []

    async def play() -> None:
        replica = CannedReplica(propose, step_s=0.01)
        loop = asyncio.get_running_loop()
        connection = replica.connect(lambda answers: heard.append((loop.time(), len(answers))))
        connection.receive([draft_item(session) for session in range(1, STEP_SESSIONS + 2)])
        await asyncio.sleep(0.005)
        connection.receive([draft_item(99)])
        await asyncio.sleep(0.1)
        connection.receive([draft_item(100)])
        await asyncio.sleep(0.1)

    run_virtually(play())
    assert heard == [
        (pytest.approx(end), number)
        for end, number in ((0.01, STEP_SESSIONS), (0.02, 2), (0.115, 1))
    ]


def test_canned_replicas_answer_within_the_call() -> None:
    """With well-formed proposals and verdicts, always the same."""
    item, heard = draft_item(1), list[ProposalReply | VerdictReply]()
    CannedReplica(propose).connect(heard.extend).receive([item])
    proposed = heard.pop()
    assert isinstance(proposed, ProposalReply)
    assert (proposed.base_length, proposed.cached_length) == (3, 11)
    q = proposed.proposal.open().q
    assert [len(entry.token_ids) for entry in q if entry] == [Q_ENTRIES] * 8
    assert max(max(entry.token_ids) for entry in q if entry) < CANNED.vocab_size
    question = VerifyItem(item.head, proposed.proposal)
    CannedReplica(verify).connect(heard.extend).receive([question])
    verdict = heard.pop()
    assert isinstance(verdict, VerdictReply)
    assert (verdict.key, verdict.cached_length) == (item.head.key, 11)
    assert len(verdict.verdict.accept_probability) == 8
    assert len(verdict.verdict.correction) == 9
    # The draft's answer and the target's question carry q; nothing else is large.
    assert 2 * 8 * Q_ENTRIES * 5 < bytes_per_round() < 8_192


def test_a_round_lasts_from_the_draft_request_to_the_acknowledged_commit() -> None:
    reports = [RoundReport(i, (), 0, 1.0, 2.0, 0.5, 0.5, 1.0 + i) for i in range(5)]
    found = round_figures(reports)
    assert (found["round_ms_p50"], found["round_ms_p99"]) == pytest.approx((7.0, 8.96))
    assert found["round_parts_ms"] == {
        "draft": 1, "wire": 2, "queue": 0.5, "verify": 0.5, "commit": 3,
    }  # fmt: skip


def test_what_a_transport_adds_is_a_median_of_pairs_and_a_difference_of_medians() -> None:
    """Pairs, so that a slow turn is slow by every transport."""
    found = transport_figures(
        {
            "in_process": [(10.0, [0.1] * 3), (50.0, [0.1] * 3), (20.0, [0.1] * 3)],
            "grpc": [(11.0, [0.3] * 3), (52.0, [0.3] * 3), (20.0, [0.3, 0.9, 0.9])],
            "http": [(13.0, [0.7] * 3), (53.0, [0.7] * 3), (29.0, [0.7] * 3)],
        },
    )
    assert (found["in_process_ttft_ms_p50"], found["in_process_chunk_ms"]) == (20.0, 0.1)
    assert (found["grpc_ttft_added_ms_p50"], found["http_ttft_added_ms_p50"]) == (1.0, 3.0)
    assert found["grpc_chunk_added_ms"] == pytest.approx(0.2)
    assert found["http_chunk_added_ms"] == pytest.approx(0.6)


async def test_a_transport_that_loses_chunks_is_no_measurement() -> None:
    had: list[float] = []

    class Losing(BenchClient):
        async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
            had.extend((0.0, 0.0))
            return Completion((1, 2), 0.0, 1.0, chunk_s=(1.0,))

    with pytest.raises(Unavailable, match="by http came 1 chunks where the coordinator had 2"):
        await take_turns({"http": Losing()}, had, lambda line: None)


@pytest.mark.xdist_group("redis")
def test_the_command_measures_every_part_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in this process. Three sessions whose rounds take 28.7 ms and more cannot have more than
    104 a second."""

    def service_process(name: str, config: Any) -> ProcessHere:
        setup = {"service": name, "config": asdict(replace(config, port=0))}
        return ProcessHere("benchmarks.processes:service", name, setup)

    monkeypatch.setattr("benchmarks.overhead.Process", ProcessHere)
    monkeypatch.setattr("benchmarks.overhead.service_process", service_process)
    monkeypatch.setattr("benchmarks.overhead.WARM_UP_S", 0.5)
    monkeypatch.setattr("benchmarks.overhead.WARM_UP_ROUNDS", 10)
    for name, value in (("TURNS", 3), ("TURN_TOKENS", 8), ("TURN_STEP_MS", 4.0)):
        monkeypatch.setattr(f"benchmarks.overhead.{name}", value)
    flags = (
        "--parts", "rounds,capacity,transports", "--rounds", "20", "--sessions", "3", "--seconds",
        "1", "--json",
    )  # fmt: skip
    assert main(["bench", "overhead", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    value = json.loads(shown.out)
    assert value["num_rounds"] == 20
    assert 0 < value["round_ms_p50"] <= value["round_ms_p99"]
    capacity = value["capacity"]
    assert 3 < capacity["rounds_per_second"] < 125, "tokens a round are a mean"
    assert capacity["coordinator_ms_per_round"] > 0
    added = value["transports"]
    assert 0 < added["in_process_chunk_ms"] < 4
    assert added["in_process_ttft_ms_p50"] > 4
    assert {"grpc_ttft_added_ms_p50", "http_chunk_added_ms"} <= set(added)
