"""`bench overhead`: figures, and a small run of each part; processes of benchmarks."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.measurement import BenchClient, Completion
from outrider.bench.overhead import added_ms, round_figures
from outrider.bench.processes import Process, delayed
from outrider.errors import ConfigError
from outrider.foundation.clock import run_virtually
from outrider.interfaces.request import GenerateRequest, RoundReport
from tests.support.bench_sides import ProcessHere
from tests.support.command_lines import reported


def test_a_round_lasts_from_the_draft_request_to_the_acknowledged_commit() -> None:
    found = round_figures([RoundReport(i, (), 0, 1.0, 2.0, 0.5, 0.5, 1.0 + i) for i in range(5)])
    assert (found["round_ms_p50"], found["round_ms_p99"]) == pytest.approx((7.0, 8.96))
    assert found["round_parts_ms"] == {
        "draft": 1,
        "wire": 2,
        "queue": 0.5,
        "verify": 0.5,
        "commit": 3,
    }


async def test_a_transport_adds_what_the_coordinator_does_not_take() -> None:
    """The coordinator gets the request at 10.1 s and has tokens at 10.5 and 11 s. The client reads
    them at 10.7 and 11.1 s."""
    stamps: list[float] = []

    class Scripted(BenchClient):
        async def generate(self, request: GenerateRequest) -> Completion:
            stamps.extend((10.1, 10.5, 11.0))
            return Completion((1, 2), 10.0, 1.2, chunk_s=(0.7, 1.1))

    first_ms, chunks_ms = await added_ms(Scripted(), stamps)
    assert first_ms == pytest.approx(300)
    assert chunks_ms == pytest.approx([200, 100])


@pytest.mark.xdist_group("redis")
def test_the_command_measures_every_part_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions whose rounds take at least 28.7 ms have at most 104 rounds a second. In the
    part `steps`, they have a plain token in 15 ms, and a round with a remote draft in 18 ms."""
    for name, value in {
        "processes.Process": ProcessHere,
        "overhead.Process": ProcessHere,
        "overhead.WARM_UP_S": 0.5,
        "overhead.WARM_UP_ROUNDS": 10,
        "overhead.TURNS": 3,
        "step_overhead.WARM_UP_S": 0.2,
    }.items():
        monkeypatch.setattr(f"outrider.bench.{name}", value)
    parts = "rounds,capacity,transports,steps"
    flags = ("--parts", parts, "--rounds", "20", "--sessions", "3", "--seconds", "1")
    steps = ("--steps-ms", "15", "--drafting", "plain,remote", "--temperatures", "1")
    value, err = reported(capsys, "bench", "overhead", *flags, *steps)
    assert value["num_rounds"] == 20
    assert 0 < value["round_ms_p50"] <= value["round_ms_p99"]
    capacity = value["capacity"]
    assert 3 < capacity["rounds_per_second"] < 125, "tokens a round are a mean"
    assert capacity["coordinator_ms_per_round"] > 0
    names = "grpc_ttft_added_ms_p50 grpc_chunk_added_ms http_ttft_added_ms_p50 http_chunk_added_ms"
    assert value["transports"].keys() == set(names.split())
    assert all(ms > 0 for ms in value["transports"].values())
    assert "turn 2 of 2: 15 ms, 3 sessions, plain, temperature 1" in err
    plain, remote = value["steps"]
    names = ("step_ms", "sessions", "drafting", "temperature", "num_draft_tokens")
    assert [plain[name] for name in names] == [15, 3, "plain", 1, 0]
    assert [remote[name] for name in names] == [15, 3, "remote", 1, 3]
    assert (plain["tokens_per_round"], plain["ideal_tokens_per_second"]) == (1, 200)
    assert 1 < remote["tokens_per_round"] < 4
    for row in value["steps"]:
        assert 0 < row["fraction_of_ideal"] < 1.1
        assert row["seconds"] == pytest.approx(1.0, abs=0.3)
        assert all(row[f"{name}_core_ms_per_token"] > 0 for name in ("target", "client", "redis"))
    assert plain["draft_core_ms_per_token"] is None
    assert remote["draft_core_ms_per_token"] > 0


def test_each_message_takes_longer_in_each_direction_and_waits_for_no_other() -> None:
    """The service answers each item at once, with the time at which it got the item."""
    arrived: list[Any] = []

    async def run() -> None:
        clock = asyncio.get_running_loop().time

        def connect(send: Any) -> Any:
            return SimpleNamespace(receive=lambda item: send((item, clock())), close=None)

        def note(answer: Any) -> None:
            arrived.append((*answer, clock()))

        connection = delayed(SimpleNamespace(connect=connect), 0.5).connect(note)
        for item in range(3):
            connection.receive(item)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)

    run_virtually(run())
    assert arrived == [
        (item, pytest.approx(0.5 + item / 10), pytest.approx(1.0 + item / 10)) for item in range(3)
    ]


CHILD_TIMES = """
import subprocess, sys, time
from outrider.bench.processes import cpu_time

def children_s():
    return cpu_time() - time.process_time()

code = "import time\\nwhile time.process_time() < 0.3: 1\\ninput()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
until = time.monotonic() + 20
while children_s() < 0.25 and time.monotonic() < until:
    time.sleep(0.05)
print(children_s())
child.communicate(b"\\n")
print(children_s())
"""
"""A child computes for 0.3 s, waits, and then ends."""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_cpu_time_of_a_process_includes_its_children() -> None:
    """The process has a group of its own, as those of benchmarks have."""
    shown = subprocess.run(
        [sys.executable, "-c", CHILD_TIMES],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    running_s, ended_s = map(float, shown.stdout.split())
    assert 0.25 <= running_s < 1.0
    assert 0.25 <= ended_s < 1.0


async def test_a_process_that_cannot_start_says_why() -> None:
    setup = {"service": "target", "config": {"engine": "emulated:no=1"}, "delay_ms": 0}
    with pytest.raises(ConfigError, match="the target process: emulated: no="):
        async with Process("outrider.bench.processes:service", "the target process", setup):
            pass
