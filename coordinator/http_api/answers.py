"""From events to an answer: whole, in chunks of chat or completions, or with every round."""

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
"""OpenAI's log-probability of a token that cannot come: JSON knows no infinity."""


def as_text(data: bytes) -> str:
    """A token's bytes as text; where they are no whole characters `bytes:` and each as `\\xNN`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


Scored = tuple[int, list[tuple[bytes, float | None]]]
"""A token of an answer: where its first whole character is in the answer's text, and as it is
written, with its log-probability (None: it is the first of a prompt); then the likeliest in its
place."""


class _Scorer:
    """Says where tokens with log-probabilities stand in an answer's text."""

    def __init__(self, text: TokenizerText | None, offset: int = 0, given: str = "") -> None:
        """The first one stands at `offset`. Special tokens are in no text, but in one that was
        `given`, which begins there, they may be spelled."""
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
    """One text of an answer, as far as it has come."""

    def __init__(
        self, text: TokenizerText | None, form: AnswerForm | None, echoed: Prompt | None
    ) -> None:
        """Behind the prompt that is `echoed`, if one is."""
        self._text, self._echoed = text, echoed
        self.prompt_scorer = self.scorer = _Scorer(text)
        self.reader = None if form is None else form.make_reader()
        self.num_calls = 0
        """Of tools, that were told."""
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.is_opened = False
        self.num_tokens = 0
        # What has come, and of a stream has not been told:
        self.parts: list[Part] = []
        self.token_ids: list[int] = []
        self.scored: list[Scored] = []

    @property
    def text(self) -> str:
        """What has come of the content, and of a stream has not been told."""
        return "".join(part.text for part in self.parts if part.kind == "content")

    def begin(self, started: Started) -> None:
        """It has been admitted, so its prompt is one."""
        self.started, before, text = started, self._echoed, self._text
        if not isinstance(before, str):
            before = text.decode(cast(tuple[int, ...], before)) if before and text else ""
        self.prompt_scorer, self.scorer = _Scorer(text, given=before), _Scorer(text, len(before))
        self.parts += [Part("content", before)] if before else []

    def add(self, text: str) -> None:
        """Some text has come."""
        if self.reader is not None:
            self.parts += self.reader.push(text)
        elif text:
            self.parts.append(Part("content", text))

    def forget(self) -> None:
        """What has come was told."""
        self.parts, self.token_ids, self.scored = [], [], []


class Told:
    """How an answer is told as server-sent events, where nothing else is said."""

    is_named: ClassVar[bool] = False
    """Whether the type of each event stands before its data, too."""
    last: ClassVar[bytes] = b"data: [DONE]\n\n"
    """What ends the stream."""

    def failed(self, error: Json) -> Sequence[Json]:
        """What is told of an error behind the first event."""
        return [error]


