"""The cores, threads and priority of a replica's process."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from outrider.config.deployment import VLLM

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SPIN_COUNT = 10_000
"""How many times a waiting OpenMP thread checks for work before it sleeps (`GOMP_SPINCOUNT`). A
check takes about 50 ns. All checks together should take longer than the gap between two operators.
On two cores, a step of the demo target took 31 ms with 3,000 checks, 23 ms with 10,000, and 24 ms
with 20,000. While two other processes ran, a step took 70 ms with 3,000 checks, and 1,500 ms with
the library's default, which makes threads check for some milliseconds."""


_INTEL_OPENMP = Path(sys.prefix, "lib", "libiomp5.so")
"""The OpenMP runtime that vLLM's CPU build requires. If it is loaded before torch, torch uses it
instead of libgomp. In this runtime, waiting threads yield their cores. With eight sessions of the
demo target on two cores, a token took 34 to 43 ms instead of 40 to 52 ms."""


LOADING_NICENESS = 10
"""Added to the niceness of the thread that loads a model, and of its helper threads. The number
for steps (`outrider.kernels.threads.NICENESS`) is smaller, so a replica that loads leaves the cores
to the steps of other replicas."""


_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Returns how many cores this process may use, by its CPU affinity and its control group."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # A quota may be missing, or "max".
        quota, period = map(int, _CGROUP_CPU.read_text(encoding="ascii").split())
        return max(1, min(cores, round(quota / period)))
    return cores


def cores_for(role: str) -> int:
    """Returns the number of threads for a model. A draft uses half of the cores. A target uses all
    cores, because it waits while drafts run."""
    return available_cores() if role == "target" else max(1, available_cores() // 2)


def use_threads(num_threads: int, engine: str = "") -> None:
    """Sets the number of threads of numeric libraries. Must be called before they are imported.
    `engine` names the engine whose steps use the threads."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(num_threads)
    if engine == VLLM and "torch" not in sys.modules and _INTEL_OPENMP.exists():
        ctypes.CDLL(str(_INTEL_OPENMP), ctypes.RTLD_GLOBAL)
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
        if engine == VLLM:
            # vLLM leaves threads behind. In a process with more threads than cores, libgomp hardly
            # spins, except with the policy `active`. A step of the demo target took 146 ms without
            # this policy, and 14 ms with it.
            os.environ["OMP_WAIT_POLICY"] = "active"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


async def on_passing_thread(work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Runs `work` on a new thread. When this thread ends, its OpenMP threads end, too. If they
    stayed, the process would have more OpenMP threads than cores, and the threads of steps would
    sleep between operators. On two cores, a step of 16 sessions took 42 ms instead of 27 ms."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
    finally:
        pool.shutdown(wait=False)


def lower_priority(niceness: int) -> None:
    """Raises the niceness of the calling thread, and of threads that it starts later, to `niceness`
    above the niceness of the process."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness)
    except OSError as error:
        logging.getLogger(__name__).info("a thread keeps its priority: %r", error)
