"""What can be set, once: a frozen configuration per service, and one of a whole deployment.

Flags, `OUTRIDER_*` variables, YAML keys and the README's table are all made from these fields.
Fields that no `setting` makes are filled in by whoever starts the service.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from outrider.drafting.registry import AUTO, DrafterChoice, drafter_for, parse_drafter
from outrider.errors import SettingError
from outrider.limits import (
    BATCHED_TOKENS_DEFAULT,
    BATCHED_TOKENS_MIN,
    DEADLINE_MS_DEFAULT,
    DEADLINE_MS_MAX,
    DRAFT_SUPPORT_ENTRIES,
    HYBRID_MODEL_TOKENS,
    HYBRID_SCORE_MIN,
    LOOK_AHEAD_BYTES_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
    RUN_AHEAD_ROUNDS_MAX,
    SEED_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    SIBLINGS_DEFAULT,
    SIBLINGS_MAX,
    TENSOR_PARALLEL_SIZE_MAX,
)
from outrider.settings import Setting, build, merge, setting, settings_by_key, verify_settings
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
NGRAM_MAX: Final = 64
SUFFIX_DEPTH_MAX: Final = 64
SUFFIX_TOKENS_MAX: Final = 2**26
TRACE_ROUNDS_MAX: Final = 2**20
WAIT_MS_MAX: Final = 600_000
WAIT_S_MAX: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What every service that listens has."""

    host: str = setting("127.0.0.1", "Address the servers bind to.")
    insecure: bool = setting(
        False, "Allow an address other than loopback, without keys and without TLS."
    )
    telemetry: str = setting(
        "", "Where traces and metrics go: `otlp=http://HOST:PORT`, `prometheus=PORT`, or both with "
        "a comma; the target takes the port after PORT, the draft the next. Empty = nowhere."
    )  # fmt: skip

    def __post_init__(self) -> None:
        verify_settings(self)
        if not self.insecure and not _is_loopback(self.host):
            raise SettingError(
                "host",
                f"{self.host!r} is reachable from other machines, and nothing asks callers for a "
                "key; bind 127.0.0.1, or give --insecure if the network is trusted",
            )
        Destination.parse(self.telemetry)


def _is_loopback(host: str) -> bool:
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
        64, "Sessions that share a step of a replica.", minimum=1, maximum=NUM_SEQS_MAX
    )
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
        "tokens do not depend on `num_draft_tokens` or on other sessions; steps take longer.",
    )  # fmt: skip
    trust_remote_code: bool = setting(False, "Run Python code that comes with a model's files.")

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
        0, "Threads of the target's steps; 0 = all cores, and all but one in a step of a few "
        "tokens unless that is found much slower at the start.",
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


def _ngram_min() -> Any:
    return setting(
        1, "Tokens that prompt lookup must match, at least.", minimum=1, maximum=NGRAM_MAX
    )


def _ngram_max() -> Any:
    return setting(
        16, "Tokens beyond which a longer match is no better.", minimum=1, maximum=NGRAM_MAX
    )


