"""Lets the target write a corpus of conversations. Given only the beginning of the chat template,
the target writes a user's turn, and then an answer."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from outrider.interfaces.engine import Engine, SequenceStep
from outrider.speculation.proposal import EMPTY_PROPOSAL
from outrider.speculation.random_streams import RoundNoise, choice_seed
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams
from outrider.speculation.verification import VerifyInput, verdicts_from_logits

from .documents import Document, Template, is_kept_back
from .storage import Stopwatch

TEMPERATURES = (0.0, 0.7, 1.0)  # Temperatures of the answers. Conversations use them in turn.
_TURN = SamplingParams(temperature=1.0, min_p=0.03)
"""Parameters of user turns. `min_p` drops the least likely tokens, so that turns make sense."""
_TURN_TOKENS_MAX = 512
_ANSWER_TOKENS_MAX = 320
_BEGINNING = 16  # tokens at the start of an answer that are hashed; see `WrittenCorpus.documents`


class Record(TypedDict):
    """A conversation, as its line of the file states it."""

    index: int
    prompt: list[int]
    answer: list[int]
    temperature: float


class WrittenCorpus:
    """Conversations in a file, one in each line. The target first answers the given prompts, and
    then writes whole conversations. Except for rounding, a conversation depends only on seed,
    index, prompt and target. Rounding also depends on conversations written at the same time."""

    def __init__(
        self,
        directory: Path,
        template: Template,
        prompts: Sequence[Sequence[int]],
        seed: int,
        tokens_max: int,
        *,
        tokens: int | None = None,
        seconds: float | None = None,
        temperatures: Sequence[float] = TEMPERATURES,
        answer_tokens_max: int = _ANSWER_TOKENS_MAX,
    ) -> None:
        """Conversations have at most `tokens_max` tokens, and all prompts must be shorter. `write`
        stops when the answers have `tokens` tokens, or when it has run for `seconds`, including
        earlier runs. If both are None, `write` only answers the prompts."""
        self.template = template
        self.seed = seed
        self.tokens_max = tokens_max
        self.temperatures = temperatures
        self.answer_tokens_max = answer_tokens_max
        self._prompts = prompts
        self._tokens, self._seconds = tokens, seconds
        self.spent = Stopwatch(directory)
        self._path = directory / "conversations.jsonl"
        self._records: dict[int, Record] = {}
        # Counts of conversations before the first missing index, and of their answer tokens.
        self._num_first = self._first_tokens = 0
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            # Removes a line that a kill cut off. A rewrite of the whole file could lose all lines.
            os.truncate(self._path, len(whole))
            for line in whole.splitlines():
                self._keep(json.loads(line))

    def documents(self) -> list[Document]:
        """Returns the written conversations. With `tokens`, returns only the first conversations
        whose answers together have this many tokens. Answers to the same prompt are alike. So a
        hash of the prompt decides whether they are held out. Conversations without a user's turn
        share their prompt, so their hash includes the answer's beginning."""
        records = list(self._records.values())
        if self._tokens is not None:
            missing, records = self._tokens, []
            while missing > 0 and len(records) < self._num_first:
                records.append(self._records[len(records)])
                missing -= len(records[-1]["answer"])
        documents: list[Document] = []
        for record in records:
            prompt, answer = record["prompt"], record["answer"]
            is_given = record["index"] < len(self._prompts)
            first = max(1, len(prompt if is_given else self.template.before))
            token_ids = np.array([*prompt, *answer], dtype=np.int32)
            has_own_prompt = is_given or len(prompt) > first
            held = is_kept_back(prompt if has_own_prompt else token_ids[: first + _BEGINNING])
            documents.append(Document(token_ids, first, len(prompt), record["temperature"], held))
        return documents

    @property
    def part(self) -> float:
        done, wanted = float(len(self._records)), float(len(self._prompts))
        if self._tokens is not None:
            done, wanted = self._first_tokens, self._tokens
        elif self._seconds is not None:
            done, wanted = self.spent.seconds, self._seconds
        return 1.0 if done >= wanted else done / wanted

    @torch.inference_mode()
    def write(self, engine: Engine, together: int, progress: Callable[[float, str], None]) -> None:
        """Lets the target write the missing conversations, up to `together` at a time. When the
        time is over, keeps an unfinished conversation only if its answer has `_BEGINNING` tokens,
        because these tokens may decide whether the conversation is held out. After each step, calls
        `progress` with `part` and a text about the written tokens (empty if `tokens` is None)."""
        room = engine.page_counts().num_slots // self.tokens_max
        together = max(1, min(together, room))
        end = len(self._prompts) if self._tokens is self._seconds is None else None
        eos = frozenset(engine.info.eos_token_ids)
        running: list[_Conversation] = []
        following = 0

        def store(ended: Sequence[_Conversation]) -> None:
            for conversation in ended:
                self._keep(conversation.record)
                file.write(json.dumps(conversation.record) + "\n")
                engine.release(conversation.name)
                running.remove(conversation)
            file.flush()
            self.spent.save()

        with self.spent.working(), self._path.open("a", encoding="utf-8") as file:
            while self.part < 1.0:
                while len(running) < together and following != end:
                    if following not in self._records:
                        prompt = self._prompts[following : following + 1]
                        running.append(_Conversation(self, following, *prompt))
                        running[-1].begin(engine)
                    following += 1
                rows = engine.forward(
                    [
                        SequenceStep(conversation.name, conversation.unseen, 1)
                        for conversation in running
                    ]
                )
                inputs = [
                    conversation.verify_input(row)
                    for conversation, row in zip(running, rows, strict=True)
                ]
                drawn = zip(running, verdicts_from_logits(inputs), strict=True)
                if ended := [
                    conversation
                    for conversation, verdict in drawn
                    if conversation.take(verdict.correction[0], eos)
                ]:
                    store(ended)
                wanted = self._tokens
                done = f"{self._first_tokens:,} of {wanted:,} tokens" if wanted is not None else ""
                progress(self.part, done)
            if self._seconds is not None:
                store(
                    [
                        conversation
                        for conversation in running
                        if len(conversation.answer) >= _BEGINNING
                    ]
                )
        for conversation in running:
            engine.release(conversation.name)

    def _keep(self, record: Record) -> None:
        self._records[record["index"]] = record
        while (first := self._records.get(self._num_first)) is not None:
            self._first_tokens += len(first["answer"])
            self._num_first += 1


