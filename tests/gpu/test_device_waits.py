"""How often the verdicts of a step wait for the device."""

import warnings

import pytest
import torch

from outrider.bench.device import _question
from outrider.speculation.sampling_params import Rule
from outrider.speculation.verification import VerifyInput, verdicts_from_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def inputs(num: int) -> list[VerifyInput]:
    rows = 3 * torch.randn((num, 5, 5_000), device="cuda")
    rules = [*Rule] * num
    return [_question(logits, rules[i], i) for i, logits in enumerate(rows)]


def num_waits(asked: list[VerifyInput]) -> int:
    verdicts_from_logits(asked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        verdicts_from_logits(asked)
        torch.cuda.set_sync_debug_mode("default")
    return len(caught)


def test_verdicts_wait_once_for_any_number_of_sessions() -> None:
    assert num_waits(inputs(4)) == num_waits(inputs(32)) == 1
