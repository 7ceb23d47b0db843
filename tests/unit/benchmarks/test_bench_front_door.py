"""`bench front-door`: its figures from passages made by hand, and its flags."""

from __future__ import annotations

import json

import pytest

from benchmarks.front_door import (
    GRPC,
    HTTP,
    IN_PROCESS,
    FrontDoorOptions,
    Passage,
    render,
    summarise,
)
from deploy.cli.main import main


def passages(firsts: list[float], delivery: float) -> list[Passage]:
    return [Passage(first, (delivery, delivery, delivery * 3)) for first in firsts]


def test_what_is_added_is_a_median_of_pairs_and_a_difference_of_medians() -> None:
    """Pairs, so that a slow turn is slow through every door."""
    found = summarise(
        FrontDoorOptions(turns=3),
        {
            IN_PROCESS: passages([0.010, 0.050, 0.020], 0.0001),
            GRPC: passages([0.011, 0.052, 0.020], 0.0003),
            HTTP: passages([0.013, 0.053, 0.029], 0.0007),
        },
    )
    assert found.in_process_ttft_ms_p50 == pytest.approx(20)
    assert found.grpc_ttft_added_ms_p50 == pytest.approx(1)
    assert found.http_ttft_added_ms_p50 == pytest.approx(3)
    assert found.grpc_chunk_added_ms == pytest.approx(0.2)
    assert found.http_chunk_added_ms == pytest.approx(0.6)
    assert found.http_chunk_added_ms_p99 == pytest.approx(2.0)
    assert len(render(found).rows) == 7


def test_its_json_has_every_figure() -> None:
    """A gRPC that adds nothing is told as zeros, not as missing."""
    here = passages([0.010], 0.0001)
    found = json.loads(
        summarise(FrontDoorOptions(), {IN_PROCESS: here, GRPC: here, HTTP: here}).to_json()
    )
    for door in ("grpc", "http"):
        for figure in ("ttft_added_ms_p50", "chunk_added_ms"):
            assert found[f"{door}_{figure}"] == 0
        assert 0.1 < found[f"{door}_chunk_added_ms_p99"] <= 0.2


@pytest.mark.parametrize("flag", ["--turns", "--max-tokens", "--step-ms"])
def test_wrong_flags_are_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "front-door", flag, "-1"]) == 2
    assert capsys.readouterr().err.startswith(f"outrider: error: {flag}: -1")