class _Conversation:
    """An unfinished conversation. A user's turn that the target writes is added to the prompt."""

    def __init__(self, corpus: WrittenCorpus, index: int, prompt: Sequence[int] = ()) -> None:
        self.name = f"conversation-{index}"
        self._corpus = corpus
        self._seed = choice_seed(corpus.seed, index + 1)
        template = corpus.template
        self.is_turn = bool(template.after) and not prompt
        room = corpus.tokens_max - len(template.before) - len(template.after)
        self._turn_tokens_max = max(1, min(_TURN_TOKENS_MAX, room // 2))
        self.prompt = [*(prompt or template.before)]
        self.answer: list[int] = []
        self.unseen: tuple[int, ...] = ()
        temperature = corpus.temperatures[index % len(corpus.temperatures)]
        self.record: Record = {
            "index": index,
            "prompt": self.prompt,
            "answer": self.answer,
            "temperature": temperature,
        }
        self._params = SamplingParams(temperature=temperature)

    def begin(self, engine: Engine) -> None:
        if not self.prompt:  # Without a template, a text may begin with any token.
            self.prompt.append(self._seed % engine.info.vocab_size)
        self.unseen = tuple(self.prompt[engine.attach(self.name, self.prompt) :])

    def verify_input(self, logits: torch.Tensor) -> VerifyInput:
        params = _TURN if self.is_turn else self._params
        rule = Rule.GREEDY if params.greedy else Rule.COUPLED
        noise = RoundNoise(self._seed, rule, len(self.prompt) + len(self.answer))
        return VerifyInput(logits, params, NO_HISTORY, EMPTY_PROPOSAL, noise)

    def take(self, token_id: int, eos: frozenset[int]) -> bool:
        """Appends a token. Returns whether the conversation is complete."""
        self.unseen = (token_id,)
        corpus = self._corpus
        if not self.is_turn:
            self.answer.append(token_id)
            is_full = len(self.prompt) + len(self.answer) == corpus.tokens_max
            return is_full or len(self.answer) == corpus.answer_tokens_max or token_id in eos
        after = corpus.template.after
        ends = token_id in eos or token_id == after[0]
        if ends or len(self.prompt) - len(corpus.template.before) >= self._turn_tokens_max:
            self.is_turn = False
            self.unseen = after if ends else (token_id, *after)
        self.prompt.extend(self.unseen)
        return False
