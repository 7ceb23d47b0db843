"""Protobuf messages <-> the values of `outrider.messages`.

Decoding trusts nothing that a peer says: whatever does not fit raises `BadRequest` with the
field's path. Encoding trusts our own values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Generic, Protocol, TypeVar

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

RULES: dict[int, Rule] = {
    types_pb2.RULE_TOKEN: Rule.TOKEN,
    types_pb2.RULE_BLOCK: Rule.BLOCK,
    types_pb2.RULE_COUPLED: Rule.COUPLED,
    types_pb2.RULE_GREEDY: Rule.GREEDY,
}
"""A rule by its number on the wire."""
RULE_NUMBERS: Final[Any] = {rule: number for number, rule in RULES.items()}
"""A rule's number on the wire."""
_SESSION_ID = re.compile(r"[0-9a-f]{32}")


def copied(source: Any, kind: type[T], **others: Any) -> T:
    """A dataclass of this kind: `others`, and for the rest of its fields what `source` has under
    the same name. For messages that are not part of a round: it is slower than a constructor."""
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **others)


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


def _at_most(value: int, bound: int, field: str) -> int:
    if value > bound:
        raise BadRequest(field, f"{value} is over {bound}")
    return value


def _milliseconds(value: float, field: str) -> float:
    if not 0.0 <= value < math.inf:
        raise BadRequest(field, f"{value!r} is no duration")
    return value


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Every field is set, defaults too."""
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
    )


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


def _proposal_to_proto(proposal: SealedProposal) -> types_pb2.Proposal:
    """`q` stays empty under rules that do not look at it, and `parents` for a chain."""
    return types_pb2.Proposal(
        token_ids=proposal.token_ids,
        q=proposal.q,
        parents=[parent + 1 for parent in proposal.parents],
    )


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
    if features is None:
        return None
    return types_pb2.Features(first=features.first, width=features.width, rows=features.rows)


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
    message = types_pb2.RoundHead(
        session_id=head.session_id,
        tenant=head.tenant,
        epoch=head.epoch,
        round=head.round,
        base_length=head.base_length,
        prefix_digest=head.prefix_digest,
        append=head.append,
        prompt_length=head.prompt_length,
        rule=RULE_NUMBERS[head.rule],
        seed=head.seed,
        deadline_ms=head.deadline_ms,
        traceparent=head.traceparent,
    )
    if hashed:
        message.sampling_hash = head.sampling_hash
    elif head.sampling is None:
        raise BadRequest("head.sampling", "the first item of a stream needs the parameters")
    else:
        message.sampling_params.CopyFrom(sampling_to_proto(head.sampling))
    if hashed and head.constraint_hash:
        message.constraint_hash = head.constraint_hash
    elif head.constraint is not None:
        message.constraint.kind = head.constraint.kind
        message.constraint.text = head.constraint.text
    return message


def head_from_proto(message: types_pb2.RoundHead) -> RoundHead:
    """`sampling` and `constraint` are None where only a hash was sent."""
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
    if len(message.tenant) > TENANT_CHARS_MAX:
        raise BadRequest("head.tenant", f"is longer than {TENANT_CHARS_MAX} characters")
    if len(message.traceparent) > TRACEPARENT_CHARS_MAX:
        raise BadRequest("head.traceparent", f"is longer than {TRACEPARENT_CHARS_MAX} characters")
    sampling, sampling_hash = None, message.sampling_hash
    given = message.WhichOneof("sampling")
    if given is None:
        raise BadRequest("head.sampling", "neither parameters nor their hash are given")
    if given == "sampling_params":
        sampling = sampling_from_proto(message.sampling_params, "head.sampling_params")
        sampling_hash = sampling.hash()
    constraint, constraint_hash = constraint_from_proto(message, "head.constraint")
    return RoundHead(
        session_id=session_id_from_wire(message.session_id, "head.session_id"),
        tenant=message.tenant,
        epoch=message.epoch,
        round=message.round,
        base_length=message.base_length,
        prefix_digest=message.prefix_digest,
        append=append,
        prompt_length=message.prompt_length,
        rule=rule,
        seed=message.seed,
        sampling=sampling,
        sampling_hash=sampling_hash,
        deadline_ms=_at_most(message.deadline_ms, DEADLINE_MS_MAX, "head.deadline_ms"),
        traceparent=message.traceparent,
        constraint=constraint,
        constraint_hash=constraint_hash,
    )


def verify_item_to_proto(item: VerifyItem, hashed: bool = False) -> target_pb2.VerifyItem:
    return target_pb2.VerifyItem(
        head=head_to_proto(item.head, hashed),
        proposal=_proposal_to_proto(item.proposal) if item.proposal else None,
        run_ahead=item.run_ahead,
        num_logprobs=item.num_logprobs,
        num_next_draft_tokens=item.num_next_draft_tokens,
        next_siblings=item.next_siblings,
        wants_features=item.wants_features,
        next_budget_us=item.next_budget_us,
        audit=item.audit,
    )


def verify_item_from_proto(message: target_pb2.VerifyItem) -> VerifyItem:
    num_next, siblings = message.num_next_draft_tokens, tuple(message.next_siblings)
    _check_tree(num_next, "num_next_draft_tokens", siblings, "next_siblings")
    num_logprobs = None
    if message.HasField("num_logprobs"):
        num_logprobs = _at_most(message.num_logprobs, LOGPROBS_MAX, "num_logprobs")
    return VerifyItem(
        head=head_from_proto(message.head),
        proposal=_proposal_from_proto(message.proposal),
        run_ahead=_at_most(message.run_ahead, RUN_AHEAD_ROUNDS_MAX, "run_ahead"),
        num_logprobs=num_logprobs,
        num_next_draft_tokens=num_next,
        next_siblings=siblings,
        wants_features=message.wants_features,
        next_budget_us=_budget_from_wire(message.next_budget_us, "next_budget_us"),
        audit=message.audit,
    )


def draft_item_to_proto(item: DraftItem, hashed: bool = False) -> draft_pb2.DraftItem:
    return draft_pb2.DraftItem(
        head=head_to_proto(item.head, hashed),
        num_draft_tokens=item.num_draft_tokens,
        look_ahead=item.look_ahead,
        held=None if item.held is None else draft_pb2.HeldProposal(token_ids=item.held),
        siblings=item.siblings,
        features=_features_to_proto(item.features),
        budget_us=item.budget_us,
    )


def draft_item_from_proto(message: draft_pb2.DraftItem) -> DraftItem:
    siblings = tuple(message.siblings)
    _check_tree(message.num_draft_tokens, "num_draft_tokens", siblings, "siblings")
    held = None
    if message.HasField("held"):
        ids = message.held.token_ids
        held = token_ids_from_wire(ids, "held.token_ids", NUM_DRAFT_TOKENS_MAX)
    return DraftItem(
        head=head_from_proto(message.head),
        num_draft_tokens=message.num_draft_tokens,
        look_ahead=_at_most(message.look_ahead, LOOK_AHEAD_MAX, "look_ahead"),
        held=held,
        siblings=siblings,
        features=_features_from_proto(message.features, "features"),
        budget_us=_budget_from_wire(message.budget_us, "budget_us"),
    )


def _budget_from_wire(budget_us: int, field: str) -> int:
    if budget_us > DRAFT_DEADLINE_MS_MAX * 1000:
        raise BadRequest(field, f"{budget_us} us is over {DRAFT_DEADLINE_MS_MAX} ms")
    return budget_us


def _check_tree(number: int, number_field: str, siblings: tuple[int, ...], field: str) -> None:
    """Of what is asked for: tokens in a chain, and siblings beside them."""
    _at_most(number, NUM_DRAFT_TOKENS_MAX, number_field)
    if len(siblings) > NUM_DRAFT_TOKENS_MAX or max(siblings, default=0) > SIBLINGS_MAX:
        raise BadRequest(
            field,
            f"{siblings} are more than {SIBLINGS_MAX} beside each of {NUM_DRAFT_TOKENS_MAX} tokens",
        )
    if sum(siblings) + number > TREE_TOKENS_MAX:
        raise BadRequest(field, f"{siblings} make a tree of over {TREE_TOKENS_MAX} tokens")


# Answers


def verify_answer_to_proto(
    answer: VerdictReply | Resync | Refused,
) -> target_pb2.VerifyReplyItem:
    key = answer.key
    message = target_pb2.VerifyReplyItem(
        session_id=key.session_id, epoch=key.epoch, round=key.round
    )
    if not isinstance(answer, VerdictReply):
        _other_answer_to_proto(answer, message)
        return message
    verdict = message.verdict
    verdict.accept_probability.extend(answer.verdict.accept_probability)
    verdict.correction.extend(answer.verdict.correction)
    verdict.logprobs.extend(logprobs_to_proto(entry) for entry in answer.logprobs)
    verdict.cached_length = answer.cached_length
    verdict.queue_ms = answer.queue_ms
    verdict.compute_ms = answer.compute_ms
    if answer.next_proposal:
        verdict.next_proposal.CopyFrom(_proposal_to_proto(answer.next_proposal))
        verdict.next_base_length = answer.next_base_length
    verdict.next_draft_ms = answer.next_draft_ms
    verdict.next_work_ms = answer.next_work_ms
    verdict.next_out_of_time = answer.next_out_of_time
    if answer.features is not None:
        verdict.features.first = answer.features.first
        verdict.features.width = answer.features.width
        verdict.features.rows = answer.features.rows
    if answer.audit is not None:
        verdict.audit.SetInParent()
        for name, value in asdict(answer.audit).items():
            setattr(verdict.audit, name, value)
    return message


def verify_answer_from_proto(
    message: target_pb2.VerifyReplyItem,
) -> VerdictReply | Resync | Refused:
    key = key_from_proto(message)
    if message.WhichOneof("answer") != "verdict":
        return _other_answer_from_proto(key, message)
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
    return VerdictReply(
        key=key,
        verdict=Verdict(accept, token_ids_from_wire(correction, "verdict.correction")),
        cached_length=verdict.cached_length,
        logprobs=tuple(logprobs_from_proto(entry) for entry in verdict.logprobs),
        queue_ms=_milliseconds(verdict.queue_ms, "verdict.queue_ms"),
        compute_ms=_milliseconds(verdict.compute_ms, "verdict.compute_ms"),
        next_proposal=_proposal_from_proto(verdict.next_proposal),
        next_base_length=verdict.next_base_length,
        next_draft_ms=_milliseconds(verdict.next_draft_ms, "verdict.next_draft_ms"),
        next_work_ms=_milliseconds(verdict.next_work_ms, "verdict.next_work_ms"),
        next_out_of_time=verdict.next_out_of_time,
        features=_features_from_proto(verdict.features, "verdict.features"),
        audit=_audit_from_proto(verdict) if verdict.HasField("audit") else None,
    )


def _audit_from_proto(verdict: target_pb2.Verdict) -> AuditSums:
    sums = copied(verdict.audit, AuditSums)
    parts = (sums.num_impossible, sums.num_unlikely, sums.num_near_ties)
    if sums.num_tokens != len(verdict.accept_probability) or sum(parts) > sums.num_tokens:
        raise BadRequest("verdict.audit", f"{sums} does not count the tokens of its verdict")
    for value in (sums.surprise, sums.entropy, sums.variance):
        if not 0.0 <= value < math.inf:
            raise BadRequest("verdict.audit", f"{value!r} is no sum of an audit")
    return sums


def draft_answer_to_proto(answer: ProposalReply | Resync | Refused) -> draft_pb2.DraftReplyItem:
    key = answer.key
    message = draft_pb2.DraftReplyItem(session_id=key.session_id, epoch=key.epoch, round=key.round)
    if not isinstance(answer, ProposalReply):
        _other_answer_to_proto(answer, message)
        return message
    message.proposal.CopyFrom(
        draft_pb2.ProposalAnswer(
            proposal=_proposal_to_proto(answer.proposal),
            base_length=answer.base_length,
            cached_length=answer.cached_length,
            queue_ms=answer.queue_ms,
            compute_ms=answer.compute_ms,
            work_ms=answer.work_ms,
            assumed=answer.assumed,
            out_of_time=answer.out_of_time,
        )
    )
    return message


def draft_answer_from_proto(
    message: draft_pb2.DraftReplyItem,
) -> ProposalReply | Resync | Refused:
    key = key_from_proto(message)
    if message.WhichOneof("answer") != "proposal":
        return _other_answer_from_proto(key, message)
    answer = message.proposal
    # An outcome is assumed: accepted draft tokens and one more.
    assumed = token_ids_from_wire(answer.assumed, "proposal.assumed", NUM_DRAFT_TOKENS_MAX + 1)
    return ProposalReply(
        key=key,
        proposal=_proposal_from_proto(answer.proposal),
        base_length=answer.base_length,
        cached_length=answer.cached_length,
        queue_ms=_milliseconds(answer.queue_ms, "proposal.queue_ms"),
        compute_ms=_milliseconds(answer.compute_ms, "proposal.compute_ms"),
        work_ms=_milliseconds(answer.work_ms, "proposal.work_ms"),
        assumed=assumed,
        out_of_time=answer.out_of_time,
    )


def key_from_proto(
    message: target_pb2.VerifyReplyItem | draft_pb2.DraftReplyItem | types_pb2.RoundHead,
) -> ReplyKey:
    """The key of an answer, or the one that the answer to an item must carry."""
    return ReplyKey(session_id_from_wire(message.session_id), message.epoch, message.round)


def _other_answer_to_proto(
    answer: Resync | Refused, message: target_pb2.VerifyReplyItem | draft_pb2.DraftReplyItem
) -> None:
    if isinstance(answer, Resync):
        message.resync.cached_length = answer.cached_length
        message.resync.prefix_digest = answer.prefix_digest
        message.resync.SetInParent()
    else:
        message.refused.code = answer.code
        message.refused.message = answer.message[:ERROR_MESSAGE_CHARS_MAX]


def _other_answer_from_proto(
    key: ReplyKey, message: target_pb2.VerifyReplyItem | draft_pb2.DraftReplyItem
) -> Resync | Refused:
    kind = message.WhichOneof("answer")
    if kind == "resync":
        return Resync(key, message.resync.cached_length, message.resync.prefix_digest)
    if kind == "refused":
        text = message.refused.message[:ERROR_MESSAGE_CHARS_MAX]
        return Refused(key, message.refused.code, text)
    raise BadRequest("answer", "is empty")


# Descriptions


def description_to_proto(description: ReplicaDescription) -> types_pb2.ReplicaDescription:
    costs = description.step_costs
    values = {field.name: getattr(description, field.name) for field in fields(description)}
    values["step_costs"] = costs if costs is None else types_pb2.StepCosts(**asdict(costs))
    return types_pb2.ReplicaDescription(**values)


def description_from_proto(message: types_pb2.ReplicaDescription) -> ReplicaDescription:
    costs = None
    if message.HasField("step_costs"):
        found = message.step_costs
        try:
            rows, seconds = tuple(found.rows), tuple(found.seconds)
            costs = copied(found, StepCosts, rows=rows, seconds=seconds)
        except InvariantError as error:
            raise BadRequest("step_costs", error.message) from error
    eos_token_ids = token_ids_from_wire(message.eos_token_ids, "eos_token_ids")
    return copied(message, ReplicaDescription, eos_token_ids=eos_token_ids, step_costs=costs)


# Streams


class Keyed(Protocol):
    """An answer: it says which item it belongs to."""

    @property
    def key(self) -> ReplyKey:
        """The item's round."""
        ...


