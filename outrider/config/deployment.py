"""Configurations: one frozen dataclass of settings for each service, and one for a deployment.

Each field that is not `Internal` is a setting, with a flag, an `OUTRIDER_*` variable, a YAML key
and a row in `docs/settings.md`. The code that starts a service sets the `Internal` fields."""

import ipaddress
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field

from outrider import limits
from outrider.config.speculative import SPECULATIVE_CONFIG, SpeculativeConfig, settings_of_vllm
from outrider.config.telemetry_destination import Destination
from outrider.drafters.names import EAGLE3, MTP, DrafterChoice, LookupKind, parse_drafter
from outrider.errors import ConfigError, SettingError
from outrider.foundation.api_keys import given_keys
from outrider.foundation.settings import (
    Internal,
    Setting,
    Value,
    between,
    blaming,
    build,
    checked,
    layers,
    settings_of,
)
from outrider.redis.address import RedisAddress
from outrider.registry.registry import Membership, Role

PORT_MAX = 65_535
THREADS_MAX = 1024
LOOPBACK = "127.0.0.1"
PATHS = (
    "internal_tls_dir",
    "api_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "redis_password_file",
    "redis_ca_file",
)
"""Settings whose values are paths of files or directories that replicas read."""

Port = Annotated[int, between(0, PORT_MAX)]
Cpus = Annotated[float, between(0, THREADS_MAX)]
Server = TypeVar("Server", bound="ServerConfig")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_security(config: Server) -> Server:
    """A copy for measurements: on loopback, without keys and TLS."""
    cleared = {field.name: "" for field in fields(config) if field.name in (*PATHS, "api_key")}
    changes: dict[str, Any] = {"host": LOOPBACK, **cleared}
    return replace(config, **changes)


@checked()
class ServerConfig:
    """Settings of every service."""

    host: str = LOOPBACK
    """Address that each server binds to."""
    insecure: bool = False
    """Let servers that do not authenticate callers bind an address other than loopback."""
    internal_tls_dir: str = ""
    """Directory of the certificates that `outrider certs` made. Every machine needs a copy at the
    same path. Coordinators, targets and drafts authenticate each other by these certificates;
    empty = they use neither TLS nor authentication."""
    telemetry: str = ""
    """Where to send traces and metrics: `otlp=http://HOST:PORT`, `prometheus=PORT`, or both with a
    comma between them; empty = nowhere. The coordinator serves its metrics on PORT, the target on
    PORT + 1, the draft on PORT + 2. For each further replica of a role on the same machine, the
    port grows by 3. A coordinator with HTTP always serves its own metrics by `GET /metrics`."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Log level; `debug` adds a line for each session that ends or moves to another replica."""
    role: ClassVar[Role]
    guard: ClassVar[str] = "certificates with --internal-tls-dir"
    """Part of an error text: the setting that makes the server authenticate its callers."""
    membership: Internal[Membership | None] = None
    """None = the replica does not announce itself in the registry."""

    @property
    def replica_index(self) -> int:
        """Index of the replica among the replicas of its role on this machine, from 0."""
        return 0 if self.membership is None else self.membership.index

    @property
    def log_name(self) -> str:
        return self.role if self.membership is None else self.membership.name

    @property
    def authenticates_callers(self) -> bool:
        return bool(self.internal_tls_dir)

    @property
    def metrics_host(self) -> str:
        """Address on which metrics are served to Prometheus, without authentication."""
        return self.host if self.insecure or is_loopback(self.host) else LOOPBACK

    def __post_init__(self) -> None:
        if not (self.insecure or self.authenticates_callers or is_loopback(self.host)):
            raise SettingError(
                "host",
                f"{self.host!r} is reachable from other machines, but the {self.role} does not "
                f"authenticate callers; bind 127.0.0.1, give {self.guard}, or give --insecure if "
                "the network is trusted",
            )
        Destination.parse(self.telemetry)


