"""What a draft can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from outrider.config.models import (
    DTYPES,
    MEMORY_BYTES_MAX,
    MODEL_LEN_MAX,
    NUM_SEQS_MAX,
    PORT_MAX,
    THREADS_MAX,
    ModelServerConfig,
)
from outrider.drafters.names import AUTO, DrafterChoice, parse_drafter
from outrider.errors import SettingError
from outrider.limits import (
    DRAFT_SUPPORT_ENTRIES,
    HYBRID_MODEL_TOKENS,
    HYBRID_SCORE_MIN,
    NUM_DRAFT_TOKENS_MAX,
    TENSOR_PARALLEL_SIZE_MAX,
)
from outrider.settings import setting

NGRAM_MAX: Final = 64
SUFFIX_DEPTH_MAX: Final = 64
SUFFIX_TOKENS_MAX: Final = 2**26


def ngram_min_setting() -> Any:
    """The field of who looks prompts up: the shortest match."""
    return setting(
        1, "Tokens that prompt lookup must match, at least.", minimum=1, maximum=NGRAM_MAX
    )


def ngram_max_setting() -> Any:
    """The field of who looks prompts up: the longest match."""
    return setting(
        16, "Tokens beyond which a longer match is no better.", minimum=1, maximum=NGRAM_MAX
    )


def check_ngrams(ngram_min: int, ngram_max: int) -> None:
    """Raises `SettingError` where no match is possible."""
    if ngram_min > ngram_max:
        raise SettingError("ngram_min", f"{ngram_min} is more than ngram_max, {ngram_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(ModelServerConfig):
    """One draft replica."""

    model: str = setting(
        AUTO,
        "The draft: `auto` (`suffix`), a model as for the target, or what else `outrider drafters` "
        "lists.",
        key="draft_model",
    )
    dtype: str = setting("auto", "Of the draft's weights.", key="draft_dtype", choices=DTYPES)
    max_model_len: int = setting(
        0, "Tokens that the draft's cache takes; 0 = what its model allows.",
        key="draft_max_model_len", minimum=0, maximum=MODEL_LEN_MAX,
    )  # fmt: skip
    own_max_num_seqs: int = setting(
        0, "Sessions that share a step of the draft, and outcomes that it looks ahead to beside "
        "them; 0 = as many as of the target.",
        key="draft_max_num_seqs", minimum=0, maximum=NUM_SEQS_MAX,
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
        0, "Threads of the draft's steps; 0 = a share of the machine's cores.",
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
    ngram_min: int = ngram_min_setting()
    ngram_max: int = ngram_max_setting()
    suffix_depth: int = setting(
        16, "Tokens beyond which a longer match is no better in suffix decoding.",
        minimum=2, maximum=SUFFIX_DEPTH_MAX,
    )  # fmt: skip
    suffix_min_score: float = setting(
        0.1, "Suffix decoding drafts a token while the product of its and the earlier ones' shares "
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
        HYBRID_MODEL_TOKENS, "Draft tokens that a hybrid's model, heads or early exit draw in a "
        "round, at most; its look-up may propose all that are asked for.",
        minimum=1, maximum=NUM_DRAFT_TOKENS_MAX,
    )  # fmt: skip
    directory: str = ""
    """Where the model's files are, once its name is resolved; empty without a model."""
    target: str = ""
    """The target's name, for a drafter that was made for it; else empty."""
    target_directory: str = ""
    """Where that target's files are."""

    @property
    def step_sessions(self) -> int:
        """That share a step of this replica."""
        return self.own_max_num_seqs or self.max_num_seqs

    def __post_init__(self) -> None:
        ModelServerConfig.__post_init__(self)
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
