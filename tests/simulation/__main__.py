"""Runs seeds of the simulation: python -m tests.simulation --seeds 200 [--from 1000] | --seed 17"""

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.scenario import Result, run_seeds

SEEDS_AT_ONCE = 10
"""Seeds that a process runs before it gets more."""


def run_side_by_side(seeds: range, num_jobs: int) -> Iterator[tuple[Result, list[str]]]:
    """Runs `run_seeds` in several processes."""
    parts = [seeds[at : at + SEEDS_AT_ONCE] for at in range(0, len(seeds), SEEDS_AT_ONCE)]
    if num_jobs == 1 or len(parts) == 1:
        yield from map(run_seeds, parts)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=spawning) as pool:
        yield from pool.map(run_seeds, parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, help="run this seed alone, and show what it does")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="side by side")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # This also ends the pool's processes.
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    total = Result()
    for part, told in run_side_by_side(seeds, options.jobs):
        total.merge(part)
        for text in told:
            print(text, flush=True)
    print("\n".join(total.lines()))
    return 0 if total.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
