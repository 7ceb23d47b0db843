"""Protobuf messages of the coordinator <-> the values of `outrider.request`, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from outrider.errors import BadRequest, InvariantError
from outrider.grammar.constraint import Constraint, ConstraintKind
from outrider.limits import CHAT_MESSAGES_MAX, DEADLINE_MS_MAX
from outrider.request import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    Prompt,
    ResumeRequest,
    RoundReport,
    Started,
    Tokens,
    Usage,
)
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule
from outrider.transport.codec import (
    RULE_NUMBERS,
    RULES,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    session_id_from_wire,
)
from outrider.v1 import coordinator_pb2 as pb

Value = TypeVar("Value")

ORIGINS: Final[dict[int, Origin]] = {
    pb.ORIGIN_ACCEPTED: Origin.ACCEPTED,
    pb.ORIGIN_CORRECTION: Origin.CORRECTION,
    pb.ORIGIN_BONUS: Origin.BONUS,
    pb.ORIGIN_STORED: Origin.STORED,
}
FINISH_REASONS: Final[dict[int, FinishReason]] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    pb.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
}
_ORIGIN_NUMBERS: Final[Any] = {origin: number for number, origin in ORIGINS.items()}
_REASON_NUMBERS: Final[Any] = {reason: number for number, reason in FINISH_REASONS.items()}
_RULE_NUMBERS: Final[Any] = RULE_NUMBERS


# Requests


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Fields that are None stay unset. Its texts are Unicode."""
    message = pb.GenerateRequest(
        model=request.model,
        sampling=sampling_to_proto(request.sampling),
        max_tokens=request.max_tokens,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        seed=request.seed,
        rule=None if request.rule is None else _RULE_NUMBERS[request.rule],
        num_draft_tokens=request.num_draft_tokens,
        deadline_ms=request.deadline_ms,
        logprobs=request.logprobs,
        include_rounds=request.include_rounds,
        draft_deadline_ms=request.draft_deadline_ms,
    )
    if request.constraint is not None:
        _put_constraint(message, request.constraint)
    if isinstance(request.prompt, str):
        message.text = request.prompt
        return message
    turns = [turn for turn in request.prompt if isinstance(turn, ChatMessage)]
    if turns:
        message.chat.messages.extend(
            pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns
        )
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(i for i in request.prompt if isinstance(i, int))
    return message


def _put_constraint(message: pb.GenerateRequest, constraint: Constraint) -> None:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            message.json_schema = constraint.text
        case ConstraintKind.JSON_OBJECT:
            message.json_object = True
        case ConstraintKind.REGEX:
            message.regex = constraint.text
        case ConstraintKind.CHOICE:
            message.choice.texts.extend(constraint.choices)


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises `BadRequest` for a sampling parameter out of its limits, an unknown rule, what is no
    constraint, or a request without a prompt; everything else is checked by the coordinator."""
    rule = RULES.get(message.rule)
    if rule is None and message.rule != 0:
        raise BadRequest("rule", f"{message.rule} is no rule (token, block, coupled, greedy)")

    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return GenerateRequest(
        prompt=_prompt_from_proto(message),
        model=message.model,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=given("max_tokens"),
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        seed=given("seed"),
        rule=rule,
        num_draft_tokens=given("num_draft_tokens"),
        deadline_ms=given("deadline_ms"),
        logprobs=given("logprobs"),
        include_rounds=message.include_rounds,
        draft_deadline_ms=given("draft_deadline_ms"),
        constraint=_constraint_from_proto(message),
    )


def _constraint_from_proto(message: pb.GenerateRequest) -> Constraint | None:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return Constraint.of_schema(message.json_schema)
        case "json_object":
            return Constraint.any_object() if message.json_object else None
        case "regex":
            return Constraint.of_regex(message.regex)
        case "choice":
            return Constraint.of_choices(message.choice.texts)
        case _:
            return None


def _prompt_from_proto(message: pb.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return tuple(message.token_ids.ids)
    if kind == "chat":
        if not 1 <= len(message.chat.messages) <= CHAT_MESSAGES_MAX:
            raise BadRequest(
                "chat.messages",
                f"got {len(message.chat.messages)} messages; allowed: 1..{CHAT_MESSAGES_MAX}",
            )
        return tuple(ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
    raise BadRequest("prompt", "is missing; give one of text, chat, token_ids")


def resume_to_proto(request: ResumeRequest) -> pb.ResumeRequest:
    """Raises `BadRequest` for a number that no message holds."""
    for field in ("num_tokens", "num_characters"):
        value = getattr(request, field)
        if value is not None and not 0 <= value < 2**32:
            raise BadRequest(field, f"{value} is wrong; allowed: 0..{2**32 - 1}")
    return pb.ResumeRequest(
        session_id=request.session_id,
        num_tokens=request.num_tokens,
        num_characters=request.num_characters,
        deadline_ms=request.deadline_ms,
        tokens_digest=request.tokens_digest,
    )


def resume_from_proto(message: pb.ResumeRequest) -> ResumeRequest:
    """Raises `BadRequest` for what is no session's id, or no deadline."""
    if message.HasField("deadline_ms") and not 1 <= message.deadline_ms <= DEADLINE_MS_MAX:
        raise BadRequest("deadline_ms", f"got {message.deadline_ms}; allowed: 1..{DEADLINE_MS_MAX}")
    return ResumeRequest(
        session_id=session_id_from_wire(message.session_id),
        num_tokens=message.num_tokens,
        num_characters=message.num_characters if message.HasField("num_characters") else None,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
        tokens_digest=message.tokens_digest if message.HasField("tokens_digest") else None,
    )


