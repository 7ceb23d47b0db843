"""Converts between protobuf messages and the values of `outrider.interfaces.messages`.

A field of a message corresponds to the dataclass field with the same name. `OWN_CODECS` has the
messages that need other conversions. Peers are not trusted, so decoding raises `BadRequest` with
the field's path if a field exceeds its limit in `_LIMITS`."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from outrider import limits
from outrider.drafters.features import BYTES_OF_A_NUMBER, Features, rows_max
from outrider.errors import BadRequest, InvariantError
from outrider.grammar.constraint import DIGEST_BYTES, Constraint
from outrider.interfaces.messages import (
    DraftAnswer,
    DraftItem,
    PositionLogprobs,
    ProposalReply,
    Refused,
    ReplyKey,
    Resync,
    RoundHead,
    RoundItem,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import Q_BYTES_MAX, EncodedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams, check_sampling
from outrider.v1 import draft_pb2, target_pb2, types_pb2

T = TypeVar("T")

_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SESSION_ID = re.compile(r"[0-9a-f]{32}")
_LIMITS: Mapping[str, int] = {
    "RoundHead.tenant": limits.TENANT_CHARS_MAX,
    "RoundHead.traceparent": limits.TRACEPARENT_CHARS_MAX,
    "RoundHead.deadline_ms": limits.DEADLINE_MS_MAX,
    "VerifyItem.run_ahead": limits.RUN_AHEAD_ROUNDS_MAX,
    "VerifyItem.num_logprobs": limits.LOGPROBS_MAX,
    "VerifyItem.num_next_draft_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "VerifyItem.features_from": limits.SESSION_TOKENS_MAX,
    "VerifyItem.num_lookup_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "VerifyItem.num_probe_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "VerifyItem.num_tokens_left": limits.SESSION_TOKENS_MAX,
    "VerifyItem.next_budget_us": 1000 * limits.DRAFT_DEADLINE_MS_MAX,
    "DraftItem.num_draft_tokens": limits.NUM_DRAFT_TOKENS_MAX,
    "DraftItem.look_ahead": limits.LOOK_AHEAD_MAX,
    "DraftItem.budget_us": 1000 * limits.DRAFT_DEADLINE_MS_MAX,
    # The accepted draft tokens, and the token after them.
    "Verdict.looked_up": limits.NUM_DRAFT_TOKENS_MAX,
    "Verdict.probed": limits.NUM_DRAFT_TOKENS_MAX,
    "ProposalAnswer.assumed": limits.NUM_DRAFT_TOKENS_MAX + 1,
    "Refused.message": limits.ERROR_MESSAGE_CHARS_MAX,
}
"""Maps a field to its largest value, or to its largest number of characters or list entries."""
_AMOUNTS = ("VerifyItem", "Verdict", "ProposalAnswer", "AuditSums")
"""In these messages, floating-point fields that are not repeated must be finite and at least 0."""
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def to_proto(value: Any, kind: type[T], **others: Any) -> T:
    """Builds a message. Raises `BadRequest` for a value that the message cannot hold."""
    given = fields_to_proto(value, kind, **others)
    try:
        return kind(**given)
    except (TypeError, ValueError):
        _find_unsendable(kind, given)
        raise


def fields_to_proto(value: Any, kind: type[Any], **others: Any) -> dict[str, Any]:
    """Returns the fields of a message of class `kind`. Takes the fields in `others` as they are and
    the rest from the dataclass `value`. Omits None and protobuf's default values. Most nested
    messages become dictionaries of their fields, because protobuf would copy message objects."""
    for name, is_optional, encode in _encoders(kind, type(value)):  # type: ignore[arg-type]
        if name not in others:
            content = getattr(value, name)
            if content or (is_optional and content is not None):
                try:
                    others[name] = content if encode is None else encode(content)
                except BadRequest as error:
                    raise BadRequest(f"{name}.{error.field}", error.reason) from error
    return others


def _find_unsendable(kind: Any, given: Mapping[str, Any], path: str = "") -> None:
    """Raises `BadRequest` for the first value that a message of class `kind` cannot hold."""
    for name, content in given.items():
        field = kind.DESCRIPTOR.fields_by_name[name]
        several = field.is_repeated and isinstance(content, list | tuple)
        for index, item in enumerate(content if several else (content,)):
            place = f"{path}{name}[{index}]" if several else f"{path}{name}"
            try:
                kind(**{name: [item] if several else item})
            except (TypeError, ValueError) as error:
                reason = f"cannot be sent: {error}"
                if field.cpp_type in _RANGES and isinstance(item, int):
                    lowest, highest = _RANGES[field.cpp_type]
                    reason = f"{item} is wrong; it must be from {lowest} to {highest}"
                elif isinstance(item, dict) and not field.message_type.GetOptions().map_entry:
                    _find_unsendable(GetMessageClass(field.message_type), item, f"{place}.")
                raise BadRequest(place, reason) from error


def from_proto(message: Any, kind: type[T], path: str = "", **others: Any) -> T:
    """Builds a dataclass `kind` from a message. Takes values in `others` as they are, and all other
    values from the message. Unset fields get their defaults. An enum's member 0 becomes None if the
    dataclass allows None. Raises `BadRequest`, whose field begins with `path`, for a value beyond
    `_LIMITS`, a missing value, an unknown enum member, or a value that the dataclass refuses."""
    decoders, unset, read_unset = _decoders(type(message), kind)  # type: ignore[arg-type]
    values, prefix = {**unset, **others}, f"{path}." if path else ""
    for field, content in message.ListFields():
        name = field.name
        if name in decoders and name not in others:
            decode = decoders[name]
            values[name] = content if decode is None else decode(content, prefix + name)
    for name, decode in read_unset.items():
        if name not in values:
            values[name] = decode(0, prefix + name)
    try:
        return kind(**values)
    except InvariantError as error:
        raise BadRequest(path, error.message) from error


Decode = Callable[[Any, str], Any]  # converts a field's value; the string is its path


@cache
def _encoders(message: Any, kind: Any) -> list[tuple[str, bool, Callable[[Any], Any] | None]]:
    """For each field that message and dataclass share, returns its name, whether it can be unset,
    and its encoder (None = the value is used as it is)."""
    return [
        (field.name, field.has_presence, _encoder(field)) for field, _ in _shared(message, kind)
    ]


@cache
def _decoders(
    message: Any, kind: Any
) -> tuple[dict[str, Decode | None], dict[str, Any], dict[str, Decode]]:
    """Returns three dictionaries, keyed by the names of fields that message and dataclass share:

    - The decoder of a set field; None = the value is used as it is.
    - The value of an unset field.
    - The decoder of an unset field without a default. It raises `BadRequest`, or returns None for
      an enum field that may be None."""
    decoders: dict[str, Decode | None] = {}
    unset, read_unset = dict[str, Any](), dict[str, Decode]()
    for field, ours in _shared(message, kind):
        decode = decoders[field.name] = _decoder(field, ours)
        if field.has_presence:
            if ours.default is MISSING and ours.default_factory is MISSING:
                read_unset[field.name] = _missing
        elif field.is_repeated:
            unset[field.name] = ()
        elif field.enum_type is not None and decode is not None:
            read_unset[field.name] = decode
        else:
            unset[field.name] = field.default_value
    return decoders, unset, read_unset


def _shared(message: Any, kind: Any) -> list[tuple[Any, Any]]:
    ours = {field.name: field for field in fields(kind) if field.init}
    return [(field, ours[field.name]) for field in message.DESCRIPTOR.fields if field.name in ours]


def _encoder(field: Any) -> Callable[[Any], Any] | None:
    encode: Callable[[Any], Any]
    if field.enum_type is not None:
        encode = {member: number for number, member in _members(field).items()}.__getitem__
    elif field.message_type is None:
        return None
    else:
        own, _ = OWN_CODECS.get(field.message_type.name, (None, None))
        encode = own or partial(fields_to_proto, kind=GetMessageClass(field.message_type))
    return (lambda values: [encode(item) for item in values]) if field.is_repeated else encode


def _decoder(field: Any, ours: Any) -> Decode | None:
    of = field.containing_type.name
    decode = _reader(field, may_be_none="None" in str(ours.type))
    limit: float | None = _LIMITS.get(f"{of}.{field.name}")
    if of in _AMOUNTS and not field.is_repeated and field.cpp_type in _FLOATS:
        limit = sys.float_info.max
    if limit is None:
        return decode
    has_length = field.is_repeated or field.cpp_type == field.CPPTYPE_STRING

    def bounded(content: Any, path: str) -> Any:
        what, size = ("length", len(content)) if has_length else ("value", content)
        if not 0 <= size <= limit:
            raise BadRequest(path, f"{what} {size} is not in 0..{limit}")
        return content if decode is None else decode(content, path)

    return bounded


def _missing(_: Any, path: str) -> Any:
    raise BadRequest(path, "is missing")


def _reader(field: Any, may_be_none: bool) -> Callable[..., Any] | None:
    read: Callable[..., Any]
    if field.enum_type is not None:
        read = _enum_reader(field, may_be_none)
    elif field.message_type is not None:
        name = field.message_type.name
        own = OWN_CODECS.get(name)
        read = own[1] if own else lambda message, path: from_proto(message, VALUES[name], path)
    elif not field.is_repeated:
        return None
    elif field.cpp_type == field.CPPTYPE_UINT32:
        return token_ids_from_wire
    else:
        return lambda values, path: tuple(values)
    if not field.is_repeated:
        return read
    return lambda values, path: tuple(read(value, path) for value in values)


def _enum_reader(field: Any, may_be_none: bool) -> Callable[..., Any]:
    members = _members(field)
    kind = _WORD_START.sub(" ", field.enum_type.name).lower()

    def read(number: int, path: str) -> Any:
        member = members.get(number)
        if member is None and (number or not may_be_none):
            raise BadRequest(path, f"{number} is no {kind} ({', '.join(members.values())})")
        return member

    return read


def _members(field: Any) -> dict[int, Any]:
    """Maps the numbers of an enum's members to the members, without 0 (unspecified)."""
    _, *values = field.enum_type.values
    prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
    kind = VALUES[field.enum_type.name]
    return {value.number: kind[value.name.removeprefix(prefix)] for value in values}


