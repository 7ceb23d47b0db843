"""Turns the events of sessions into whole answers, or into server-sent events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, cast

from coordinator.http_api import schemas
from coordinator.http_api.bodies import StreamedBody, StreamOptions, TranslatedBody
from coordinator.http_api.tools import ARGUMENTS, PLAIN, AnswerForm, Part, Reader, call_id_of
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import (
    Event,
    Finished,
    Prompt,
    PromptTokens,
    RoundReport,
    Started,
    Tokens,
)
from outrider.sessions.store import FinishReason

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText

Json = dict[str, Any]

IMPOSSIBLE = -9999.0
"""OpenAI's value for a log-probability of minus infinity, because JSON cannot express infinity."""
_CUT_OFF = (FinishReason.DEADLINE, FinishReason.CANCELLED)


def as_text(data: bytes) -> str:
    """Returns the text of a token, or `bytes:\\xNN...` if its bytes are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


Scored = tuple[int, list[tuple[bytes, float | None]]]
"""A token's offset in the answer's text, in characters, and pairs (bytes of a token, its
log-probability). The first pair is for the token itself. The other pairs are for the likeliest
tokens at its position. The log-probability of a prompt's first token is None."""


class _Scorer:
    def __init__(self, text: TokenizerText | None, offset: int = 0, given: str = "") -> None:
        """`offset` is the first token's offset in the answer's text. For a prompt's tokens, `given`
        is the prompt. A special token adds to the offset only if `given` spells it out."""
        self._text, self._offset, self._given = text, offset, given
        self._stream = None if text is None else text.stream()

    def score(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None]
    ) -> list[Scored]:
        scored = list[Scored]()
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            own = self._spell(token_id)
            top: list[tuple[bytes, float | None]] = [(own, None)]
            if entry is not None:
                each = ((token_id, entry.logprob), *entry.top)
                top = [
                    (self._spell(candidate), max(logprob, IMPOSSIBLE))
                    for candidate, logprob in each
                ]
            scored.append((self._offset, top))
            if self._text is not None and self._stream is not None:
                piece = self._stream.push(token_id)
                if self._text.is_special(token_id):
                    name = own.decode(errors="replace")
                    piece = name if self._given.startswith(name, self._offset) else ""
                self._offset += len(piece)
        return scored

    def _spell(self, token_id: int) -> bytes:
        return f"token_id:{token_id}".encode() if self._text is None else self._text.spell(token_id)


class _Choice:
    def __init__(self, text: TokenizerText | None, form: AnswerForm, echoed: Prompt) -> None:
        """The choice's text begins with the prompt `echoed`, which may be empty."""
        self._text, self._echoed = text, echoed
        self.reader = Reader(form)
        self.num_calls = 0
        self.session_id = ""
        self.num_prompt_tokens = 0
        self.finished: Finished | None = None
        self.is_opened = False
        self.num_tokens = 0
        # The content of the next chunk:
        self.parts: list[Part] = []
        self.token_ids: list[int] = []
        self.scored: list[Scored] = []

    def begin(self, started: Started) -> None:
        # The coordinator has checked the prompt's token ids, so they can be decoded.
        self.session_id, self.num_prompt_tokens = started.session_id, started.num_prompt_tokens
        before, text = self._echoed, self._text
        if not isinstance(before, str):
            before = text.decode(cast(tuple[int, ...], before)) if before and text else ""
        self.prompt_scorer, self.scorer = _Scorer(text, given=before), _Scorer(text, len(before))
        self.parts += [Part("content", before)] if before else []