HERMES = "hermes"
"""The value of `chat_template` for Outrider's own template."""
AUTO_ENGINE = "auto"
VLLM = "vllm"
EMULATED = "emulated:"
"""Prefix of the values of `engine` for an engine that runs no model and simulates step times."""
NGRAM_MAX = 64

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
Device = Annotated[
    str, Field(pattern="^(auto|cpu|cuda(:[0-9]+)?)$", title="auto, cpu, cuda or cuda:N")
]


@checked()
class ModelServerConfig(ServerConfig):
    """Settings of targets and drafts."""

    engine: Annotated[
        str,
        Field(
            pattern="^(auto|transformers|vllm|emulated:.*)$",
            title="auto, transformers, vllm or emulated:SPEC",
        ),
    ] = AUTO_ENGINE
    """Engine that runs the models: `transformers`; `vllm` (must be installed); `auto` = vLLM on a
    CUDA device if vLLM is installed and supports the settings, otherwise transformers;
    `emulated:KEY=VALUE,...` = toy models whose steps take the given times."""
    enforce_eager: bool = False
    """Run models on vLLM without compilation and without CUDA graphs."""
    device: Device = "auto"
    """Device of the models: `cpu`, `cuda`, `cuda:N`, or `auto` = `cuda` if the replica has a GPU,
    otherwise `cpu`."""
    max_num_seqs: Annotated[int, between(1, 4096)] = 64
    """Largest number of sessions in one step of a target or of a draft."""
    gpu_memory_utilization: Annotated[float, between(0.01, 1)] = 0.9
    """Fraction of GPU memory that a replica uses for weights, keys and values. If replicas share a
    GPU, this number is the fraction of a replica's share of the memory."""
    max_num_batched_tokens: Annotated[int | None, between(limits.BATCHED_TOKENS_MIN, 2**20)] = None
    """Largest number of tokens in one step; unset = 2048 with vLLM and 512 with other engines.
    Longer prompts are prefilled in several steps. A larger number raises throughput, but requests
    wait longer while other prompts are prefilled."""
    deterministic: bool = False
    """Compute logits that are bit-identical regardless of the other tokens in the step. Under the
    rules coupled and greedy, the output then depends neither on `num_draft_tokens` nor on other
    sessions. This setting makes all kernels slower except the fused CPU kernels."""
    cpu_kernels: Literal["auto", "amd-pace", "openvino", "torch"] = "auto"
    """Kernels for steps on a CPU: `amd-pace` = its fused kernels, for bfloat16 on processors with
    AVX-512 BF16; `openvino` = OpenVINO's runtime, for float32; `torch` = torch's operators; `auto`
    = the first of these that is installed and supports the processor and the dtype. If it cannot
    run the model, torch's operators do."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model's files."""
    dtype: Dtype = "auto"
    """Data type of the weights; `auto` = as in the files, but `float32` in place of `bfloat16` on a
    CPU that lacks instructions for `bfloat16`."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Round the weights of linear layers to 8 or 4 bits, for less memory and faster steps on a CPU
    with OpenVINO. The model with rounded weights is then the model: output is exact with respect to
    it. `none` = weights as in the files."""
    max_model_len: Annotated[int, between(0, 2**24)] = 0
    """Largest number of tokens of prompt and completion together; 0 = as many as the model allows
    and the memory for keys and values can hold."""
    kv_cache_memory_bytes: Annotated[int, between(0, 2**50)] = 0
    """Bytes for keys and values on each rank; 0 = 1 GiB on a CPU, and on a GPU the memory that
    `gpu_memory_utilization` allows, less the weights. A replica allocates at most what
    `max_num_seqs` sequences of full length need."""
    port: Port = 0
    """The replica's gRPC port, for firewalls that admit only some ports; 0 = any free port."""
    num_cpus: Cpus = 0.5
    """CPUs that Ray reserves for a replica. This number limits how many replicas Ray places on a
    machine, not how many cores a replica uses."""
    num_gpus: Annotated[float | None, between(0, THREADS_MAX)] = None
    """Number of GPUs, or a fraction of a GPU, that Ray reserves for each rank of a replica; unset =
    an equal share of the cluster's GPUs, at most one GPU."""
    num_threads: Annotated[int, between(0, THREADS_MAX)] = 0
    """Number of threads that run a replica's steps; 0 = all cores for a target, half of the cores
    for each draft. If `outrider serve` starts several targets on this machine, these divide its
    cores; drafts do not. With 0 and without `deterministic`, a target that has all cores uses one
    thread for steps of a few milliseconds that more threads hardly shorten, and one thread fewer
    for small steps while other processes slow it down. If a target's step has as many threads as
    there are cores, each thread has a core of its own. OpenVINO's steps always have all threads,
    and one thread for tiny models."""
    tensor_parallel_size: Annotated[int, between(1, limits.TENSOR_PARALLEL_SIZE_MAX)] = 1
    """Number of tensor-parallel ranks. The numbers of CPUs, GPUs and threads apply to each rank."""
    directory: Internal[str] = ""
    """Directory of the model's files; empty without a model."""
    tokenizer_directory: Internal[str] = ""
    """Directory of the target's tokenizer, which constraints need; empty without a tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization == "none":
            return
        for key, allowed in (
            ("dtype", ("auto", "float32")),
            ("cpu_kernels", ("auto", "openvino")),
            ("tensor_parallel_size", (1,)),
        ):
            if (value := getattr(self, key)) not in allowed:
                name = settings_of(type(self))[key].key
                reason = f"rounds weights for OpenVINO in float32, which {name} {value} rules out"
                raise SettingError(
                    "quantization", f"{self.quantization} {reason}; give {name} {allowed[0]}"
                )
        if self.emulated is not None:
            raise SettingError(
                "quantization", f"{self.quantization} is wrong; an emulated engine has no weights"
            )

    @property
    def model_engine(self) -> str:
        return self.engine

    @property
    def emulated(self) -> str | None:
        """The specification of an emulated engine; None for other engines."""
        return self.engine.removeprefix(EMULATED) if self.engine.startswith(EMULATED) else None


_OF_REPLICAS = ("port", "num_cpus", "num_gpus", "num_threads")
_OF_MODELS = (
    "model",
    "dtype",
    "quantization",
    "max_model_len",
    "kv_cache_memory_bytes",
    "tensor_parallel_size",
)


@checked("draft_", _OF_REPLICAS + _OF_MODELS)
class DraftConfig(ModelServerConfig):
    """Settings of drafts."""

    role = "draft"

    model: str = LookupKind.SUFFIX.value
    """The drafter: a model (a directory, a .gguf file, or a hub id), or a drafter that `outrider
    drafters` lists."""
    own_engine: Annotated[
        Literal["", "auto", "transformers", "vllm"], Field(alias="draft_engine")
    ] = ""
    """Engine that runs the draft's model; empty = the value of `engine`."""
    num_cpus: Cpus = 0.25
    eagle3_on: Literal["target", "draft"] = "target"
    """Where an EAGLE-3 head runs: on targets or on draft replicas. If it runs on draft replicas,
    the target sends them one row of hidden states for each token."""
    ngram_min: Annotated[int, between(1, NGRAM_MAX)] = 1
    """Shortest match of prompt lookup, in tokens."""
    ngram_max: Annotated[int, between(1, NGRAM_MAX)] = 16
    """Longest match of prompt lookup, in tokens."""
    suffix_depth: Annotated[int, between(2, 64)] = 16
    """Longest match, in tokens, that suffix decoding looks for."""
    suffix_min_score: Annotated[float, between(0.01, 1)] = 0.1
    """Suffix decoding extends a proposal while the estimated probability that all its tokens are
    accepted is at least this number."""
    suffix_tokens_per_tenant: Annotated[int, between(0, 2**26)] = 2**17
    """Number of tokens of earlier outputs that suffix decoding keeps for each tenant; 0 = none. A
    token takes about 200 bytes. All tenants together have room for four times this number."""
    hybrid_min_score: Annotated[float, between(0.1, limits.NUM_DRAFT_TOKENS_MAX)] = 0.6
    """If the look-up (`suffix` or `ngram`) of a hybrid drafter expects at least this number of
    accepted tokens, the hybrid uses the look-up, otherwise its model or head."""
    hybrid_model_tokens: Annotated[int, between(1, limits.NUM_DRAFT_TOKENS_MAX)] = 1
    """Largest number of tokens that a hybrid drafter's model or head drafts in a round."""
    target: Internal[str] = ""
    """Name of the target for which the drafter was trained; empty = for no particular target."""
    target_directory: Internal[str] = ""

    @property
    def model_engine(self) -> str:
        return self.own_engine or self.engine

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram_min > self.ngram_max:
            reason = f"{self.ngram_min} is more than ngram_max, {self.ngram_max}"
            raise SettingError("ngram_min", reason)
        if self.drafter.kind and self.emulated is not None:
            raise SettingError(
                "draft_model",
                f"{self.model} needs a target with weights; an emulated target has none",
            )
        if self.drafter.kind and self.tensor_parallel_size > 1:
            raise SettingError(
                "draft_tensor_parallel_size",
                f"{self.tensor_parallel_size} is wrong; {self.model} runs on one rank",
            )
        if self.drafter.kind and self.quantization != "none":
            raise SettingError(
                "quantization",
                f"{self.quantization} is wrong; {self.model} reads the target's weights",
            )

    @property
    def drafter(self) -> DrafterChoice:
        choice = parse_drafter(self.model)
        return replace(choice, runs_on=self.eagle3_on) if choice.kind == EAGLE3 else choice


