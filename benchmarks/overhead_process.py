"""The processes that `bench overhead` starts; `overhead_roles` is what runs there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .answering import AnsweringProcess

ANSWER_TIMEOUT_S: Final = 60.0


class RoleProcess(AnsweringProcess):
    """One role, ready when it listens."""

    def __init__(self, role: str, setup: Mapping[str, object]) -> None:
        """`role` and `setup` are what `overhead_roles` knows."""
        name = f"the {role} process"
        super().__init__("benchmarks.overhead_roles", name, {"role": role, **setup})

    @property
    def address(self) -> str:
        """HOST:PORT of its gRPC server, once started."""
        return str(self.ready["address"])

    async def seen(self) -> dict[str, Any]:
        """What it has seen so far. Raises as `ask` does."""
        return await self.ask({}, ANSWER_TIMEOUT_S)
