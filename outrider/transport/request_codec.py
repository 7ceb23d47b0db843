"""Converts between the coordinator's protobuf messages and `outrider.interfaces.request`."""

from collections.abc import Sized

from google.protobuf.message import Message

from outrider.errors import BadRequest, InvariantError
from outrider.grammar.constraint import Constraint, ConstraintKind
from outrider.interfaces.request import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    Prompt,
    PromptTokens,
    ResumeRequest,
    RoundReport,
    Started,
    Tokens,
    Usage,
)
from outrider.limits import (
    CHAT_MESSAGES_MAX,
    DEADLINE_MS_MAX,
    HTTP_VALUES_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
)
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin
from outrider.transport.codec import session_id_from_wire
from outrider.transport.fields import ENUMS, VALUES, Value, fields_to_proto, from_proto, to_proto
from outrider.v1 import coordinator_pb2 as pb

ENUMS |= {"Origin": Origin, "FinishReason": FinishReason}
VALUES |= {"ChatMessage": ChatMessage, "Usage": Usage, "GenerationMetrics": Metrics}


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """A field that is None stays unset. Raises `BadRequest` for a value that gRPC cannot carry."""
    given: dict[str, object] = {}
    if request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs", "is available only by HTTP (`echo` of completions)")
    match request.constraint:
        case Constraint(ConstraintKind.JSON_SCHEMA, text):
            given["json_schema"] = text
        case Constraint(ConstraintKind.JSON_OBJECT):
            given["json_object"] = True
        case Constraint(ConstraintKind.REGEX, text):
            given["regex"] = text
        case Constraint(ConstraintKind.CHOICE) as constraint:
            given["choice"] = {"texts": constraint.choices}
    prompt = request.prompt
    if isinstance(prompt, str):
        given["text"] = prompt
    elif len({type(part) for part in prompt}) > 1:
        raise BadRequest("prompt", "must be a text, a list of chat messages or a list of token ids")
    elif prompt and isinstance(prompt[0], ChatMessage):
        if any(isinstance(turn, ChatMessage) and turn.more for turn in prompt):
            raise BadRequest(
                "prompt", "has tool calls or reasoning, which are only supported by HTTP"
            )
        given["chat"] = {"messages": [fields_to_proto(turn, pb.ChatMessage) for turn in prompt]}
    else:
        given["token_ids"] = {"ids": prompt}
    return to_proto(request, pb.GenerateRequest, **given)


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises `BadRequest` for an invalid sampling parameter, rule or constraint, or a missing
    prompt. The coordinator checks all other fields later, but long fields would delay it."""
    _check_length("stop", message.stop, STOP_STRINGS_MAX)
    _check_length("sampling.logit_bias", message.sampling.logit_bias, LOGIT_BIAS_ENTRIES_MAX)
    _check_length("sampling.stop_token_ids", message.sampling.stop_token_ids, STOP_TOKEN_IDS_MAX)
    prompt, constraint = _prompt_from_proto(message), _constraint_from_proto(message)
    return from_proto(message, GenerateRequest, prompt=prompt, constraint=constraint)


def _check_length(field: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise BadRequest(field, f"got {len(values)} entries; at most {most} are allowed")


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
            _check_length("token_ids", message.token_ids.ids, HTTP_VALUES_MAX)
            return tuple(message.token_ids.ids)
        case "chat":
            turns = message.chat.messages
            if not 1 <= len(turns) <= CHAT_MESSAGES_MAX:
                raise BadRequest(
                    "chat.messages", f"got {len(turns)} messages; allowed: 1..{CHAT_MESSAGES_MAX}"
                )
            return tuple(from_proto(turn, ChatMessage) for turn in turns)
        case _:
            raise BadRequest("prompt", "is missing; give one of text, chat, token_ids")


def resume_to_proto(request: ResumeRequest) -> pb.ResumeRequest:
    """Raises `BadRequest` for a number outside the range of its protobuf field."""
    return to_proto(request, pb.ResumeRequest)


def resume_from_proto(message: pb.ResumeRequest) -> ResumeRequest:
    """Raises `BadRequest` for an invalid session id or deadline."""
    if message.HasField("deadline_ms") and not 1 <= message.deadline_ms <= DEADLINE_MS_MAX:
        raise BadRequest("deadline_ms", f"got {message.deadline_ms}; allowed: 1..{DEADLINE_MS_MAX}")
    session_id_from_wire(message.session_id)
    return from_proto(message, ResumeRequest)


def event_to_proto(event: Event) -> pb.GenerateEvent:
    """Converts any event but `PromptTokens`, which only HTTP requests ask for."""
    match event:
        case Started():
            return pb.GenerateEvent(started=fields_to_proto(event, pb.Started))
        case Tokens():
            return pb.GenerateEvent(tokens=fields_to_proto(event, pb.Tokens))
        case RoundReport():
            return pb.GenerateEvent(round=fields_to_proto(event, pb.Round))
        case Finished():
            return pb.GenerateEvent(finished=fields_to_proto(event, pb.Finished))
        case PromptTokens():
            raise InvariantError("the prompt's tokens are sent only by HTTP")


def event_from_proto(message: pb.GenerateEvent) -> Event | None:
    """Returns None for an unknown kind of event. Raises `InvariantError` for an invalid event."""
    match message.WhichOneof("event"):
        case "started" as name:
            return from_coordinator(message.started, Started, name)
        case "tokens" as name:
            return from_coordinator(message.tokens, Tokens, name)
        case "round" as name:
            return from_coordinator(message.round, RoundReport, name)
        case "finished" as name:
            return from_coordinator(message.finished, Finished, name)
        case _:
            return None


def from_coordinator(message: Message, kind: type[Value], path: str = "") -> Value:
    """Calls `from_proto`. Raises `InvariantError` in place of `BadRequest`, because the fault is
    the coordinator's."""
    try:
        return from_proto(message, kind, path)
    except BadRequest as error:
        raise InvariantError(
            f"the coordinator sent a message that this client cannot read: {error}"
        ) from error


def session_to_proto(record: SessionRecord) -> pb.Session:
    """Returns the part of a stored session that users may see."""
    state = "running" if record.finish_reason is None else "finished"
    return to_proto(record, pb.Session, state=state)
