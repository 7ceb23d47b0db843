"""A follower: does to its engine what the leader tells it, until the leader ends."""

from __future__ import annotations

from outrider.engine.interface import Engine
from outrider.engine.tensor_parallel.rank_calls import replay
from outrider.engine.tensor_parallel.rank_rpc import FrameReceiver


def follow(frames: FrameReceiver, engine: Engine) -> None:
    """Returns when the leader has ended. Raises what a call raised: this rank's state is then no
    longer the leader's, and the caller must end the process's part in it (`RankGroup.close`,
    `FrameReceiver.close`), so that the leader's step fails instead of waiting."""
    while (words := frames.receive()) is not None:
        replay(words, engine)