class EventStream:
    """An answer that can be sent as a stream of server-sent events."""

    is_named: ClassVar[bool] = False
    """Whether each event has a `sequence_number`, and an `event:` line with the event's type."""
    last: ClassVar[bytes] = b"data: [DONE]\n\n"
    is_stream = True
    """Whether the answer is a stream. If not, `whole` returns the answer."""

    def take(self, index: int, event: Event) -> Sequence[Json]:
        """Adds an event of choice `index`. Returns the server-sent events to send now, if any."""
        raise NotImplementedError

    def whole(self) -> Json:
        """Returns the whole answer. Must be called after all choices have ended."""
        raise NotImplementedError

    def failed(self, error: schemas.ErrorBody) -> Json:
        """Returns the server-sent event that ends a stream with this error."""
        return {**error}


class Answer(EventStream):
    """The answer to a request, with all of its choices. Each of OpenAI's APIs has a subclass."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """The field `object` of a whole answer."""
    chunk_kind: ClassVar[str]
    opening: ClassVar[Json | None] = None
    """Content of an extra first chunk of each choice. None = no extra chunk."""
    closing: ClassVar[Json]
    """Content of an extra last chunk of each choice."""

    def __init__(
        self,
        translated: TranslatedBody,
        text: TokenizerText | None,
        num_draft_tokens: int,
        created: int,
    ) -> None:
        """`num_draft_tokens` is the server's default. `created` is a time in seconds since 1970."""
        self._translated = translated
        body, self.is_stream = translated.body, translated.body.stream
        self._options, self._has_ids = StreamOptions(), False
        if isinstance(body, StreamedBody):
            self._options = body.stream_options or self._options
            self._has_ids = body.return_token_ids
        given = translated.requests[0].num_draft_tokens
        self._num_draft_tokens = num_draft_tokens if given is None else given
        self._choices = [
            _Choice(text, translated.form, request.prompt if translated.echoes else "")
            for request in translated.requests
        ]
        self._envelope: Json = {"id": "", "object": "", "created": created, "model": ""}
        self._rounds: Counter[tuple[int, int]] = Counter()
        """(number of proposed tokens, number of accepted tokens) -> number of rounds."""

    delta: Callable[[_Choice], Json]
    """Returns the new text of a choice, for a chunk."""
    message: Callable[[_Choice], Json]
    """Returns all text of a choice, for a whole answer."""
    logprobs: Callable[[Sequence[Scored]], schemas.ChatLogprobs | schemas.CompletionLogprobs]

    def whole(self) -> Json:
        choices = [
            self._choice(index, self.message(choice), choice.finished, choice)
            for index, choice in enumerate(self._choices)
        ]
        return self._object(self.kind, choices, usage=self._usage(), metrics=self._metrics())

    def take(self, index: int, event: Event) -> Sequence[Json]:
        self._note(self._choices[index], event)
        if not self.is_stream or isinstance(event, Started | RoundReport):
            return ()
        return self._parts(index, event)

    def _note(self, choice: _Choice, event: Event) -> None:
        match event:
            case Started():
                choice.begin(event)
                self._envelope["id"] = self._envelope["id"] or self.id_prefix + event.session_id
                self._envelope["model"] = event.model
            case PromptTokens():
                choice.scored += choice.prompt_scorer.score(event.token_ids, event.logprobs)
            case Tokens():
                choice.num_tokens += len(event.token_ids)
                choice.parts += choice.reader.push(event.text_delta)
                choice.token_ids += event.token_ids
                if self._translated.has_logprobs:
                    choice.scored += choice.scorer.score(event.token_ids, event.logprobs)
            case RoundReport():
                self._rounds[len(event.proposed_token_ids), event.num_accepted] += 1
            case Finished():
                choice.finished = event
                choice.parts += choice.reader.finish()

    def _parts(self, index: int, event: Event) -> Sequence[Json]:
        choice, chunks = self._choices[index], list[Json]()
        if self.opening is not None and not choice.is_opened:
            choice.is_opened = True
            chunks.append(self._chunk(self._choice(index, self.opening)))
        # Without tools and reasoning, each event with tokens sends a chunk, even without text.
        sends_tokens = isinstance(event, PromptTokens | Tokens) and self._translated.form == PLAIN
        if choice.parts or sends_tokens or (choice.token_ids and choice.finished):
            chunks.append(self._chunk(self._choice(index, self.delta(choice), None, choice)))
            choice.parts, choice.token_ids, choice.scored = [], [], []
        if not isinstance(event, Finished):
            return chunks
        chunks.append(self._chunk(self._choice(index, self.closing, event)))
        if all(choice.finished for choice in self._choices):
            if self._options.include_usage:
                chunks.append(self._object(self.chunk_kind, [], usage=self._usage()))
            chunks[-1]["metrics"] = self._metrics()
        return chunks

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {**self._envelope, "object": kind, "choices": choices, **more}

    def _chunk(self, choice: Json) -> Json:
        more: Json = {}
        if self._options.continuous_usage_stats:
            more = {"usage": self._usage()}
        elif self._options.include_usage:
            more = {"usage": None}
        return self._object(self.chunk_kind, [choice], **more)

    def _choice(
        self,
        index: int,
        content: Json,
        finished: Finished | None = None,
        tokens: _Choice | None = None,
    ) -> Json:
        form, reason = self._translated.form, finished and str(finished.finish_reason)
        if reason in _CUT_OFF:  # OpenAI's API does not have these reasons.
            reason = "length"
        elif reason == FinishReason.STOP and form.calls != ARGUMENTS:
            reason = "tool_calls" if self._choices[index].num_calls else reason
        choice_object: Json = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": finished and stop_reason(finished),
        }
        if tokens is not None and self._translated.has_logprobs:
            choice_object["logprobs"] = self.logprobs(tokens.scored)
        if tokens is not None and self._has_ids:
            choice_object["token_ids"] = tokens.token_ids
        return choice_object

    def _usage(self) -> schemas.Usage:
        # The `n` choices of a prompt follow each other. The prompt counts once for all of them.
        prompt_tokens = sum(
            choice.num_prompt_tokens for choice in self._choices[:: self._translated.n]
        )
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        total = prompt_tokens + completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": total,
        }

    def _metrics(self) -> schemas.AnswerMetrics:
        """Returns statistics of all choices together, with vLLM's names and meanings. Only rounds
        with draft tokens count as steps. Accepted draft tokens after an EOS or stop string also
        count."""
        each = [choice.finished.metrics for choice in self._choices if choice.finished]
        num_drafts = sum(metrics.num_drafts for metrics in each)
        accepted = sum(metrics.num_accepted_draft_tokens for metrics in each)
        proposed = sum(metrics.num_draft_tokens for metrics in each)
        statistics: schemas.SpeculativeDecoding = {
            "mean_acceptance_length": 1 + accepted / max(1, num_drafts),
            "draft_acceptance_rate": accepted / max(1, proposed),
            "num_spec_steps": num_drafts,
            "num_spec_tokens": self._num_draft_tokens,
            "num_draft_tokens": proposed,
            "num_accepted_draft_tokens": accepted,
        }
        if self._translated.requests[0].include_rounds:
            by_length = {
                length: [self._rounds[length, number] for number in range(length + 1)]
                for length in sorted({length for length, _ in self._rounds})
            }
            statistics["acceptance_histogram"] = [
                sum(self._rounds[length, number] for length in by_length if length)
                for number in range(self._num_draft_tokens + 1)
            ]
            statistics["acceptance_histogram_by_draft_length"] = {
                str(length): rounds for length, rounds in by_length.items()
            }
        return {"speculative_decoding": statistics}