@checked("target_", _OF_REPLICAS)
class TargetConfig(ModelServerConfig):
    """Settings of targets."""

    role = "target"

    model: str = "demo"
    """The target: `demo`, a directory, a .gguf file, or a hub id."""
    head: Internal[str] = ""
    """Name of the target's draft head; empty without a head."""
    head_kind: Internal[str] = ""
    """Kind of the head: `eagle3` or `mtp`; empty without a head."""
    head_directory: Internal[str] = ""
    shows_features: Internal[bool] = False
    """Whether the target sends features to an EAGLE-3 head on draft replicas."""
    lookup: Internal[DraftConfig] = DraftConfig(model="model")
    """Settings of the target's look-up. If `lookup.model` is not a look-up, the target has none."""
    stream_interval_ms: Annotated[int, between(0, 1000)] = limits.STREAM_INTERVAL_MS
    """If the target runs rounds ahead of the coordinator, as in plain decoding, it collects tokens
    for up to this time before it sends them, ms. A longer interval saves CPU time, but clients get
    the tokens in larger groups."""


ReplicaConfig = TargetConfig | DraftConfig
WAIT_MS_MAX = 600_000
WaitMs = Annotated[int, between(1, WAIT_MS_MAX)]


@checked()
class CoordinatorConfig(ServerConfig):
    """Settings of coordinators."""

    api_key: str = Field(default="", repr=False)
    """API keys or their hashes, in several flags or separated by commas. If set, callers must send
    a key. Prefer the environment variable, because other users of the machine can see flags."""
    api_key_file: str = ""
    """File of API keys, tenants and limits (see `outrider keys`). A changed file is read again."""
    ssl_certfile: str = ""
    """Certificate of the coordinators, in PEM, followed by intermediate certificates. If set,
    callers must use TLS. A changed file is read again."""
    ssl_keyfile: str = ""
    """Private key of `ssl_certfile`, in PEM."""
    ssl_ca_certs: str = ""
    """Certificate authorities, in PEM. Each caller's certificate must be signed by one of these
    authorities. Empty = callers need no certificate."""
    role = "coordinator"
    guard = "keys with --api-key-file"
    served_model_name: str = ""
    """Name of the model in requests; empty = the target's name."""
    grpc_port: Port = 50_051
    """The coordinator's gRPC port; 0 = any free port."""
    health_port: Annotated[int | None, between(1, PORT_MAX)] = None
    """Port of a second gRPC server, which only tells the coordinator's health, to every caller and
    without TLS. Calls at `grpc_port` do not delay its answers. Unset = no such server."""
    http: bool = True
    """Serve OpenAI's API by HTTP."""
    port: Port = 8_000
    """The coordinator's HTTP port; 0 = any free port."""
    chat_template: str = ""
    """Chat template to use instead of the model's: a file, or `hermes`, which adds tool calls to
    models that use ChatML."""
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "deepseek", "none"] = "auto"
    """Format of the model's tool calls; `auto` = the format of the chat template, `none` = leave
    tool calls in the text."""
    reasoning_parser: Literal["auto", "deepseek_r1", "qwen3", "none"] = "auto"
    """Which part of a chat answer is reasoning: `qwen3` = a `<think>` block at the beginning,
    `deepseek_r1` = all text before `</think>`, `none` = no part, `auto` = the template decides."""
    redis: Internal[RedisAddress] = RedisAddress()
    redis_wait_replicas: Annotated[int, between(0, limits.REDIS_WAIT_REPLICAS_MAX)] = 0
    """Number of Redis replicas that must store a token before the client gets it; 0 = only the
    primary must store it. If all replicas must store it, a failover cannot lose it."""
    num_draft_tokens: Annotated[int, between(0, limits.NUM_DRAFT_TOKENS_MAX)] = 8
    """Number of draft tokens in a round, for requests that do not set it; 0 = plain decoding. With
    `length_control`, rounds may have fewer draft tokens."""
    length_control: bool = True
    """Choose the number of draft tokens of each round, up to the number that the request allows,
    from the expected acceptance and the time of drafting."""
    unseeded_rule: Literal["token", "block"] = "block"
    """Acceptance rule for requests that set no rule and no seed and have a temperature above 0."""
    look_ahead: Annotated[int | None, between(0, limits.LOOK_AHEAD_MAX)] = None
    """While the target verifies a round, the draft drafts the next round for this number of
    possible outcomes; 0 = no look-ahead. Unset = 16 if draft and target share neither cores nor a
    device, otherwise 0."""
    run_ahead_rounds: Annotated[int, between(0, limits.RUN_AHEAD_ROUNDS_MAX)] = 32
    """Largest number of rounds that a target may run ahead of the coordinator: rounds without
    drafts, and rounds for which the target's look-up or head drafts."""
    lookup_on: Literal["coordinator", "target"] | None = None
    """Where look-ups draft. On the target, they draft for several rounds that do not wait for the
    coordinator, unless another session has the same seed (under the rules token and block). On the
    target, a prompt is indexed in steps, and has no drafts until then. The tenant's earlier answers
    are kept where `suffix` drafts: each target has those that it wrote. Unset = `target` for
    `suffix` and `ngram`, and `coordinator` for the look-up of `hybrid:LOOKUP,X`."""
    max_sessions: Annotated[int, between(1, limits.SESSIONS_PER_COORDINATOR_MAX)] = 4096
    """Largest number of sessions at a time. Further requests are refused."""
    deadline_ms: Annotated[int, between(1, limits.DEADLINE_MS_MAX)] = limits.DEADLINE_MS_DEFAULT
    """Deadline of requests that set no deadline, ms."""
    resume_grace_ms: Annotated[int, between(0, WAIT_MS_MAX)] = 10_000
    """If a session's stream breaks, a client may resume the session within this time, ms. Meanwhile
    the session does not decode. If it is not resumed in time, it is cancelled."""
    draft_timeout_ms: WaitMs = 1_000
    """Time limit for drafting in a round, ms. At the limit, the draft returns the tokens drawn so
    far. If drafting for this time would not pay, length control sets a shorter limit."""
    target_gone_ms: WaitMs = 60_000
    """A request fails if, for this time, its target cannot be reached and no target is known to be
    starting, ms."""
    target_start_ms: Annotated[int, between(1, limits.DEADLINE_MS_MAX)] = 600_000
    """While no target can be reached and a target is known to be starting, a request waits for at
    most this time, ms. A value below `target_gone_ms` counts as `target_gone_ms`."""
    seed: Annotated[int | None, between(0, limits.SEED_MAX)] = None
    """Seed of the generators that draw seeds for requests without a seed; unset = the operating
    system draws these seeds. Each coordinator draws its own series, which depends on this seed and
    on the coordinator's name. If a deployment begins again with an empty Redis and the same numbers
    of replicas, the names and the series are the same. A coordinator that replaces another has
    another name and draws another series."""
    num_cpus: Annotated[Cpus, Field(alias="coordinator_num_cpus")] = 0.25
    """Number of CPUs that Ray reserves for a coordinator."""
    audit_share: Annotated[float, between(0, 1)] = 0.001
    """Fraction of the sessions that are audited at their end; 0 = no audits. In an audit the target
    scores the session's tokens again, and metrics compare these tokens with the target's
    distribution. One session is audited at a time. Without `telemetry` there are no audits."""
    trace_every_rounds: Annotated[int, between(0, 2**20)] = 64
    """In a trace, the first two rounds of a request have spans, and then every Nth round, where N
    is this number; 0 = no round has spans. The totals in the request's span include all rounds."""
    vllm_metric_names: bool = False
    """Also export speculation counters to Prometheus under vLLM's names, `vllm:spec_decode_...`."""
    tokenizer_directory: Internal[str] = ""
    """Directory of the tokenizer; empty = requests give token ids and get no text."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model's files."""
    drafting_delays: Internal[bool] = False
    """Whether drafting slows the target down because draft and target share cores or a device."""
    shares_ports: Internal[bool] = False
    """Whether this coordinator and its replacement may share ports while both run."""
    takes_over_ports: Internal[bool] = False
    """Whether to listen on ports on which the replaced coordinator may still listen."""
    target_address: Internal[str] = ""
    """HOST:PORT of a target that does not announce itself in the registry; empty = none."""
    draft_address: Internal[str] = ""
    """HOST:PORT of a draft that does not announce itself in the registry; empty = none."""
    lookup: Internal[DraftConfig] = DraftConfig(model="model")
    """Settings of the look-up in the coordinator. If `lookup.model` is neither a look-up nor a
    hybrid, the coordinator uses `ngram`, but only in place of missing proposals."""

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    @property
    def authenticates_callers(self) -> bool:
        return self.asks_for_keys

    @property
    def serves_reflection(self) -> bool:
        return not self.asks_for_keys

    def reaching(self, redis: RedisAddress) -> Self:
        """A copy that uses the address `redis` for the sessions and the registry."""
        member = self.membership and replace(self.membership, redis=redis)
        return replace(self, redis=redis, membership=member)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redis.password and self.redis.password_file:
            raise SettingError("redis_password_file", "cannot go with redis_password")
        for key, needed in (
            ("ssl_certfile", "ssl_keyfile"),
            ("ssl_keyfile", "ssl_certfile"),
            ("ssl_ca_certs", "ssl_certfile"),
        ):
            if getattr(self, key) and not getattr(self, needed):
                raise SettingError(key, f"needs {needed}, too")
        with blaming("api_key"):
            given_keys(self.api_key)


