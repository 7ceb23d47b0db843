"""How often the verdicts of a step wait for the device, and how many operators they start there."""

import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device import _question
from outrider.speculation.sampling_params import Rule
from outrider.speculation.verification import Question, verdicts_from_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
OPERATORS_MAX = 20


def questions(num: int) -> list[Question]:
    rows = 3 * torch.randn((num, 5, 5_000), device="cuda")
    rules = [*Rule] * num
    return [_question(logits, rules[i], i) for i, logits in enumerate(rows)]


def num_waits(asked: list[Question]) -> int:
    verdicts_from_logits(asked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        verdicts_from_logits(asked)
        torch.cuda.set_sync_debug_mode("default")
    return len(caught)


def num_operators(asked: list[Question]) -> int:
    """Number of kernels and copies."""
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as profiled:
        verdicts_from_logits(asked)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(each.count for each in profiled.key_averages() if each.device_type == on_device)


def test_verdicts_wait_once_and_take_as_many_operators_for_any_number_of_sessions() -> None:
    few, many = questions(4), questions(32)
    assert num_waits(few) == num_waits(many) == 1
    assert num_operators(few) == num_operators(many) <= OPERATORS_MAX
