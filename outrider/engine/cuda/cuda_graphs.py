"""Work that is recorded once and then replayed: on a CUDA device as a captured graph, which starts
hundreds of kernels at the cost of one call.

Recorded work reads and writes the same memory each time, and asks for nothing that the device has
yet to compute. What it is about is written into its inputs before it is replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

RECORDINGS_MAX: Final = 64
RECORDED_BYTES_MAX: Final = 2**30
"""Of a device's memory that recordings take beside the model; what they compute on is shared."""
_log = logging.getLogger(__name__)

StepRequest = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recording:
    """Work that can be done again."""

    output: torch.Tensor
    """Where each replay leaves its result; valid until the next one."""
    replay: Callable[[], None]


class Recorder(Protocol):
    """How work is recorded."""

    def record(self, work: StepRequest) -> Recording:
        """Does the work, and records it. Raises what it raises, and where it cannot be recorded."""
        ...

    def num_bytes(self) -> int:
        """Memory that recordings have taken so far."""
        ...


class GraphRecorder:
    """Captures CUDA graphs, all in one pool of memory: one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._num_bytes = 0

    def record(self, work: StepRequest) -> Recording:
        """See `Recorder.record`. The first time the work is done in plain steps, so that whatever
        is set up on first use is there when it is captured."""
        # A capture begins with this too: what it gives back would hide what is taken.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            recording = self._capture(work)
        self._num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return recording

    def _capture(self, work: StepRequest) -> Recording:
        """Raises what the work raises, rather than what the end of its capture makes of it."""
        graph = torch.cuda.CUDAGraph()
        failures: list[Exception] = []
        try:
            # A capture that fails leaves its stream the current one; the outer context does not.
            # Other threads may use the device meanwhile.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                try:
                    output = work()
                except Exception as error:
                    failures.append(error)
                    raise
        except Exception:
            if failures:
                raise failures[0] from None
            raise
        return Recording(output, graph.replay)

    def num_bytes(self) -> int:
        """See `Recorder.num_bytes`."""
        return self._num_bytes


class Recordings:
    """The recordings of one engine, by what they depend on; bounded in number and memory. Of too
    many the one that was not replayed for longest is dropped."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, Recording | None] = {}
        """The last one that was asked for is last; None for what could not be recorded."""
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether all that was asked for could be recorded."""
        return not self._closed and None not in self._known.values()

    def replay(self, key: Hashable, work: StepRequest) -> torch.Tensor | None:
        """The result of `work`, which depends on nothing but `key` and what it reads; valid until
        the next replay. None where it is not recorded and cannot be."""
        found = self._known.pop(key) if key in self._known else self._record(work)
        if not self._closed or found is not None:
            self._known[key] = found
        if found is None:
            return None
        found.replay()
        return found.output

    def _record(self, work: StepRequest) -> Recording | None:
        """None where it cannot be recorded. Where the first one cannot, none is tried any more,
        unless memory was short: then others may need less."""
        if self._closed:
            return None
        if self._recorder.num_bytes() >= RECORDED_BYTES_MAX:
            self._close(f"{len(self._known)} recordings have taken all their memory")
            return None
        if len(self._known) >= RECORDINGS_MAX:
            del self._known[next(iter(self._known))]
        try:
            return self._recorder.record(work)
        except torch.OutOfMemoryError as error:
            _log.warning("for a step there is no memory to record it: %r", error)
        except Exception as error:  # noqa: BLE001 (whatever it is, plain steps show it again)
            if any(self._known.values()):
                _log.warning("a step cannot be recorded: %r", error)
            else:
                self._close(f"a step cannot be recorded: {error!r}")
        return None

    def _close(self, reason: str) -> None:
        self._closed = True
        _log.warning("%s; other steps are run one operator after another", reason)
