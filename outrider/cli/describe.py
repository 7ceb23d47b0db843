"""`outrider collect-env` describes this machine for a bug report. `outrider drafters` lists the
kinds of drafters."""

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import yaml

from outrider.bench.report import Report
from outrider.config.deployment import deployment_settings
from outrider.drafters.names import DRAFTER_COLUMNS, DRAFTERS
from outrider.errors import OutriderError
from outrider.replica.threads import available_cores

from .command import Arguments, command, json_option
from .output import MASK, masked_settings, tell

LIBRARIES = ("torch", "transformers", "ray", "vllm", "amd-pace", "openvino")
INSTRUCTIONS = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_bf16", "sve", "sve_bf16")
"""The instruction sets that decide which kernels run and how fast."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OUTRIDER_CACHE",
    "OUTRIDER_STATE_DIR",
    "RAY_ADDRESS",
)
"""Variables without secrets that are no settings of a deployment."""


@command("collect-env", json_option())
def collect_env(arguments: Arguments) -> int:
    """Prints what a bug report needs first, then all that torch tells, and last all packages."""
    from torch.utils.collect_env import get_env_info

    from outrider.redis.embedded import find_server

    try:
        redis = str(find_server())
    except OutriderError as error:
        redis = f"none: {error}"
    packages = dict(sorted((dist.name, dist.version) for dist in metadata.distributions()))
    machine: dict[str, Any] = get_env_info()._asdict()  # type: ignore[no-untyped-call]
    del machine["pip_packages"]
    machine["cpu_info"] = str(machine["cpu_info"]).splitlines()
    facts: dict[str, Any] = {
        "versions": {
            "outrider": packages["outrider"],
            "python": platform.python_version(),
            **{name: packages.get(name, "none") for name in LIBRARIES},
        },
        "processor": _processor(),
        "gpus": _gpus(),
        "settings": shown_variables(os.environ),
        "machine": {"redis_server": redis, **machine},
        "packages": packages,
    }
    text = yaml.safe_dump(json.loads(json.dumps(facts)), sort_keys=False).rstrip()
    return tell(Report(facts, [text]), arguments.json)


def _processor() -> dict[str, Any]:
    import torch

    has = torch.cpu.get_capabilities()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "name": has.get("cpu_name", "unknown"),
        "architecture": platform.machine(),
        "available_cores": available_cores(),
        "memory_gib": round(memory / 2**30, 2),
        "instructions": [name for name in INSTRUCTIONS if has.get(name)],
        "cpu_kernels": _cpu_kernels(),
    }


def _cpu_kernels() -> dict[str, str]:
    """By package: for which dtype its kernels can be used here, or why they cannot."""
    from outrider.kernels import cpu, openvino

    found = {}
    for package, load in ((cpu.PACKAGE, cpu.load_pace), (openvino.PACKAGE, openvino.load_openvino)):
        try:
            found[package] = f"for {str(load().dtype).removeprefix('torch.')}"
        except cpu.KernelsUnavailable as error:
            found[package] = f"none: {error}"
    return found


def _gpus() -> list[str]:
    import torch

    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [f"{device.name}, {device.total_memory / 2**30:.1f} GiB" for device in devices]


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what Outrider does. Masks secrets, and the values of unknown
    `OUTRIDER_*` variables, because a misspelt name may hold a secret."""
    settings = deployment_settings().items()
    open_names = {f"OUTRIDER_{key.upper()}" for key, setting in settings if not setting.secret}
    open_names |= {*VARIABLES}
    return masked_settings(
        {
            name: value if name in open_names else MASK
            for name, value in sorted(environment.items())
            if name in open_names or name == "HF_TOKEN" or name.startswith("OUTRIDER_")
        }
    )


@command("drafters", json_option())
def drafters(arguments: Arguments) -> int:
    from rich.table import Table
    from rich.text import Text

    rows = [dict(zip(DRAFTER_COLUMNS, row, strict=True)) for row in DRAFTERS]
    table = Table("--draft-model", "proposes, and needs", box=None, pad_edge=False)
    for row in rows:
        name, proposes, *needs = row.items()
        needed = "; ".join(f"{what}: {text}" for what, text in needs)
        table.add_row(Text(name[1]), Text(f"{proposes[1]}\n{needed}\n"))
    about = "q: the draft's distribution, over one token (one-hot) or the likeliest tokens (sparse)"
    return tell(Report({"drafters": rows}, [table, Text(about)]), arguments.json)
