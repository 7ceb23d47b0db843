"""From a body to requests of the coordinator, for chat, completions and the page.

Nothing is checked here that the coordinator checks: it names its own fields, and `Asked.renamed`
gives them the names that the body has for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from pydantic import Discriminator, Tag

from coordinator.http_api.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    Speculation,
)
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.limits import CHAT_MESSAGES_MAX, MAX_TOKENS_DEFAULT, PROMPTS_MAX, SEED_BITS
from outrider.request import ChatMessage, GenerateRequest, Prompt
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import Rule, SamplingParams

_KINDS: Final = ("json", "json_object", "regex", "choice")
_GUIDED: Final = ("json", "regex", "choice")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A form that a body asks for."""

    constraint: Constraint
    field: str
    """Of the body that asks for it."""

    @property
    def names(self) -> Mapping[str, str]:
        return {self.constraint.kind.value: self.field}


def output_format(body: GenerationBody) -> OutputFormat | None:
    """Of `response_format`, or vLLM's `structured_outputs` or `guided_...`; None = any text. Raises
    `BadRequest` for more than one, and for what no constraint can be read from."""
    if body.guided_grammar is not None:
        raise BadRequest("guided_grammar", "is not served; leave it out")
    guided = {f"guided_{name}": (name, getattr(body, f"guided_{name}")) for name in _GUIDED}
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *(_read(*entry, field) for field, entry in guided.items() if entry[1] is not None),
    ]
    if len(found) > 1:
        raise BadRequest(found[1].field, f"is given beside {found[0].field}; allowed: one of them")
    return found[0] if found else None


def _of_response_format(value: Mapping[str, Any] | None) -> list[OutputFormat]:
    field = "response_format"
    if value is None:
        return []
    match value.get("type"):
        case "text":
            return []
        case "json_object":
            return [OutputFormat(Constraint.any_object(), field)]
        case "json_schema":
            field += ".json_schema"
            described = value.get("json_schema")
            if not isinstance(described, Mapping) or "schema" not in described:
                raise BadRequest(f"{field}.schema", "is missing")
            return [_read("json", described["schema"], f"{field}.schema")]
        case other:
            raise BadRequest(
                f"{field}.type", f"got {other!r}; allowed: text, json_object, json_schema"
            )


def _of_structured_outputs(value: Mapping[str, Any] | None) -> list[OutputFormat]:
    found = []
    for name, entry in (value or {}).items():
        field = f"structured_outputs.{name}"
        if entry is None or (name == "json_object" and entry is False):
            continue
        if name not in _KINDS:
            allowed = ", ".join(_KINDS)
            raise BadRequest(field, f"is not served; allowed: one of {allowed}")
        found.append(_read(name, entry, field))
    return found


def _read(name: str, entry: Any, field: str) -> OutputFormat:
    match name:
        case "json":
            constraint = Constraint.of_schema(entry, field)
        case "json_object":
            if entry is not True:
                raise BadRequest(field, f"got {entry!r}; allowed: true, false")
            constraint = Constraint.any_object()
        case "regex":
            constraint = Constraint.of_regex(entry, field)
        case _:
            if not isinstance(entry, list):
                raise BadRequest(field, "is no list of texts")
            constraint = Constraint.of_choices(entry, field)
    return OutputFormat(constraint, field)