def session_id_from_wire(session_id: str, path: str = "session_id") -> str:
    """Checks that a session id is 32 lower-case hexadecimal digits."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise BadRequest(
            path, f"{session_id[:64]!r} is no session id (32 hexadecimal digits, lower case)"
        )
    return session_id


def token_ids_from_wire(
    ids: Sequence[int], path: str, num_max: int = limits.SESSION_TOKENS_MAX
) -> tuple[int, ...]:
    """Checks the number of token ids, and that each id fits in 31 bits."""
    token_ids = tuple(ids[:])  # Iteration over a slice of a repeated field is twice as fast.
    if len(token_ids) > num_max:
        raise BadRequest(path, f"{len(token_ids)} tokens are more than {num_max}")
    if token_ids and (max(token_ids) > limits.TOKEN_ID_MAX or min(token_ids) < 0):
        raise BadRequest(path, f"a token id is not in 0..{limits.TOKEN_ID_MAX}")
    return token_ids


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


def _proposal_to_proto(proposal: EncodedProposal) -> dict[str, Any] | None:
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


OWN_CODECS: dict[str, tuple[Callable[[Any], Any] | None, Callable[[Any, str], Any]]] = {
    "SamplingParams": (sampling_to_proto, sampling_from_proto),
    "Proposal": (_proposal_to_proto, _proposal_from_proto),
    "HeldProposal": (
        lambda token_ids: draft_pb2.HeldProposal(token_ids=token_ids),
        lambda held, path: token_ids_from_wire(held.token_ids, path, limits.NUM_DRAFT_TOKENS_MAX),
    ),
    "Features": (None, _features_from_proto),
    "PositionLogprobs": (_logprobs_to_proto, _logprobs_from_proto),
    "Constraint": (None, lambda message, path: Constraint.read(message.kind, message.text, path)),
}
"""Encoder (None = `fields_to_proto`) and decoder of messages, by the message's name."""
VALUES: dict[str, Any] = {"Rule": Rule, "StepCosts": StepCosts, "AuditSums": AuditSums}
"""Python type of each enum, and of each nested message that is not in `OWN_CODECS`, by name."""


