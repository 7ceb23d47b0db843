"""`python -m tests.mutants FILE`: runs the tests on each mutant of a file. `tests.mutants.picking`
makes the file, or it is an earlier output of this command. Each mutant is applied to a copy of the
tree, in which the tests of its area run until one fails, those of its file first. Prints a JSON
line for each mutant, with its outcome: `caught`, `survived`, or `missing` (no file of its area has
its lines). `--against FILE` names an earlier output, such as `baseline.jsonl`: the exit code is 1
if more than 2 % of the mutants that were caught then survive now."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.mutants.areas import AREAS, Mutant, nearest_tests

TIMES_MAX: Final = 4.0
"""Time limit of an area's tests on a mutant, as a multiple of their time without one. A mutant that
makes them hang is caught."""
LOST_MAX: Final = 0.02
_COPIED: Final = (
    "outrider",
    "coordinator",
    "draft_service",
    "target_service",
    "tests",
    "protos",
    "pyproject.toml",
)


def main() -> int:
    """Prints the outcome of each mutant, and the sums to standard error."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("mutants", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    mutants = [Mutant.from_json(one) for one in _read(arguments.mutants)]
    with tempfile.TemporaryDirectory(prefix="outrider-mutants-") as directory:
        found = run(mutants, Path.cwd(), Path(directory), arguments.workers)
    counts = Counter((one["area"], one["outcome"]) for one in found)
    for (area, outcome), number in sorted(counts.items()):
        print(f"{area}: {number} {outcome}", file=sys.stderr)
    return 0 if arguments.against is None else _compared(found, arguments.against)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(
    mutants: Sequence[Mutant], root: Path, directory: Path, workers: int
) -> list[dict[str, Any]]:
    """The outcome of each mutant of the tree at `root`. The copies are below `directory`."""
    of_thread = threading.local()

    def begin() -> None:
        of_thread.copy = _copy(root, directory / str(threading.get_ident()))

    def seconds(area: str) -> float | None:
        began = time.monotonic()
        passed = _passes(AREAS[area].tests, of_thread.copy, None)
        return time.monotonic() - began if passed else None

    def outcome_of(mutant: Mutant) -> dict[str, Any]:
        limit_s = TIMES_MAX * usual_s[mutant.area]
        found = {**mutant.to_json(), "outcome": _outcome(mutant, root, of_thread.copy, limit_s)}
        print(json.dumps(found), flush=True)
        return found

    with ThreadPoolExecutor(workers, initializer=begin) as pool:
        areas, usual_s = dict.fromkeys(mutant.area for mutant in mutants), dict[str, float]()
        for area, took_s in zip(areas, pool.map(seconds, areas), strict=True):
            if took_s is None:
                raise SystemExit(f"the tests of {area} fail without a mutant; none can be judged")
            usual_s[area] = took_s
        return list(pool.map(outcome_of, mutants))


def _copy(root: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    for name in _COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def _outcome(mutant: Mutant, root: Path, copy: Path, timeout_s: float) -> str:
    file, changed = _changed(mutant, root)
    if changed is None:
        return "missing"
    target = copy / file
    target.write_text(changed)
    # The tests of a file catch most of its mutants, and take little of the time of the area's.
    runs = [tests for tests in (nearest_tests(file, root), AREAS[mutant.area].tests) if tests]
    try:
        passes = all(_passes(tests, copy, timeout_s) for tests in runs)
        return "survived" if passes else "caught"
    finally:
        shutil.copy(root / file, target)


def _changed(mutant: Mutant, root: Path) -> tuple[str, str | None]:
    """The file that has the mutant's lines, and its changed source. This is the mutant's own file,
    or the only file of its area that has these lines now. If there is none, the source is None."""
    found = {}
    for file in {mutant.file, *AREAS[mutant.area].files(root)}:
        original = root / file
        if original.exists() and (changed := mutant.applied(original.read_text())) is not None:
            found[file] = changed
    if mutant.file not in found and len(found) == 1:
        return next(iter(found.items()))
    return mutant.file, found.get(mutant.file)


def _passes(tests: Sequence[str], copy: Path, timeout_s: float | None) -> bool:
    """Whether all tests pass on the copy, which comes first on the path, in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # A mutant may have the size and time stamp of the file it replaces: keep no bytecode.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, timeout=timeout_s, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _compared(found: Sequence[dict[str, Any]], against: Path) -> int:
    before = {_key(one) for one in _read(against) if one["outcome"] == "caught"}
    lost = before & {_key(one) for one in found if one["outcome"] == "survived"}
    for key in sorted(map(str, lost)):
        print(f"caught before, and not now: {key}", file=sys.stderr)
    return int(len(lost) > LOST_MAX * len(before))


def _key(one: dict[str, Any]) -> tuple[object, ...]:
    return (one["area"], one["operator"], tuple(one["before"]), tuple(one["after"]))


if __name__ == "__main__":
    raise SystemExit(main())
