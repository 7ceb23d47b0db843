"""Runs tests on every available device, and their sums on one thread."""

import pytest
import torch

_NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=_NO_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of tensors; results must not depend on it."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """What was loaded in other tests may have left another number."""
    torch.set_num_threads(1)