def _head_to_proto(head: RoundHead, hashed: bool) -> dict[str, Any]:
    if hashed:
        digest = head.constraint_hash or None
        return fields_to_proto(head, types_pb2.RoundHead, constraint=None, constraint_hash=digest)
    if head.sampling is None:
        raise BadRequest("head.sampling", "a session's first item on a stream needs the parameters")
    given: Any = {"sampling_params": sampling_to_proto(head.sampling), "sampling_hash": None}
    return fields_to_proto(head, types_pb2.RoundHead, **given, constraint_hash=None)


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
    given: dict[str, Any] = {"sampling": None, "sampling_hash": message.sampling_hash}
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


_ANSWERS: Mapping[str, Any] = {
    "verdict": VerdictReply,
    "proposal": ProposalReply,
    "resync": Resync,
    "refused": Refused,
}
_ANSWER_FIELDS = {kind: name for name, kind in _ANSWERS.items()}


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


@cache
def _kind_of(message: Any, field: str) -> Any:
    return GetMessageClass(message.DESCRIPTOR.fields_by_name[field].message_type)


def _frame(frame: Any, kind: Any, given: dict[str, Any]) -> bytes:
    try:
        return frame(items=[given]).SerializeToString()  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        _find_unsendable(kind, given)
        raise


@dataclass(frozen=True)
class Codec:
    """The gRPC methods of targets or of drafts, and the conversions of their messages."""

    service: ServiceDescriptor
    stream_method: str
    item: type[RoundItem]

    def path(self, method: str) -> str:
        return f"/{self.service.full_name}/{method}"

    @cached_property
    def request(self) -> Any:
        return GetMessageClass(self.service.methods_by_name[self.stream_method].input_type)

    @cached_property
    def reply(self) -> Any:
        return GetMessageClass(self.service.methods_by_name[self.stream_method].output_type)

    def item_frame(self, item: RoundItem, hashed: bool = False) -> bytes:
        """Serialises a frame with one item. Concatenated frames form one frame with all items. If
        `hashed`, the frame has hashes in place of sampling parameters and constraint. Raises
        `BadRequest` for a value that no message can hold."""
        kind = _kind_of(self.request, "items")
        given = fields_to_proto(item, kind, head=_head_to_proto(item.head, hashed))
        return _frame(self.request, kind, given)

    def item_from_proto(self, message: Any, known: RoundHead | None = None) -> RoundItem:
        """Decodes an item. `known` is the session's last head on this stream that had the sampling
        parameters in full. Raises `BadRequest` for an invalid item."""
        return from_proto(message, self.item, head=head_from_proto(message.head, known))

    def answer_frame(self, answer: VerifyAnswer | DraftAnswer) -> bytes:
        name, kind = _ANSWER_FIELDS[type(answer)], _kind_of(self.reply, "items")
        part_kind, more = _kind_of(kind, name), dict[str, Any]()
        if isinstance(answer, VerdictReply):
            more = fields_to_proto(answer.verdict, part_kind)
        elif isinstance(answer, Refused):
            more = {"message": answer.message[: limits.ERROR_MESSAGE_CHARS_MAX]}
        part = fields_to_proto(answer, part_kind, **more)
        return _frame(self.reply, kind, fields_to_proto(answer.key, kind, **{name: part}))

    def answer_from_proto(self, message: Any) -> VerifyAnswer | DraftAnswer:
        name = message.WhichOneof("answer")
        if name is None:
            raise BadRequest("answer", "is empty")
        part = getattr(message, name)
        key = ReplyKey(session_id_from_wire(message.session_id), message.epoch, message.round)
        more: dict[str, Any] = {"key": key}
        if name == "verdict":
            more["verdict"] = _verdict_from_proto(part)
        elif name == "proposal":
            more["proposal"] = _proposal_from_proto(part.proposal)
        answer: Any = from_proto(part, _ANSWERS[name], name, **more)
        if name == "verdict" and answer.audit is not None:
            _check_audit(answer.audit, len(part.accept_probability))
        return answer  # type: ignore[no-any-return]


VERIFY = Codec(target_pb2.DESCRIPTOR.services_by_name["Target"], "Verify", VerifyItem)
DRAFT = Codec(draft_pb2.DESCRIPTOR.services_by_name["Draft"], "Propose", DraftItem)
CODECS = {"target": VERIFY, "draft": DRAFT}
