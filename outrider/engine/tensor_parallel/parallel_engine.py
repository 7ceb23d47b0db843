"""The engine of a model on several ranks. Rank 0 is the leader. The other ranks are followers, and
repeat the calls of the leader's engine.

The leader sends frames of one or more calls. A call is a MessagePack array that has the name of an
engine's method and the method's arguments."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgpack
import torch

from outrider.errors import EngineLost, OutOfPages, OutriderError, StepUndone, Unavailable, check
from outrider.interfaces.engine import Engine, SequenceStep, check_steps
from outrider.limits import FRAME_OF_CALLS_BYTES_MAX

_CALLS = frozenset({"attach", "fork", "keep", "release"})
_STEPS = frozenset({"forward", "take_slots"})
_UNSENT_BYTES_MAX = 2**18
"""Calls that are not steps wait for the next step, or until they have this many bytes together."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class ParallelEngine:
    """An `Engine` of a model on several ranks. It makes each call on the leader's engine, and sends
    the call to the followers.

    A call that is not a step runs on the leader first. If it succeeds, it is sent with the next
    step. A step that the leader refuses is not sent. An engine's state depends on its calls alone,
    so all ranks hold the same pages. If a step fails after it was sent, or if another call fails
    unexpectedly, the ranks' pages may differ. From then on every step raises `EngineLost`."""

    def __init__(
        self,
        engine: Engine,
        send_frame: Callable[[bytes], None],
        close: Callable[[], None],
        max_num_seqs: int,
    ) -> None:
        """`send_frame` sends to all followers. `close` makes the leader leave the group, so that
        followers end, even in the middle of a step."""
        self._send_frame, self.close = send_frame, close
        self._engine: Any = engine
        self.info, self.page_counts = engine.info, engine.page_counts
        self.tokens, self.length = engine.tokens, engine.length
        self.can_hold, self.stated_seconds = engine.can_hold, 0.0
        self.attach: Callable[..., int] = partial(self._on_all, "attach")
        self.fork: Callable[..., None] = partial(self._on_all, "fork")
        self.keep: Callable[..., int] = partial(self._on_all, "keep")
        self.release: Callable[..., None] = partial(self._on_all, "release")
        self.draft_layer = getattr(engine, "draft_layer", None)
        self.features = getattr(engine, "features", None)
        self._max_num_seqs = max_num_seqs
        self._unsent = bytearray()
        self._broken: BaseException | None = None

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """See `Engine.forward`. Raises `EngineLost` if the ranks' pages may differ."""
        return self.launch(steps)()

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[torch.Tensor]]:
        """See `Engine.launch`. The other ranks begin at once."""
        if self._broken is not None:
            raise EngineLost(f"the ranks run no more steps: {self._broken}") from self._broken
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        if not self._engine.can_hold(steps):
            raise OutOfPages("too few pages are free for the sequences of this step")
        self._unsent += pack_call("forward", *steps)
        wait = self._sent(lambda: self._begin(steps))
        return lambda: self._sent(wait)

    def _begin(self, steps: Sequence[SequenceStep]) -> Callable[[], list[torch.Tensor]]:
        self._send_frame(self._taken())
        wait: Callable[[], list[torch.Tensor]] = self._engine.launch(steps)
        return wait

    def _sent(self, call: Callable[[], Result]) -> Result:
        """Makes a call that is a part of a step on all ranks. Raises `EngineLost` if it fails."""
        try:
            return call()
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):
                raise
            _log.exception("a step failed after it was sent to other ranks; no more steps can run")
            raise EngineLost(f"a step failed on some ranks: {error}") from error

    def forward_draft(
        self, steps: Sequence[SequenceStep], features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Only the leader has the draft layer. The followers take the same slots, and free them if
        the draft step fails."""
        lengths = {step.sequence_id: self.length(step.sequence_id) for step in steps}
        try:
            hidden: torch.Tensor = self._changed("forward_draft", steps, features)
        except StepUndone:
            undone = (pack_call("keep", *each) for each in lengths.items())
            self._note(pack_call("take_slots", *steps) + b"".join(undone))
            raise
        self._note(pack_call("take_slots", *steps))
        return hidden

    def _on_all(self, name: str, *arguments: Any) -> Any:
        result = self._changed(name, *arguments)
        self._note(pack_call(name, *arguments))
        return result

    def _changed(self, name: str, *arguments: Any) -> Any:
        """Makes a call on the leader's engine. A call that raises `StepUndone` has taken and freed
        slots. `forward_draft` makes the followers do the same. A call that raises another
        `OutriderError` has changed nothing. After any other exception no further step may run."""
        try:
            return getattr(self._engine, name)(*arguments)
        except OutriderError:
            raise
        except BaseException as error:
            self._break(error)
            raise

    def _note(self, call: bytes) -> None:
        self._unsent += call
        if len(self._unsent) >= _UNSENT_BYTES_MAX:
            frame = self._taken()
            if self._broken is None:
                try:
                    self._send_frame(frame)
                except Unavailable as error:
                    self._break(error)  # The next step raises `EngineLost`.

    def _taken(self) -> bytes:
        frame, self._unsent = bytes(self._unsent), bytearray()
        return frame

    def _break(self, error: BaseException) -> None:
        self._broken = error
        self.close()


def pack_call(name: str, *arguments: Any) -> bytes:
    """Packs a call of an engine's method. The arguments of a step are its `SequenceStep`s."""
    packed: bytes = msgpack.packb((name, *arguments), default=_plain)
    return packed


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else int(value)


def replay(frame: bytes, engine: Engine) -> None:
    """Makes the calls of a frame on a follower's engine. Raises `InvariantError` for an unknown
    call."""
    calls = msgpack.Unpacker(use_list=False, max_buffer_size=FRAME_OF_CALLS_BYTES_MAX)
    calls.feed(frame)
    for name, *arguments in calls:
        if name in _STEPS:
            getattr(engine, name)([SequenceStep(*step) for step in arguments])
        else:
            check(name in _CALLS, f"{name} is no call of an engine")
            getattr(engine, name)(*arguments)


def follow(receive_frame: Callable[[], bytes | None], engine: Engine) -> None:
    """Repeats the leader's calls until the leader ends. Raises the error of a failed call. Always
    leave the group afterwards (`RankGroup.close`), so that no rank waits for this rank."""
    while (frame := receive_frame()) is not None:
        replay(frame, engine)
