"""The target writes its own corpus: user turns from the chat template alone, and the answers."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from outrider.engine.interface import Engine, SequenceStep
from outrider.limits import PAGE_SIZE
from outrider.speculation.random_streams import RoundNoise, choice_seed
from outrider.speculation.sampling_params import Rule

from .documents import BEGINNING, HELD_OUT_EVERY, Document, Template, conversation
from .storage import Spent

TEMPERATURES: Final = (0.0, 0.7, 1.0)
"""Of answers, in turn."""
_TURN_MIN_P: Final = 0.03
"""User turns are drawn at temperature 1 without what is less likely than this part of the
likeliest token: so they stay sensible, and differ."""
_TURN_TOKENS_MAX: Final = 512
_ANSWER_TOKENS_MAX: Final = 320
_FEW: Final = 3 * HELD_OUT_EVERY
"""Where the time was over before so many conversations had ended, those that had not are used as
far as they came, if that is as far as `BEGINNING`: of so many texts one is held out in 95 of 100
cases."""
_FILE: Final = "conversations.jsonl"


@dataclass(frozen=True, slots=True)
class Wanted:
    """When enough has been written."""

    tokens: int | None
    """That many; or None ..."""
    seconds: float
    """... as many as this time allows, earlier runs included."""
    prompts_alone: bool = False
    """Whether nothing but the answers to the given prompts is wanted, and all of these."""


class _Conversation:
    """One as it grows."""

    def __init__(
        self,
        index: int,
        seed: int,
        template: Template,
        prompt: Sequence[int],
        vocab_size: int,
        tokens_max: int,
        temperature: float,
        answer_tokens_max: int,
    ) -> None:
        self.index = index
        self.name = f"conversation-{index}"
        self.seed = choice_seed(seed, index + 1)
        self.temperature = temperature
        self._template = template
        self.is_turn = bool(template.after) and not prompt
        # Where nothing begins a text, any token does.
        self.prompt = [*(prompt or template.before or (self.seed % vocab_size,))]
        self.answer: list[int] = []
        self._tokens_max = tokens_max
        self._answer_tokens_max = answer_tokens_max
        room = tokens_max - len(template.before) - len(template.after)
        self._turn_tokens_max = max(1, min(_TURN_TOKENS_MAX, room // 2))
        self.unseen = tuple(self.prompt)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def drawing(self) -> tuple[float, float]:
        return (1.0, _TURN_MIN_P) if self.is_turn else (self.temperature, 0.0)

    def uniform(self) -> float:
        noise = RoundNoise(self.seed, Rule.TOKEN, self.length)
        return next(iter(noise.accept_uniforms(1)))

    def take(self, token_id: int, eos: frozenset[int]) -> bool:
        """Goes on with a token; whether the conversation is complete then."""
        self.unseen = (token_id,)
        if not self.is_turn:
            self.answer.append(token_id)
            full = len(self.answer) == self._answer_tokens_max or self.length == self._tokens_max
            return full or token_id in eos
        after = self._template.after
        ends = token_id in eos or token_id == after[0]
        turn = len(self.prompt) - len(self._template.before)
        if ends or turn >= self._turn_tokens_max:
            self.is_turn = False
            self.unseen = after if ends else (token_id, *after)
        self.prompt.extend(self.unseen)
        return False

    def record(self) -> dict[str, Any]:
        return {"index": self.index, "prompt": self.prompt, "answer": self.answer,
                "temperature": self.temperature}  # fmt: skip


class WrittenCorpus:
    """Conversations in a folder, one a line; a line that a kill has torn is written anew.

    Each is a function of seed, index and target alone, up to the rounding of the target's steps."""

    def __init__(
        self,
        directory: Path,
        template: Template,
        prompts: Sequence[Sequence[int]],
        seed: int,
        tokens_max: int,
        temperatures: Sequence[float] = TEMPERATURES,
        answer_tokens_max: int = _ANSWER_TOKENS_MAX,
    ) -> None:
        """Of at most `tokens_max` tokens each, which is more than any prompt has. Answers are
        written at these temperatures in turn."""
        self._tokens_max = tokens_max
        self._temperatures = temperatures
        self._answer_tokens_max = answer_tokens_max
        self._template = template
        self._prompts = prompts
        self._seed = seed
        self.spent = Spent(directory)
        self._path = directory / _FILE
        self._records: dict[int, dict[str, Any]] = {}
        """Conversations that have ended, by index ..."""
        self._cut: dict[int, dict[str, Any]] = {}
        """... and those that had not when the time was over."""
        self._sums = [0]
        """Answered tokens of the first 0, 1, .. conversations, as far as there is no gap."""
        if self._path.exists():
            self._read()

    def documents(self, tokens: int | None = None) -> list[Document]:
        """What has been written: in the order in which it was finished, and with what was cut off
        where few were; or, in their own order, the first conversations with so many answered tokens
        together."""
        if tokens is not None:
            records = [self._records[index] for index in range(self._num_first(tokens))]
        else:
            records = list(self._records.values())
            if len(records) < _FEW:
                records += [
                    one
                    for i, one in self._cut.items()
                    if i not in self._records and len(one["answer"]) >= BEGINNING
                ]
        found: list[Document] = []
        for record in records:
            index = record["index"]
            prompt: list[int] = record["prompt"]
            first = len(self._template.before) if index >= len(self._prompts) else len(prompt)
            known = conversation(
                prompt,
                record["answer"],
                first,
                record["temperature"],
                self._tokens_max,
                self._template.num_bare,
            )
            found += [] if known is None else [known]
        return found

    def is_enough(self, wanted: Wanted) -> bool:
        if wanted.prompts_alone:
            return len(self._records) == len(self._prompts)
        if wanted.tokens is None:
            return self.spent.seconds >= wanted.seconds
        return self._sums[-1] >= wanted.tokens

    def write(
        self, engine: Engine, num_together: int, wanted: Wanted, progress: Callable[[float], None]
    ) -> None:
        """Lets the target write so many conversations side by side, or as many as its pages hold,
        until it is enough; tells `progress` the part that is done."""
        room = engine.page_counts().num_pages * PAGE_SIZE // self._tokens_max
        num_together = max(1, min(num_together, room))
        end = len(self._prompts) if wanted.prompts_alone else None
        eos = frozenset(engine.info.eos_token_ids)
        running: list[_Conversation] = []
        following = 0
        with self.spent.working(), self._path.open("a", encoding="utf-8") as file:
            while not self.is_enough(wanted):
                while len(running) < num_together and following != end:
                    if following not in self._records:
                        running.append(self._begin(engine, following))
                    following += 1
                ended = [
                    one
                    for one, token_id in zip(running, _next_tokens(engine, running), strict=True)
                    if one.take(token_id, eos)
                ]
                for one in ended:
                    running.remove(one)
                    engine.release(one.name)
                    self._keep(one.record())
                    file.write(json.dumps(one.record()) + "\n")
                if ended:
                    file.flush()
                    self.spent.save()
                progress(self._part(wanted))
            if not wanted.prompts_alone and wanted.tokens is None and len(self._records) < _FEW:
                for one in running:
                    if one.answer:
                        self._cut[one.index] = one.record()
                        file.write(json.dumps(one.record() | {"cut": True}) + "\n")
        for one in running:
            engine.release(one.name)

    def _begin(self, engine: Engine, index: int) -> _Conversation:
        prompt = self._prompts[index] if index < len(self._prompts) else ()
        one = _Conversation(
            index,
            self._seed,
            self._template,
            prompt,
            engine.info.vocab_size,
            self._tokens_max,
            self._temperatures[index % len(self._temperatures)],
            self._answer_tokens_max,
        )
        one.unseen = one.unseen[engine.attach(one.name, one.unseen) :]
        return one

    def _keep(self, record: dict[str, Any]) -> None:
        self._records[record["index"]] = record
        while (following := len(self._sums) - 1) in self._records:
            self._sums.append(self._sums[-1] + len(self._records[following]["answer"]))

    def _num_first(self, tokens: int) -> int:
        return min(bisect_left(self._sums, tokens), len(self._sums) - 1)

    def _part(self, wanted: Wanted) -> float:
        if wanted.prompts_alone:
            return len(self._records) / len(self._prompts)
        if wanted.tokens is None:
            return min(1.0, self.spent.seconds / max(wanted.seconds, 1e-9))
        return min(1.0, self._sums[-1] / max(wanted.tokens, 1))

    def _read(self) -> None:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for record in map(json.loads, whole.splitlines()):
            if record.pop("cut", False):
                self._cut[record["index"]] = record
            else:
                self._keep(record)
        if len(whole) < len(data):
            with self._path.open("r+b") as file:
                file.truncate(len(whole))


def _next_tokens(engine: Engine, running: Sequence[_Conversation]) -> list[int]:
    """One step of all; the next token of each."""
    steps = [SequenceStep(one.name, one.unseen, 1) for one in running]
    logits = torch.cat(engine.forward(steps))
    temperatures, floors = zip(*(one.drawing for one in running), strict=True)
    uniforms = [one.uniform() for one in running]
    return draw(logits, temperatures, floors, uniforms)


def draw(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    floors: Sequence[float],
    uniforms: Sequence[float],
) -> list[int]:
    """One token a row of `logits` [B, V]: the likeliest at temperature 0, else where the cumulative
    distribution passes the row's number in (0, 1), without what is below the floor."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    heat, floor = column(temperatures), column(floors)
    weights = (logits - logits.amax(dim=1, keepdim=True)) / heat.clamp(min=1e-4)
    weights.exp_()
    weights.masked_fill_(weights < floor, 0.0)
    mass = weights.cumsum(dim=1)
    places = torch.searchsorted(mass, column(uniforms) * mass[:, -1:])[:, 0]
    likeliest = logits.argmax(dim=1)
    drawn = torch.where(heat[:, 0] == 0, likeliest, places.clamp(max=logits.shape[1] - 1))
    return drawn.tolist()
