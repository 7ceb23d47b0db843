"""Protobuf messages <-> the values of `outrider.messages`.

Decoding trusts nothing that a peer says: whatever does not fit raises `BadRequest` with the
field's path. Encoding trusts our own values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
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
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.proposal import NOTHING_SEALED, Q_BYTES_MAX, SealedProposal, draft_tree
from outrider.speculation.sampling_params import Rule, SamplingParams, check_sampling
from outrider.v1 import draft_pb2, target_pb2, types_pb2

RULES: dict[int, Rule] = {
    types_pb2.RULE_TOKEN: Rule.TOKEN,
    types_pb2.RULE_BLOCK: Rule.BLOCK,
    types_pb2.RULE_COUPLED: Rule.COUPLED,
    types_pb2.RULE_GREEDY: Rule.GREEDY,
}
"""A rule by its number on the wire."""
RULE_NUMBERS: dict[Rule, int] = {rule: number for number, rule in RULES.items()}
"""A rule's number on the wire."""


# Sampling parameters

_OPTIONAL: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of the message whose absence means the default."""


def canonical_sampling(params: SamplingParams) -> SamplingParams:
    """The same parameters as they come out at the other end of a wire (1 becomes 1.0), so that
    both ends hash the same value."""
    return replace(
        params,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=int(params.top_k),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=tuple(sorted((int(v), float(bias)) for v, bias in params.logit_bias)),
    )


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
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    params = SamplingParams(**given, logit_bias=tuple(sorted(message.logit_bias.items())))
    check_sampling(params, field)
    return params


# The head of both requests


def head_to_proto(head: RoundHead, sampling_hash: int | None) -> types_pb2.RoundHead:
    """With parameters and constraint in full where `sampling_hash` is None, else with hashes."""
    message = types_pb2.RoundHead(
        session_id=head.session_id,
        tenant=head.tenant,
        epoch=head.epoch,
        round=head.round,
        base_length=head.base_length,
        prefix_digest=head.prefix_digest,
        append=head.append,
        prompt_length=head.prompt_length,
        rule=RULE_NUMBERS[head.rule],  # type: ignore[arg-type]
        seed=head.seed,
        deadline_ms=head.deadline_ms,
        traceparent=head.traceparent,
    )
    if sampling_hash is not None:
        message.sampling_hash = sampling_hash
    else:
        if head.sampling is None:
            raise BadRequest("head.sampling", "the first item of a stream needs the parameters")
        message.sampling_params.CopyFrom(sampling_to_proto(head.sampling))
    put_constraint(message, head, in_full=sampling_hash is None)
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
    if message.deadline_ms > DEADLINE_MS_MAX:
        raise BadRequest("head.deadline_ms", f"{message.deadline_ms} is over {DEADLINE_MS_MAX}")
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
        deadline_ms=message.deadline_ms,
        traceparent=message.traceparent,
        constraint=constraint,
        constraint_hash=constraint_hash,
    )


# Items


def verify_item_to_proto(item: VerifyItem, sampling_hash: int | None) -> target_pb2.VerifyItem:
    """With the sampling parameters themselves where `sampling_hash` is None."""
    return target_pb2.VerifyItem(
        head=head_to_proto(item.head, sampling_hash),
        proposal=proposal_to_proto(item.proposal) if item.proposal else None,
        run_ahead=item.run_ahead,
        num_logprobs=item.num_logprobs,
        num_next_draft_tokens=item.num_next_draft_tokens,
        next_siblings=item.next_siblings,
        wants_features=item.wants_features,
        next_budget_us=item.next_budget_us,
        audit=item.audit,
    )


def verify_item_from_proto(message: target_pb2.VerifyItem) -> VerifyItem:
    """Raises `BadRequest` naming the field that does not fit."""
    if message.run_ahead > RUN_AHEAD_ROUNDS_MAX:
        raise BadRequest("run_ahead", f"{message.run_ahead} is over {RUN_AHEAD_ROUNDS_MAX}")
    num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
    if num_logprobs is not None and num_logprobs > LOGPROBS_MAX:
        raise BadRequest("num_logprobs", f"{num_logprobs} is over {LOGPROBS_MAX}")
    num_next, siblings = message.num_next_draft_tokens, tuple(message.next_siblings)
    _check_tree(num_next, "num_next_draft_tokens", siblings, "next_siblings")
    return VerifyItem(
        head=head_from_proto(message.head),
        proposal=proposal_from_proto(message.proposal),
        run_ahead=message.run_ahead,
        num_logprobs=num_logprobs,
        num_next_draft_tokens=num_next,
        next_siblings=siblings,
        wants_features=message.wants_features,
        next_budget_us=_budget_from_wire(message.next_budget_us, "next_budget_us"),
        audit=message.audit,
    )


def draft_item_to_proto(item: DraftItem, sampling_hash: int | None) -> draft_pb2.DraftItem:
    """With the sampling parameters themselves where `sampling_hash` is None."""
    held = None if item.held is None else draft_pb2.HeldProposal(token_ids=item.held)
    return draft_pb2.DraftItem(
        head=head_to_proto(item.head, sampling_hash),
        num_draft_tokens=item.num_draft_tokens,
        look_ahead=item.look_ahead,
        held=held,
        siblings=item.siblings,
        features=None if item.features is None else features_to_proto(item.features),
        budget_us=item.budget_us,
    )


def draft_item_from_proto(message: draft_pb2.DraftItem) -> DraftItem:
    """Raises `BadRequest` naming the field that does not fit."""
    if message.look_ahead > LOOK_AHEAD_MAX:
        raise BadRequest("look_ahead", f"{message.look_ahead} is over {LOOK_AHEAD_MAX}")
    held = None
    if message.HasField("held"):
        held = drafted_from_wire(message.held.token_ids, "held.token_ids")
    siblings = tuple(message.siblings)
    _check_tree(message.num_draft_tokens, "num_draft_tokens", siblings, "siblings")
    head = head_from_proto(message.head)
    features = features_from_proto(message.features, "features")
    return DraftItem(
        head, message.num_draft_tokens, message.look_ahead, held, siblings, features,
        _budget_from_wire(message.budget_us, "budget_us"),
    )  # fmt: skip


def _budget_from_wire(budget_us: int, field: str) -> int:
    if budget_us > DRAFT_DEADLINE_MS_MAX * 1000:
        raise BadRequest(field, f"{budget_us} us is over {DRAFT_DEADLINE_MS_MAX} ms")
    return budget_us


def _check_tree(number: int, number_field: str, siblings: tuple[int, ...], field: str) -> None:
    """Of what is asked for: tokens in a chain, and siblings beside them."""
    if number > NUM_DRAFT_TOKENS_MAX:
        raise BadRequest(number_field, f"{number} is over {NUM_DRAFT_TOKENS_MAX}")
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
    """Any answer of a target."""
    key = answer.key
    message = target_pb2.VerifyReplyItem(
        session_id=key.session_id, epoch=key.epoch, round=key.round
    )
    if isinstance(answer, VerdictReply):
        verdict = message.verdict
        verdict.accept_probability.extend(answer.verdict.accept_probability)
        verdict.correction.extend(answer.verdict.correction)
        for entry in answer.logprobs:
            verdict.logprobs.append(logprobs_to_proto(entry))
        verdict.cached_length = answer.cached_length
        verdict.queue_ms = answer.queue_ms
        verdict.compute_ms = answer.compute_ms
        if answer.next_proposal:
            verdict.next_proposal.CopyFrom(proposal_to_proto(answer.next_proposal))
            verdict.next_base_length = answer.next_base_length
        verdict.next_draft_ms = answer.next_draft_ms
        verdict.next_work_ms = answer.next_work_ms
        verdict.next_out_of_time = answer.next_out_of_time
        if answer.features is not None:
            verdict.features.CopyFrom(features_to_proto(answer.features))
        audit_to_proto(answer.audit, verdict)
    else:
        _other_answer_to_proto(answer, message)
    return message


def verify_answer_from_proto(
    message: target_pb2.VerifyReplyItem,
) -> VerdictReply | Resync | Refused:
    """Raises `BadRequest` naming the field that does not fit."""
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
        queue_ms=milliseconds(verdict.queue_ms, "verdict.queue_ms"),
        compute_ms=milliseconds(verdict.compute_ms, "verdict.compute_ms"),
        next_proposal=proposal_from_proto(verdict.next_proposal),
        next_base_length=verdict.next_base_length,
        next_draft_ms=milliseconds(verdict.next_draft_ms, "verdict.next_draft_ms"),
        next_work_ms=milliseconds(verdict.next_work_ms, "verdict.next_work_ms"),
        next_out_of_time=verdict.next_out_of_time,
        features=features_from_proto(verdict.features, "verdict.features"),
        audit=audit_from_proto(verdict),
    )


def draft_answer_to_proto(answer: ProposalReply | Resync | Refused) -> draft_pb2.DraftReplyItem:
    """Any answer of a draft."""
    key = answer.key
    message = draft_pb2.DraftReplyItem(session_id=key.session_id, epoch=key.epoch, round=key.round)
    if isinstance(answer, ProposalReply):
        message.proposal.CopyFrom(
            draft_pb2.ProposalAnswer(
                proposal=proposal_to_proto(answer.proposal),
                base_length=answer.base_length,
                cached_length=answer.cached_length,
                queue_ms=answer.queue_ms,
                compute_ms=answer.compute_ms,
                work_ms=answer.work_ms,
                assumed=answer.assumed,
                out_of_time=answer.out_of_time,
            )
        )
    else:
        _other_answer_to_proto(answer, message)
    return message


def draft_answer_from_proto(
    message: draft_pb2.DraftReplyItem,
) -> ProposalReply | Resync | Refused:
    """Raises `BadRequest` naming the field that does not fit."""
    key = key_from_proto(message)
    if message.WhichOneof("answer") != "proposal":
        return _other_answer_from_proto(key, message)
    answer = message.proposal
    return ProposalReply(
        key=key,
        proposal=proposal_from_proto(answer.proposal),
        base_length=answer.base_length,
        cached_length=answer.cached_length,
        queue_ms=milliseconds(answer.queue_ms, "proposal.queue_ms"),
        compute_ms=milliseconds(answer.compute_ms, "proposal.compute_ms"),
        work_ms=milliseconds(answer.work_ms, "proposal.work_ms"),
        assumed=_assumed_from_wire(answer.assumed),
        out_of_time=answer.out_of_time,
    )


def _assumed_from_wire(ids: Sequence[int]) -> tuple[int, ...]:
    """An outcome: accepted draft tokens and one more."""
    if len(ids) > NUM_DRAFT_TOKENS_MAX + 1:
        raise BadRequest(
            "proposal.assumed", f"{len(ids)} tokens are more than {NUM_DRAFT_TOKENS_MAX + 1}"
        )
    return token_ids_from_wire(ids, "proposal.assumed")


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


def logprobs_to_proto(entry: PositionLogprobs) -> types_pb2.PositionLogprobs:
    """One position."""
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


_SESSION_ID = re.compile(r"[0-9a-f]{32}")


def session_id_from_wire(session_id: str, field: str = "session_id") -> str:
    """Checks that a session id is 32 lower-case hexadecimal digits."""
    if _SESSION_ID.fullmatch(session_id) is None:
        raise BadRequest(
            field, f"{session_id[:64]!r} is no session id (32 hexadecimal digits, lower case)"
        )
    return session_id


def token_ids_from_wire(ids: Iterable[int], field: str) -> tuple[int, ...]:
    """Checks that token ids fit 31 bits; whether they are in a vocabulary, its owner checks."""
    token_ids = tuple(ids)
    if token_ids and (max(token_ids) > TOKEN_ID_MAX or min(token_ids) < 0):
        raise BadRequest(field, f"a token id is not in 0..{TOKEN_ID_MAX}")
    return token_ids


def drafted_from_wire(
    ids: Sequence[int], field: str, num_max: int = NUM_DRAFT_TOKENS_MAX
) -> tuple[int, ...]:
    """The tokens of a proposal."""
    if len(ids) > num_max:
        raise BadRequest(field, f"{len(ids)} tokens are more than {num_max}")
    return token_ids_from_wire(ids, field)


def proposal_to_proto(proposal: SealedProposal) -> types_pb2.Proposal:
    """`q` stays empty under rules that do not look at it, and `parents` for a chain."""
    return types_pb2.Proposal(
        token_ids=proposal.token_ids,
        q=proposal.q,
        parents=[parent + 1 for parent in proposal.parents],
    )


def proposal_from_proto(message: types_pb2.Proposal) -> SealedProposal:
    """Checks the tree, the token ids and the size of q, which is for the target to open."""
    if not (message.token_ids or message.q or message.parents):
        return NOTHING_SEALED
    num_max = TREE_TOKENS_MAX if message.parents else NUM_DRAFT_TOKENS_MAX
    token_ids = drafted_from_wire(message.token_ids, "proposal.token_ids", num_max)
    if len(message.q) > Q_BYTES_MAX:
        raise BadRequest("proposal.q", f"{len(message.q)} bytes are more than {Q_BYTES_MAX}")
    parents = tuple(parent - 1 for parent in message.parents)
    draft_tree(parents, len(token_ids))
    return SealedProposal(token_ids, message.q, parents)


def put_constraint(message: types_pb2.RoundHead, head: RoundHead, *, in_full: bool) -> None:
    """What the completion must be, if anything, or the hash of that."""
    if not in_full and head.constraint_hash:
        message.constraint_hash = head.constraint_hash
    elif head.constraint is not None:
        message.constraint.kind = head.constraint.kind
        message.constraint.text = head.constraint.text


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


def features_to_proto(features: Features) -> types_pb2.Features:
    """Field for field."""
    return types_pb2.Features(first=features.first, width=features.width, rows=features.rows)


def features_from_proto(message: types_pb2.Features, field: str) -> Features | None:
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


def milliseconds(value: float, field: str) -> float:
    """Checks that a duration is one."""
    if not 0.0 <= value < math.inf:
        raise BadRequest(field, f"{value!r} is no duration")
    return value


def audit_to_proto(sums: AuditSums | None, message: target_pb2.Verdict) -> None:
    """Puts sums into a verdict, field for field, if there are any."""
    if sums is None:
        return
    found = message.audit
    found.SetInParent()
    found.num_tokens = sums.num_tokens
    found.num_impossible = sums.num_impossible
    found.num_unlikely = sums.num_unlikely
    found.num_near_ties = sums.num_near_ties
    found.surprise = sums.surprise
    found.entropy = sums.entropy
    found.variance = sums.variance


def audit_from_proto(message: target_pb2.Verdict) -> AuditSums | None:
    """Those of a verdict, if it has any. Raises `BadRequest` for numbers that are none, or that
    count more tokens than there are."""
    if not message.HasField("audit"):
        return None
    found = message.audit
    sums = AuditSums(
        found.num_tokens,
        found.num_impossible,
        found.num_unlikely,
        found.num_near_ties,
        found.surprise,
        found.entropy,
        found.variance,
    )
    parts = (sums.num_impossible, sums.num_unlikely, sums.num_near_ties)
    if sums.num_tokens != len(message.accept_probability) or sum(parts) > sums.num_tokens:
        raise BadRequest("verdict.audit", f"{sums} does not count the tokens of its verdict")
    for value in (sums.surprise, sums.entropy, sums.variance):
        if not 0.0 <= value < math.inf:
            raise BadRequest("verdict.audit", f"{value!r} is no sum of an audit")
    return sums


def description_to_proto(description: ReplicaDescription) -> types_pb2.ReplicaDescription:
    """Field for field."""
    costs = description.step_costs
    return types_pb2.ReplicaDescription(
        model=description.model,
        weights_fingerprint=description.weights_fingerprint,
        tokenizer_fingerprint=description.tokenizer_fingerprint,
        vocab_size=description.vocab_size,
        dtype=description.dtype,
        max_model_len=description.max_model_len,
        eos_token_ids=description.eos_token_ids,
        max_num_seqs=description.max_num_seqs,
        step_costs=costs if costs is None else types_pb2.StepCosts(**asdict(costs)),
        drafts_itself=description.drafts_itself,
        shows_features=description.shows_features,
        reads_features=description.reads_features,
        numerics=description.numerics,
    )


def description_from_proto(message: types_pb2.ReplicaDescription) -> ReplicaDescription:
    """Field for field."""
    return ReplicaDescription(
        model=message.model,
        weights_fingerprint=message.weights_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        dtype=message.dtype,
        max_model_len=message.max_model_len,
        eos_token_ids=token_ids_from_wire(message.eos_token_ids, "eos_token_ids"),
        max_num_seqs=message.max_num_seqs,
        step_costs=_costs(message.step_costs) if message.HasField("step_costs") else None,
        drafts_itself=message.drafts_itself,
        shows_features=message.shows_features,
        reads_features=message.reads_features,
        numerics=message.numerics,
    )


def _costs(message: types_pb2.StepCosts) -> StepCosts:
    rows, seconds = tuple(message.rows), tuple(message.seconds)
    try:
        return StepCosts(rows, seconds, message.session_s, message.slot_s, message.row_slot_s)
    except InvariantError as error:
        raise BadRequest("step_costs", error.message) from error


class Keyed(Protocol):
    """An answer: it says which item it belongs to."""

    @property
    def key(self) -> ReplyKey:
        """The item's round."""
        ...


Item = TypeVar("Item")
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
    item_to_proto: Callable[[Item, int | None], Any]
    item_from_proto: Callable[[Any], Item]
    item_head: Callable[[Item], RoundHead]
    awaits_answer: Callable[[Item], bool]
    """Whether an item asks for anything but guesses."""
    with_head: Callable[[Item, RoundHead], Item]
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
    item_head=lambda item: item.head,
    awaits_answer=lambda item: True,
    with_head=lambda item, head: replace(item, head=head),
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
    item_head=lambda item: item.head,
    awaits_answer=lambda item: item.held is None,
    with_head=lambda item, head: replace(item, head=head),
    answer_to_proto=draft_answer_to_proto,
    answer_from_proto=draft_answer_from_proto,
)
"""The stream between a coordinator and a draft."""
