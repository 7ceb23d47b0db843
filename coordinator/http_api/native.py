"""Generation with everything that is known of it: `POST /api/generate`.

Bodies are those of chat and of completions, for one answer. Events are those of gRPC's
`GenerateEvent`, with the texts of tokens beside their ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from pydantic import Discriminator, Tag

from coordinator.requests.tokenization import Text
from outrider.errors import BadRequest
from outrider.limits import MAX_TOKENS_DEFAULT
from outrider.request import Event, Finished, RoundReport, Started, Tokens

from .bodies import ChatBody, CompletionBody
from .chat import translate_chat
from .completions import translate_completion
from .logprobs import Spelled, finite
from .translation import Asked

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


class Teller:
    """Tells the events of one session."""

    def __init__(self, text: Text | None) -> None:
        """Without a tokenizer there are no texts."""
        self._text = text
        self._stream = None if text is None else text.stream()
        self._num_tokens = 0

    def tell(self, event: Event) -> Json:
        """The next event, as JSON."""
        if isinstance(event, Tokens):
            return self._tokens(event)
        if isinstance(event, RoundReport):
            return self._round(event)
        kind = {Started: "started", Finished: "finished"}[type(event)]
        return {"type": kind, **asdict(event)}

    def _tokens(self, event: Tokens) -> Json:
        self._num_tokens = event.first_index + len(event.token_ids)
        texts = None
        if self._stream is not None:
            texts = [self._stream.push(token_id) for token_id in event.token_ids]
        told: Json = {
            "type": "tokens",
            "first_index": event.first_index,
            "token_ids": event.token_ids,
            "origins": event.origins,
            "texts": texts,
            "text_delta": event.text_delta,
        }
        if event.logprobs:
            told["logprobs"] = [
                {
                    "logprob": finite(one.logprob),
                    "top": [[token_id, finite(logprob)] for token_id, logprob in one.top],
                }
                for one in event.logprobs
            ]
        return told

    def _round(self, event: RoundReport) -> Json:
        texts = None
        if self._text is not None:
            texts = [Spelled.of(self._text.spell(one)).text for one in event.proposed_token_ids]
        return {
            "type": "round",
            "first_index": self._num_tokens,
            **asdict(event),
            "proposed_texts": texts,
        }


async def told_events(
    text: Text | None, events: AsyncGenerator[tuple[int, Event]]
) -> AsyncGenerator[Json]:
    """The events of one session as JSON. Closes them when it is closed."""
    teller = Teller(text)
    async with aclosing(events):
        async for _, event in events:
            yield teller.tell(event)
