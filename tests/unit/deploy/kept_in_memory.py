"""What a reconciler keeps, for tests without Ray."""

from __future__ import annotations

from deploy.fleet.saved_state import Topic
from outrider.errors import OutriderError


class KeptInMemory:
    """A `Kept`."""

    def __init__(self) -> None:
        self.texts: dict[Topic, str] = {}
        self.failure: OutriderError | None = None
        """What each call raises, while it is set."""

    async def load(self, topic: Topic) -> str:
        self._check()
        return self.texts.get(topic, "")

    async def save(self, topic: Topic, text: str) -> None:
        self._check()
        self.texts[topic] = text

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
