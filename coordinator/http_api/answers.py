"""Turns the events of a generation into its answer: whole, in chunks, or as native events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, cast

from coordinator.http_api.bodies import CompletionBody, StreamOptions, TranslatedBody
from coordinator.http_api.tool_parsers import AnswerForm, Part, joined
from outrider.messages import PositionLogprobs
from outrider.request import (
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
    from outrider.tokenizer import TokenizerText

Json = dict[str, Any]

IMPOSSIBLE = -9999.0
"""OpenAI's log-probability of an impossible token: JSON has no infinity."""


def as_text(data: bytes) -> str:
    """A token's bytes as text, or as `bytes:\\xNN...` if they are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


Scored = tuple[int, list[tuple[bytes, float | None]]]
"""The offset of a token in the answer's text, and pairs of bytes and log-probability: first the
token's own, then those of the likeliest tokens in its place. The log-probability of a prompt's
first token is None."""


class _Scorer:
    """Finds the offsets of tokens with log-probabilities in an answer's text."""

    def __init__(self, text: TokenizerText | None, offset: int = 0, given: str = "") -> None:
        """The first token is at `offset`, where the text `given` by the caller begins. The answer's
        text contains only the special tokens that `given` spells out."""
        self._text = text
        self._stream = None if text is None else text.stream()
        self._offset = offset
        self._given = given

    def score(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None]
    ) -> list[Scored]:
        scored = list[Scored]()
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            own = self._spell(token_id)
            top: list[tuple[bytes, float | None]] = [(own, None)]
            if entry is not None:
                each = [(token_id, entry.logprob), *entry.top]
                top = [(self._spell(one), max(logprob, IMPOSSIBLE)) for one, logprob in each]
            scored.append((self._offset, top))
            if self._text is not None and self._stream is not None:
                shown = self._stream.push(token_id)
                if self._text.is_special(token_id):
                    name = own.decode(errors="replace")
                    shown = name if self._given.startswith(name, self._offset) else ""
                self._offset += len(shown)
        return scored

    def _spell(self, token_id: int) -> bytes:
        return f"token_id:{token_id}".encode() if self._text is None else self._text.spell(token_id)


class _Choice:
    """One choice of an answer, as far as it has been generated."""

    def __init__(
        self, text: TokenizerText | None, form: AnswerForm | None, echoed: Prompt | None
    ) -> None:
        """The choice begins with the `echoed` prompt, if any."""
        self._text, self._echoed = text, echoed
        self.prompt_scorer = self.scorer = _Scorer(text)
        self.reader = None if form is None else form.make_reader()
        self.num_calls = 0
        """Tool calls so far."""
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.is_opened = False
        self.num_tokens = 0
        # What the next chunk has:
        self.parts: list[Part] = []
        self.token_ids: list[int] = []
        self.scored: list[Scored] = []

    def begin(self, started: Started) -> None:
        """Begins the choice. Its prompt was checked before the generation started."""
        self.started, before, text = started, self._echoed, self._text
        if not isinstance(before, str):
            before = text.decode(cast(tuple[int, ...], before)) if before and text else ""
        self.prompt_scorer, self.scorer = _Scorer(text, given=before), _Scorer(text, len(before))
        self.parts += [Part("content", before)] if before else []

    def add(self, text: str) -> None:
        if self.reader is not None:
            self.parts += self.reader.push(text)
        elif text:
            self.parts.append(Part("content", text))

    def clear(self) -> None:
        """Call when the next chunk has been made."""
        self.parts, self.token_ids, self.scored = [], [], []


