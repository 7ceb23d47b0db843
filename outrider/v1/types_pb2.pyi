from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_TOKEN: _ClassVar[Rule]
    RULE_BLOCK: _ClassVar[Rule]
    RULE_COUPLED: _ClassVar[Rule]
    RULE_GREEDY: _ClassVar[Rule]
RULE_UNSPECIFIED: Rule
RULE_TOKEN: Rule
RULE_BLOCK: Rule
RULE_COUPLED: Rule
RULE_GREEDY: Rule

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RoundHead(_message.Message):
    __slots__ = ("session_id", "tenant", "epoch", "round", "base_length", "prefix_digest", "append", "prompt_length", "rule", "seed", "sampling_params", "sampling_hash", "deadline_ms", "traceparent", "constraint", "constraint_hash")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_HASH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_HASH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    epoch: int
    round: int
    base_length: int
    prefix_digest: int
    append: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    rule: Rule
    seed: int
    sampling_params: SamplingParams
    sampling_hash: int
    deadline_ms: int
    traceparent: str
    constraint: Constraint
    constraint_hash: bytes
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., base_length: _Optional[int] = ..., prefix_digest: _Optional[int] = ..., append: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ..., seed: _Optional[int] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., sampling_hash: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., constraint_hash: _Optional[bytes] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("token_ids", "q")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    q: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., q: _Optional[bytes] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("first", "width", "rows")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    first: int
    width: int
    rows: bytes
    def __init__(self, first: _Optional[int] = ..., width: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("cached_length", "prefix_digest")
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    cached_length: int
    prefix_digest: int
    def __init__(self, cached_length: _Optional[int] = ..., prefix_digest: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicaDescription(_message.Message):
    __slots__ = ("model", "weights_fingerprint", "tokenizer_fingerprint", "vocab_size", "dtype", "max_model_len", "eos_token_ids", "max_num_seqs", "step_costs", "drafts_itself", "shows_features", "reads_features", "numerics", "draft_note", "features", "dtype_note", "row_coupling", "looks_up", "kernels")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ITSELF_FIELD_NUMBER: _ClassVar[int]
    SHOWS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    READS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NOTE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_NOTE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUPLING_FIELD_NUMBER: _ClassVar[int]
    LOOKS_UP_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    dtype: str
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_num_seqs: int
    step_costs: StepCosts
    drafts_itself: bool
    shows_features: bool
    reads_features: bool
    numerics: str
    draft_note: str
    features: str
    dtype_note: str
    row_coupling: float
    looks_up: bool
    kernels: str
    def __init__(self, model: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_num_seqs: _Optional[int] = ..., step_costs: _Optional[_Union[StepCosts, _Mapping]] = ..., drafts_itself: _Optional[bool] = ..., shows_features: _Optional[bool] = ..., reads_features: _Optional[bool] = ..., numerics: _Optional[str] = ..., draft_note: _Optional[str] = ..., features: _Optional[str] = ..., dtype_note: _Optional[str] = ..., row_coupling: _Optional[float] = ..., looks_up: _Optional[bool] = ..., kernels: _Optional[str] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("rows", "seconds", "session_s", "slot_s", "row_slot_s")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_S_FIELD_NUMBER: _ClassVar[int]
    SLOT_S_FIELD_NUMBER: _ClassVar[int]
    ROW_SLOT_S_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    session_s: float
    slot_s: float
    row_slot_s: float
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., session_s: _Optional[float] = ..., slot_s: _Optional[float] = ..., row_slot_s: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "learned_length", "learned_digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEARNED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEARNED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    learned_length: int
    learned_digest: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., learned_length: _Optional[int] = ..., learned_digest: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
