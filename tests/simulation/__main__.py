"""Runs seeds of the simulation: python -m tests.simulation --seeds 200 [--from 1000] | --seed 17"""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.results import Result
from tests.simulation.side_by_side import run_side_by_side


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, help="run this seed alone, and show what it does")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side"
    )
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds: {options.seeds} is wrong; it must be at least 1")
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
