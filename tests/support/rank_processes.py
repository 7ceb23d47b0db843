"""Followers that run in processes of their own, for tests of ranks that share no memory."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

JOIN_S = 60.0
"""Timeout for processes that import torch on a busy machine."""
LARGE = 2**16
"""Number of values in a sum that is too large for the algorithm for small sums."""
_END_S = 10.0


@contextmanager
def processes(work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[list[Any]]:
    """Starts a process for each tuple of arguments. Kills those that run at the end."""
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started: list[BaseProcess] = [context.Process(target=work, args=each) for each in arguments]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join(_END_S)


def add_up(rendezvous: Any, rank: int, step_timeout_s: float, load_s: float = 0.0) -> None:
    """A follower that adds its rank to the requested number, as often as a frame says. The exit
    code is 0 unless it still waited in a step when the leader ended."""
    import torch

    from outrider.engine.tensor_parallel.group import RankGroup
    from outrider.errors import ConfigError

    group = RankGroup(rendezvous, rank, torch.device("cpu"), JOIN_S, step_timeout_s)
    try:
        time.sleep(load_s)
        with suppress(ConfigError):  # if the leader says that it has loaded another model
            group.wait_for_all()
        while (frame := group.links.receive_frame()) is not None:
            for _ in range(int(frame)):
                group.all_reduce(torch.full((3,), float(rank)))
                group.all_reduce(torch.full((LARGE,), float(rank)))
                group.all_gather(torch.full((2, 1), float(rank)))
                group.gather(torch.full((2, 1), float(rank)))
    finally:
        group.close()


def follow_model(config: Any, rendezvous: Any, rank: int) -> None:
    """A follower of the model that `config` names, without Ray."""
    import asyncio

    from outrider.replica.rank_process import RankHost

    async def follow() -> None:
        host = RankHost()
        await host.start(config, rendezvous, rank, 1, JOIN_S, "")
        await host.wait()

    asyncio.run(follow())
