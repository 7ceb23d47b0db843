"""The messages between coordinators and replicas, in protobuf.

Decoding checks what peers send, and raises `BadRequest` with the path of a wrong field."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Generic

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from outrider import limits
from outrider.drafters.features import BYTES_OF_A_NUMBER, Features, rows_max
from outrider.errors import BadRequest
from outrider.grammar.constraint import DIGEST_BYTES, Constraint
from outrider.interfaces.messages import (
    Answer,
    DraftAnswer,
    DraftItem,
    Item,
    PositionLogprobs,
    ProposalReply,
    Refused,
    ReplyKey,
    Resync,
    RoundAnswer,
    RoundHead,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import Q_BYTES_MAX, EncodedProposal
from outrider.speculation.sampling_params import SamplingParams, check_sampling
from outrider.transport.fields import (
    OWN_CODECS,
    fields_to_proto,
    find_unsendable,
    from_proto,
    to_proto,
    token_ids_from_wire,
)
from outrider.v1 import draft_pb2, target_pb2, types_pb2

_SESSION_ID = re.compile(r"[0-9a-f]{32}")


def session_id_from_wire(session_id: str, path: str = "session_id") -> str:
    """Checks that a session id is 32 lower-case hexadecimal digits."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise BadRequest(
            path, f"{session_id[:64]!r} is no session id (32 hexadecimal digits, lower case)"
        )
    return session_id


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    return to_proto(params, types_pb2.SamplingParams, logit_bias=dict(params.logit_bias))


def sampling_from_proto(
    message: types_pb2.SamplingParams, path: str = "sampling"
) -> SamplingParams:
    """Raises `BadRequest` for a value beyond its limit. Token ids may exceed the vocabulary."""
    if (size := len(message.logit_bias)) > limits.LOGIT_BIAS_ENTRIES_MAX:
        reason = f"got {size} entries; allowed: up to {limits.LOGIT_BIAS_ENTRIES_MAX}"
        raise BadRequest(f"{path}.logit_bias", reason)
    bias = tuple(sorted(message.logit_bias.items()))
    params = from_proto(message, SamplingParams, path, logit_bias=bias)
    check_sampling(params, f"{path}.")
    return params


def _proposal_to_proto(proposal: EncodedProposal) -> dict[str, object] | None:
    if not proposal:
        return None
    return fields_to_proto(proposal, types_pb2.Proposal)


def _proposal_from_proto(message: types_pb2.Proposal, path: str = "proposal") -> EncodedProposal:
    token_ids = token_ids_from_wire(
        message.token_ids, f"{path}.token_ids", limits.NUM_DRAFT_TOKENS_MAX
    )
    q = message.q  # Read once, as each read copies the bytes.
    if len(q) > Q_BYTES_MAX:
        raise BadRequest(f"{path}.q", f"{len(q)} bytes are more than {Q_BYTES_MAX}")
    return EncodedProposal(token_ids, q)


def _features_from_proto(message: types_pb2.Features, path: str) -> Features:
    if not 0 < message.width <= limits.FEATURES_WIDTH_MAX:
        raise BadRequest(
            f"{path}.width", f"{message.width} is not in 1..{limits.FEATURES_WIDTH_MAX}"
        )
    num, rest = divmod(len(message.rows), message.width * BYTES_OF_A_NUMBER)
    most = rows_max(message.width)
    if rest or not 0 < num <= most:
        whole = f"1 to {most} rows of {message.width} numbers"
        raise BadRequest(f"{path}.rows", f"{len(message.rows)} bytes are not {whole}")
    return from_proto(message, Features, path)


def _logprobs_to_proto(entry: PositionLogprobs) -> types_pb2.PositionLogprobs:
    top = [types_pb2.TokenLogprob(token_id=v, logprob=value) for v, value in entry.top]
    return types_pb2.PositionLogprobs(logprob=entry.logprob, top=top)


