"""python -m tests.simulation --seeds 200 | --seed 17"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

import torch

from .scenario import RankCount, run_seed

DEVIATION_MAX = 6.0
"""Standard deviations; 4 ranks a run: false alarm below 1e-8."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run, from 0")
    parser.add_argument("--seed", type=int, help="run this seed alone, and show what it does")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [options.seed] if options.seed is not None else range(options.seeds)
    faults: Counter[str] = Counter()
    ranks = RankCount()
    failed = num_tokens = num_sessions = num_moves = 0
    for seed in seeds:
        try:
            result = run_seed(seed)
        except Exception:  # noqa: BLE001 - whatever a seed dies of is its result
            failed += 1
            print(f"seed {seed} failed; replay with: python -m tests.simulation --seed {seed}")
            traceback.print_exc()
            continue
        faults += result.faults
        ranks.merge(result.ranks)
        num_tokens += result.num_tokens
        num_sessions += result.num_sessions
        num_moves += result.num_moves
    deviation = ranks.largest_deviation()
    if deviation > DEVIATION_MAX:
        failed += 1
        print(f"the committed tokens are not the target's: {deviation:.1f} standard deviations")
    counts = " ".join(f"{kind}={count}" for kind, count in sorted(faults.items()))
    print(f"sampled_tokens={ranks.num_tokens} largest_deviation={deviation:.2f}")
    print(
        f"seeds={len(seeds)} failed={failed} faults{{{counts}}} "
        f"tokens={num_tokens} sessions={num_sessions} sessions_moved={num_moves}"
    )
    return 1 if failed else 0


sys.exit(main())
