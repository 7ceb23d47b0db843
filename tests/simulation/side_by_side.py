"""Many seeds, in as many processes as are wanted."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.simulation.results import Result
from tests.simulation.scenario import run_seed

SEEDS_AT_ONCE = 10
"""Of a process, before it is told what comes next."""
GARBAGE_THRESHOLDS = (5_000, 10, 10)
"""See `gc.set_threshold`."""


def prepare() -> None:
    """Makes this process quick at seeds: their arrays are too small for threads, and what is there
    before them is no garbage, nor is most of what they hold whenever it is looked for."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def run_seeds(seeds: range) -> tuple[Result, list[str]]:
    """What they came to, and what is to be told of those that failed."""
    prepare()
    total, told = Result(), []
    for seed in seeds:
        try:
            total.merge(run_seed(seed))
        except Exception:  # noqa: BLE001 - whatever a seed dies of is its result
            total.merge(Result(num_seeds=1, num_failed=1))
            replay = f"python -m tests.simulation --seed {seed}"
            told.append(f"seed {seed} failed; replay with: {replay}\n{traceback.format_exc()}")
    return total, told


def run_side_by_side(seeds: range, num_jobs: int) -> Iterator[tuple[Result, list[str]]]:
    """`run_seeds` of all of them, some at a time."""
    parts = [seeds[at : at + SEEDS_AT_ONCE] for at in range(0, len(seeds), SEEDS_AT_ONCE)]
    if num_jobs == 1 or len(parts) == 1:
        yield from map(run_seeds, parts)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=spawning) as pool:
        yield from pool.map(run_seeds, parts)