def _logprobs_from_proto(message: types_pb2.PositionLogprobs, path: str) -> PositionLogprobs:
    token_ids = token_ids_from_wire(
        [entry.token_id for entry in message.top], path, limits.LOGPROBS_MAX
    )
    values = [entry.logprob for entry in message.top]
    for value in (message.logprob, *values):  # Minus infinity is valid, for an impossible token.
        if not value < math.inf:
            raise BadRequest(path, f"{value!r} is no log-probability")
    return PositionLogprobs(message.logprob, tuple(zip(token_ids, values, strict=True)))


def _held_to_proto(token_ids: tuple[int, ...]) -> draft_pb2.HeldProposal:
    return draft_pb2.HeldProposal(token_ids=token_ids)


def _held_from_proto(message: draft_pb2.HeldProposal, path: str) -> tuple[int, ...]:
    return token_ids_from_wire(message.token_ids, path, limits.NUM_DRAFT_TOKENS_MAX)


def _constraint_from_proto(message: types_pb2.Constraint, path: str) -> Constraint:
    return Constraint.read(message.kind, message.text, path)


OWN_CODECS |= {
    "SamplingParams": (sampling_to_proto, sampling_from_proto),
    "Proposal": (_proposal_to_proto, _proposal_from_proto),
    "HeldProposal": (_held_to_proto, _held_from_proto),
    "Features": (None, _features_from_proto),
    "PositionLogprobs": (_logprobs_to_proto, _logprobs_from_proto),
    "Constraint": (None, _constraint_from_proto),
}


def _head_to_proto(head: RoundHead, hashed: bool) -> dict[str, object]:
    if hashed:
        digest = head.constraint_hash or None
        return fields_to_proto(head, types_pb2.RoundHead, constraint=None, constraint_hash=digest)
    if head.sampling is None:
        raise BadRequest("head.sampling", "a session's first item on a stream needs the parameters")
    sampling = sampling_to_proto(head.sampling)
    return fields_to_proto(
        head,
        types_pb2.RoundHead,
        sampling_params=sampling,
        sampling_hash=None,
        constraint_hash=None,
    )


# The sessions of a request have the same parameters and constraint, which may take milliseconds to
# read. Tenants share no results, so times reveal nothing about another tenant's requests.


@lru_cache(limits.GIVEN_READ_MAX)
def _read_sampling(tenant: str, data: bytes) -> SamplingParams:
    message = types_pb2.SamplingParams.FromString(data)
    return sampling_from_proto(message, "head.sampling_params")


@lru_cache(limits.GIVEN_READ_MAX)
def _read_constraint(tenant: str, kind: str, text: str) -> Constraint:
    return Constraint.read(kind, text, "head.constraint")


def head_from_proto(message: types_pb2.RoundHead, known: RoundHead | None = None) -> RoundHead:
    """Decodes and checks a head. If the message has only hashes, takes `sampling` and `constraint`
    from `known`, a head of the session. They are None if `known` is None or has other hashes."""
    session_id_from_wire(message.session_id, "head.session_id")
    given: dict[str, object] = {"sampling": None, "sampling_hash": message.sampling_hash}
    if message.HasField("sampling_params"):
        data = message.sampling_params.SerializeToString(deterministic=True)
        sampling = _read_sampling(message.tenant, data)
        given = {"sampling": sampling, "sampling_hash": sampling.hash()}
    elif not message.HasField("sampling_hash"):
        raise BadRequest("head.sampling", "neither parameters nor their hash are given")
    elif (
        known is not None
        and known.given_hashes == (message.sampling_hash, message.constraint_hash)
        and not message.HasField("constraint")
    ):
        given["sampling"], given["constraint"] = known.sampling, known.constraint
    if message.HasField("constraint"):
        constraint = message.constraint
        given["constraint"] = _read_constraint(message.tenant, constraint.kind, constraint.text)
    head = from_proto(message, RoundHead, "head", **given)
    if head.constraint is not None and not head.constraint_hash:
        head = replace(head, constraint_hash=head.constraint.digest())
    if len(head.constraint_hash) not in (0, DIGEST_BYTES):
        reason = f"has {len(head.constraint_hash)} bytes, not {DIGEST_BYTES}"
        raise BadRequest("head.constraint_hash", reason)
    if head.committed_length > limits.SESSION_TOKENS_MAX:
        reason = f"{head.committed_length} tokens are more than {limits.SESSION_TOKENS_MAX}"
        raise BadRequest("head.base_length", reason)
    if not 1 <= head.prompt_length <= head.committed_length:
        reason = f"{head.prompt_length} is not in 1..{head.committed_length} (the committed length)"
        raise BadRequest("head.prompt_length", reason)
    if head.epoch < 1:
        raise BadRequest("head.epoch", "epochs begin at 1")
    return head


