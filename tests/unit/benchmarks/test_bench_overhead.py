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
    CannedReplica,
    added_ms,
    bytes_per_round,
    propose,
    round_figures,
    verify,
)
from benchmarks.prompts import BenchPrompt
from deploy.cli.main import main
from outrider.errors import Unavailable
from outrider.messages import DraftItem, VerifyItem
from outrider.request import RoundReport
from outrider.speculation.sampling_params import Rule


async def test_canned_replicas_answer_within_the_call_or_after_a_time() -> None:
    """With well-formed proposals and verdicts, always the same."""
    item = DraftItem(make_head((1, 2, 3), session=1, round_index=1, rule=Rule.TOKEN), 8)
    heard: list[Any] = []
    CannedReplica(propose, step_s=0.01).connect(heard.extend).receive([item])
    assert not heard
    await asyncio.sleep(0.05)
    proposed = heard.pop()
    assert (proposed.base_length, proposed.cached_length) == (3, 11)
    q = proposed.proposal.open().q
    assert [len(entry.token_ids) for entry in q if entry] == [Q_ENTRIES] * 8
    assert max(max(entry.token_ids) for entry in q if entry) < CANNED.vocab_size
    CannedReplica(verify).connect(heard.extend).receive([VerifyItem(item.head, proposed.proposal)])
    verdict = heard.pop()
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


async def test_a_transport_adds_what_the_coordinator_does_not_take() -> None:
    """Asked at 10.1 s, the coordinator has tokens at 10.5 and 11 s; the client has sent at 10.0 and
    reads them at 10.7 and 11.1 s. A transport that loses chunks is no measurement."""
    stamps: list[float] = []

    class Scripted(BenchClient):
        def __init__(self, *chunk_s: float) -> None:
            self.chunk_s = chunk_s

        async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
            stamps.extend((10.1, 10.5, 11.0))
            return Completion((1, 2), 10.0, 1.2, chunk_s=self.chunk_s)

    first_ms, chunks_ms = await added_ms("grpc", Scripted(0.7, 1.1), stamps)
    assert first_ms == pytest.approx(300)
    assert chunks_ms == pytest.approx([200, 100])
    with pytest.raises(Unavailable, match="by http came 1 chunks where the coordinator had 2"):
        await added_ms("http", Scripted(0.7), stamps)


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
    monkeypatch.setattr("benchmarks.overhead.TURNS", 3)
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
    assert set(added) == {
        f"{name}_{what}" for name in ("grpc", "http")
        for what in ("ttft_added_ms_p50", "chunk_added_ms")
    }  # fmt: skip
    assert all(ms > 0 for ms in added.values())