WAIT_S_MAX = 86_400
LEAST: dict[Role, int] = {"coordinator": 1, "target": 1, "draft": 0}
"""Smallest allowed number of replicas of each role."""
BOUND_SETTINGS = tuple(f"autoscale_{role}s" for role in LEAST)
_Bounds = Annotated[
    str,
    Field(pattern="^([0-9]{1,9}:[0-9]{1,9})?$", title="LEAST:MOST (two whole numbers) or empty"),
]


@checked()
class AutoscaleConfig:
    """Settings of autoscaling."""

    autoscale_targets: _Bounds = ""
    """Smallest and largest number of targets, as LEAST:MOST. The number follows the load within
    these bounds. Empty = the number does not follow the load."""
    autoscale_drafts: _Bounds = ""
    """Smallest and largest number of drafts, in the format of `autoscale_targets`."""
    autoscale_coordinators: _Bounds = ""
    """Smallest and largest number of coordinators, in the format of `autoscale_targets`."""
    autoscale_queue_steps: Annotated[float, between(0.1, 1000)] = 1.5
    """Add targets if the mean wait in the queue exceeds this number of step durations."""
    autoscale_draft_waits: Annotated[float, between(0.01, 1)] = 0.25
    """Add drafts if more than this share of the rounds waits for a busy draft."""
    autoscale_calm_s: Annotated[float, between(1, WAIT_S_MAX)] = 120.0
    """Remove a replica if one fewer would have been enough throughout this time, s."""

    def __post_init__(self) -> None:
        self.bounds  # noqa: B018 (raises)

    @property
    def bounds(self) -> dict[Role, tuple[int, int]]:
        """The bounds of each role that is scaled by load. Raises `SettingError`."""
        bounds_by_role: dict[Role, tuple[int, int]] = {}
        for role, key in zip(LEAST, BOUND_SETTINGS, strict=True):
            if not (text := getattr(self, key)):
                continue
            least, most = map(int, text.split(":"))
            if not LEAST[role] <= least <= most <= limits.REPLICAS_MAX:
                bounds = f"{LEAST[role]} <= LEAST <= MOST <= {limits.REPLICAS_MAX}"
                raise SettingError(key, f"{text!r} is wrong; it must be LEAST:MOST with {bounds}")
            bounds_by_role[role] = least, most
        return bounds_by_role


