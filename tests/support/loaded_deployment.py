"""A deployment under load."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from outrider.client import Client, GenerateRequest
from outrider.fleet.launcher import Deployment
from tests.support import stack

CHANGE_S = 120.0
"""Time to start or end some replicas on a busy machine."""


until = partial(stack.until, within_s=CHANGE_S)


@asynccontextmanager
async def under_load(
    deployment: Deployment, requests: Sequence[GenerateRequest], pause_s: float = 0.0
) -> AsyncIterator[None]:
    """Meanwhile each request is repeated by a client of its own, with the same tokens each time.
    Ends once there are some more answers. Raises the error that any client met."""
    num_answers = 0

    async def ask(request: GenerateRequest) -> tuple[int, ...]:
        """Chooses the ports here: if the only coordinator that clients know is replaced before it
        has answered them, they ask its successor at the same port."""
        async with Client(lambda: deployment.address) as client:
            return (await client.complete(request)).token_ids

    async def repeat(request: GenerateRequest) -> None:
        nonlocal num_answers
        expected = await ask(request)
        while True:
            assert await ask(request) == expected
            num_answers += 1
            await asyncio.sleep(pause_s)

    asking = [asyncio.create_task(repeat(request)) for request in requests]
    await until(lambda: num_answers >= len(requests) or any(task.done() for task in asking))
    yield
    wanted = num_answers + 2 * len(requests)  # The last ones begin from here on.
    await until(lambda: num_answers >= wanted or any(task.done() for task in asking))
    for task in asking:
        task.cancel()
    for found in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(found, Exception):
            raise found