def stop_reason(finished: Finished) -> str | int | None:
    """Returns the stop string or the id of the stop token that ended the text. Returns the finish
    reason if a deadline or a cancel request ended it. Otherwise returns None."""
    if finished.finish_reason in _CUT_OFF:
        return finished.finish_reason
    return finished.stop_token_id if finished.stop_string is None else finished.stop_string


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening: ClassVar[Json | None] = {"delta": {"role": "assistant", "content": ""}}
    closing: ClassVar[Json] = {"delta": {}}

    def delta(self, choice: _Choice) -> Json:
        return {"delta": self._joined_parts(choice) or {"content": ""}}

    def message(self, choice: _Choice) -> Json:
        parts = self._joined_parts(choice)
        for call in parts.get("tool_calls", ()):
            del call["index"]
        whole: schemas.AssistantMessage = {
            "role": "assistant",
            "content": None if "tool_calls" in parts else "",
            "refusal": None,
            **parts,
        }
        return {"message": whole}

    def _joined_parts(self, choice: _Choice) -> schemas.AssistantMessage:
        joined: schemas.AssistantMessage = {}
        calls: list[schemas.ToolCall] = []
        for kind, text in choice.parts:
            if kind == "name":
                index, choice.num_calls = choice.num_calls, choice.num_calls + 1
                call_id = call_id_of(choice.session_id, index)
                function: schemas.FunctionCall = {"name": text, "arguments": ""}
                calls.append(
                    {"index": index, "id": call_id, "type": "function", "function": function}
                )
            elif kind == "arguments":
                if not calls:
                    index = choice.num_calls - 1
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
            else:
                joined[kind] = (joined.get(kind) or "") + text
        return {**joined, "tool_calls": calls} if calls else joined

    def logprobs(self, tokens: Sequence[Scored]) -> schemas.ChatLogprobs:
        content: list[schemas.ChatToken] = []
        for _, each in tokens:
            own, *top = [_likely(data, logprob) for data, logprob in each]
            content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}