@checked()
class DeploymentConfig:
    """Settings of the deployment."""

    target: Internal[TargetConfig] = TargetConfig()
    draft: Internal[DraftConfig] = DraftConfig()
    coordinator: Internal[CoordinatorConfig] = CoordinatorConfig()
    autoscale: Internal[AutoscaleConfig] = AutoscaleConfig()
    num_targets: Annotated[int, between(1, limits.REPLICAS_MAX)] = 1
    """Number of target replicas at the start. `outrider scale` changes the number later."""
    num_drafts: Annotated[int, between(0, limits.REPLICAS_MAX)] = 1
    """Number of draft replicas at the start. Look-ups and heads on the target need no replica."""
    num_coordinators: Annotated[int, between(1, limits.REPLICAS_MAX)] = 1
    """Number of coordinators at the start. On one machine, their port numbers are consecutive."""
    target_resources: str = ""
    """Ray resources that each rank of a target needs in addition to CPUs and GPUs, as NAME=AMOUNT,
    separated by commas."""
    draft_resources: str = ""
    """Ray resources that each rank of a draft needs, in the format of `target_resources`."""
    coordinator_resources: str = ""
    """Ray resources that each coordinator needs, in the format of `target_resources`."""
    address: str = ""
    """Address of the Ray cluster on which the actors start; empty = a local cluster."""
    deployment_name: Annotated[
        str, Field(pattern="^[A-Za-z0-9_-]{0,63}$", title="at most 63 letters, digits, - and _")
    ] = ""
    """Name of the deployment; empty = a new name each time. If a deployment of this name runs on
    the cluster, `serve` takes it over and upgrades it to these settings."""
    startup_timeout_s: Annotated[float, between(0.1, WAIT_S_MAX)] = 20.0
    """Time within which the Ray cluster must have room for all actors, s."""
    model_timeout_s: Annotated[float, between(0.1, WAIT_S_MAX)] = 900.0
    """Time limit for loading the models, s."""
    stop_timeout_s: Annotated[float, between(0, WAIT_S_MAX)] = 10.0
    """When a replica stops, its running requests have this time to end, s."""

    def __post_init__(self) -> None:
        drafter, ranks = self.draft.drafter, self.target.tensor_parallel_size
        on_vllm = self.target.engine == VLLM
        look_ahead = self.coordinator.look_ahead
        apart = drafter.runs_on == "draft" and drafter.kind
        # Heads on draft replicas, and MTP without vLLM, need a target with one rank.
        on_one_rank = apart or (drafter.kind == MTP and not on_vllm)
        reads = f"{self.draft.model} reads the target's hidden states"
        or_vllm = ", or --engine vllm" if drafter.kind == MTP else ""
        if on_one_rank and ranks > 1:
            raise SettingError(
                "tensor_parallel_size",
                f"{ranks} is wrong; {reads}, so the target must run on one rank; give 1{or_vllm}",
            )
        if drafter.kind and look_ahead:
            raise SettingError(
                "look_ahead",
                f"{look_ahead} is wrong; {reads}, which exist only once the outcome is known; "
                "give 0",
            )
        if on_vllm and apart:
            raise SettingError(
                "eagle3_on", "draft is wrong; vllm sends no hidden states; give target"
            )

    def values(self, *, secrets: bool = True) -> dict[str, Value]:
        """All settings by key, with or without secrets."""
        coordinator = self.coordinator
        return {
            setting.key: getattr(part, name)
            for part in (
                self.target,
                self.draft,
                coordinator,
                coordinator.redis,
                self.autoscale,
                self,
            )
            for name, setting in settings_of(type(part)).items()
            if secrets or not setting.secret
        }

    @property
    def target_name(self) -> str:
        """The name of the target's model; `emulated` for an emulated engine."""
        return self.target.model if self.target.emulated is None else EMULATED.removesuffix(":")

    @property
    def served_model_name(self) -> str:
        return self.coordinator.served_model_name or self.target_name