_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
_NAMES: Final[Mapping[str, str]] = {
    "rule": "speculation.rule",
    "num_draft_tokens": "speculation.num_draft_tokens",
    "draft_deadline_ms": "speculation.draft_deadline_ms",
}
"""What fields of the coordinator's are called in every body, where it is not the same."""
PROMPT: Final = "prompt"
"""What a body calls the field that may have several prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a body asks for in its own kind's words."""

    prompts: Sequence[Prompt]
    max_tokens: int | None
    logprobs: int | None
    names: Mapping[str, str]
    """What the body calls fields of the coordinator's; `_NAMES` beside."""
    default_max_tokens: int = MAX_TOKENS_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body, translated."""

    requests: tuple[GenerateRequest, ...]
    """`n` for each prompt, all of the first prompt first."""
    n: int
    streams: bool
    usage_at_end: bool
    usage_always: bool
    histograms: bool
    token_ids: bool
    """Whether the answer tells its tokens, too."""
    names: Mapping[str, str]

    @property
    def logprobs(self) -> bool:
        return self.requests[0].logprobs is not None

    def renamed(self, error: BadRequest, index: int) -> BadRequest:
        """The error of one of the requests, with the name that the body has for its field."""
        name = _renamed(error.field, self.names)
        if len(self.requests) > self.n and re.match(rf"{PROMPT}\b", name):
            name = f"{PROMPT}[{index // self.n}]{name.removeprefix(PROMPT)}"
        return BadRequest(name, error.reason)


def translate(body: GenerationBody, wishes: Wishes, draw_seed: Callable[[], int]) -> Asked:
    """The requests that a body asks for. Raises `BadRequest` for fields that contradict each
    other, and for what is not served. `draw_seed` is for a body that names no seed."""
    wanted = output_format(body)
    _check_min_tokens(body, wishes.max_tokens)
    options = body.stream_options
    if options is not None and not body.stream:
        raise BadRequest("stream_options", "is for streams; set stream to true, or leave it out")
    n = body.n or 1
    speculation = body.speculation or Speculation()
    sampling = _sampling(body)
    rule = speculation.rule
    if rule is None and body.seed is None:
        rule = Rule.TOKEN  # A seed that is drawn here is none that the caller asked for.
    requests = tuple(
        GenerateRequest(
            prompt=prompt,
            model=body.model or "",
            sampling=sampling,
            max_tokens=wishes.max_tokens,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            seed=choice_seed(seed, choice),
            rule=rule,
            num_draft_tokens=_num_draft_tokens(speculation),
            deadline_ms=body.deadline_ms,
            logprobs=wishes.logprobs,
            include_rounds=bool(speculation.histograms),
            draft_deadline_ms=speculation.draft_deadline_ms,
            constraint=None if wanted is None else wanted.constraint,
            default_max_tokens=wishes.default_max_tokens,
        )
        for prompt in wishes.prompts
        for seed in (draw_seed() if body.seed is None else body.seed % 2**SEED_BITS,)
        for choice in range(n)
    )
    return Asked(
        requests=requests,
        n=n,
        streams=bool(body.stream),
        usage_at_end=bool(options and options.include_usage),
        usage_always=bool(options and options.continuous_usage_stats),
        histograms=bool(speculation.histograms),
        token_ids=bool(body.return_token_ids),
        names={
            **_NAMES,
            **wishes.names,
            **({"stop[0]": "stop"} if isinstance(body.stop, str) else {}),
            **({} if wanted is None else wanted.names),
        },
    )


def _sampling(body: GenerationBody) -> SamplingParams:
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    biases = sorted((_token_id(token), bias) for token, bias in (body.logit_bias or {}).items())
    return SamplingParams(**given, logit_bias=tuple(biases))


def _token_id(text: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", text):
        raise BadRequest("logit_bias", f"{text[:20]!r} is not a token id")
    return int(text)


def _num_draft_tokens(speculation: Speculation) -> int | None:
    if speculation.enabled is not False:
        return speculation.num_draft_tokens
    if speculation.num_draft_tokens:
        raise BadRequest("speculation.num_draft_tokens", "must be 0, or be left out, with enabled "
                         "false")  # fmt: skip
    return 0


def _check_min_tokens(body: GenerationBody, max_tokens: int | None) -> None:
    """So many are sure to come where nothing but `max_tokens` ends an answer."""
    least = body.min_tokens or 0
    if least and not (body.ignore_eos and not body.stop and least <= (max_tokens or 0)):
        raise BadRequest(
            "min_tokens", "is served only with ignore_eos true, without stop, up to max_tokens"
        )


def _renamed(field: str, names: Mapping[str, str]) -> str:
    field = field.removeprefix("sampling.")
    for known in sorted(names, key=len, reverse=True):
        if re.match(rf"{re.escape(known)}(?!\w)", field):
            return names[known] + field[len(known) :]
    return field


_SYSTEM: Final = "system"
_ASSISTANT: Final = "assistant"
_NAMES_OF_SYSTEM: Final = ("system", "developer")
_TOOLS: Final = ("tool", "function")


def translate_chat(body: ChatBody, draw_seed: Callable[[], int]) -> Asked:
    """See `translate`. Text parts of a message become lines of one text."""
    max_tokens, name = _max_tokens(body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs", "needs logprobs to be true")
    wishes = Wishes(
        prompts=[_messages(body.messages)],
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        names={
            "chat": "messages",
            "chat.messages": "messages",
            "max_tokens": name,
            "logprobs": "top_logprobs",
        },
    )
    return translate(body, wishes, draw_seed)


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The bound, and the field that says it: OpenAI has two names for it."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest("max_completion_tokens", f"{new} is not the {old} of max_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    if not 1 <= len(messages) <= CHAT_MESSAGES_MAX:
        raise BadRequest(
            "messages", f"got {len(messages)} messages; allowed: 1..{CHAT_MESSAGES_MAX}"
        )
    return tuple(_turn(index, message) for index, message in enumerate(messages))


def _turn(index: int, message: Message) -> ChatMessage:
    if message.role in _TOOLS:
        raise BadRequest(f"messages[{index}].role", f"{message.role!r} is not served")
    role = _SYSTEM if message.role in _NAMES_OF_SYSTEM else message.role
    content = message.content
    if content is None and role != _ASSISTANT:
        raise BadRequest(
            f"messages[{index}].content", f"is missing; only the {_ASSISTANT}'s may be left out"
        )
    if content is None or isinstance(content, str):
        return ChatMessage(role, content or "")
    return ChatMessage(role, "\n".join(part.text for part in content))


DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""


def translate_completion(body: CompletionBody, draw_seed: Callable[[], int]) -> Asked:
    wishes = Wishes(
        prompts=_prompts(body.prompt),
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        names={"text": PROMPT, "token_ids": PROMPT},
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    return translate(body, wishes, draw_seed)


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):  # And so are the others.
        return [tuple(given)]
    if not 1 <= len(given) <= PROMPTS_MAX:
        raise BadRequest("prompt", f"got {len(given)} prompts; allowed: 1..{PROMPTS_MAX}")
    return [part if isinstance(part, str) else tuple(part) for part in given]  # type: ignore[arg-type]


Json = dict[str, Any]

# Tags that are no identifiers name no part of a field in an error.
_CHAT: Final = "with messages"
_RAW: Final = "with a prompt"


def _kind(value: object) -> str:
    if isinstance(value, dict) and None not in map(value.get, ("messages", "prompt")):
        raise BadRequest("prompt", "is given beside messages; allowed: one of the two")
    if isinstance(value, ChatBody) or (isinstance(value, dict) and "messages" in value):
        return _CHAT
    return _RAW


NativeBody = Annotated[
    Annotated[ChatBody, Tag(_CHAT)] | Annotated[CompletionBody, Tag(_RAW)], Discriminator(_kind)
]
EVENTS: Final = """A stream of server-sent events, each a JSON object with its `type`:

