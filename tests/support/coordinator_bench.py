"""A coordinator whose store and replicas run in the same process."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from coordinator.service import CoordinatorService
from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.errors import StoreUnavailable
from outrider.interfaces.request import Event, GenerateRequest, Tokens
from outrider.replica.drivers import InlineDriver
from outrider.telemetry.observer import UNOBSERVED, Observation
from target_service.service import TargetService
from tests.support.pages import check_service
from tests.support.rounds import SeverableLink, each_step
from tests.support.script_store import ScriptStore
from tests.support.toy_engine import ToyEngine

CONFIG = CoordinatorConfig(
    served_model_name="toy",
    num_draft_tokens=2,
    deadline_ms=60_000,
    length_control=False,
    resume_grace_ms=0,
    target_gone_ms=2_000,
)
STEP_S = 0.01
REQUEST = GenerateRequest((1, 2, 3), max_tokens=20, num_draft_tokens=2, seed=1)


class SlowText:
    """A tokenizer that blocks the calling thread for some seconds."""

    token_bytes_max = 4

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def encode(self, text: str, *_: object) -> list[int]:
        time.sleep(self._seconds)
        return [1] * (len(text) // 4 or 1)

    def stream(self, _: object = ()) -> Any:
        return self

    def push(self, token_id: int) -> str:
        return "x"

    def finish(self) -> str:
        return ""


class Letters:
    """A detokenizer whose token t is the t-th letter. It holds `lag` letters back."""

    def __init__(self, lag: int = 0) -> None:
        self._lag = lag
        self._pending = ""

    def push(self, token_id: int) -> str:
        self._pending += chr(97 + token_id)
        cut = max(0, len(self._pending) - self._lag)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def finish(self) -> str:
        text, self._pending = self._pending, ""
        return text


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [one for event in events if isinstance(event, Tokens) for one in event.token_ids]


def target_service(
    engine: Any = None, step_s: float | None = None, **options: Any
) -> TargetService:
    """A target with 8 seats. Its engine is a toy by default, and its steps take `STEP_S`."""
    driver = InlineDriver(each_step(STEP_S if step_s is None else step_s))
    return TargetService(engine or ToyEngine(), driver, max_num_seqs=8, **options)


def draft_service(engine: Any = None, step_s: float | None = None, **options: Any) -> DraftService:
    """A draft with 8 seats. By default its engine disagrees with the toy target's."""
    driver = InlineDriver(each_step(STEP_S if step_s is None else step_s))
    drafter = ModelDrafter(engine or ToyEngine(salt=2))
    return DraftService(drafter, driver, max_num_seqs=8, **options)


class Bench:
    def __init__(
        self,
        text: Any = None,
        store: ScriptStore | None = None,
        name: str = "c",
        target: TargetService | None = None,
        draft: DraftService | None = None,
        target_link: Any = None,
        drafts: Mapping[str, Any] | None = None,
        fallback: Any = None,
        observation: Observation = UNOBSERVED,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.target = target or target_service()
        self.draft = draft or draft_service()
        self.target_link = target_link or SeverableLink(self.target)
        self.store = store or ScriptStore(lambda: loop.time() * 1e3)
        self.service = CoordinatorService(
            replace(CONFIG, **{"max_sessions": 10, **settings}),
            name,
            store=self.store,
            targets={"t": self.target_link},
            drafts={"d": SeverableLink(self.draft)} if drafts is None else drafts,
            fallback=fallback or NgramDrafter(),
            text=text,
            observation=observation,
        )

    async def events(self, request: GenerateRequest = REQUEST) -> list[Event]:
        return [event async for event in self.service.streams.generate(request)]


def bench(**fields: Any) -> AbstractAsyncContextManager[Bench]:
    return running(Bench(**fields))


@asynccontextmanager
async def running(made: Any) -> AsyncIterator[Any]:
    """Starts the coordinator. At the end, checks that nothing is left over."""
    await made.service.start()
    yield made
    await made.service.close()
    made.service.check_integrity()
    for replica in (made.target, made.draft):
        await replica.close()
        check_service(replica)


def failing(call: Any, until: float) -> Any:
    """Wraps a call of a store: it fails until a point in time."""

    async def wrapped(*arguments: Any) -> Any:
        if asyncio.get_running_loop().time() < until:
            raise StoreUnavailable("away")
        return await call(*arguments)

    return wrapped
