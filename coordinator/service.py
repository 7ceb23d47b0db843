"""The coordinator: admits requests, runs their sessions, and keeps them in the store."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.drafting.drafter import Drafter
from outrider.errors import (
    BadRequest,
    Incompatible,
    NotFound,
    Overloaded,
    Unavailable,
)
from outrider.generation import ChatMessage, Event, GenerateRequest, Prompt, Started
from outrider.limits import SEED_BITS
from outrider.messages import (
    DraftAnswer,
    DraftItem,
    ReplicaDescription,
    VerifyAnswer,
    VerifyItem,
)
from outrider.sessions.state import Session
from outrider.sessions.store import NewSession, SessionRecord, SessionStore
from outrider.wire.link import Link

from .commits import Committer
from .completion import Completion, TextStream
from .mailbox import PostOffice
from .request import (
    GenerationParameters,
    ServedModel,
    check_request,
)
from .run import COMMIT_GRACE_S, SessionRun
from .sides import DraftSide, HeadWriter, Patience, TargetSide

DESCRIBE_TIMEOUT_S: Final = 10.0


class Text(Protocol):
    """The target's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        ...

    def stream(self) -> TextStream:
        """A fresh incremental detokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """What a coordinator decides where a request does not."""

    name: str
    """The owner's name in the session store; unique among coordinators."""
    served_model_name: str
    num_draft_tokens: int
    run_ahead_rounds: int
    deadline_ms: int
    max_sessions: int
    patience: Patience


