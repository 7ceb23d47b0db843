"""A CUDA device of fake tensors for every test here."""

from collections.abc import Iterator

import pytest

from tests.support.fake_cuda import DeviceWatch, fake_device


@pytest.fixture
def watch() -> Iterator[DeviceWatch]:
    with fake_device() as made:
        yield made
