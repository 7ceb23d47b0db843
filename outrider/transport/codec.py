"""Protobuf messages <-> the values of `outrider.messages`.

Decoding trusts nothing that a peer says: whatever does not fit raises `BadRequest` with the
field's path. Encoding trusts our own values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from outrider.engine.step_costs import StepCosts
from outrider.errors import BadRequest, InvariantError
from outrider.grammar.constraint import DIGEST_BYTES, Constraint
from outrider.hidden_states import BYTES_OF_A_NUMBER, Features
from outrider.limits import (
    DEADLINE_MS_MAX,
    DRAFT_DEADLINE_MS_MAX,
    ERROR_MESSAGE_CHARS_MAX,
    FEATURES_MAX,
    FEATURES_WIDTH_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
    LOGPROBS_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
    RUN_AHEAD_ROUNDS_MAX,
    SESSION_TOKENS_MAX,
    SIBLINGS_MAX,
    TENANT_CHARS_MAX,
    TOKEN_ID_MAX,
    TRACEPARENT_CHARS_MAX,
    TREE_TOKENS_MAX,
)
from outrider.messages import (
    DraftAnswer,
    DraftItem,
    PositionLogprobs,
    ProposalReply,
    Refused,
    ReplicaDescription,
    ReplyKey,
    Resync,
    RoundHead,
    RoundItem,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import NOTHING_SEALED, Q_BYTES_MAX, SealedProposal, draft_tree
from outrider.speculation.sampling_params import Rule, SamplingParams, check_sampling
from outrider.v1 import draft_pb2, target_pb2, types_pb2

T = TypeVar("T")

RULES: Final = {types_pb2.Rule.Value(f"RULE_{rule.name}"): rule for rule in Rule}
"""A rule by its number on the wire."""
RULE_NUMBERS: Final[Any] = {rule: number for number, rule in RULES.items()}
"""A rule's number on the wire."""
_SESSION_ID = re.compile(r"[0-9a-f]{32}")


def copied(source: Any, kind: type[T], **others: Any) -> T:
    """A dataclass or a message of this kind: `others`, and for the rest of its fields what `source`
    has under the same name, as a tuple where a message has several. A field that is None is not set
    in a message."""
    values = {
        name: tuple(getattr(source, name)) if is_repeated else getattr(source, name)
        for name, is_repeated in _shared(type(source), kind)  # type: ignore[arg-type]
        if name not in others
    }
    return kind(**values, **others)


@cache
def _shared(source: Any, kind: Any) -> tuple[tuple[str, bool], ...]:
    """Names of the fields that both have, and whether the source, a message, has several there."""
    names = _names(kind)
    return tuple((name, repeats) for name, repeats in _names(source).items() if name in names)


def _names(kind: Any) -> dict[str, bool]:
    if is_dataclass(kind):
        return {field.name: False for field in fields(kind) if field.init}
    return {field.name: bool(field.is_repeated) for field in kind.DESCRIPTOR.fields}


# Fields


def session_id_from_wire(session_id: str, field: str = "session_id") -> str:
    """Checks that a session id is 32 lower-case hexadecimal digits."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise BadRequest(
            field, f"{session_id[:64]!r} is no session id (32 hexadecimal digits, lower case)"
        )
    return session_id


def token_ids_from_wire(
    ids: Iterable[int], field: str, num_max: int | None = None
) -> tuple[int, ...]:
    """Checks that token ids fit 31 bits, and their number; whether they are in a vocabulary, its
    owner checks."""
    token_ids = tuple(ids)
    if num_max is not None and len(token_ids) > num_max:
        raise BadRequest(field, f"{len(token_ids)} tokens are more than {num_max}")
    if token_ids and (max(token_ids) > TOKEN_ID_MAX or min(token_ids) < 0):
        raise BadRequest(field, f"a token id is not in 0..{TOKEN_ID_MAX}")
    return token_ids


def _check_bounds(message: Any, prefix: str = "", **bounds: int) -> None:
    """Of numbers, by their fields' names."""
    for name, bound in bounds.items():
        value = getattr(message, name)
        if value > bound:
            raise BadRequest(prefix + name, f"{value} is over {bound}")


