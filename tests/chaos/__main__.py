"""`python -m tests.chaos`: runs a deployment on several Ray nodes of this machine under load, with
a proxy between all its processes, while its processes are killed, stopped and cut off. A quarter of
the requests comes by HTTP, through two gateways. Requests that fail during a pair of faults, or
while Sentinel promotes nothing because it had stood still (TILT), are counted and named separately.
Writes one JSON object: every fault and what it affected, the gaps in streams by kind of fault, and
the requests that failed or whose tokens differed from a run without faults. Prints all of it except
the single faults. The exit code is 1 if a request failed, was wrong or did not end, if a hung
replica was replaced too late or made a request wait too long, or if a run of full length with all
faults missed another goal."""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

from outrider.config.deployment import DeploymentConfig, load_config
from outrider.fleet.launcher import Deployment
from tests.chaos.faults import FULL_MINUTES, KILLS, KINDS, Adversary, missed, missed_in_hangs
from tests.chaos.gateways import gateways, http_urls
from tests.chaos.load import Load, Work
from tests.chaos.machines import Machines

LOAD_SHARE: Final = 0.7
EMULATED: Final = "emulated:vocab_size=1000,verify_ms=75,verify_tokens=64,draft_ms=5"
"""The target reads 850 tokens of prompts in a second. If it read much less, the sessions that leave
a target would wait mostly for each other's prompts."""
WORK: Final = Work(num_tokens=96, num_seeds=16, num_clients=8)
REAL_WORK: Final = Work(num_tokens=32, num_seeds=8, num_clients=4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=1000, help="end after this many")
    parser.add_argument("--real", action="store_true", help="demo in float32, and kills alone")
    kinds = sorted({kind for kind, _ in KINDS})
    parser.add_argument("--only", choices=kinds, help="only faults of this kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("chaos.json"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("outrider.fleet").setLevel(logging.CRITICAL)  # Killed replicas would fill it.
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as state:
        found = asyncio.run(_run(arguments, Path(state)))
    arguments.report.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "faults"}, indent=2))
    print(f"all of it: {arguments.report}")
    wrong = ("errors", "num_wrong", "num_stuck", "missed")
    return 1 if any(found.get(key) for key in wrong) else 0


async def _run(arguments: argparse.Namespace, state: Path) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    until = 60 * arguments.minutes
    async with (
        Machines(state) as machines,
        Deployment(_config(arguments, machines), state) as found,
        gateways(state / "coordinators", partial(http_urls, found)) as fronts,
    ):
        work = REAL_WORK if arguments.real else WORK
        load = Load(lambda: found.address, work, arguments.seed, fronts)
        peak = await load.prepare()
        asking = asyncio.create_task(load.run(LOAD_SHARE * peak))
        adversary, began = Adversary(machines, found, fronts, load, arguments.seed), loop.time()
        try:
            only = KILLS if arguments.real else ()
            if arguments.only:
                only = tuple(one for one in KINDS if one[0] == arguments.only)
            await adversary.run(arguments.faults, began + until, only)
        finally:
            asking.cancel()
            await load.finish()
    seconds, faults = loop.time() - began, adversary.report()
    is_full = not only and seconds >= 60 * FULL_MINUTES
    hung = [role for kind, role in KINDS if kind == "hang" and (is_full or (kind, role) in only)]
    return {
        "missed": missed_in_hangs(faults, hung) + (missed(faults) if is_full else []),
        "seconds": round(seconds),
        "peak_requests_per_second": round(peak, 2),
        **load.report(),
        **faults,
    }


def _config(arguments: argparse.Namespace, machines: Machines) -> DeploymentConfig:
    engines = {"engine": EMULATED, "draft_model": "emulated"}
    if arguments.real:
        engines = {
            "model": "demo",
            "draft_model": "hybrid:suffix,demo-drafter",
            "dtype": "float32",
            "draft_dtype": "float32",
        }
    settings = engines | {
        "address": machines.address,
        "redis_url": machines.redis.url,
        "redis_wait_replicas": 1,  # All replicas, so no single fault loses tokens.
        "grpc_port": 0,
        "port": 0,
        "num_targets": 2,
        "num_drafts": 2,
        "num_coordinators": 2,
        "target_num_cpus": 0.2,
        "draft_num_cpus": 0.1,
        "coordinator_num_cpus": 0.1,
        "stop_timeout_s": 5,
    }
    return load_config(settings, {})


if __name__ == "__main__":
    sys.exit(main())
