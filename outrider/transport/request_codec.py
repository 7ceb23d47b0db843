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
    copied,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    session_id_from_wire,
)
from outrider.v1 import coordinator_pb2 as pb

Value = TypeVar("Value")

ORIGINS: Final = {pb.Origin.Value(f"ORIGIN_{origin.name}"): origin for origin in Origin}
FINISH_REASONS: Final = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason
}
_ORIGIN_NUMBERS: Final[Any] = {origin: number for number, origin in ORIGINS.items()}
_REASON_NUMBERS: Final[Any] = {reason: number for number, reason in FINISH_REASONS.items()}


def _given(message: Any, *names: str) -> dict[str, Any]:
    """The values of optional fields, None where they are not set."""
    return {name: getattr(message, name) if message.HasField(name) else None for name in names}


# Requests


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Fields that are None stay unset. Its texts are Unicode."""
    message = copied(
        request,
        pb.GenerateRequest,
        sampling=sampling_to_proto(request.sampling),
        rule=None if request.rule is None else RULE_NUMBERS[request.rule],
    )
    match request.constraint:
        case Constraint(ConstraintKind.JSON_SCHEMA, text):
            message.json_schema = text
        case Constraint(ConstraintKind.JSON_OBJECT):
            message.json_object = True
        case Constraint(ConstraintKind.REGEX, text):
            message.regex = text
        case Constraint(ConstraintKind.CHOICE) as constraint:
            message.choice.texts.extend(constraint.choices)
    if isinstance(request.prompt, str):
        message.text = request.prompt
        return message
    turns = [turn for turn in request.prompt if isinstance(turn, ChatMessage)]
    if turns:
        message.chat.messages.extend(copied(turn, pb.ChatMessage) for turn in turns)
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(i for i in request.prompt if isinstance(i, int))
    return message


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises `BadRequest` for a sampling parameter out of its limits, an unknown rule, what is no
    constraint, or a request without a prompt; everything else is checked by the coordinator."""
    rule = RULES.get(message.rule)
    if rule is None and message.rule != 0:
        raise BadRequest("rule", f"{message.rule} is no rule (token, block, coupled, greedy)")
    return copied(
        message,
        GenerateRequest,
        prompt=_prompt_from_proto(message),
        sampling=sampling_from_proto(message.sampling),
        rule=rule,
        constraint=_constraint_from_proto(message),
        **_given(
            message, "max_tokens", "seed", "num_draft_tokens", "deadline_ms", "logprobs",
            "draft_deadline_ms",
        ),
    )  # fmt: skip


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
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "chat":
            turns = message.chat.messages
            if not 1 <= len(turns) <= CHAT_MESSAGES_MAX:
                raise BadRequest(
                    "chat.messages", f"got {len(turns)} messages; allowed: 1..{CHAT_MESSAGES_MAX}"
                )
            return tuple(copied(turn, ChatMessage) for turn in turns)
        case _:
            raise BadRequest("prompt", "is missing; give one of text, chat, token_ids")


def resume_to_proto(request: ResumeRequest) -> pb.ResumeRequest:
    """Raises `BadRequest` for a number that no message holds."""
    for field in ("num_tokens", "num_characters"):
        value = getattr(request, field)
        if value is not None and not 0 <= value < 2**32:
            raise BadRequest(field, f"{value} is wrong; allowed: 0..{2**32 - 1}")
    return copied(request, pb.ResumeRequest)


def resume_from_proto(message: pb.ResumeRequest) -> ResumeRequest:
    """Raises `BadRequest` for what is no session's id, or no deadline."""
    if message.HasField("deadline_ms") and not 1 <= message.deadline_ms <= DEADLINE_MS_MAX:
        raise BadRequest("deadline_ms", f"got {message.deadline_ms}; allowed: 1..{DEADLINE_MS_MAX}")
    session_id_from_wire(message.session_id)
    given = _given(message, "num_characters", "deadline_ms", "tokens_digest")
    return copied(message, ResumeRequest, **given)


# Events


def event_to_proto(event: Event) -> pb.GenerateEvent:
    """One event."""
    match event:
        case Tokens():
            return pb.GenerateEvent(
                tokens=pb.Tokens(
                    first_index=event.first_index,
                    token_ids=event.token_ids,
                    text_delta=event.text_delta,
                    origins=[_ORIGIN_NUMBERS[origin] for origin in event.origins],
                    logprobs=[logprobs_to_proto(entry) for entry in event.logprobs],
                )
            )
        case Started():
            return pb.GenerateEvent(
                started=copied(event, pb.Started, rule=RULE_NUMBERS[event.rule])
            )
        case RoundReport():
            parents = [parent + 1 for parent in event.proposed_parents]
            return pb.GenerateEvent(round=copied(event, pb.Round, proposed_parents=parents))
        case Finished():
            finished = pb.Finished(
                finish_reason=_REASON_NUMBERS[event.finish_reason],
                usage=copied(event.usage, pb.Usage),
                metrics=copied(event.metrics, pb.GenerationMetrics),
            )
            return pb.GenerateEvent(finished=finished)


def event_from_proto(message: pb.GenerateEvent) -> Event | None:
    """None for a kind of event that this version does not know."""
    match message.WhichOneof("event"):
        case "tokens":
            tokens = message.tokens
            return copied(
                tokens,
                Tokens,
                origins=tuple(_known(ORIGINS, origin, "origin") for origin in tokens.origins),
                logprobs=tuple(logprobs_from_proto(entry) for entry in tokens.logprobs),
            )
        case "started":
            return copied(message.started, Started, rule=rule_from_number(message.started.rule))
        case "round":
            parents = tuple(parent - 1 for parent in message.round.proposed_parents)
            return copied(message.round, RoundReport, proposed_parents=parents)
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
    reason = record.finish_reason
    return copied(
        record,
        pb.Session,
        state="running" if reason is None else "finished",
        rule=RULE_NUMBERS[record.rule],
        finish_reason=None if reason is None else _REASON_NUMBERS[reason],
    )


def rule_from_number(number: int) -> Rule:
    """Raises `InvariantError` for a number that this version does not know."""
    return _known(RULES, number, "rule")


def _known(table: Mapping[int, Value], number: int, what: str) -> Value:
    if number not in table:
        raise InvariantError(f"the coordinator sent {what} {number}, which this client lacks")
    return table[number]