class Answer(Told):
    """An answer to all choices of a request. What differs between chat and completions is in the
    two classes below."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """What a whole answer calls itself ..."""
    chunk_kind: ClassVar[str]
    """... and each chunk of one."""
    opening: ClassVar[Json | None] = None
    """What the first chunk of a choice has; None = there is no such chunk."""
    closing: ClassVar[Json]
    """What the last chunk of a choice has."""

    def __init__(
        self, asked: TranslatedBody, text: TokenizerText | None, num_draft_tokens: int, created: int
    ) -> None:
        """`num_draft_tokens` is the most of a round, where the request does not say; `created` is a
        time in seconds since 1970."""
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
        """By tokens proposed and accepted."""

    delta: Callable[[_Choice], Json]
    """What has come of a choice and was not told, in a chunk."""
    message: Callable[[_Choice], Json]
    """All of a choice."""
    logprobs: Callable[[Sequence[Scored]], Json]
    """The log-probabilities of a choice's tokens."""

    def whole(self) -> Json | None:
        """All that has come, if it is told at once. Every choice must have ended."""
        if self._asked.body.stream:
            return None
        told = [
            self._choice(index, self.message(one), one.finished, one)
            for index, one in enumerate(self._choices)
        ]
        return self._told(self.kind, told, usage=self._usage(), metrics=self._metrics())

    def take(self, index: int, event: Event) -> Sequence[Json]:
        """What is told once an event of a choice has come; often nothing."""
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
        """Of a stream, what is told of an event that a client waits for."""
        choice, chunks = self._choices[index], list[Json]()
        if self.opening is not None and not choice.is_opened:
            choice.is_opened = True
            chunks.append(self._chunk(self._choice(index, self.opening)))
        # Each round has a chunk, but for one whose whole text is held back.
        is_round = isinstance(event, PromptTokens | Tokens) and choice.reader is None
        if choice.parts or is_round or (choice.token_ids and choice.finished):
            chunks.append(self._chunk(self._choice(index, self.delta(choice), None, choice)))
            choice.forget()
        if not isinstance(event, Finished):
            return chunks
        chunks.append(self._chunk(self._choice(index, self.closing, event)))
        if all(one.finished for one in self._choices):
            if self._options.include_usage:
                chunks.append(self._told(self.chunk_kind, [], usage=self._usage()))
            chunks[-1]["metrics"] = self._metrics()
        return chunks

    def _told(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {**self._envelope, "object": kind, "choices": choices, **more}

    def _chunk(self, choice: Json) -> Json:
        more: Json = {}
        if self._options.continuous_usage_stats:
            more = {"usage": self._usage()}
        elif self._options.include_usage:
            more = {"usage": None}
        return self._told(self.chunk_kind, [choice], **more)

    def _choice(
        self,
        index: int,
        content: Json,
        finished: Finished | None = None,
        tokens: _Choice | None = None,
    ) -> Json:
        """With the `tokens` that it tells of, if it does."""
        reason = finished and finished.finish_reason
        was_cut = reason in (FinishReason.DEADLINE, FinishReason.CANCELLED)
        form = self._asked.form
        told_reason = "length" if was_cut else reason  # Clients know `length`.
        if reason is FinishReason.STOP and form is not None and form.ends_with_calls:
            told_reason = "tool_calls" if self._choices[index].num_calls else reason
        told: Json = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": told_reason,
            "stop_reason": reason if was_cut else _stopped_by(finished),
        }
        if tokens is not None and self._asked.has_logprobs:
            told["logprobs"] = self.logprobs(tokens.scored)
        if tokens is not None and self._asked.body.return_token_ids:
            told["token_ids"] = tokens.token_ids
        return told

    def _usage(self) -> Json:
        # The choices of a prompt share it.
        begun = [one.started for one in self._choices[:: self._asked.body.n] if one.started]
        num_prompt_tokens = sum(one.num_prompt_tokens for one in begun)
        num_tokens = sum(one.num_tokens for one in self._choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def _metrics(self) -> Json:
        """A step is a round; one without a proposal accepts nothing. So `mean_acceptance_length` is
        the tokens that a round brought, on average, before an answer's end cut it short."""
        each = [one.finished.metrics for one in self._choices if one.finished]
        num_rounds = sum(one.num_rounds for one in each)
        accepted = sum(one.num_accepted_draft_tokens for one in each)
        proposed = sum(one.num_draft_tokens for one in each)
        told: Json = {
            "mean_acceptance_length": 1 + accepted / max(1, num_rounds),
            "draft_acceptance_rate": accepted / max(1, proposed),
            "num_spec_steps": num_rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": self._num_draft_tokens,
        }
        if self._asked.body.speculation.histograms:
            lengths = sorted({length for length, _ in self._rounds})
            told["acceptance_histogram"] = self._histogram(self._num_draft_tokens, lengths)
            told["acceptance_histogram_by_draft_length"] = {
                str(length): self._histogram(length, [length]) for length in lengths
            }
        return {"speculative_decoding": told}

    def _histogram(self, most: int, lengths: Sequence[int]) -> list[int]:
        """Rounds that proposed so many tokens by those that they accepted, 0..`most`."""
        return [
            sum(self._rounds[length, accepted] for length in lengths)
            for accepted in range(most + 1)
        ]


def _stopped_by(finished: Finished | None) -> str | int | None:
    """The stop string or the id of the stop token that ended a text."""
    if finished is None:
        return None
    return finished.stop_token_id if finished.stop_string is None else finished.stop_string


class ChatAnswer(Answer):
    """To a chat completion."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening: ClassVar[Json | None] = {"delta": {"role": "assistant", "content": ""}}
    closing: ClassVar[Json] = {"delta": {}}

    def delta(self, choice: _Choice) -> Json:
        return {"delta": self._told_parts(choice) or {"content": ""}}

    def message(self, choice: _Choice) -> Json:
        told = self._told_parts(choice)
        for call in told.get("tool_calls", ()):
            del call["index"]
        nothing = None if "tool_calls" in told else ""
        return {"message": {"role": "assistant", "content": nothing, "refusal": None, **told}}

    def _told_parts(self, choice: _Choice) -> Json:
        """The content, the reasoning and the calls of what was not told."""
        told: Json = {}
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
                told[name] = told.get(name, "") + text
        return {**told, "tool_calls": calls} if calls else told

    def _called(self, choice: _Choice, name: str) -> Json:
        """The beginning of a call."""
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
    """To a completion."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    closing: ClassVar[Json] = {"text": ""}

    def delta(self, choice: _Choice) -> Json:
        return {"text": choice.text}

    message = delta

    def logprobs(self, tokens: Sequence[Scored]) -> Json:
        """See `Answer.logprobs`. The token that came is among the likeliest ones, too."""
        own = [one[0] for _, one in tokens]
        likeliest: list[Json | None] = []
        for _, each in tokens:  # Of several that spell the same the first.
            top = {as_text(data): logprob for data, logprob in reversed(each)}
            likeliest.append(None if each[0][1] is None else dict(reversed(top.items())))
        return {
            "tokens": [as_text(data) for data, _ in own],
            "token_logprobs": [logprob for _, logprob in own],
            "top_logprobs": likeliest,
            "text_offset": [offset for offset, _ in tokens],
        }


class NativeEvents(Told):
    """The events of one session as `POST /api/generate` tells them."""

    def __init__(self, text: TokenizerText | None) -> None:
        self._text = text
        self._stream = None if text is None else text.stream()
        self._num_tokens = 0

    def whole(self) -> None:
        """Nothing is told once."""

    def take(self, index: int, event: Event) -> list[Json]:
        """What is told of an event."""
        told = {"type": type(event).__name__.lower(), **asdict(event)}
        text, stream = self._text, self._stream
        if isinstance(event, RoundReport):
            proposed = event.proposed_token_ids
            told |= {"type": "round", "first_index": self._num_tokens}
            told["proposed_texts"] = text and [as_text(text.spell(one)) for one in proposed]
        if isinstance(event, Tokens):
            self._num_tokens = event.first_index + len(event.token_ids)
            told["texts"] = stream and [stream.push(token_id) for token_id in event.token_ids]
            if not event.logprobs:
                del told["logprobs"]
            for entry in told.get("logprobs", ()):
                entry["logprob"] = max(entry["logprob"], IMPOSSIBLE)
                entry["top"] = [[token_id, max(one, IMPOSSIBLE)] for token_id, one in entry["top"]]
        return [told]
