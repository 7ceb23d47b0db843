"""What the services that run a model can be told: targets and drafts."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from outrider.config.servers import THREADS_MAX, Port, ServerConfig
from outrider.drafters.names import AUTO, DrafterChoice, parse_drafter
from outrider.errors import SettingError
from outrider.limits import (
    BATCHED_TOKENS_DEFAULT,
    BATCHED_TOKENS_MIN,
    DRAFT_SUPPORT_ENTRIES,
    HYBRID_MODEL_TOKENS,
    HYBRID_SCORE_MIN,
    NUM_DRAFT_TOKENS_MAX,
    TENSOR_PARALLEL_SIZE_MAX,
)
from outrider.settings import CHECKED, Internal

TRANSFORMERS: Final = "transformers"
EMULATED: Final = "emulated:"
"""Begins an engine that states its step times instead of running a model."""
NUM_SEQS_MAX: Final = 4096
BATCHED_TOKENS_MAX: Final = 2**20
MODEL_LEN_MAX: Final = 2**24
MEMORY_BYTES_MAX: Final = 2**50
NGRAM_MAX: Final = 64
SUFFIX_DEPTH_MAX: Final = 64
SUFFIX_TOKENS_MAX: Final = 2**26

Dtype = Literal["auto", "bfloat16", "float16", "float32", "float64"]
DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)
NgramMin = Annotated[
    int,
    Field(ge=1, le=NGRAM_MAX, description="Tokens that prompt lookup must match, at least."),
]
NgramMax = Annotated[
    int,
    Field(ge=1, le=NGRAM_MAX, description="Tokens beyond which a longer match is no better."),
]


def check_ngrams(ngram_min: int, ngram_max: int) -> None:
    """Raises `SettingError` where no match is possible."""
    if ngram_min > ngram_max:
        raise SettingError("ngram_min", f"{ngram_min} is more than ngram_max, {ngram_max}")


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ModelServerConfig(ServerConfig):
    """What the two services that run a model have in common."""

    engine: str = TRANSFORMERS
    """What runs the models: `transformers`, or `emulated:KEY=VALUE,...` for a toy pair with stated
    step times."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    max_num_seqs: Annotated[int, Field(ge=1, le=NUM_SEQS_MAX)] = 64
    """Sessions that share a step of a target, and of a draft that is not given its own number."""
    gpu_memory_utilization: Annotated[float, Field(ge=0.01, le=1)] = 0.9
    """Part of a replica's share of its GPU's memory that it takes: its weights, and the rest for
    keys and values."""
    max_num_batched_tokens: Annotated[int, Field(ge=BATCHED_TOKENS_MIN, le=BATCHED_TOKENS_MAX)] = (
        BATCHED_TOKENS_DEFAULT
    )
    """Tokens of a step; a longer prompt is run in parts beside others."""
    deterministic: bool = False
    """Make logits bit-equal whatever else is in a step, so that coupled and greedy tokens do not
    depend on `num_draft_tokens` or on other sessions. With fused kernels they are; else steps take
    longer."""
    cpu_kernels: Literal["auto", "torch"] = "auto"
    """What a step on a CPU runs on: `auto` = the fused kernels of amd-pace where it is installed
    and fits processor and model, `torch` = torch's own operators."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model's files."""
    tokenizer_directory: Internal[str] = ""
    """Where the target's tokenizer is, by which constraints are held to; empty without one."""

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class TargetConfig(ModelServerConfig):
    """One target replica."""

    model: str = "demo"
    """The target: `demo`, a directory, a .gguf file, or a hub id."""
    dtype: Dtype = "auto"
    """Of the target's weights."""
    max_model_len: Annotated[int, Field(ge=0, le=MODEL_LEN_MAX)] = 0
    """Tokens of prompt and completion; 0 = what the model allows and the memory for keys and values
    holds."""
    kv_cache_memory_bytes: Annotated[int, Field(ge=0, le=MEMORY_BYTES_MAX)] = 0
    """Bytes for the target's keys and values, on each rank; 0 = 1 GiB on CPU, on a GPU what
    `gpu_memory_utilization` leaves. No more is taken than `max_num_seqs` sequences of full length
    fill."""
    gather_sessions: bool = True
    """Let a step of the target wait for sessions that will soon want one too, where all of them
    then have their rounds sooner than in turns."""
    port: Annotated[Port, Field(alias="target_port")] = 0
    """The target's gRPC port; 0 = any."""
    num_cpus: Annotated[float, Field(alias="target_num_cpus", ge=0, le=THREADS_MAX)] = 0.5
    """CPUs that Ray reserves for the target."""
    num_gpus: Annotated[float | None, Field(alias="target_num_gpus", ge=0, le=THREADS_MAX)] = None
    """GPUs, or a fraction of one, that Ray reserves for the target; unset = a share of one where
    the cluster has any."""
    num_threads: Annotated[int, Field(alias="target_num_threads", ge=0, le=THREADS_MAX)] = 0
    """Threads of the target's steps; 0 = all cores, and all but one in steps of a few tokens while
    other processes use the cores."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=TENSOR_PARALLEL_SIZE_MAX)] = 1
    """Ranks that share the target's model out, each with CPUs, GPUs and threads as above."""
    directory: Internal[str] = ""
    """Where the model's files are, once its name is resolved; empty for an emulated engine."""
    heads: Internal[str] = ""
    """What its draft heads, or exit head, are called, where it drafts for itself; else empty."""
    heads_kind: Internal[str] = ""
    """`medusa` or `early-exit`."""
    heads_directory: Internal[str] = ""
    """Where these are."""
    heads_support_entries: Internal[int] = DRAFT_SUPPORT_ENTRIES
    """Tokens that their distributions may keep on the wire."""
    shows_features: Internal[bool] = False
    """Whether a draft is to read what its head reads."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DraftConfig(ModelServerConfig):
    """One draft replica."""

    model: Annotated[str, Field(alias="draft_model")] = AUTO
    """The draft: `auto` (`suffix`), a model as for the target, or what else `outrider drafters`
    lists."""
    dtype: Annotated[Dtype, Field(alias="draft_dtype")] = "auto"
    """Of the draft's weights."""
    max_model_len: Annotated[int, Field(alias="draft_max_model_len", ge=0, le=MODEL_LEN_MAX)] = 0
    """Tokens that the draft's cache takes; 0 = what its model allows."""
    own_max_num_seqs: Annotated[int, Field(alias="draft_max_num_seqs", ge=0, le=NUM_SEQS_MAX)] = 0
    """Sessions that share a step of the draft, and outcomes that it looks ahead to beside them; 0 =
    as many as of the target."""
    kv_cache_memory_bytes: Annotated[
        int, Field(alias="draft_kv_cache_memory_bytes", ge=0, le=MEMORY_BYTES_MAX)
    ] = 0
    """Bytes for the draft's keys and values, on each rank; 0 as for the target."""
    port: Annotated[Port, Field(alias="draft_port")] = 0
    """The draft's gRPC port; 0 = any."""
    num_cpus: Annotated[float, Field(alias="draft_num_cpus", ge=0, le=THREADS_MAX)] = 0.25
    """CPUs that Ray reserves for the draft."""
    num_gpus: Annotated[float | None, Field(alias="draft_num_gpus", ge=0, le=THREADS_MAX)] = None
    """GPUs, or a fraction of one, that Ray reserves for the draft; unset = a share of one where the
    cluster has any and the draft is a model."""
    num_threads: Annotated[int, Field(alias="draft_num_threads", ge=0, le=THREADS_MAX)] = 0
    """Threads of the draft's steps; 0 = a share of the machine's cores."""
    tensor_parallel_size: Annotated[
        int, Field(alias="draft_tensor_parallel_size", ge=1, le=TENSOR_PARALLEL_SIZE_MAX)
    ] = 1
    """Ranks that share the draft's model out, each with CPUs, GPUs and threads as above."""
    support_entries: Annotated[int, Field(alias="draft_support_entries", ge=2, le=4096)] = (
        DRAFT_SUPPORT_ENTRIES
    )
    """Tokens that a draft distribution may keep on the wire."""
    ngram_min: NgramMin = 1
    ngram_max: NgramMax = 16
    suffix_depth: Annotated[int, Field(ge=2, le=SUFFIX_DEPTH_MAX)] = 16
    """Tokens beyond which a longer match is no better in suffix decoding."""
    suffix_min_score: Annotated[float, Field(ge=0.01, le=1)] = 0.1
    """Suffix decoding drafts a token while the product of its and the earlier ones' shares is at
    least this."""
    suffix_tokens_per_tenant: Annotated[int, Field(ge=0, le=SUFFIX_TOKENS_MAX)] = 2**17
    """Tokens of earlier outputs that suffix decoding keeps of a tenant, some 200 bytes each; 0 =
    none."""
    suffix_tokens_total: Annotated[int, Field(ge=0, le=SUFFIX_TOKENS_MAX)] = 2**19
    """Tokens of earlier outputs that it keeps of all tenants together."""
    hybrid_min_score: Annotated[float, Field(ge=0.1, le=NUM_DRAFT_TOKENS_MAX)] = HYBRID_SCORE_MIN
    """Tokens that a hybrid's look-up must expect to be accepted before it answers in the model's
    place."""
    hybrid_model_tokens: Annotated[int, Field(ge=1, le=NUM_DRAFT_TOKENS_MAX)] = HYBRID_MODEL_TOKENS
    """Draft tokens that a hybrid's model, heads or early exit draw in a round, at most; its look-up
    may propose all that are asked for."""
    directory: Internal[str] = ""
    """Where the model's files are, once its name is resolved; empty without a model."""
    target: Internal[str] = ""
    """The target's name, for a drafter that was made for it; else empty."""
    target_directory: Internal[str] = ""
    """Where that target's files are."""

    @property
    def step_sessions(self) -> int:
        """That share a step of this replica."""
        return self.own_max_num_seqs or self.max_num_seqs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ngrams(self.ngram_min, self.ngram_max)
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
