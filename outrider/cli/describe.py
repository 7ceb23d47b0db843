"""`outrider collect-env` describes this machine for a bug report. `outrider drafters` lists the
kinds of drafters."""

import json
import os
from importlib import metadata
from typing import Any

import yaml

from outrider.bench.report import Report
from outrider.drafters.names import DRAFTER_COLUMNS, DRAFTERS
from outrider.errors import OutriderError
from outrider.replica.process_setup import available_cores

from .command import Arguments, command, json_option
from .output import tell


@command("collect-env", json_option())
def collect_env(arguments: Arguments) -> int:
    from torch.utils.collect_env import get_env_info

    from outrider.kernels.cpu import KernelsUnavailable, load_pace
    from outrider.redis.embedded import find_server

    try:
        kernels = load_pace().name
    except KernelsUnavailable as error:
        kernels = f"none: {error}"
    try:
        redis = str(find_server())
    except OutriderError as error:
        redis = f"none: {error}"
    machine: dict[str, Any] = get_env_info()._asdict()  # type: ignore[no-untyped-call]
    del machine["pip_packages"]
    machine["cpu_info"] = str(machine["cpu_info"]).splitlines()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found: dict[str, Any] = {
        "packages": dict(sorted((one.name, one.version) for one in metadata.distributions())),
        "machine": {
            "available_cores": available_cores(),
            "memory_gib": round(memory / 2**30, 2),
            "cpu_kernels": kernels,
            "redis_server": redis,
            **machine,
        },
    }
    text = yaml.safe_dump(json.loads(json.dumps(found)), sort_keys=False).rstrip()
    return tell(Report(found, [text]), arguments.json)


@command("drafters", json_option())
def drafters(arguments: Arguments) -> int:
    from rich.table import Table
    from rich.text import Text

    found = [dict(zip(DRAFTER_COLUMNS, row, strict=True)) for row in DRAFTERS]
    table = Table("--draft-model", "proposes, and needs", box=None, pad_edge=False)
    for one in found:
        name, proposes, *needs = one.items()
        needed = "; ".join(f"{what}: {text}" for what, text in needs)
        table.add_row(Text(name[1]), Text(f"{proposes[1]}\n{needed}\n"))
    about = "q: the draft's distribution, over one token (one-hot) or the likeliest tokens (sparse)"
    return tell(Report({"drafters": found}, [table, Text(about)]), arguments.json)