@cache
def deployment_settings() -> dict[str, Setting]:
    """Every setting of a deployment by key, in the order of the documentation."""
    settings: dict[str, Setting] = {}
    for config in (
        TargetConfig,
        DraftConfig,
        CoordinatorConfig,
        RedisAddress,
        DeploymentConfig,
        AutoscaleConfig,
        SpeculativeConfig,
    ):
        settings |= {
            setting.key: setting
            for setting in settings_of(config).values()
            if setting.key not in settings
        }
    return settings


def merge(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> dict[str, Value]:
    """The values of settings by key, from a YAML `file`, from the `environment` (`OUTRIDER_*`) and
    from `flags` (texts or values). Flags override the environment, which overrides the file. A
    bad value raises a `ConfigError` that names its source, even if the value is overridden."""
    given = translated_layers(flags, environment, file)
    values = {setting.key: setting.parse(raw, source) for setting, raw, source in given}
    if rates := values.pop(SPECULATIVE_CONFIG, ""):
        engine = str(values.get("engine", AUTO_ENGINE))
        if not engine.startswith(EMULATED):
            raise SettingError(
                SPECULATIVE_CONFIG,
                "rejection_sample_method: synthetic needs --engine emulated:SPEC. With real models "
                "users would get tokens that the model did not choose",
            )
        values["engine"] = f"{engine.rstrip(',')},acceptance_rates={rates}"
    return values


def translated_layers(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> list[tuple[Setting, object, str]]:
    """The entries of all layers (see `layers`), in order of increasing precedence. In each layer,
    a `speculative_config` is replaced by the settings that it stands for. Raises `ConfigError` if
    the layer also sets one of these settings directly."""
    settings = deployment_settings()
    translated: list[tuple[Setting, object, str]] = []
    for layer in layers(settings, file, environment, flags):
        if SPECULATIVE_CONFIG in layer:
            # In `translated`, this key has an earlier layer's acceptance rates, which this layer
            # replaces.
            translated = [entry for entry in translated if entry[0].key != SPECULATIVE_CONFIG]
            _, text, source = layer.pop(SPECULATIVE_CONFIG)
            for key, raw, name in settings_of_vllm(text, source):
                if key in layer:
                    raise ConfigError(f"{name}: is the same as {layer[key][2]}; give one only")
                layer[key] = settings[key], raw, name
        translated += layer.values()
    return translated


def load_config(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> DeploymentConfig:
    """The deployment that these settings describe (see `merge`). Raises `ConfigError`."""
    return configuration(merge(flags, environment, file))


def configuration(values: Mapping[str, Value]) -> DeploymentConfig:
    """The deployment with these values by key. Raises `SettingError` for a contradiction."""
    coordinator = build(CoordinatorConfig, values, redis=build(RedisAddress, values))
    inner = dict(values)
    is_open = coordinator.insecure or coordinator.internal_tls_dir or values.get("address")
    if coordinator.asks_for_keys and not is_open:
        # Targets and drafts do not check keys, so other machines must not reach them.
        inner["host"] = LOOPBACK
    return build(
        DeploymentConfig,
        values,
        target=build(TargetConfig, inner),
        draft=build(DraftConfig, inner),
        coordinator=coordinator,
        autoscale=build(AutoscaleConfig, values),
    )
