from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftItem]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftItem, _Mapping]]] = ...) -> None: ...

class DraftItem(_message.Message):
    __slots__ = ("head", "num_draft_tokens", "look_ahead", "held", "features", "budget_us")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_US_FIELD_NUMBER: _ClassVar[int]
    head: _types_pb2.RoundHead
    num_draft_tokens: int
    look_ahead: int
    held: HeldProposal
    features: _types_pb2.Features
    budget_us: int
    def __init__(self, head: _Optional[_Union[_types_pb2.RoundHead, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., look_ahead: _Optional[int] = ..., held: _Optional[_Union[HeldProposal, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.Features, _Mapping]] = ..., budget_us: _Optional[int] = ...) -> None: ...

class HeldProposal(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftReplyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftReplyItem, _Mapping]]] = ...) -> None: ...

class DraftReplyItem(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "proposal", "resync", "refused")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    proposal: ProposalAnswer
    resync: _types_pb2.Resync
    refused: _types_pb2.Refused
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., proposal: _Optional[_Union[ProposalAnswer, _Mapping]] = ..., resync: _Optional[_Union[_types_pb2.Resync, _Mapping]] = ..., refused: _Optional[_Union[_types_pb2.Refused, _Mapping]] = ...) -> None: ...

class ProposalAnswer(_message.Message):
    __slots__ = ("proposal", "base_length", "cached_length", "queue_ms", "compute_ms", "work_ms", "assumed", "out_of_time")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    WORK_MS_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_TIME_FIELD_NUMBER: _ClassVar[int]
    proposal: _types_pb2.Proposal
    base_length: int
    cached_length: int
    queue_ms: float
    compute_ms: float
    work_ms: float
    assumed: _containers.RepeatedScalarFieldContainer[int]
    out_of_time: bool
    def __init__(self, proposal: _Optional[_Union[_types_pb2.Proposal, _Mapping]] = ..., base_length: _Optional[int] = ..., cached_length: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., work_ms: _Optional[float] = ..., assumed: _Optional[_Iterable[int]] = ..., out_of_time: _Optional[bool] = ...) -> None: ...
