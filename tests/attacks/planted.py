"""A system under attack with a bug. The variable `PLANTED_BUG` names the bug."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from coordinator.auth.access_control import AccessControl
from outrider.transport import server
from outrider.transport.server import Context
from tests.attacks import doors, whole_system

Main = Callable[[dict[str, Any], Path], Awaitable[None]]


def first_message_without_limit() -> Main:
    """The message of a health check without a key is awaited."""
    check_call = AccessControl.check_call

    def check(self: AccessControl, method: str, context: Context) -> str:
        return check_call(self, method, context) or ""

    async def message(frames: AsyncIterator[bytes], name: str) -> bytes | None:
        return await anext(aiter(frames), None)

    AccessControl.check_call = check  # type: ignore[method-assign]
    server._health_message = message
    return doors.main


def body_validated_before_admission() -> Main:
    """A request with a wrong body takes no token from its caller's bucket."""

    async def count(*_: Any) -> None:
        pass

    AccessControl.count = count  # type: ignore[method-assign]
    return whole_system.main


BUGS: Final = {
    bug.__name__: bug for bug in (first_message_without_limit, body_validated_before_admission)
}

if __name__ == "__main__":
    run = BUGS[os.environ["PLANTED_BUG"]]()
    asyncio.run(run(json.loads(sys.argv[1]), Path(sys.argv[2])))