def _likely(data: bytes, logprob: float | None) -> schemas.LikelyToken:
    # Only the first token of a prompt has none, and chat completions do not show prompts.
    return {"token": as_text(data), "bytes": list(data), "logprob": cast(float, logprob)}


class CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    closing: ClassVar[Json] = {"text": ""}

    def delta(self, choice: _Choice) -> Json:
        return {"text": "".join(part.text for part in choice.parts)}

    message = delta

    def logprobs(self, tokens: Sequence[Scored]) -> schemas.CompletionLogprobs:
        own = [candidates[0] for _, candidates in tokens]
        likeliest: list[dict[str, float] | None] = []
        for _, each in tokens:  # Of tokens with the same text, the first is kept.
            top = {as_text(data): cast(float, logprob) for data, logprob in reversed(each)}
            likeliest.append(None if each[0][1] is None else dict(reversed(top.items())))
        return {
            "tokens": [as_text(data) for data, _ in own],
            "token_logprobs": [logprob for _, logprob in own],
            "top_logprobs": likeliest,
            "text_offset": [offset for offset, _ in tokens],
        }


class NativeEvents(EventStream):
    """The answer to `POST /api/generate`: the events of one session, as JSON."""

    def __init__(self, text: TokenizerText | None) -> None:
        self._text = text
        self._stream = None if text is None else text.stream()
        self._num_tokens = 0

    def take(self, index: int, event: Event) -> list[Json]:
        body = {"type": type(event).__name__.lower(), **asdict(event)}
        text, stream = self._text, self._stream
        if isinstance(event, RoundReport):
            proposed = event.proposed_token_ids
            body |= {"type": "round", "first_index": self._num_tokens}
            body["proposed_texts"] = text and [
                as_text(text.spell(token_id)) for token_id in proposed
            ]
        if isinstance(event, Tokens):
            self._num_tokens = event.first_index + len(event.token_ids)
            body["texts"] = stream and [stream.push(token_id) for token_id in event.token_ids]
            if not event.logprobs:
                del body["logprobs"]
            for entry in body.get("logprobs", ()):
                entry["logprob"] = max(entry["logprob"], IMPOSSIBLE)
                entry["top"] = [
                    [token_id, max(logprob, IMPOSSIBLE)] for token_id, logprob in entry["top"]
                ]
        return [body]