class CoordinatorService:
    """Serves requests with one target and one draft replica; knows nothing of gRPC or Ray."""

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        store: SessionStore,
        target: Link[VerifyItem, VerifyAnswer],
        draft: Link[DraftItem, DraftAnswer] | None,
        stand_in: Drafter,
        text: Text | None,
        random_bits: Callable[[int], int] = secrets.randbits,
        random_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        """`stand_in` drafts while no draft replica answers. `random_bits(n)` gives n fresh random
        bits, for session ids; `random_seed()` the seed of a request that names none."""
        self._options = options
        self._store = store
        self._target = PostOffice(target, "target-0")
        self._draft = None if draft is None else PostOffice(draft, "draft-0")
        self._stand_in = stand_in
        self._text = text
        self._random_bits = random_bits
        self._random_seed = random_seed
        self._committer = Committer(store, options.name, lambda: random_bits(53) / 2**53)
        self._commit_task: asyncio.Task[None] | None = None
        self._running: dict[str, SessionRun] = {}
        self._num_admitted = 0
        self._background: set[asyncio.Task[None]] = set()
        self._model: ServedModel | None = None

    async def start(self) -> None:
        """Learns what the replicas run, and starts committing. Raises `Unavailable` where one
        does not answer, `Incompatible` where they do not fit together."""
        target = await self._target.link.describe(DESCRIBE_TIMEOUT_S)
        if self._draft is not None:
            check_compatible(target, await self._draft.link.describe(DESCRIBE_TIMEOUT_S))
        self._model = ServedModel(
            name=self._options.served_model_name,
            vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            eos_token_ids=target.eos_token_ids,
        )
        self._commit_task = asyncio.create_task(self._committer.run())

    @property
    def model(self) -> ServedModel:
        """What is served. Raises `Unavailable` before `start`."""
        if self._model is None:
            raise Unavailable("the coordinator is starting")
        return self._model

    @property
    def num_running(self) -> int:
        """Sessions that run now."""
        return len(self._running)

    async def generate(self, request: GenerateRequest, tenant: str = "") -> AsyncGenerator[Event]:
        """Runs a request from its check to its last event. Closing the iterator early cancels
        the session. Raises `BadRequest`, `NotFound` (another model), `Overloaded`,
        `DeadlineExceeded` (before the first token), `Unavailable`, and what the session's store
        ended it with (`StaleEpoch`, `DataLoss`)."""
        arrived = asyncio.get_running_loop().time()
        parameters = await self._check(request)
        if self._num_admitted >= self._options.max_sessions:
            raise Overloaded(f"{self._options.max_sessions} sessions run already; try again later")
        self._num_admitted += 1
        try:
            session = await self._open(tenant, parameters)
            run = self._begin(session, parameters, arrived)
            try:
                yield Started(session.session_id, self.model.name, parameters.seed, parameters.rule)
                async for event in run.events():
                    yield event
            finally:
                self._end(run)
        finally:
            self._num_admitted -= 1

    async def cancel(self, session_id: str, tenant: str = "") -> None:
        """Ends a running session as cancelled; a finished one is left as it is. Raises
        `NotFound`."""
        record = await self.session(session_id, tenant)
        run = self._running.get(record.session_id)
        if run is not None:
            run.cancel()

    async def session(self, session_id: str, tenant: str = "") -> SessionRecord:
        """What is stored of a session. Raises `NotFound`, for another tenant's session too."""
        record = await self._store.load(session_id)
        if record.tenant != tenant:
            raise NotFound(f"session_id: there is no session {session_id}")
        return record

    async def close(self) -> None:
        """Cancels what runs, commits what was decided, closes the links and the store."""
        for run in self._running.values():
            run.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=COMMIT_GRACE_S)
        await self._committer.close()
        if self._commit_task is not None:
            await asyncio.gather(self._commit_task, return_exceptions=True)
        await self._target.link.close()
        if self._draft is not None:
            await self._draft.link.close()
        await self._store.close()

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every running session, and no other, has a mailbox.
        For an idle coordinator: sessions that are just ending have one as well."""
        if not self._background:
            self._target.check_integrity(set(self._running))

    async def _check(self, request: GenerateRequest) -> GenerationParameters:
        if request.model not in ("", self.model.name):
            raise NotFound(f"model: {request.model!r} is not served; {self.model.name!r} is")
        if request.stop and self._text is None:
            raise BadRequest("stop", "the model has no tokenizer, so there is no text to stop at")
        prompt_field, prompt_ids = await self._encode(request.prompt)
        return check_request(
            request,
            prompt_ids,
            prompt_field,
            self.model,
            default_num_draft_tokens=self._options.num_draft_tokens,
            default_deadline_ms=self._options.deadline_ms,
            random_seed=self._random_seed(),
        )

    async def _encode(self, prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        """The prompt's token ids, and the name of the field that it came in. Tokenizes on a
        thread, because a long text takes seconds."""
        if prompt == "":
            return "text", ()
        if isinstance(prompt, str):
            tokenizer = self._tokenizer("text")
            return "text", tuple(await asyncio.to_thread(tokenizer.encode, prompt))
        turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
        if not turns:
            return "token_ids", tuple(token for token in prompt if isinstance(token, int))
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        tokenizer = self._tokenizer("chat")
        return "chat", tuple(await asyncio.to_thread(tokenizer.encode_chat, messages))

    def _tokenizer(self, field: str) -> Text:
        if self._text is None:
            raise BadRequest(field, "the model has no tokenizer; give token_ids")
        return self._text

    async def _open(self, tenant: str, parameters: GenerationParameters) -> Session:
        new = NewSession(
            session_id=f"{self._random_bits(128):032x}",
            tenant=tenant,
            owner=self._options.name,
            seed=parameters.seed,
            rule=parameters.rule,
            parameters=parameters.to_json(),
            prompt_ids=parameters.prompt_ids,
        )
        await self._store.open(new)
        return Session.opened(new)

    def _begin(
        self, session: Session, parameters: GenerationParameters, arrived: float
    ) -> SessionRun:
        options = self._options
        deadline = arrived + parameters.deadline_ms / 1e3
        heads = HeadWriter(session, parameters.sampling, deadline)
        draft: DraftSide | None = None
        if self._draft is not None and parameters.num_draft_tokens > 0:
            draft = DraftSide(self._draft, heads, options.patience, self._stand_in)
        completion = Completion(
            max_tokens=parameters.max_tokens,
            stop=parameters.stop,
            eos_token_ids=() if parameters.ignore_eos else self.model.eos_token_ids,
            text_stream=None if self._text is None else self._text.stream(),
        )
        run = SessionRun(
            session=session,
            parameters=parameters,
            completion=completion,
            target=TargetSide(self._target, heads, options.patience),
            draft=draft,
            committer=self._committer,
            run_ahead_rounds=options.run_ahead_rounds,
            arrived=arrived,
            deadline=deadline,
        )
        self._running[session.session_id] = run
        return run

    def _end(self, run: SessionRun) -> None:
        """The client has its last event, or has gone: frees what the session holds."""
        del self._running[run.session_id]
        task = asyncio.create_task(run.close())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def check_compatible(target: ReplicaDescription, draft: ReplicaDescription) -> None:
    """Raises `Incompatible` unless the draft's tokens mean what the target's mean. A draft that
    only copies tokens fits every target."""
    known = draft.tokenizer_fingerprint and target.tokenizer_fingerprint
    if known and draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise Incompatible(
            f"the draft {draft.model!r} has another tokenizer ({draft.tokenizer_fingerprint}) than "
            f"the target {target.model!r} ({target.tokenizer_fingerprint})"
        )
