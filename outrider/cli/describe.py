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
from outrider.replica.threads import available_cores

from .command import Arguments, command, json_option
from .output import tell

MIN_WIDTHS = {"proposes": 10, "files": 10}


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

    found = [dict(zip(DRAFTER_COLUMNS, row, strict=True)) for row in DRAFTERS]
    about = "q: the draft's distribution, over one token (one-hot) or the likeliest tokens (sparse)"
    table = Table(show_lines=True, caption=about)
    for name in DRAFTER_COLUMNS:
        is_name = name == "draft_model"
        table.add_column(
            "--draft-model" if is_name else name, no_wrap=is_name, min_width=MIN_WIDTHS.get(name)
        )
    for row in DRAFTERS:
        table.add_row(*row)
    return tell(Report({"drafters": found}, [table]), arguments.json)
