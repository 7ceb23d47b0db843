"""What a server of any kind, one that runs a model, and a target can be told."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from outrider.errors import SettingError
from outrider.limits import (
    BATCHED_TOKENS_DEFAULT,
    BATCHED_TOKENS_MIN,
    DRAFT_SUPPORT_ENTRIES,
    TENSOR_PARALLEL_SIZE_MAX,
)
from outrider.registry.membership import Membership
from outrider.settings import setting, verify_settings
from outrider.telemetry.destination import Destination

TRANSFORMERS: Final = "transformers"
EMULATED: Final = "emulated:"
"""Begins an engine that states its step times instead of running a model."""
DTYPES: Final = ("auto", "bfloat16", "float16", "float32", "float64")
PORT_MAX: Final = 65_535
NUM_SEQS_MAX: Final = 4096
BATCHED_TOKENS_MAX: Final = 2**20
MODEL_LEN_MAX: Final = 2**24
MEMORY_BYTES_MAX: Final = 2**50
THREADS_MAX: Final = 1024
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What every service that listens has."""

    host: str = setting(LOOPBACK, "Address the servers bind to.")
    insecure: bool = setting(
        False, "Allow an address other than loopback, without keys and without TLS."
    )
    internal_tls_dir: str = setting(
        "", "Directory of certificates, as `outrider certs` makes it, by which coordinators, "
        "targets and drafts know each other; it must be on each one's machine. Empty = they speak "
        "in plain text and answer whoever reaches them.",
    )  # fmt: skip
    telemetry: str = setting(
        "", "Where traces and metrics go: `otlp=http://HOST:PORT`, `prometheus=PORT`, or both with "
        "a comma; the target takes the port after PORT, the draft the next. Empty = nowhere, but "
        "for `GET /metrics` of a coordinator with HTTP."
    )  # fmt: skip

    log_level: str = setting(
        "info", "What the logs have: `debug` adds a line for each session that ends or moves.",
        choices=("debug", "info", "warning"),
    )  # fmt: skip

    membership: Membership | None = None
    """Where it is announced; None = nowhere."""

    @property
    def plan(self) -> str:
        """See `Membership.plan`."""
        return "" if self.membership is None else self.membership.plan

    @property
    def slot(self) -> int:
        """See `Membership.slot`."""
        return 0 if self.membership is None else self.membership.slot

    def log_name(self, role: str) -> str:
        """What its log is called: as the replica, or else as its role."""
        return role if self.membership is None else self.membership.name

    @property
    def knows_callers(self) -> bool:
        """Whether whoever calls must show who that is."""
        return bool(self.internal_tls_dir)

    @property
    def metrics_host(self) -> str:
        """Where Prometheus is served, which asks nobody who they are."""
        return self.host if self.insecure or is_loopback(self.host) else LOOPBACK

    def __post_init__(self) -> None:
        verify_settings(self)
        if not (self.insecure or self.knows_callers or is_loopback(self.host)):
            raise SettingError(
                "host",
                f"{self.host!r} is reachable from other machines, and nothing asks callers for a "
                "key; bind 127.0.0.1, give keys with --api-key-file, or give --insecure if the "
                "network is trusted",
            )
        Destination.parse(self.telemetry)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServerConfig(ServerConfig):
    """What the two services that run a model have in common."""

    engine: str = setting(
        TRANSFORMERS,
        "What runs the models: `transformers`, or `emulated:KEY=VALUE,...` for a toy pair with "
        "stated step times.",
    )
    device: str = setting("auto", "`auto`, `cpu`, `cuda` or `cuda:N`.")
    max_num_seqs: int = setting(
        64, "Sessions that share a step of a target, and of a draft that is not given its own "
        "number.", minimum=1, maximum=NUM_SEQS_MAX,
    )  # fmt: skip
    gpu_memory_utilization: float = setting(
        0.9, "Part of a replica's share of its GPU's memory that it takes: its weights, and the "
        "rest for keys and values.", minimum=0.01, maximum=1,
    )  # fmt: skip
    max_num_batched_tokens: int = setting(
        BATCHED_TOKENS_DEFAULT, "Tokens of a step; a longer prompt is run in parts beside others.",
        minimum=BATCHED_TOKENS_MIN, maximum=BATCHED_TOKENS_MAX,
    )  # fmt: skip
    deterministic: bool = setting(
        False, "Make logits bit-equal whatever else is in a step, so that coupled and greedy "
        "tokens do not depend on `num_draft_tokens` or on other sessions. With fused kernels they "
        "are; else steps take longer.",
    )  # fmt: skip
    cpu_kernels: str = setting(
        "auto", "What a step on a CPU runs on: `auto` = the fused kernels of amd-pace where it is "
        "installed and fits processor and model, `torch` = torch's own operators.",
        choices=("auto", "torch"),
    )  # fmt: skip
    trust_remote_code: bool = setting(False, "Run Python code that comes with a model's files.")
    tokenizer_directory: str = ""
    """Where the target's tokenizer is, by which constraints are held to; empty without one."""

    def __post_init__(self) -> None:
        # super() without arguments does not work in a class that slots=True builds anew.
        ServerConfig.__post_init__(self)
        if self.engine != TRANSFORMERS and not self.engine.startswith(EMULATED):
            raise SettingError(
                "engine", f"{self.engine!r} is wrong; it must be `transformers` or `emulated:SPEC`"
            )
        name, _, index = self.device.partition(":")
        if not (self.device in ("auto", "cpu", "cuda") or (name == "cuda" and index.isdecimal())):
            raise SettingError(
                "device", f"{self.device!r} is wrong; it must be auto, cpu, cuda or cuda:N"
            )

    @property
    def step_sessions(self) -> int:
        """That share a step of this replica."""
        return self.max_num_seqs

    @property
    def emulated(self) -> str | None:
        """The specification of an emulated engine; None where models run."""
        return self.engine.removeprefix(EMULATED) if self.engine.startswith(EMULATED) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(ModelServerConfig):
    """One target replica."""

    model: str = setting(
        "demo",
        "The target: `demo`, a directory, a .gguf file, or a hub id.",
    )
    dtype: str = setting("auto", "Of the target's weights.", choices=DTYPES)
    max_model_len: int = setting(
        0, "Tokens of prompt and completion; 0 = what the model allows and the memory for keys and "
        "values holds.", minimum=0, maximum=MODEL_LEN_MAX,
    )  # fmt: skip
    kv_cache_memory_bytes: int = setting(
        0, "Bytes for the target's keys and values, on each rank; 0 = 1 GiB on CPU, on a GPU what "
        "`gpu_memory_utilization` leaves. No more is taken than `max_num_seqs` sequences of full "
        "length fill.", minimum=0, maximum=MEMORY_BYTES_MAX,
    )  # fmt: skip
    gather_sessions: bool = setting(
        True, "Let a step of the target wait for sessions that will soon want one too, where all "
        "of them then have their rounds sooner than in turns.",
    )  # fmt: skip
    port: int = setting(
        0, "The target's gRPC port; 0 = any.", key="target_port", minimum=0, maximum=PORT_MAX
    )
    num_cpus: float = setting(
        0.5, "CPUs that Ray reserves for the target.", key="target_num_cpus", minimum=0,
        maximum=THREADS_MAX,
    )  # fmt: skip
    num_gpus: float | None = setting(
        None, "GPUs, or a fraction of one, that Ray reserves for the target; unset = a share of "
        "one where the cluster has any.", key="target_num_gpus", minimum=0, maximum=THREADS_MAX,
    )  # fmt: skip
    num_threads: int = setting(
        0, "Threads of the target's steps; 0 = all cores, and all but one in steps of a few "
        "tokens while other processes use the cores.",
        key="target_num_threads", minimum=0, maximum=THREADS_MAX,
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "Ranks that share the target's model out, each with CPUs, GPUs and threads as above.",
        minimum=1, maximum=TENSOR_PARALLEL_SIZE_MAX,
    )  # fmt: skip
    directory: str = ""
    """Where the model's files are, once its name is resolved; empty for an emulated engine."""
    heads: str = ""
    """What its draft heads, or exit head, are called, where it drafts for itself; else empty."""
    heads_kind: str = ""
    """`medusa` or `early-exit`."""
    heads_directory: str = ""
    """Where these are."""
    heads_support_entries: int = DRAFT_SUPPORT_ENTRIES
    """Tokens that their distributions may keep on the wire."""
    shows_features: bool = False
    """Whether a draft is to read what its head reads."""
