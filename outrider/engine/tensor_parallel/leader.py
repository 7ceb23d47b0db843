"""The leader's engine: what it does, its followers do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from outrider.engine.interface import Engine, FoundPrefix, ModelInfo, PageCounts, SequenceStep
from outrider.engine.tensor_parallel.rank_calls import CallWriter
from outrider.engine.tensor_parallel.rank_rpc import FrameSender
from outrider.errors import EngineLost, OutOfPages, OutriderError, Unavailable
from outrider.kv_cache.slot_rules import check_steps

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
