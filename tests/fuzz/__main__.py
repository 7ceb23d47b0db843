"""`python -m tests.fuzz --seconds N [--seed S]`: sends hostile input to every HTTP route and gRPC
method of a coordinator, a gateway, a target and a draft, which run in another process. Meanwhile
the answers to a control caller must not change, and 99 % of them must arrive within `--control-s`.
Prints the failures, each with a command that repeats it, and a summary line. `--only KIND --batch
B` runs only that batch and those after it."""

import argparse
import math
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz import seeds
from tests.fuzz.by_frames import FramesFeed, frames
from tests.fuzz.by_grpc import GrpcFeed, calls
from tests.fuzz.by_http import HttpFeed, requests
from tests.fuzz.control import LATE_S, ControlProcess
from tests.fuzz.ledger import Ledger
from tests.fuzz.started import Started

KINDS = ("http", "grpc", "bytes", "frames")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--least", type=int, default=0, help="requests of each kind, at least")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--control-s", type=float, default=LATE_S)
    parser.add_argument("--only", choices=(*KINDS, "seeds"))
    parser.add_argument("--batch", type=int, default=0, help="the first of each kind")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="outrider-fuzz-log-") as directory:
        started = Started(Path(directory) / "log")
        try:
            return _fuzzed(started, arguments, seed)
        finally:
            if started.is_alive:
                started.stop()


def _fuzzed(started: Started, arguments: argparse.Namespace, seed: int) -> int:
    ledger = Ledger(seed, math.inf, arguments.batch, 0 if arguments.only else arguments.least)
    control = ControlProcess(started.addresses, started.keys["control"])
    grpc, http = GrpcFeed(started, ledger), HttpFeed(started, ledger)
    by_frames = FramesFeed(started, ledger)
    feeds: dict[str, tuple[Any, Any, Callable[[str, Any], None]]] = {
        "http": (requests(http.document), seeds.by_http, http.feed),
        "grpc": (calls(raw=False), seeds.by_grpc, partial(grpc.feed, "grpc")),
        "bytes": (calls(raw=True), tuple, partial(grpc.feed, "bytes")),
        "frames": (frames(), tuple, by_frames.feed),
    }
    if arguments.only in (None, "seeds"):
        for _, known, feed in feeds.values():
            for one in known():
                ledger.feed_one(f"--seed {seed} --only seeds", one, feed)
    before = {**started.figures(), "sessions": 0, "admitted": 0}
    ledger.ends_at = time.monotonic() + arguments.seconds
    threads = [
        threading.Thread(target=ledger.run_batches, args=(kind, inputs, feed))
        for kind, (inputs, _, feed) in feeds.items()
        if arguments.only in (None, kind)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    control.finish(ledger)
    for client in (http, grpc, by_frames):
        client.close()
    if control.late_s > arguments.control_s:
        took = f"99 % of the answers arrived within {control.late_s:.2f} s only"
        ledger.fail("control", took, f"{len(control.waits_s)} answers")
    for wrong in (*(started.left_behind(before) if started.is_alive else []), *started.stop()):
        ledger.fail("at the end", wrong, f"--seed {seed}")
    print(*ledger.failures, sep="\n")
    print(
        f"seed {seed}; before {before}; control p99 {control.late_s:.2f} s, "
        f"longest {max(control.waits_s, default=0.0):.2f} s"
    )
    print(", ".join(f"{name}: {number}" for name, number in sorted(ledger.statuses.items())))
    counts = ledger.counts
    grpc_count = counts["grpc"] + counts["bytes"]
    total = counts["http"] + grpc_count + counts["frames"]
    print(
        f"requests={total} http={counts['http']} grpc={grpc_count} frames={counts['frames']} "
        f"failed={len(ledger.failures)} control={len(control.waits_s)}"
    )
    return 1 if ledger.failures else 0


if __name__ == "__main__":
    sys.exit(main())