* `started`: `session_id`, `model`, `seed`, `rule`, `num_prompt_tokens`
* `round`, before its tokens: `index`, `first_index` (of its first token in the answer),
  `proposed_token_ids`, `proposed_texts`, `proposed_parents` (of a tree: the index of the proposed
  token that each follows, -1 = what was committed before), `num_accepted`, `look_ahead_hit`,
  `draft_ms`, `wire_ms`, `queue_ms`, `verify_ms`, `commit_ms`
* `tokens`: `first_index`, `token_ids`, `origins` (`accepted`, `correction`, `bonus`), `texts` (the
  characters that became whole with each token), `text_delta` (the part of all texts that is certain
  to belong to the answer; it may lag behind), `logprobs` where they were asked for
* `finished`: `finish_reason` (`stop`, `length`, `cancelled`, `deadline`), `usage`, `metrics`

Then `[DONE]`. An error behind `started` is an event with `error`, and the last one. Texts are null
where the model has no tokenizer. A client that goes cancels its session."""


def translate_native(body: ChatBody | CompletionBody, draw_seed: Callable[[], int]) -> Asked:
    """The one request that a body asks for, with its rounds told. Raises `BadRequest`."""
    if body.n not in (None, 1):
        raise BadRequest("n", "must be 1, or be left out: events are of one answer")
    if body.stream is False:
        raise BadRequest("stream", "must be true, or be left out: events are always a stream")
    if isinstance(body, ChatBody):
        asked = translate_chat(body, draw_seed)
    else:
        asked = translate_completion(body, draw_seed)
        if len(asked.requests) != 1:
            raise BadRequest("prompt", f"got {len(asked.requests)} prompts; allowed: 1")
    [request] = asked.requests
    request = replace(request, include_rounds=True, default_max_tokens=MAX_TOKENS_DEFAULT)
    return replace(asked, requests=(request,))
