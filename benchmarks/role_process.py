"""A process of ours that plays one role of a module and serves while it does (`roles.play`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .answering import AnsweringProcess

ANSWER_TIMEOUT_S: Final = 60.0


class RoleProcess(AnsweringProcess):
    """One role, ready when it listens."""

    def __init__(self, module: str, role: str, setup: Mapping[str, object]) -> None:
        """`role` and `setup` are what `benchmarks.<module>` knows."""
        super().__init__(f"benchmarks.{module}", f"the {role} process", {"role": role, **setup})

    @property
    def address(self) -> str:
        """HOST:PORT of its server, once started."""
        return str(self.ready["address"])

    async def seen(self) -> dict[str, Any]:
        """What it has seen so far. Raises as `ask` does."""
        return await self.ask({}, ANSWER_TIMEOUT_S)