def _verdict_from_proto(message: target_pb2.Verdict) -> Verdict:
    accept, correction = tuple(message.accept_probability[:]), message.correction
    if len(accept) > limits.NUM_DRAFT_TOKENS_MAX or len(correction) != len(accept) + 1:
        reason = f"has {len(accept)} probabilities and {len(correction)} corrections, "
        reason += f"not N and N + 1 with N <= {limits.NUM_DRAFT_TOKENS_MAX}"
        raise BadRequest("verdict", reason)
    for probability in accept:
        if not 0.0 <= probability <= 1.0:
            raise BadRequest("verdict.accept_probability", f"{probability!r} is not in 0..1")
    if message.logprobs and len(message.logprobs) != 2 * len(accept) + 1:
        reason = f"{len(message.logprobs)} entries, not {2 * len(accept) + 1}"
        raise BadRequest("verdict.logprobs", reason)
    return Verdict(accept, token_ids_from_wire(correction, "verdict.correction"))


def _check_audit(sums: AuditSums, num_tokens: int) -> None:
    parts = (sums.num_impossible, sums.num_unlikely, sums.num_near_ties)
    if sums.num_tokens != num_tokens or sum(parts) > num_tokens:
        raise BadRequest("verdict.audit", f"{sums} does not fit a verdict on {num_tokens} tokens")


ItemFrame = target_pb2.VerifyRequest | draft_pb2.DraftRequest
ItemMessage = target_pb2.VerifyItem | draft_pb2.DraftItem
_VerifyReplyItem = target_pb2.VerifyReplyItem
_DraftReplyItem = draft_pb2.DraftReplyItem


def _key_from_proto(message: _VerifyReplyItem | _DraftReplyItem) -> ReplyKey:
    return ReplyKey(session_id_from_wire(message.session_id), message.epoch, message.round)


def _verify_answer(message: _VerifyReplyItem) -> VerifyAnswer:
    kind = message.WhichOneof("answer")
    if kind != "verdict":
        return _other_answer(message, kind)
    part, key = message.verdict, _key_from_proto(message)
    verdict = _verdict_from_proto(part)
    reply = from_proto(part, VerdictReply, "verdict", key=key, verdict=verdict)
    if reply.audit is not None:
        _check_audit(reply.audit, len(verdict.accept_probability))
    return reply


def _draft_answer(message: _DraftReplyItem) -> DraftAnswer:
    kind = message.WhichOneof("answer")
    if kind != "proposal":
        return _other_answer(message, kind)
    part, key = message.proposal, _key_from_proto(message)
    proposal = _proposal_from_proto(part.proposal)
    return from_proto(part, ProposalReply, "proposal", key=key, proposal=proposal)


def _other_answer(
    message: _VerifyReplyItem | _DraftReplyItem, kind: str | None
) -> Resync | Refused:
    if kind is None:
        raise BadRequest("answer", "is empty")
    key = _key_from_proto(message)
    if kind == "resync":
        return from_proto(message.resync, Resync, kind, key=key)
    return from_proto(message.refused, Refused, kind, key=key)


