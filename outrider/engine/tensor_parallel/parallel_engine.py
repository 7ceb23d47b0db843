"""The engine of a model on several ranks: the leader's calls are repeated by its followers."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from outrider.engine.interface import (
    Engine,
    FoundPrefix,
    ModelInfo,
    PageCounts,
    SequenceStep,
    check_steps,
)
from outrider.engine.tensor_parallel.rank_rpc import (
    WORD_BYTES,
    WORD_TYPE,
    FrameReceiver,
    FrameSender,
)
from outrider.errors import EngineLost, OutOfPages, OutriderError, Unavailable, check

_FORWARD, _ATTACH, _KEEP, _FORK, _MARK_IDLE, _RELEASE = range(1, 7)


class CallWriter:
    """Notes calls, named as `Engine` names them, until they are taken as one frame."""

    def __init__(self) -> None:
        self._words = array(WORD_TYPE)

    def __len__(self) -> int:
        """Words noted so far."""
        return len(self._words)

    def take(self) -> array[int]:
        """The calls since the last time."""
        words, self._words = self._words, array(WORD_TYPE)
        return words

    def forward(self, steps: Sequence[SequenceStep]) -> None:
        """See `Engine.forward`."""
        self._words.extend((_FORWARD, len(steps)))
        for step in steps:
            self._text(step.sequence_id)
            self._words.append(step.num_logits)
            self._numbers(step.token_ids)
            self._numbers(step.parents)

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str) -> None:
        """See `Engine.attach`."""
        self._words.append(_ATTACH)
        self._text(sequence_id)
        self._numbers(token_ids)
        self._text(salt)

    def keep(self, sequence_id: str, length: int, path: Sequence[int]) -> None:
        """See `Engine.keep`."""
        self._words.append(_KEEP)
        self._text(sequence_id)
        self._words.append(length)
        self._numbers(path)

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """See `Engine.fork`."""
        self._words.append(_FORK)
        self._text(sequence_id)
        self._text(branch_id)

    def mark_idle(self, sequence_id: str) -> None:
        """See `Engine.mark_idle`."""
        self._words.append(_MARK_IDLE)
        self._text(sequence_id)

    def release(self, sequence_id: str) -> None:
        """See `Engine.release`."""
        self._words.append(_RELEASE)
        self._text(sequence_id)

    def _numbers(self, numbers: Sequence[int]) -> None:
        self._words.append(len(numbers))
        self._words.extend(numbers)

    def _text(self, text: str) -> None:
        encoded = text.encode()
        self._words.append(len(encoded))
        self._words.frombytes(encoded + bytes(-len(encoded) % WORD_BYTES))


def replay(words: array[int], engine: Engine) -> None:
    """Makes the calls of a frame on another engine. Raises what they raise, and `InvariantError`
    for words that are no frame."""
    reader = _Reader(words)
    while not reader.at_end:
        call = reader.number()
        if call == _FORWARD:
            engine.forward([reader.step() for _ in range(reader.number())])
        elif call == _ATTACH:
            engine.attach(reader.text(), reader.numbers(), reader.text())
        elif call == _KEEP:
            engine.keep(reader.text(), reader.number(), reader.numbers())
        elif call == _FORK:
            engine.fork(reader.text(), reader.text())
        elif call == _MARK_IDLE:
            engine.mark_idle(reader.text())
        else:
            check(call == _RELEASE, f"{call} is no call of an engine")
            engine.release(reader.text())


class _Reader:
    def __init__(self, words: array[int]) -> None:
        self._words = words
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._next == len(self._words)

    def number(self) -> int:
        return self._take(1)[0]

    def numbers(self) -> tuple[int, ...]:
        return tuple(self._take(self.number()))

    def text(self) -> str:
        num_bytes = self.number()
        return self._take(-(-num_bytes // WORD_BYTES)).tobytes()[:num_bytes].decode()

    def step(self) -> SequenceStep:
        sequence_id, num_logits = self.text(), self.number()
        return SequenceStep(sequence_id, self.numbers(), num_logits, self.numbers())

    def _take(self, count: int) -> array[int]:
        end = self._next + count
        check(count >= 0 and end <= len(self._words), "a frame of calls is cut short")
        taken = self._words[self._next : end]
        self._next = end
        return taken


_UNSENT_WORDS_MAX: Final = 2**16
"""Calls that go out with the next step, unless they are more than this."""

_log = logging.getLogger(__name__)


class ParallelEngine:
    """Implements `Engine` on the leader's share of a model.

    A call that changes state is made here first; once it has succeeded it is noted, and goes to the
    followers with the next step. Engines do the same when they hear the same, so that all ranks
    hold the same pages. A step is refused before anybody is told of it. One that fails after that,
    or a call that fails in its middle, has left the ranks in different states: from then on every
    step raises `EngineLost`.
    """

    def __init__(
        self,
        engine: Engine,
        followers: FrameSender,
        max_num_seqs: int,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`leave` ends this rank's part in what the others' steps do together."""
        self._leave = leave
        self._engine = engine
        self._followers = followers
        self._max_num_seqs = max_num_seqs
        self._calls = CallWriter()
        self._broken: BaseException | None = None

    @property
    def info(self) -> ModelInfo:
        """The whole model."""
        return self._engine.info

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """See `Engine.forward`. Raises `EngineLost` where a rank is gone or does not answer."""
        if self._broken is not None:
            raise EngineLost(f"a rank of the model is lost: {self._broken}") from self._broken
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        if not self._engine.can_hold(steps):
            raise OutOfPages("the sequences of this step find no room beside those in use")
        self._calls.forward(steps)
        try:
            self._followers.send(self._calls.take())
            return self._engine.forward(steps)
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):
                raise
            _log.exception("a step failed after the ranks had been told of it; no more follow")
            raise EngineLost(f"a step failed on some ranks: {error}") from error

    def can_hold(
        self,
        steps: Sequence[SequenceStep],
        without: Iterable[str] = (),
        begun: Mapping[str, FoundPrefix] | None = None,
    ) -> bool:
        """See `Engine.can_hold`."""
        return self._engine.can_hold(steps, without, begun)

    def find(self, token_ids: Sequence[int], salt: str = "") -> FoundPrefix:
        """See `Engine.find`."""
        return self._engine.find(token_ids, salt)

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """See `Engine.attach`."""
        with self._made_here_first():
            num_slots = self._engine.attach(sequence_id, token_ids, salt)
        self._calls.attach(sequence_id, token_ids, salt)
        self._send_many()
        return num_slots

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """See `Engine.fork`."""
        with self._made_here_first():
            self._engine.fork(sequence_id, branch_id)
        self._calls.fork(sequence_id, branch_id)
        self._send_many()

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        """See `Engine.keep`."""
        with self._made_here_first():
            self._engine.keep(sequence_id, length, path)
        self._calls.keep(sequence_id, length, path)
        self._send_many()

    def mark_idle(self, sequence_id: str) -> None:
        """See `Engine.mark_idle`."""
        self._engine.mark_idle(sequence_id)
        self._calls.mark_idle(sequence_id)
        self._send_many()

    def release(self, sequence_id: str) -> None:
        """See `Engine.release`."""
        self._engine.release(sequence_id)
        self._calls.release(sequence_id)
        self._send_many()

    def length(self, sequence_id: str) -> int:
        """See `Engine.length`."""
        return self._engine.length(sequence_id)

    def page_counts(self) -> PageCounts:
        """Of each rank."""
        return self._engine.page_counts()

    def take_step_seconds(self) -> float:
        """See `Engine.take_step_seconds`."""
        return self._engine.take_step_seconds()

    @property
    def stated_seconds(self) -> float:
        """See `Engine.stated_seconds`."""
        return self._engine.stated_seconds

    def close(self) -> None:
        """The followers end, those in the middle of a step too."""
        self._followers.close()
        self._leave()

    def _send_many(self) -> None:
        """So that calls without a step do not pile up. A follower that is gone is the next step's
        error."""
        if len(self._calls) < _UNSENT_WORDS_MAX:
            return
        words = self._calls.take()
        if self._broken is None:
            try:
                self._followers.send(words)
            except Unavailable as error:
                self._break(error)

    @contextmanager
    def _made_here_first(self) -> Iterator[None]:
        """What is refused has changed nothing. What fails otherwise has, and the followers have not
        heard of it."""
        try:
            yield
        except OutriderError:
            raise
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """No step follows any more."""
        self._broken = error
        self.close()


def follow(frames: FrameReceiver, engine: Engine) -> None:
    """Returns when the leader has ended. Raises what a call raised: this rank's state is then no
    longer the leader's, and the caller must end the process's part in it (`RankGroup.close`,
    `FrameReceiver.close`), so that the leader's step fails instead of waiting."""
    while (words := frames.receive()) is not None:
        replay(words, engine)
