"""The fake device finds planted faults of each kind that its tests are to find."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.speculation.logits_processing import row_sums, target_probabilities
from outrider.speculation.sampling_params import SamplingParams
from tests.support.fake_cuda import CUDA, VOCAB, DeviceWatch, fake_device, to_device
from tests.support.models import tiny_config, tiny_module


def logits(num: int = 4) -> Tensor:
    return torch.zeros(num, VOCAB, device=CUDA)


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        (lambda rows: rows[0, 0].item(), (1, 0)),
        (lambda rows: bool((rows > 0).all()), (1, 0)),
        (lambda rows: rows.cpu(), (1, 0)),
        (lambda rows: rows.to("cpu", torch.bfloat16), (1, 0)),
        (lambda rows: rows[0].tolist(), (1, 0)),
        (lambda rows: torch.equal(rows, rows), (1, 0)),
        (lambda rows: torch.empty(rows.shape).copy_(rows), (1, 0)),
        (lambda rows: torch.tensor([1, 2], device=CUDA), (0, 1)),
        (lambda rows: torch.ones(3).to(CUDA), (0, 1)),
        (lambda rows: rows[[0, 2]], (0, 1)),
        (lambda rows: rows[torch.tensor([0, 2])], (0, 1)),
        (lambda rows: rows.copy_(torch.ones(rows.shape)), (0, 1)),
        (lambda rows: rows[1:].view(-1).unsqueeze(0).split(64, 1), (0, 0)),
    ],
)
def test_a_read_or_send_is_counted_once(
    watch: DeviceWatch, call: Callable[[Tensor], Any], counts: tuple[int, int]
) -> None:
    rows = logits()
    assert watch.counted(lambda: call(rows))[:2] == counts


def test_reads_are_told_with_the_line_of_the_product(watch: DeviceWatch) -> None:
    target_probabilities(logits(), SamplingParams())
    assert all("logits_processing.py:" in place for place in watch.reads)


@pytest.mark.parametrize(
    "mix",
    [
        lambda rows: rows + torch.ones(rows.shape),
        lambda rows: rows.index_select(0, torch.tensor([0])),
        lambda rows: torch.cat([rows, torch.ones(rows.shape)]),
        lambda rows: rows + torch.zeros(rows.shape, device="cuda:1"),
    ],
    ids=["add", "index", "cat", "cuda1"],
)
def test_a_mismatch_fails_though_it_is_caught(mix: Callable[[Tensor], Any]) -> None:
    told = pytest.raises(AssertionError, match=r"test_watch.py:\d+: ")
    with told, fake_device(), suppress(RuntimeError):
        mix(logits())


def test_a_loop_over_sessions_grows_with_them(watch: DeviceWatch) -> None:
    for num in (1, 16):
        rows = logits(num)
        watch.clear()
        for row in rows:
            row_sums(row[None])
        assert watch.counts == (0, 0, 2 * num)


def test_reads_of_the_librarys_models_count_and_their_operators_do_not(watch: DeviceWatch) -> None:
    module = to_device(tiny_module(tiny_config("llama", VOCAB)))
    ids = torch.zeros((1, 3), dtype=torch.int64, device=CUDA)
    num_reads, _, num_operators = watch.counted(lambda: module(input_ids=ids, use_cache=False))
    assert num_reads == num_operators <= 1
