"""Capturing graphs, on a stand-in for the library's calls to a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.cuda import backend
from outrider.engine.cuda.backend import GraphRecorder

CPU = torch.device("cpu")
CACHED = 1_000
"""Bytes that nobody uses, and that the allocator has kept."""


class _Stream:
    def wait_stream(self, _: _Stream) -> None:
        pass


class _Capture:
    """Does as `torch.cuda.graph`: gives back what is unused, and leaves its stream the current one
    where the capture cannot be ended."""

    def __init__(self, cuda: _Cuda) -> None:
        self._cuda = cuda

    def __enter__(self) -> None:
        self._cuda.empty_cache()
        self._before, self._cuda.current = self._cuda.current, _Stream()

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("capture was invalidated")
        self._cuda.current = self._before


class _Cuda:
    """What `torch.cuda` is to a recorder."""

    Stream = _Stream

    def __init__(self) -> None:
        self.current = _Stream()
        self.used, self.cached = 0, CACHED

    def empty_cache(self) -> None:
        self.cached = 0

    def memory_reserved(self, _: torch.device) -> int:
        return self.used + self.cached

    def graph_pool_handle(self) -> None:
        return None

    def device(self, _: torch.device) -> Any:
        return nullcontext()

    def current_stream(self) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def graph(self, *_: object, **__: object) -> _Capture:
        return _Capture(self)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    found = _Cuda()
    monkeypatch.setattr(backend.torch, "cuda", found)
    return found


def test_the_memory_of_a_recording_is_counted(cuda: _Cuda) -> None:
    """Whatever the allocator gives back when a capture begins."""
    recorder = GraphRecorder(CPU)

    def work() -> torch.Tensor:
        cuda.used += 50
        return torch.zeros(1)

    recorder.record(work)
    assert recorder.num_bytes() == 100  # once plain, once captured
    cuda.cached = CACHED
    recorder.record(work)
    assert recorder.num_bytes() == 200


def test_a_capture_that_fails_leaves_the_stream_and_its_reason(cuda: _Cuda) -> None:
    """The work fails only where it is captured."""
    before, num_done = cuda.current, 0

    def work() -> torch.Tensor:
        nonlocal num_done
        num_done += 1
        if num_done > 1:
            raise ValueError("a module that waits for the device")
        return torch.zeros(1)

    with pytest.raises(ValueError, match="waits for the device"):
        GraphRecorder(CPU).record(work)
    assert cuda.current is before
