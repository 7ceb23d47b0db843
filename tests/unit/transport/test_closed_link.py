"""A link that is closed while somebody asks what its replica runs."""

from __future__ import annotations

import asyncio
import socket

import pytest

from outrider.errors import Unavailable
from outrider.transport.grpc_link import target_link


async def test_who_asks_hears_that_it_is_closed() -> None:
    """And is not cancelled, as closing a channel looks to its calls."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        link = target_link(f"127.0.0.1:{silent.getsockname()[1]}")
        asking = asyncio.create_task(link.describe(30.0))
        accepted, _ = await asyncio.get_running_loop().sock_accept(silent)
        await link.close()
        with pytest.raises(Unavailable, match="closed"):
            await asking
        with pytest.raises(Unavailable, match="closed"):
            await link.describe(1.0)
        accepted.close()