# Events


def event_to_proto(event: Event) -> pb.GenerateEvent:
    """One event."""
    message = pb.GenerateEvent()
    if isinstance(event, Tokens):
        message.tokens.first_index = event.first_index
        message.tokens.token_ids.extend(event.token_ids)
        message.tokens.text_delta = event.text_delta
        message.tokens.origins.extend(_ORIGIN_NUMBERS[origin] for origin in event.origins)
        message.tokens.logprobs.extend(logprobs_to_proto(entry) for entry in event.logprobs)
    elif isinstance(event, Started):
        message.started.session_id = event.session_id
        message.started.model = event.model
        message.started.seed = event.seed
        message.started.rule = _RULE_NUMBERS[event.rule]
        message.started.num_prompt_tokens = event.num_prompt_tokens
    elif isinstance(event, RoundReport):
        message.round.CopyFrom(_round_to_proto(event))
    else:
        message.finished.CopyFrom(_finished_to_proto(event))
    return message


def event_from_proto(message: pb.GenerateEvent) -> Event | None:
    """None for a kind of event that this version does not know."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        return _tokens_from_proto(message.tokens)
    if kind == "started":
        found = message.started
        return Started(
            found.session_id, found.model, found.seed, rule_from_number(found.rule),
            found.num_prompt_tokens,
        )  # fmt: skip
    if kind == "round":
        return _round_from_proto(message.round)
    if kind == "finished":
        return _finished_from_proto(message.finished)
    return None


def _tokens_from_proto(found: pb.Tokens) -> Tokens:
    return Tokens(
        first_index=found.first_index,
        token_ids=tuple(found.token_ids),
        text_delta=found.text_delta,
        origins=tuple(_known(ORIGINS, origin, "origin") for origin in found.origins),
        logprobs=tuple(logprobs_from_proto(entry) for entry in found.logprobs),
    )


def _round_to_proto(event: RoundReport) -> pb.Round:
    return pb.Round(
        index=event.index,
        proposed_token_ids=event.proposed_token_ids,
        num_accepted=event.num_accepted,
        draft_ms=event.draft_ms,
        wire_ms=event.wire_ms,
        queue_ms=event.queue_ms,
        verify_ms=event.verify_ms,
        commit_ms=event.commit_ms,
        look_ahead_hit=event.look_ahead_hit,
        proposed_parents=[parent + 1 for parent in event.proposed_parents],
    )


def _round_from_proto(found: pb.Round) -> RoundReport:
    return RoundReport(
        index=found.index,
        proposed_token_ids=tuple(found.proposed_token_ids),
        num_accepted=found.num_accepted,
        draft_ms=found.draft_ms,
        wire_ms=found.wire_ms,
        queue_ms=found.queue_ms,
        verify_ms=found.verify_ms,
        commit_ms=found.commit_ms,
        look_ahead_hit=found.look_ahead_hit,
        proposed_parents=tuple(parent - 1 for parent in found.proposed_parents),
    )


def _finished_to_proto(event: Finished) -> pb.Finished:
    metrics = event.metrics
    return pb.Finished(
        finish_reason=_REASON_NUMBERS[event.finish_reason],
        usage=pb.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
        ),
        metrics=pb.GenerationMetrics(
            num_rounds=metrics.num_rounds,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_draft_tokens=metrics.num_accepted_draft_tokens,
            mean_acceptance_length=metrics.mean_acceptance_length,
            time_to_first_token_ms=metrics.time_to_first_token_ms,
            tokens_per_second=metrics.tokens_per_second,
        ),
    )


def _finished_from_proto(found: pb.Finished) -> Finished:
    metrics = found.metrics
    return Finished(
        finish_reason=_known(FINISH_REASONS, found.finish_reason, "finish reason"),
        usage=Usage(found.usage.prompt_tokens, found.usage.completion_tokens),
        metrics=Metrics(
            num_rounds=metrics.num_rounds,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_draft_tokens=metrics.num_accepted_draft_tokens,
            mean_acceptance_length=metrics.mean_acceptance_length,
            time_to_first_token_ms=metrics.time_to_first_token_ms,
            tokens_per_second=metrics.tokens_per_second,
        ),
    )


# Sessions


def session_to_proto(record: SessionRecord) -> pb.Session:
    """What a user may see of a stored session."""
    return pb.Session(
        session_id=record.session_id,
        epoch=record.epoch,
        state=record.state,
        seed=record.seed,
        rule=_RULE_NUMBERS[record.rule],
        prompt_length=record.prompt_length,
        token_ids=record.token_ids,
        finish_reason=(
            None if record.finish_reason is None else _REASON_NUMBERS[record.finish_reason]
        ),
    )


def rule_from_number(number: int) -> Rule:
    """Raises `InvariantError` for a number that this version does not know."""
    return _known(RULES, number, "rule")


def _known(table: Mapping[int, Value], number: int, what: str) -> Value:
    if number not in table:
        raise InvariantError(f"the coordinator sent {what} {number}, which this client lacks")
    return table[number]
