"""Protobuf messages of the coordinator <-> the values of `outrider.request`, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
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
    copied,
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


_OPTIONAL: Final = (
    "max_tokens", "seed", "num_draft_tokens", "deadline_ms", "logprobs", "draft_deadline_ms"
)  # fmt: skip
"""Fields of a request whose absence means the coordinator's default."""


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
        rule=None if request.rule is None else RULE_NUMBERS[request.rule],
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

    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return GenerateRequest(
        prompt=_prompt_from_proto(message),
        model=message.model,
        sampling=sampling_from_proto(message.sampling),
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        rule=rule,
        include_rounds=message.include_rounds,
        constraint=_constraint_from_proto(message),
        **given,
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
    optional = ("num_characters", "deadline_ms", "tokens_digest")
    return ResumeRequest(
        session_id=session_id_from_wire(message.session_id),
        num_tokens=message.num_tokens,
        **{name: getattr(message, name) for name in optional if message.HasField(name)},
    )


# Events


def event_to_proto(event: Event) -> pb.GenerateEvent:
    """One event."""
    message = pb.GenerateEvent()
    match event:
        case Tokens():
            message.tokens.first_index = event.first_index
            message.tokens.token_ids.extend(event.token_ids)
            message.tokens.text_delta = event.text_delta
            message.tokens.origins.extend(_ORIGIN_NUMBERS[origin] for origin in event.origins)
            message.tokens.logprobs.extend(logprobs_to_proto(entry) for entry in event.logprobs)
        case Started():
            values = asdict(event) | {"rule": RULE_NUMBERS[event.rule]}
            message.started.CopyFrom(pb.Started(**values))
        case RoundReport():
            parents = [parent + 1 for parent in event.proposed_parents]
            message.round.CopyFrom(pb.Round(**asdict(event) | {"proposed_parents": parents}))
        case Finished():
            message.finished.finish_reason = _REASON_NUMBERS[event.finish_reason]
            message.finished.usage.CopyFrom(pb.Usage(**asdict(event.usage)))
            message.finished.metrics.CopyFrom(pb.GenerationMetrics(**asdict(event.metrics)))
    return message


def event_from_proto(message: pb.GenerateEvent) -> Event | None:
    """None for a kind of event that this version does not know."""
    match message.WhichOneof("event"):
        case "tokens":
            tokens = message.tokens
            return Tokens(
                first_index=tokens.first_index,
                token_ids=tuple(tokens.token_ids),
                text_delta=tokens.text_delta,
                origins=tuple(_known(ORIGINS, origin, "origin") for origin in tokens.origins),
                logprobs=tuple(logprobs_from_proto(entry) for entry in tokens.logprobs),
            )
        case "started":
            return copied(message.started, Started, rule=rule_from_number(message.started.rule))
        case "round":
            found = message.round
            return copied(
                found,
                RoundReport,
                proposed_token_ids=tuple(found.proposed_token_ids),
                proposed_parents=tuple(parent - 1 for parent in found.proposed_parents),
            )
        case "finished":
            reason = message.finished.finish_reason
            return Finished(
                finish_reason=_known(FINISH_REASONS, reason, "finish reason"),
                usage=copied(message.finished.usage, Usage),
                metrics=copied(message.finished.metrics, Metrics),
            )
    return None


# Sessions


def session_to_proto(record: SessionRecord) -> pb.Session:
    """What a user may see of a stored session."""
    return pb.Session(
        session_id=record.session_id,
        epoch=record.epoch,
        state=record.state,
        seed=record.seed,
        rule=RULE_NUMBERS[record.rule],
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
