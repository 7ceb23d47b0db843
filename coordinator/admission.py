"""Decides which requests may start: how many run at a time, the turns of tenants, the checks of
requests and their prompts, and idempotency keys."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random

from coordinator.decoding.committer import Committer
from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.sessions import RequestKey
from coordinator.requests.validation import (
    GenerationParameters,
    PromptEncoder,
    check_fields,
    check_ids,
    resolve,
)
from coordinator.routing.replica_pool import TargetPool
from coordinator.served_model import ServedModel
from outrider import errors
from outrider.config.deployment import CoordinatorConfig
from outrider.foundation.fair_turns import FairQueue
from outrider.interfaces.request import GenerateRequest
from outrider.limits import SEED_BITS, STARTS_MAX
from outrider.sessions.store import SessionStore

DETOKENIZED_BYTES = 4
"""Bytes of text whose tokenizing takes about as long as the detokenizing of one token."""


class Admission:
    """Admits the requests of one coordinator. Counts a request until its answer has ended."""

    def __init__(
        self,
        config: CoordinatorConfig,
        name: str,
        model: ServedModel,
        store: SessionStore,
        targets: TargetPool,
        committer: Committer,
        meter: LoadMeter,
        random_bits: Callable[[int], int],
    ) -> None:
        """`random_bits(n)` returns n random bits, for the seeds of requests. If a seed is
        configured, the seeds of requests follow from it and the coordinator's `name` instead."""
        self._config = config
        self._model = model
        self._store = store
        self._targets = targets
        self._committer = committer
        self._meter = meter
        self._prompts = PromptEncoder(model.text)
        self._seed_bits = random_bits
        if config.seed is not None:
            # Each coordinator draws its own series, because it knows only the seeds of its own
            # sessions. The replacement of a coordinator has another name, so another series.
            self._seed_bits = Random(f"{config.seed} {name}").getrandbits  # noqa: S311
        self.num_admitted = 0
        self._starts = FairQueue(range(STARTS_MAX))
        """Places for new requests. A request of many sessions begins in several steps of the event
        loop, between which other tenants' requests continue."""

    @contextmanager
    def admitted(self, num_sessions: int = 1) -> Iterator[None]:
        """Counts a request that will run this number of sessions. Raises `Unavailable` if the
        coordinator is shutting down, and `Overloaded` if too many requests run, or if the event
        loop is late."""
        self.num_admitted += num_sessions
        try:
            if self._committer.closing:
                raise errors.Unavailable("this coordinator is shutting down")
            if self.num_admitted > self._config.max_sessions:  # Includes this request.
                raise errors.Overloaded(
                    f"{self._config.max_sessions} sessions run already (--max-sessions); try again "
                    "later",
                    limit="max_sessions",
                    of_server=True,
                )
            self._meter.check()
            yield
        finally:
            self.num_admitted -= num_sessions

    async def take_turn(self, request: GenerateRequest, tenant: str) -> None:
        """Waits for the tenant's turn, and checks the request's fields. Raises `BadRequest`, and
        `NotFound` if the request names another model."""
        async with self._starts.turn(tenant):
            self.check(request)
            await asyncio.sleep(0)

    def check(self, request: GenerateRequest) -> None:
        """Raises the errors of `take_turn`."""
        served = self._model.description
        if request.model not in ("", served.model):
            raise errors.NotFound(
                f"model {request.model[:256]!r} does not exist; this server serves {served.model!r}"
            )
        if request.stop and self._model.text is None:
            raise errors.BadRequest(
                "stop", "the model has no tokenizer, so there is no text to search"
            )
        check_fields(request, served)

    async def resolve(self, request: GenerateRequest, tenant: str) -> GenerationParameters:
        """Tokenizes the prompt of a checked request, and fills in all defaults. Waits for a target
        if none is there but one is expected. Raises `BadRequest`, `Overloaded` if too many prompts
        wait, and `Unavailable` if there is no target."""
        tokens_max = self._model.description.max_model_len
        field, prompt_ids = await self._prompts.encode(request, tokens_max, tenant)
        if request.constraint is not None:
            ends = self._model.description.eos_token_ids
            await self._prompts.check_constraint(request.constraint, ends, tenant)
        # The session's parameters name the target's weights, so a target must be known.
        target = await self._targets.wait_for_one(self._config)
        served, seed = self._model.description, self._seed_bits(SEED_BITS)
        parameters = resolve(request, field, prompt_ids, served, self._config, seed)
        return replace(parameters, weights=target.weights)

    async def known(self, key: RequestKey) -> RequestKey:
        """Returns the key, with its session's id if the key has a session. Raises `BadRequest` if
        the key was used for a different request."""
        return key.with_session_of(await self._store.claim_key(key.name))

    async def tokenize(
        self, request: GenerateRequest, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """Returns the tokens of a request's prompt, which may be longer than `max_model_len`.
        Raises `BadRequest`, `NotFound` and `Overloaded`."""
        with self.admitted():
            self.check(request)
            tokens_max = self._model.description.max_model_len
            _, token_ids = await self._prompts.encode(
                request, tokens_max, tenant, add_special_tokens=add_special_tokens
            )
        return token_ids

    async def detokenize(self, token_ids: Sequence[int], model: str = "", tenant: str = "") -> str:
        """Returns the text of tokens, including special tokens. Raises the errors of `tokenize`."""
        with self.admitted():
            self.check(GenerateRequest("", model))
            if self._model.text is None:
                raise errors.BadRequest(
                    "tokens", "the model has no tokenizer, so tokens have no text"
                )
            check_ids(token_ids, "tokens", self._model.description.vocab_size)
            decode = partial(self._model.text.decode, token_ids, True)
            size = DETOKENIZED_BYTES * len(token_ids)
            return await self._prompts.threads.run(tenant, decode, size)

    async def close(self) -> None:
        """Does not wait for running calls of the tokenizer."""
        await self._prompts.close()
