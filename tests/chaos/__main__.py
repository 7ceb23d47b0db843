"""`python -m tests.chaos`: a deployment on local Ray under load, and everything that dies in it.

Writes one JSON object: every fault, what it touched, the gaps in streams by kind of fault, and
requests that failed or whose tokens were not those of their fault-free streams; and prints all but
the single faults. Exit code 1 where a request failed, was wrong or did not end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.launcher import Deployment
from outrider.config import load_config

from .faults import SCALED_MAX, Adversary
from .load import Load

LOAD_SHARE = 0.7
"""Of the measured peak."""
END_S = 60.0
"""What runs in the end may take so long."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=1000, help="end after so many")
    parser.add_argument(
        "--scale-s", type=float, default=0.0, help="kill nobody; other numbers all so many seconds"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("chaos.json"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("deploy").setLevel(logging.CRITICAL)  # Replicas die all the time.
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as state:
        found = asyncio.run(_run(arguments, Path(state)))
    arguments.report.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    del found["faults"]
    print(json.dumps(found, indent=2))
    print(f"every fault: {arguments.report}")
    return 1 if found["num_failed"] or found["num_wrong"] or found["num_stuck"] else 0


async def _run(arguments: argparse.Namespace, state: Path) -> dict[str, Any]:
    settings = {
        "engine": "emulated:vocab_size=1000,verify_ms=20,draft_ms=2",
        "draft_model": "emulated",
        "grpc_port": _free_ports(),
        "num_targets": 2, "num_drafts": 2, "num_coordinators": 2,
        "target_num_cpus": 0.2, "draft_num_cpus": 0.1, "coordinator_num_cpus": 0.1,
        "stop_timeout_s": 5,
    }  # fmt: skip
    loop = asyncio.get_running_loop()
    async with Deployment(load_config(settings, {}), state) as deployment:
        # Those that come in the place of others have their ports, so clients need no other list.
        first = int(deployment.endpoints.coordinators[0].rpartition(":")[2])
        addresses = ",".join(f"127.0.0.1:{first + slot}" for slot in range(SCALED_MAX))
        load = Load(lambda: addresses, arguments.seed)
        peak = await load.prepare()
        asking = asyncio.create_task(load.run(LOAD_SHARE * peak))
        adversary, began = Adversary(deployment, load, arguments.seed), loop.time()
        try:
            until = began + 60 * arguments.minutes
            if arguments.scale_s:
                await adversary.scale(until, arguments.scale_s)
            else:
                await adversary.run(arguments.faults, began, until)
        finally:
            asking.cancel()
            num_stuck = await load.finish(END_S)
    errors = [one.error for one in load.asked if one.error]
    return {
        "seconds": round(loop.time() - began),
        "peak_requests_per_second": round(peak, 2),
        "num_requests": len(load.asked),
        "num_faults": len(adversary.faults),
        "num_failed": len(errors),
        "num_wrong": sum(one.is_wrong for one in load.asked),
        "num_stuck": num_stuck,
        "errors": sorted(set(errors))[:20],
        **adversary.report(),
    }


def _free_ports() -> int:
    """A port that is free, and the next ones too, as far as can be told."""
    while True:
        with ExitStack() as taken:
            port: int = taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for place in range(1, SCALED_MAX):
                    taken.enter_context(socket.create_server(("127.0.0.1", port + place)))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    sys.exit(main())