def _check_amounts(message: Any, prefix: str, *names: str) -> None:
    """Of numbers that are finite, and 0 or more."""
    for name in names:
        value = getattr(message, name)
        if not 0.0 <= value < math.inf:
            raise BadRequest(prefix + name, f"{value!r} is not finite, or less than 0")


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Every field is set, defaults too."""
    return copied(params, types_pb2.SamplingParams, logit_bias=dict(params.logit_bias))


def sampling_from_proto(
    message: types_pb2.SamplingParams, field: str = "sampling"
) -> SamplingParams:
    """Fields that are not set take their defaults; each is checked against `outrider.limits`.
    Whether `top_k` and biased tokens fit a vocabulary, its owner checks."""
    if len(message.logit_bias) > LOGIT_BIAS_ENTRIES_MAX:  # before they are sorted
        raise BadRequest(
            f"{field}.logit_bias",
            f"got {len(message.logit_bias)} entries; at most {LOGIT_BIAS_ENTRIES_MAX}",
        )
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    params = SamplingParams(**given)
    check_sampling(params, field)
    return params


def _proposal_to_proto(proposal: SealedProposal) -> types_pb2.Proposal | None:
    """`q` stays empty under rules that do not look at it, and `parents` for a chain."""
    if not proposal:
        return None
    parents = [parent + 1 for parent in proposal.parents]
    return types_pb2.Proposal(token_ids=proposal.token_ids, q=proposal.q, parents=parents)


def _proposal_from_proto(message: types_pb2.Proposal) -> SealedProposal:
    """Checks the tree, the token ids and the size of q, which is for the target to open."""
    if not (message.token_ids or message.q or message.parents):
        return NOTHING_SEALED
    num_max = TREE_TOKENS_MAX if message.parents else NUM_DRAFT_TOKENS_MAX
    token_ids = token_ids_from_wire(message.token_ids, "proposal.token_ids", num_max)
    if len(message.q) > Q_BYTES_MAX:
        raise BadRequest("proposal.q", f"{len(message.q)} bytes are more than {Q_BYTES_MAX}")
    parents = tuple(parent - 1 for parent in message.parents)
    draft_tree(parents, len(token_ids))
    return SealedProposal(token_ids, message.q, parents)


def constraint_from_proto(
    message: types_pb2.RoundHead, field: str
) -> tuple[Constraint | None, bytes]:
    """What the completion must be, and its hash; None where only that was sent, or nothing."""
    given = message.WhichOneof("completion")
    if given is None:
        return None, b""
    if given == "constraint":
        constraint = Constraint.read(message.constraint.kind, message.constraint.text, field)
        return constraint, constraint.digest()
    if len(message.constraint_hash) != DIGEST_BYTES:
        raise BadRequest(f"{field}_hash", f"has {len(message.constraint_hash)} bytes, not 16")
    return None, message.constraint_hash


def _features_to_proto(features: Features | None) -> types_pb2.Features | None:
    return None if features is None else copied(features, types_pb2.Features)


def _features_from_proto(message: types_pb2.Features, field: str) -> Features | None:
    """Checks that they are whole rows, and few; None where none were sent."""
    if not (message.width or message.rows):
        return None
    if not 0 < message.width <= FEATURES_WIDTH_MAX:
        raise BadRequest(f"{field}.width", f"{message.width} is not in 1..{FEATURES_WIDTH_MAX}")
    num, rest = divmod(len(message.rows), message.width * BYTES_OF_A_NUMBER)
    if rest or not 0 < num <= FEATURES_MAX:
        whole = f"1 to {FEATURES_MAX} rows of {message.width} numbers"
        raise BadRequest(f"{field}.rows", f"{len(message.rows)} bytes are not {whole}")
    return Features(message.first, message.width, message.rows)


def logprobs_to_proto(entry: PositionLogprobs) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        logprob=entry.logprob,
        top=[types_pb2.TokenLogprob(token_id=v, logprob=value) for v, value in entry.top],
    )


def logprobs_from_proto(message: types_pb2.PositionLogprobs) -> PositionLogprobs:
    """One position. Minus infinity is the log-probability of an impossible token."""
    if len(message.top) > LOGPROBS_MAX:
        raise BadRequest("logprobs.top", f"{len(message.top)} entries are over {LOGPROBS_MAX}")
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    for value in (message.logprob, *(value for _, value in top)):
        if not value < math.inf:
            raise BadRequest("logprobs", f"{value!r} is no log-probability")
    token_ids_from_wire((v for v, _ in top), "logprobs.top")
    return PositionLogprobs(message.logprob, top)


# Items


def head_to_proto(head: RoundHead, hashed: bool = False) -> types_pb2.RoundHead:
    """With parameters and constraint in full, or with their hashes."""
    own: dict[str, Any] = {"constraint": None, "constraint_hash": None, "sampling_hash": None}
    if hashed:
        own["sampling_hash"] = head.sampling_hash
        own["constraint_hash"] = head.constraint_hash or None
    elif head.sampling is None:
        raise BadRequest("head.sampling", "the first item of a stream needs the parameters")
    else:
        own["sampling_params"] = sampling_to_proto(head.sampling)
        if head.constraint is not None:
            own["constraint"] = copied(head.constraint, types_pb2.Constraint)
    return copied(head, types_pb2.RoundHead, rule=RULE_NUMBERS[head.rule], **own)


def head_from_proto(message: types_pb2.RoundHead) -> RoundHead:
    """`sampling` and `constraint` are None where only a hash was sent."""
    session_id_from_wire(message.session_id, "head.session_id")
    append = token_ids_from_wire(message.append, "head.append")
    committed_length = message.base_length + len(append)
    if committed_length > SESSION_TOKENS_MAX:
        reason = f"a prefix of {committed_length} tokens is over {SESSION_TOKENS_MAX}"
        raise BadRequest("head.base_length", reason)
    if not 1 <= message.prompt_length <= committed_length:
        raise BadRequest(
            "head.prompt_length",
            f"{message.prompt_length} is not in 1..{committed_length}, the committed length",
        )
    rule = RULES.get(message.rule)
    if rule is None:
        raise BadRequest("head.rule", f"{message.rule} is no rule (token, block, coupled, greedy)")
    if message.epoch < 1:
        raise BadRequest("head.epoch", "epochs begin at 1")
    for name, most in (("tenant", TENANT_CHARS_MAX), ("traceparent", TRACEPARENT_CHARS_MAX)):
        if len(getattr(message, name)) > most:
            raise BadRequest(f"head.{name}", f"is longer than {most} characters")
    _check_bounds(message, "head.", deadline_ms=DEADLINE_MS_MAX)
    sampling, sampling_hash = None, message.sampling_hash
    given = message.WhichOneof("sampling")
    if given is None:
        raise BadRequest("head.sampling", "neither parameters nor their hash are given")
    if given == "sampling_params":
        sampling = sampling_from_proto(message.sampling_params, "head.sampling_params")
        sampling_hash = sampling.hash()
    constraint, constraint_hash = constraint_from_proto(message, "head.constraint")
    return copied(
        message,
        RoundHead,
        append=append,
        rule=rule,
        sampling=sampling,
        sampling_hash=sampling_hash,
        constraint=constraint,
        constraint_hash=constraint_hash,
    )


def verify_item_to_proto(item: VerifyItem, hashed: bool = False) -> target_pb2.VerifyItem:
    head, proposal = head_to_proto(item.head, hashed), _proposal_to_proto(item.proposal)
    return copied(item, target_pb2.VerifyItem, head=head, proposal=proposal)


def verify_item_from_proto(message: target_pb2.VerifyItem) -> VerifyItem:
    _check_tree(message, "num_next_draft_tokens", "next_siblings")
    _check_bounds(
        message,
        run_ahead=RUN_AHEAD_ROUNDS_MAX,
        num_logprobs=LOGPROBS_MAX,
        next_budget_us=1000 * DRAFT_DEADLINE_MS_MAX,
    )
    return copied(
        message,
        VerifyItem,
        head=head_from_proto(message.head),
        proposal=_proposal_from_proto(message.proposal),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def draft_item_to_proto(item: DraftItem, hashed: bool = False) -> draft_pb2.DraftItem:
    return copied(
        item,
        draft_pb2.DraftItem,
        head=head_to_proto(item.head, hashed),
        held=None if item.held is None else draft_pb2.HeldProposal(token_ids=item.held),
        features=_features_to_proto(item.features),
    )


def draft_item_from_proto(message: draft_pb2.DraftItem) -> DraftItem:
    _check_tree(message, "num_draft_tokens", "siblings")
    _check_bounds(message, look_ahead=LOOK_AHEAD_MAX, budget_us=1000 * DRAFT_DEADLINE_MS_MAX)
    held = token_ids_from_wire(message.held.token_ids, "held.token_ids", NUM_DRAFT_TOKENS_MAX)
    return copied(
        message,
        DraftItem,
        head=head_from_proto(message.head),
        held=held if message.HasField("held") else None,
        features=_features_from_proto(message.features, "features"),
    )


def _check_tree(message: Any, number_field: str, field: str) -> None:
    """Of what is asked for: tokens in a chain, and siblings beside them."""
    siblings = tuple(getattr(message, field))
    _check_bounds(message, "", **{number_field: NUM_DRAFT_TOKENS_MAX})
    if len(siblings) > NUM_DRAFT_TOKENS_MAX or max(siblings, default=0) > SIBLINGS_MAX:
        raise BadRequest(
            field,
            f"{siblings} are more than {SIBLINGS_MAX} beside each of {NUM_DRAFT_TOKENS_MAX} tokens",
        )
    if sum(siblings) + getattr(message, number_field) > TREE_TOKENS_MAX:
        raise BadRequest(field, f"{siblings} make a tree of over {TREE_TOKENS_MAX} tokens")


# Answers


def verify_answer_to_proto(answer: VerifyAnswer) -> target_pb2.VerifyReplyItem:
    if not isinstance(answer, VerdictReply):
        return _other_answer_to_proto(answer, target_pb2.VerifyReplyItem)
    verdict = copied(
        answer,
        target_pb2.Verdict,
        accept_probability=answer.verdict.accept_probability,
        correction=answer.verdict.correction,
        logprobs=[logprobs_to_proto(entry) for entry in answer.logprobs],
        next_proposal=_proposal_to_proto(answer.next_proposal),
        features=_features_to_proto(answer.features),
        audit=None if answer.audit is None else copied(answer.audit, target_pb2.AuditSums),
    )
    return copied(answer.key, target_pb2.VerifyReplyItem, verdict=verdict)


def verify_answer_from_proto(message: target_pb2.VerifyReplyItem) -> VerifyAnswer:
    if message.WhichOneof("answer") != "verdict":
        return _other_answer_from_proto(message)
    verdict = message.verdict
    accept, correction = tuple(verdict.accept_probability), tuple(verdict.correction)
    if len(accept) > TREE_TOKENS_MAX or len(correction) != len(accept) + 1:
        raise BadRequest(
            "verdict", f"{len(accept)} probabilities do not go with {len(correction)} corrections"
        )
    for probability in accept:
        if not 0.0 <= probability <= 1.0:
            raise BadRequest("verdict.accept_probability", f"{probability!r} is not in [0, 1]")
    if verdict.logprobs and len(verdict.logprobs) != 2 * len(accept) + 1:
        raise BadRequest(
            "verdict.logprobs", f"{len(verdict.logprobs)} entries, not {2 * len(accept) + 1}"
        )
    _check_amounts(verdict, "verdict.", "queue_ms", "compute_ms", "next_draft_ms", "next_work_ms")
    return copied(
        verdict,
        VerdictReply,
        key=key_from_proto(message),
        verdict=Verdict(accept, token_ids_from_wire(correction, "verdict.correction")),
        logprobs=tuple(logprobs_from_proto(entry) for entry in verdict.logprobs),
        next_proposal=_proposal_from_proto(verdict.next_proposal),
        features=_features_from_proto(verdict.features, "verdict.features"),
        audit=_audit_from_proto(verdict) if verdict.HasField("audit") else None,
    )


def _audit_from_proto(verdict: target_pb2.Verdict) -> AuditSums:
    sums = copied(verdict.audit, AuditSums)
    parts = (sums.num_impossible, sums.num_unlikely, sums.num_near_ties)
    if sums.num_tokens != len(verdict.accept_probability) or sum(parts) > sums.num_tokens:
        raise BadRequest("verdict.audit", f"{sums} does not count the tokens of its verdict")
    _check_amounts(sums, "verdict.audit.", "surprise", "entropy", "variance")
    return sums


def draft_answer_to_proto(answer: DraftAnswer) -> draft_pb2.DraftReplyItem:
    if not isinstance(answer, ProposalReply):
        return _other_answer_to_proto(answer, draft_pb2.DraftReplyItem)
    proposal = _proposal_to_proto(answer.proposal)
    told = copied(answer, draft_pb2.ProposalAnswer, proposal=proposal)
    return copied(answer.key, draft_pb2.DraftReplyItem, proposal=told)


def draft_answer_from_proto(message: draft_pb2.DraftReplyItem) -> DraftAnswer:
    if message.WhichOneof("answer") != "proposal":
        return _other_answer_from_proto(message)
    answer = message.proposal
    _check_amounts(answer, "proposal.", "queue_ms", "compute_ms", "work_ms")
    # An outcome is assumed: accepted draft tokens and one more.
    assumed = token_ids_from_wire(answer.assumed, "proposal.assumed", NUM_DRAFT_TOKENS_MAX + 1)
    return copied(
        answer,
        ProposalReply,
        key=key_from_proto(message),
        proposal=_proposal_from_proto(answer.proposal),
        assumed=assumed,
    )


def key_from_proto(message: Any) -> ReplyKey:
    """The key of an answer, or the one that the answer to an item with this head must carry."""
    return ReplyKey(session_id_from_wire(message.session_id), message.epoch, message.round)


def _other_answer_to_proto(answer: Resync | Refused, kind: type[T]) -> T:
    if isinstance(answer, Resync):
        return copied(answer.key, kind, resync=copied(answer, types_pb2.Resync))
    text = answer.message[:ERROR_MESSAGE_CHARS_MAX]
    return copied(answer.key, kind, refused=types_pb2.Refused(code=answer.code, message=text))


def _other_answer_from_proto(message: Any) -> Resync | Refused:
    key, kind = key_from_proto(message), message.WhichOneof("answer")
    if kind == "resync":
        return copied(message.resync, Resync, key=key)
    if kind == "refused":
        text = message.refused.message[:ERROR_MESSAGE_CHARS_MAX]
        return Refused(key, message.refused.code, text)
    raise BadRequest("answer", "is empty")


# Descriptions


def description_to_proto(description: ReplicaDescription) -> types_pb2.ReplicaDescription:
    costs = description.step_costs
    told = None if costs is None else copied(costs, types_pb2.StepCosts)
    return copied(description, types_pb2.ReplicaDescription, step_costs=told)


def description_from_proto(message: types_pb2.ReplicaDescription) -> ReplicaDescription:
    costs = None
    if message.HasField("step_costs"):
        try:
            costs = copied(message.step_costs, StepCosts)
        except InvariantError as error:
            raise BadRequest("step_costs", error.message) from error
    token_ids_from_wire(message.eos_token_ids, "eos_token_ids")
    return copied(message, ReplicaDescription, step_costs=costs)


# Streams


Item = TypeVar("Item", bound=RoundItem)
Answer = TypeVar("Answer", bound=VerifyAnswer | DraftAnswer)


@dataclass(frozen=True, slots=True)
class Codec(Generic[Item, Answer]):
    """Names and conversions of one kind of replica. Protobuf messages are `Any` here: the fields
    that are used (`items`, `head`) are the same in both kinds."""

    service: ServiceDescriptor
    stream_method: str
    request: Any
    """A frame of items: its message's class."""
    reply: Any
    """A frame of answers."""
    item_to_proto: Callable[[Item, bool], Any]
    """An item, with hashes in the place of parameters and constraint or not."""
    item_from_proto: Callable[[Any], Item]
    answer_to_proto: Callable[[Answer], Any]
    answer_from_proto: Callable[[Any], Answer]

    def path(self, method: str) -> str:
        """The path of a method of the service."""
        return f"/{self.service.full_name}/{method}"


VERIFY: Codec[VerifyItem, VerifyAnswer] = Codec(
    target_pb2.DESCRIPTOR.services_by_name["Target"],
    "Verify",
    target_pb2.VerifyRequest,
    target_pb2.VerifyReply,
    verify_item_to_proto,
    verify_item_from_proto,
    verify_answer_to_proto,
    verify_answer_from_proto,
)
"""The stream between a coordinator and a target."""

DRAFT: Codec[DraftItem, DraftAnswer] = Codec(
    draft_pb2.DESCRIPTOR.services_by_name["Draft"],
    "Propose",
    draft_pb2.DraftRequest,
    draft_pb2.DraftReply,
    draft_item_to_proto,
    draft_item_from_proto,
    draft_answer_to_proto,
    draft_answer_from_proto,
)
"""The stream between a coordinator and a draft."""