def _check_ngrams(ngram_min: int, ngram_max: int) -> None:
    if ngram_min > ngram_max:
        raise SettingError("ngram_min", f"{ngram_min} is more than --ngram-max, {ngram_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(ModelServerConfig):
    """One draft replica."""

    model: str = setting(
        AUTO,
        "The draft: `auto` (what is shipped for the target, else `ngram`), a model as for the "
        "target, or what else `outrider drafters` lists.",
        key="draft_model",
    )
    dtype: str = setting("auto", "Of the draft's weights.", key="draft_dtype", choices=DTYPES)
    max_model_len: int = setting(
        0, "Tokens that the draft's cache takes; 0 = what its model allows.",
        key="draft_max_model_len", minimum=0, maximum=MODEL_LEN_MAX,
    )  # fmt: skip
    kv_cache_memory_bytes: int = setting(
        0, "Bytes for the draft's keys and values, on each rank; 0 as for the target.",
        key="draft_kv_cache_memory_bytes", minimum=0, maximum=MEMORY_BYTES_MAX,
    )  # fmt: skip
    port: int = setting(
        0, "The draft's gRPC port; 0 = any.", key="draft_port", minimum=0, maximum=PORT_MAX
    )
    num_cpus: float = setting(
        0.25, "CPUs that Ray reserves for the draft.", key="draft_num_cpus", minimum=0,
        maximum=THREADS_MAX,
    )  # fmt: skip
    num_gpus: float | None = setting(
        None, "GPUs, or a fraction of one, that Ray reserves for the draft; unset = a share of "
        "one where the cluster has any and the draft is a model.", key="draft_num_gpus",
        minimum=0, maximum=THREADS_MAX,
    )  # fmt: skip
    num_threads: int = setting(
        0, "Threads of the draft's steps; 0 = a share of the machine's cores, 1 where no "
        "model drafts.",
        key="draft_num_threads", minimum=0, maximum=THREADS_MAX,
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "Ranks that share the draft's model out, each with CPUs, GPUs and threads as above.",
        key="draft_tensor_parallel_size", minimum=1, maximum=TENSOR_PARALLEL_SIZE_MAX,
    )  # fmt: skip
    support_entries: int = setting(
        DRAFT_SUPPORT_ENTRIES, "Tokens that a draft distribution may keep on the wire.",
        key="draft_support_entries", minimum=2, maximum=4096,
    )  # fmt: skip
    ngram_min: int = _ngram_min()
    ngram_max: int = _ngram_max()
    suffix_depth: int = setting(
        16, "Tokens beyond which a longer match is no better in suffix decoding.",
        minimum=2, maximum=SUFFIX_DEPTH_MAX,
    )  # fmt: skip
    suffix_min_score: float = setting(
        0.2, "Suffix decoding drafts a token while the product of its and the earlier ones' shares "
        "is at least this.", minimum=0.01, maximum=1,
    )  # fmt: skip
    suffix_tokens_per_tenant: int = setting(
        2**17, "Tokens of earlier outputs that suffix decoding keeps of a tenant, some 200 bytes "
        "each; 0 = none.", minimum=0, maximum=SUFFIX_TOKENS_MAX,
    )  # fmt: skip
    suffix_tokens_total: int = setting(
        2**19, "Tokens of earlier outputs that it keeps of all tenants together.",
        minimum=0, maximum=SUFFIX_TOKENS_MAX,
    )  # fmt: skip
    hybrid_min_score: float = setting(
        HYBRID_SCORE_MIN, "Tokens that a hybrid's look-up must expect to be accepted before it "
        "answers in the model's place.", minimum=0.1, maximum=NUM_DRAFT_TOKENS_MAX,
    )  # fmt: skip
    hybrid_model_tokens: int = setting(
        HYBRID_MODEL_TOKENS, "Draft tokens that a hybrid's model draws in a round, at most; its "
        "look-up may propose all that are asked for.", minimum=1, maximum=NUM_DRAFT_TOKENS_MAX,
    )  # fmt: skip
    directory: str = ""
    """Where the model's files are, once its name is resolved; empty without a model."""
    target: str = ""
    """The target's name, for a drafter that was made for it; else empty."""
    target_directory: str = ""
    """Where that target's files are."""

    def __post_init__(self) -> None:
        ModelServerConfig.__post_init__(self)
        _check_ngrams(self.ngram_min, self.ngram_max)
        model = self.drafter.model
        bits = None if model is None else model.bits
        reads_target = self.drafter.reads_target
        if (bits is not None or reads_target) and self.emulated is not None:
            raise SettingError(
                "draft_model", f"{self.model} needs a target with weights; an emulated one has none"
            )
        if (bits is not None or reads_target) and self.tensor_parallel_size > 1:
            raise SettingError(
                "draft_tensor_parallel_size",
                f"{self.tensor_parallel_size} is wrong; {self.model} runs on one rank",
            )

    @property
    def drafter(self) -> DrafterChoice:
        """Who proposes."""
        return parse_drafter(self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(ServerConfig):
    """One coordinator."""

    served_model_name: str = setting(
        "", "Name that requests call the model by; empty = the target's own."
    )
    grpc_port: int = setting(
        50_051, "The coordinator's gRPC port; 0 = any.", minimum=0, maximum=PORT_MAX
    )
    redis_url: str = setting(
        "", "`redis://`, `rediss://` (TLS) or `unix://` URL of the session store; empty = an "
        "embedded server.",
        secret=True,
    )  # fmt: skip
    redis_username: str = setting("", "User of the session store; one in the URL wins.")
    redis_password: str = setting(
        "", "Its password; one in the URL wins. Best given as a variable.", secret=True
    )
    redis_ca_file: str = setting(
        "", "Certificate authority of a `rediss://` server; empty = the system's."
    )
    redis_key_prefix: str = setting("outrider:", "Begins every key in Redis.")
    num_draft_tokens: int = setting(
        8, "Draft tokens a round where a request does not say, or the most of them with "
        "`length_control`; 0 = plain decoding.", minimum=0, maximum=NUM_DRAFT_TOKENS_MAX,
    )  # fmt: skip
    length_control: bool = setting(
        True, "Choose the draft tokens of each round by what they are expected to bring and cost, "
        "none included; a request's number is then the most of them.",
    )  # fmt: skip
    look_ahead: int | None = setting(
        None, "Outcomes of a round that the draft works out while the target verifies; 0 = none, "
        "unset = some where draft and target share neither cores nor a device.",
        minimum=0, maximum=LOOK_AHEAD_MAX,
    )  # fmt: skip
    look_ahead_bytes_max: int = setting(
        LOOK_AHEAD_BYTES_MAX,
        "Bytes of proposals that are kept for the outcomes of one round of a session.",
        minimum=0,
    )
    draft_siblings: int | None = setting(
        None, "Candidates that a model's proposal may have beside each of its tokens, in a tree; "
        "without `length_control` just so many, as far as a tree may be large. 0 = chains, unset = "
        f"up to {SIBLINGS_DEFAULT} with `length_control` on CPUs. None with `look_ahead`, asked "
        "for or chosen, `deterministic`, penalties or the rule block.",
        minimum=0, maximum=SIBLINGS_MAX,
    )  # fmt: skip
    run_ahead_rounds: int = setting(
        8, "Rounds of plain decoding that the target may run before it hears back.",
        minimum=0, maximum=RUN_AHEAD_ROUNDS_MAX,
    )  # fmt: skip
    max_sessions: int = setting(
        SESSIONS_PER_COORDINATOR_MAX, "Sessions that may run at once; more are refused.",
        minimum=1, maximum=SESSIONS_PER_COORDINATOR_MAX,
    )  # fmt: skip
    deadline_ms: int = setting(
        DEADLINE_MS_DEFAULT,
        "Deadline of a request that names none, ms.",
        minimum=1,
        maximum=DEADLINE_MS_MAX,
    )
    resume_grace_ms: int = setting(
        10_000, "Wait for a client whose stream broke to resume its session, which then counts as "
        "cancelled, ms. Nothing is decoded meanwhile.", minimum=0, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    draft_timeout_ms: int = setting(
        1_000, "Wait for a proposal before the round goes on without one, ms.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    draft_retry_ms: int = setting(
        1_000, "Rest after a failure before the draft is asked again, ms.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    target_timeout_ms: int = setting(
        30_000, "Wait for a verdict before it is asked for again, ms.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    target_retry_ms: int = setting(
        100, "First rest after a failure before the target is asked again, ms; it doubles.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    target_gone_ms: int = setting(
        60_000,
        "A target that cannot be reached for so long ends the request, ms.",
        minimum=1,
        maximum=WAIT_MS_MAX,
    )
    ngram_min: int = _ngram_min()
    ngram_max: int = _ngram_max()
    """Of the prompt lookup that drafts while no draft replica answers."""
    seed: int | None = setting(
        None, "Seeds the stream that requests without a seed take theirs from; unset = the "
        "operating system's randomness.", minimum=0, maximum=SEED_MAX,
    )  # fmt: skip
    num_cpus: float = setting(
        0.25, "CPUs that Ray reserves for the coordinator.", key="coordinator_num_cpus",
        minimum=0, maximum=THREADS_MAX,
    )  # fmt: skip
    trace_first_rounds: int = setting(
        2, "Rounds at a request's beginning that have spans of their own.", minimum=0,
        maximum=TRACE_ROUNDS_MAX,
    )  # fmt: skip
    trace_every_rounds: int = setting(
        64, "After those, each so manieth round has; 0 = none. All count in the request's totals.",
        minimum=0, maximum=TRACE_ROUNDS_MAX,
    )  # fmt: skip
    trace_prompts: bool = setting(False, "Record the text of prompts in traces.")
    reflection: bool = setting(True, "Serve gRPC reflection on the coordinator.")
    tokenizer_directory: str = ""
    """Where the tokenizer's files are; empty = requests give token ids and get no text."""
    trust_remote_code: bool = setting(False, "Run Python code that comes with a model's files.")
    target_address: str = ""
    """HOST:PORT of the target replica."""
    draft_address: str = ""
    """HOST:PORT of the draft replica; empty = none."""
    lookup: DraftConfig | None = None
    """Of a hybrid whose target drafts: the look-up, which goes before its own proposals."""

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        if set(self.redis_key_prefix) & set("{}"):
            raise SettingError("redis_key_prefix", "braces are not allowed in it")
        _check_ngrams(self.ngram_min, self.ngram_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """A coordinator, a target replica and a draft replica, and how they are started."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    address: str = setting("", "Ray cluster to start the actors on; empty = a local one.")
    startup_timeout_s: float = setting(
        20.0, "Wait for Ray to find a place for every actor, s.", minimum=0.1, maximum=WAIT_S_MAX
    )
    model_timeout_s: float = setting(
        900.0, "Wait for the models to load, s.", minimum=0.1, maximum=WAIT_S_MAX
    )
    stop_timeout_s: float = setting(
        10.0, "Wait for running requests to end when stopping, s.", minimum=0, maximum=WAIT_S_MAX
    )

    def __post_init__(self) -> None:
        verify_settings(self)
        if self.draft.model == AUTO:
            named = drafter_for(None if self.target.emulated else self.target.model)
            object.__setattr__(self, "draft", replace(self.draft, model=named))
        if self.draft.drafter.reads_target:
            self._check_reading()
        if self.target.deterministic and self.coordinator.draft_siblings:
            raise SettingError(
                "draft_siblings",
                f"{self.coordinator.draft_siblings} given, but with `deterministic` there are no "
                "trees: their logits may differ in the last bit from those of a chain",
            )

    def _check_reading(self) -> None:
        """Of a target that computes what is drafted from."""
        ranks = self.target.tensor_parallel_size
        for key, value, reason in (
            ("tensor_parallel_size", ranks if ranks > 1 else 0, "which takes one rank"),
            ("look_ahead", self.coordinator.look_ahead, "once the outcome is known"),
        ):
            if value:
                raise SettingError(
                    key,
                    f"{value} given, but {self.draft.model} drafts from what its target computes, "
                    f"{reason}",
                )

    @property
    def served_model_name(self) -> str:
        """What requests call the model."""
        return self.coordinator.served_model_name or self.target.model


def deployment_settings() -> dict[str, Setting]:
    """Every setting of a deployment by key, in the order of the documentation."""
    return settings_by_key(TargetConfig, DraftConfig, CoordinatorConfig, DeploymentConfig)


def load_config(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> DeploymentConfig:
    """The deployment that defaults < `file` (YAML) < `environment` (`OUTRIDER_*`) < `flags` (by
    key; text or values) describe. Raises `ConfigError` naming what set the bad value, and
    `SettingError` for values that do not go together."""
    values = merge(deployment_settings(), file, environment, flags)
    return build(
        DeploymentConfig,
        values,
        target=build(TargetConfig, values),
        draft=build(DraftConfig, values),
        coordinator=build(CoordinatorConfig, values),
    )