def _frame(frame: type[Message], kind: type[Message], given: Mapping[str, object]) -> bytes:
    """Serialises a frame with one entry, which is of class `kind` and has the fields `given`."""
    try:
        return frame(items=[given]).SerializeToString()
    except (TypeError, ValueError):
        find_unsendable(kind, given)
        raise


class Codec(ABC, Generic[Item, Answer]):
    """The gRPC methods of targets or of drafts, and the conversions of their messages."""

    service: ClassVar[ServiceDescriptor]
    stream_method: ClassVar[str]
    """The rpc that `GrpcLink` calls, and `ReplicaServicer.stream` answers."""
    item: type[Item]
    request: ClassVar[type[ItemFrame]]
    _item_message: ClassVar[type[ItemMessage]]
    _reply: ClassVar[type[target_pb2.VerifyReply | draft_pb2.DraftReply]]
    _reply_item: ClassVar[type[_VerifyReplyItem | _DraftReplyItem]]

    def path(self, method: str) -> str:
        return f"/{self.service.full_name}/{method}"

    def item_frame(self, item: Item, hashed: bool = False) -> bytes:
        """Serialises a frame with one item. Concatenated frames form one frame with all items. If
        `hashed`, the frame has hashes in place of sampling parameters and constraint. Raises
        `BadRequest` for a value that no message can hold."""
        head = _head_to_proto(item.head, hashed)
        given = fields_to_proto(item, self._item_message, head=head)
        return _frame(self.request, self._item_message, given)

    def item_from_proto(self, message: ItemMessage, known: RoundHead | None = None) -> Item:
        """Decodes an item. `known` is the session's last head on this stream that had the sampling
        parameters in full. Raises `BadRequest` for an invalid item."""
        return from_proto(message, self.item, head=head_from_proto(message.head, known))

    def answer_frame(self, answer: RoundAnswer) -> bytes:
        """Serialises a frame with one answer, which a replica of this role gives."""
        match answer:
            case VerdictReply():
                verdict = fields_to_proto(answer.verdict, target_pb2.Verdict)
                part = {"verdict": fields_to_proto(answer, target_pb2.Verdict, **verdict)}
            case ProposalReply():
                part = {"proposal": fields_to_proto(answer, draft_pb2.ProposalAnswer)}
            case Resync():
                part = {"resync": fields_to_proto(answer, types_pb2.Resync)}
            case Refused():
                message = answer.message[: limits.ERROR_MESSAGE_CHARS_MAX]
                part = {"refused": fields_to_proto(answer, types_pb2.Refused, message=message)}
        given = fields_to_proto(answer.key, self._reply_item, **part)
        return _frame(self._reply, self._reply_item, given)

    @abstractmethod
    def answers(self, frame: bytes) -> Iterator[Answer]:
        """Decodes the answers of a frame one by one. Raises `DecodeError` if the bytes are no
        frame, and `BadRequest` for an invalid answer."""


class TargetCodec(Codec[VerifyItem, VerifyAnswer]):
    service = target_pb2.DESCRIPTOR.services_by_name["Target"]
    stream_method = "Verify"
    item = VerifyItem
    request = target_pb2.VerifyRequest
    _item_message = target_pb2.VerifyItem
    _reply, _reply_item = target_pb2.VerifyReply, _VerifyReplyItem

    def answers(self, frame: bytes) -> Iterator[VerifyAnswer]:
        return map(_verify_answer, target_pb2.VerifyReply.FromString(frame).items)


class DraftCodec(Codec[DraftItem, DraftAnswer]):
    service = draft_pb2.DESCRIPTOR.services_by_name["Draft"]
    stream_method = "Propose"
    item = DraftItem
    request = draft_pb2.DraftRequest
    _item_message = draft_pb2.DraftItem
    _reply, _reply_item = draft_pb2.DraftReply, _DraftReplyItem

    def answers(self, frame: bytes) -> Iterator[DraftAnswer]:
        return map(_draft_answer, draft_pb2.DraftReply.FromString(frame).items)


VERIFY, DRAFT = TargetCodec(), DraftCodec()