Item = TypeVar("Item", bound=RoundItem)
Answer = TypeVar("Answer", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Codec(Generic[Item, Answer]):
    """Names and conversions of one kind of replica. Protobuf messages are `Any` here: the fields
    that are used (`items`, `head`) are the same in both kinds."""

    service: ServiceDescriptor
    stream_method: str
    request_frame: Callable[[Sequence[Any]], Any]
    """Items to a frame."""
    parse_reply: Callable[[bytes], Any]
    """Bytes to a frame of answers; raises `DecodeError`."""
    reply_frame: Callable[[Sequence[Any]], Any]
    item_to_proto: Callable[[Item, bool], Any]
    """An item, with hashes in the place of parameters and constraint or not."""
    item_from_proto: Callable[[Any], Item]
    answer_to_proto: Callable[[Answer], Any]
    answer_from_proto: Callable[[Any], Answer]

    def path(self, method: str) -> str:
        """The path of a method of the service."""
        return f"/{self.service.full_name}/{method}"


VERIFY: Codec[VerifyItem, VerifyAnswer] = Codec(
    service=target_pb2.DESCRIPTOR.services_by_name["Target"],
    stream_method="Verify",
    request_frame=lambda items: target_pb2.VerifyRequest(items=items),
    parse_reply=target_pb2.VerifyReply.FromString,
    reply_frame=lambda items: target_pb2.VerifyReply(items=items),
    item_to_proto=verify_item_to_proto,
    item_from_proto=verify_item_from_proto,
    answer_to_proto=verify_answer_to_proto,
    answer_from_proto=verify_answer_from_proto,
)
"""The stream between a coordinator and a target."""

DRAFT: Codec[DraftItem, DraftAnswer] = Codec(
    service=draft_pb2.DESCRIPTOR.services_by_name["Draft"],
    stream_method="Propose",
    request_frame=lambda items: draft_pb2.DraftRequest(items=items),
    parse_reply=draft_pb2.DraftReply.FromString,
    reply_frame=lambda items: draft_pb2.DraftReply(items=items),
    item_to_proto=draft_item_to_proto,
    item_from_proto=draft_item_from_proto,
    answer_to_proto=draft_answer_to_proto,
    answer_from_proto=draft_answer_from_proto,
)
"""The stream between a coordinator and a draft."""
