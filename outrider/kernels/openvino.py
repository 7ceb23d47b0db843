"""Loads OpenVINO, whose runtime runs steps on CPUs without AVX-512 BF16."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any, Final

import numpy.typing as npt
import torch

from outrider.kernels.cpu import KernelsUnavailable

PACKAGE = "openvino"
VERSIONS: Final = ("2026.4",)
"""The operator `PagedAttention` may change between releases, so only releases that the tests have
run are used."""
_STARTING_ROWS = 512  # so many that the runtime uses all threads
_NO_TELEMETRY = "CI"  # `openvino-telemetry` sends nothing if this variable is set


class OpenVino:
    """OpenVINO's runtime, and its requirements."""

    dtype: torch.dtype = torch.float32
    page_size = 32  # that of its attention on CPUs

    def __init__(self, module: Any, version: str) -> None:
        self.module = module
        self.operators: Any = module.opset13
        self.name = f"{PACKAGE} {version}"
        self._core = module.Core()

    def compile(self, model: Any, num_threads: int) -> Any:
        """Compiles a model for `num_threads` threads. Keys and values stay in float32, because
        8 bits, OpenVINO's default, would make them depend on the order in which tokens arrive."""
        options = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # otherwise it rounds activations to 8 bits
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        return self._core.compile_model(model, "CPU", options)

    def start_threads(self, num_threads: int) -> None:
        """Starts the runtime's threads, which get the priority of the calling thread. The runtime
        keeps them as long as the process lives."""
        op = self.operators
        rows = op.parameter([_STARTING_ROWS, _STARTING_ROWS], self.module.Type.f32)
        weight = op.constant(torch.zeros(_STARTING_ROWS, _STARTING_ROWS).numpy())
        model = self.module.Model([op.matmul(rows, weight, False, False)], [rows], "start")
        request = self.compile(model, num_threads).create_infer_request()
        request.infer([torch.zeros(_STARTING_ROWS, _STARTING_ROWS).numpy()])

    def paged_attention(self, *inputs: Any) -> Any:
        """Returns a node of the operator `PagedAttention`."""
        outputs = [each.output(0) if hasattr(each, "output") else each for each in inputs]
        return self.module.op._PagedAttentionExtension(outputs)

    def tensor(self, values: npt.NDArray[Any]) -> Any:
        """Returns an OpenVINO tensor that shares the memory of `values`, which must be contiguous
        and must outlive it."""
        return self.module.Tensor(values, shared_memory=True)


@cache
def load_openvino() -> OpenVino:
    """Loads the runtime, once in a process. Raises `KernelsUnavailable`."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise KernelsUnavailable(f"{PACKAGE} is not installed") from None
    if not version.startswith(tuple(f"{supported}." for supported in VERSIONS)):
        raise KernelsUnavailable(f"{PACKAGE} {version} is installed, not {' or '.join(VERSIONS)}")
    try:
        with _without_telemetry():
            import openvino
            import openvino.opset13
        return OpenVino(openvino, version)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise KernelsUnavailable(f"{PACKAGE} cannot be loaded: {reason}") from error


@contextmanager
def _without_telemetry() -> Iterator[None]:
    before = os.environ.get(_NO_TELEMETRY)
    os.environ[_NO_TELEMETRY] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_TELEMETRY]
        else:
            os.environ[_NO_TELEMETRY] = before
