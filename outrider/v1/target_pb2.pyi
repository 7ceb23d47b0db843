from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("head", "proposal", "run_ahead", "num_logprobs", "num_next_draft_tokens", "next_budget_us", "features_from", "num_lookup_tokens", "lookup_min_chance", "indexes", "num_probe_tokens", "num_tokens_left", "ignores_eos", "audit")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BUDGET_US_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_MIN_CHANCE_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    IGNORES_EOS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    head: _types_pb2.RoundHead
    proposal: _types_pb2.Proposal
    run_ahead: int
    num_logprobs: int
    num_next_draft_tokens: int
    next_budget_us: int
    features_from: int
    num_lookup_tokens: int
    lookup_min_chance: float
    indexes: bool
    num_probe_tokens: int
    num_tokens_left: int
    ignores_eos: bool
    audit: bool
    def __init__(self, head: _Optional[_Union[_types_pb2.RoundHead, _Mapping]] = ..., proposal: _Optional[_Union[_types_pb2.Proposal, _Mapping]] = ..., run_ahead: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., num_next_draft_tokens: _Optional[int] = ..., next_budget_us: _Optional[int] = ..., features_from: _Optional[int] = ..., num_lookup_tokens: _Optional[int] = ..., lookup_min_chance: _Optional[float] = ..., indexes: _Optional[bool] = ..., num_probe_tokens: _Optional[int] = ..., num_tokens_left: _Optional[int] = ..., ignores_eos: _Optional[bool] = ..., audit: _Optional[bool] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[VerifyReplyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[VerifyReplyItem, _Mapping]]] = ...) -> None: ...

class VerifyReplyItem(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "verdict", "resync", "refused")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    verdict: Verdict
    resync: _types_pb2.Resync
    refused: _types_pb2.Refused
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., resync: _Optional[_Union[_types_pb2.Resync, _Mapping]] = ..., refused: _Optional[_Union[_types_pb2.Refused, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("accept_probability", "correction", "logprobs", "cached_length", "queue_ms", "compute_ms", "next_proposal", "next_base_length", "next_draft_ms", "next_work_ms", "next_out_of_time", "features", "looked_up", "has_looked_up", "probed", "committed_length", "prefix_digest", "proposal_digest", "audit")
    ACCEPT_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_WORK_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_OUT_OF_TIME_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    HAS_LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    accept_probability: _containers.RepeatedScalarFieldContainer[float]
    correction: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    cached_length: int
    queue_ms: float
    compute_ms: float
    next_proposal: _types_pb2.Proposal
    next_base_length: int
    next_draft_ms: float
    next_work_ms: float
    next_out_of_time: bool
    features: _types_pb2.Features
    looked_up: _containers.RepeatedScalarFieldContainer[int]
    has_looked_up: bool
    probed: _containers.RepeatedScalarFieldContainer[int]
    committed_length: int
    prefix_digest: int
    proposal_digest: int
    audit: AuditSums
    def __init__(self, accept_probability: _Optional[_Iterable[float]] = ..., correction: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., cached_length: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., next_proposal: _Optional[_Union[_types_pb2.Proposal, _Mapping]] = ..., next_base_length: _Optional[int] = ..., next_draft_ms: _Optional[float] = ..., next_work_ms: _Optional[float] = ..., next_out_of_time: _Optional[bool] = ..., features: _Optional[_Union[_types_pb2.Features, _Mapping]] = ..., looked_up: _Optional[_Iterable[int]] = ..., has_looked_up: _Optional[bool] = ..., probed: _Optional[_Iterable[int]] = ..., committed_length: _Optional[int] = ..., prefix_digest: _Optional[int] = ..., proposal_digest: _Optional[int] = ..., audit: _Optional[_Union[AuditSums, _Mapping]] = ...) -> None: ...

class AuditSums(_message.Message):
    __slots__ = ("num_tokens", "num_impossible", "num_unlikely", "num_near_ties", "surprise", "entropy", "variance")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_IMPOSSIBLE_FIELD_NUMBER: _ClassVar[int]
    NUM_UNLIKELY_FIELD_NUMBER: _ClassVar[int]
    NUM_NEAR_TIES_FIELD_NUMBER: _ClassVar[int]
    SURPRISE_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_impossible: int
    num_unlikely: int
    num_near_ties: int
    surprise: float
    entropy: float
    variance: float
    def __init__(self, num_tokens: _Optional[int] = ..., num_impossible: _Optional[int] = ..., num_unlikely: _Optional[int] = ..., num_near_ties: _Optional[int] = ..., surprise: _Optional[float] = ..., entropy: _Optional[float] = ..., variance: _Optional[float] = ...) -> None: ...