class EventStream:
    """How an answer is sent as server-sent events. Subclasses may differ."""

    is_named: ClassVar[bool] = False
    """Whether each event also has a line with its type."""
    last: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The end of the stream."""

    def failed(self, error: Json) -> Sequence[Json]:
        """The last events of a stream that has begun and ends with this error."""
        return [error]


class Answer(EventStream):
    """An answer with all choices of a request. Subclasses define what differs between chat and
    completions."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """The `object` of a whole answer, and of a chunk."""
    chunk_kind: ClassVar[str]
    opening: ClassVar[Json | None] = None
    """Content of a choice's first chunk; None = there is no such chunk."""
    closing: ClassVar[Json]
    """Content of a choice's last chunk."""

    def __init__(
        self, asked: TranslatedBody, text: TokenizerText | None, num_draft_tokens: int, created: int
    ) -> None:
        """`num_draft_tokens` is the default for a round; `created` is in seconds since 1970."""
        self._asked = asked
        self._options = asked.body.stream_options or StreamOptions()
        given = asked.requests[0].num_draft_tokens
        self._num_draft_tokens = num_draft_tokens if given is None else given
        echoes = isinstance(asked.body, CompletionBody) and asked.body.echo
        self._choices = [
            _Choice(text, asked.form, one.prompt if echoes else None) for one in asked.requests
        ]
        self._envelope: Json = {"id": "", "object": "", "created": created, "model": ""}
        self._rounds: Counter[tuple[int, int]] = Counter()
        """Number of rounds, by tokens proposed and accepted."""

    delta: Callable[[_Choice], Json]
    """The text of a choice for the next chunk."""
    message: Callable[[_Choice], Json]
    logprobs: Callable[[Sequence[Scored]], Json]
    """The log-probabilities of a choice's tokens."""

    def whole(self) -> Json | None:
        """The whole answer, once every choice has ended; None for a stream."""
        if self._asked.body.stream:
            return None
        choices = [
            self._choice(index, self.message(one), one.finished, one)
            for index, one in enumerate(self._choices)
        ]
        return self._object(self.kind, choices, usage=self._usage(), metrics=self._metrics())

    def take(self, index: int, event: Event) -> Sequence[Json]:
        """Adds an event of a choice. Returns the chunks to send for it, often none."""
        self._note(self._choices[index], event)
        if not self._asked.body.stream or isinstance(event, Started | RoundReport):
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
                choice.add(event.text_delta)
                choice.token_ids += event.token_ids
                if self._asked.has_logprobs:
                    choice.scored += choice.scorer.score(event.token_ids, event.logprobs)
            case RoundReport():
                self._rounds[len(event.proposed_token_ids), event.num_accepted] += 1
            case Finished():
                choice.finished = event
                if choice.reader is not None:
                    choice.parts += choice.reader.finish()

    def _parts(self, index: int, event: Event) -> Sequence[Json]:
        """The chunks of a stream for an event."""
        choice, chunks = self._choices[index], list[Json]()
        if self.opening is not None and not choice.is_opened:
            choice.is_opened = True
            chunks.append(self._chunk(self._choice(index, self.opening)))
        # Each round has a chunk, unless a parser holds its whole text back.
        is_round = isinstance(event, PromptTokens | Tokens) and choice.reader is None
        if choice.parts or is_round or (choice.token_ids and choice.finished):
            chunks.append(self._chunk(self._choice(index, self.delta(choice), None, choice)))
            choice.clear()
        if not isinstance(event, Finished):
            return chunks
        chunks.append(self._chunk(self._choice(index, self.closing, event)))
        if all(one.finished for one in self._choices):
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
        """A choice with this content, and with the new tokens of the choice `tokens`, if given."""
        reason = finished and finished.finish_reason
        was_cut = reason in (FinishReason.DEADLINE, FinishReason.CANCELLED)
        shown_reason = "length" if was_cut else reason  # The API lacks these reasons.
        form = self._asked.form
        if reason is FinishReason.STOP and form is not None and form.ends_with_calls:
            shown_reason = "tool_calls" if self._choices[index].num_calls else reason
        found: Json = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": shown_reason,
            "stop_reason": reason if was_cut else _stopped_by(finished),
        }
        if tokens is not None and self._asked.has_logprobs:
            found["logprobs"] = self.logprobs(tokens.scored)
        if tokens is not None and self._asked.body.return_token_ids:
            found["token_ids"] = tokens.token_ids
        return found

    def _usage(self) -> Json:
        # A prompt counts once, however many choices it has.
        begun = [one.started for one in self._choices[:: self._asked.body.n] if one.started]
        num_prompt_tokens = sum(one.num_prompt_tokens for one in begun)
        num_tokens = sum(one.num_tokens for one in self._choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def _metrics(self) -> Json:
        """A round counts as a speculative step; without a proposal it accepts nothing. So
        `mean_acceptance_length` is the mean number of tokens of a round, including those that the
        end of the answer cuts off the last round."""
        each = [one.finished.metrics for one in self._choices if one.finished]
        num_rounds = sum(one.num_rounds for one in each)
        accepted = sum(one.num_accepted_draft_tokens for one in each)
        proposed = sum(one.num_draft_tokens for one in each)
        found: Json = {
            "mean_acceptance_length": 1 + accepted / max(1, num_rounds),
            "draft_acceptance_rate": accepted / max(1, proposed),
            "num_spec_steps": num_rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": self._num_draft_tokens,
        }
        if self._asked.body.speculation.histograms:
            lengths = sorted({length for length, _ in self._rounds})
            found["acceptance_histogram"] = self._histogram(self._num_draft_tokens, lengths)
            found["acceptance_histogram_by_draft_length"] = {
                str(length): self._histogram(length, [length]) for length in lengths
            }
        return {"speculative_decoding": found}

    def _histogram(self, most: int, lengths: Sequence[int]) -> list[int]:
        """Number of rounds with proposals of these lengths, by accepted tokens 0..`most`."""
        return [
            sum(self._rounds[length, accepted] for length in lengths)
            for accepted in range(most + 1)
        ]


def _stopped_by(finished: Finished | None) -> str | int | None:
    """The stop string, or the id of the stop token, that ended a text."""
    if finished is None:
        return None
    return finished.stop_token_id if finished.stop_string is None else finished.stop_string


class ChatAnswer(Answer):
    """The answer to a chat completion."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening: ClassVar[Json | None] = {"delta": {"role": "assistant", "content": ""}}
    closing: ClassVar[Json] = {"delta": {}}

    def delta(self, choice: _Choice) -> Json:
        return {"delta": self._joined_parts(choice) or {"content": ""}}

    def message(self, choice: _Choice) -> Json:
        found = self._joined_parts(choice)
        for call in found.get("tool_calls", ()):
            del call["index"]
        nothing = None if "tool_calls" in found else ""
        return {"message": {"role": "assistant", "content": nothing, "refusal": None, **found}}

    def _joined_parts(self, choice: _Choice) -> Json:
        """The content, the reasoning and the calls for the next chunk."""
        found: Json = {}
        calls: list[Json] = []
        for kind, text in joined(choice.parts):
            if kind == "name":
                calls.append(self._called(choice, text))
            elif kind == "arguments":
                index = choice.num_calls - 1
                if not calls:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
            else:
                name = "content" if kind == "content" else "reasoning_content"
                found[name] = found.get(name, "") + text
        return {**found, "tool_calls": calls} if calls else found

    def _called(self, choice: _Choice, name: str) -> Json:
        session_id = choice.started.session_id if choice.started else ""
        index, choice.num_calls = choice.num_calls, choice.num_calls + 1
        return {
            "index": index,
            "id": self._asked.form.call_id(session_id, index) if self._asked.form else "",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }

    def logprobs(self, tokens: Sequence[Scored]) -> Json:
        content = []
        for _, each in tokens:
            own, *top = [
                {"token": as_text(data), "bytes": list(data), "logprob": logprob}
                for data, logprob in each
            ]
            content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """The answer to a completion."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    closing: ClassVar[Json] = {"text": ""}

    def delta(self, choice: _Choice) -> Json:
        return {"text": "".join(part.text for part in choice.parts)}

    message = delta

    def logprobs(self, tokens: Sequence[Scored]) -> Json:
        """The token itself is also among the likeliest ones."""
        own = [one[0] for _, one in tokens]
        likeliest: list[Json | None] = []
        for _, each in tokens:  # Of tokens with the same text, the first counts.
            top = {as_text(data): logprob for data, logprob in reversed(each)}
            likeliest.append(None if each[0][1] is None else dict(reversed(top.items())))
        return {
            "tokens": [as_text(data) for data, _ in own],
            "token_logprobs": [logprob for _, logprob in own],
            "top_logprobs": likeliest,
            "text_offset": [offset for offset, _ in tokens],
        }


class NativeEvents(EventStream):
    """The events of one session, for `POST /api/generate`."""

    def __init__(self, text: TokenizerText | None) -> None:
        self._text = text
        self._stream = None if text is None else text.stream()
        self._num_tokens = 0

    def whole(self) -> None:
        """None, as native events are always a stream."""

    def take(self, index: int, event: Event) -> list[Json]:
        """See `Answer.take`."""
        found = {"type": type(event).__name__.lower(), **asdict(event)}
        text, stream = self._text, self._stream
        if isinstance(event, RoundReport):
            proposed = event.proposed_token_ids
            found |= {"type": "round", "first_index": self._num_tokens}
            found["proposed_texts"] = text and [as_text(text.spell(one)) for one in proposed]
        if isinstance(event, Tokens):
            self._num_tokens = event.first_index + len(event.token_ids)
            found["texts"] = stream and [stream.push(token_id) for token_id in event.token_ids]
            if not event.logprobs:
                del found["logprobs"]
            for entry in found.get("logprobs", ()):
                entry["logprob"] = max(entry["logprob"], IMPOSSIBLE)
                entry["top"] = [[token_id, max(one, IMPOSSIBLE)] for token_id, one in entry["top"]]
        return [found]
