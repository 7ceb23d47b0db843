"""The load generator of `bench engine`: many sessions that decode plainly at one target.

Each session asks as a coordinator does for plain decoding: the target may run rounds ahead of the
answers, and is asked again, from the round reached, before its allowance ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from outrider.errors import Unavailable, check
from outrider.limits import RUN_AHEAD_ROUNDS_MAX
from outrider.messages import Resync, RoundHead, VerdictReply, VerifyAnswer, VerifyItem
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokens import TokenSequence
from outrider.transport.link import Link

DECODING_TIMEOUT_S: Final = 1_800.0
_GREEDY: Final = SamplingParams(temperature=0.0)
_EPOCH: Final = 1
_STRIDE: Final = 7
"""Tokens by which every measurement's prompts are shifted, so that none begins like an earlier one
and finds it cached."""


class Prompts:
    """Token ids of real text, other ones at each call."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = token_ids
        self._start = 0

    def take(self, number: int, length: int) -> list[list[int]]:
        """`number` prompts of `length` tokens that share no beginning with each other or with
        earlier ones."""
        self._start += _STRIDE
        size = len(self._ids)
        starts = [self._start + index * size // number for index in range(number)]
        return [[self._ids[(start + place) % size] for place in range(length)] for start in starts]


class Load:
    """Sessions on one link, any number at a time."""

    def __init__(self, link: Link[VerifyItem, VerifyAnswer]) -> None:
        """Listens on `link`, which nobody else uses."""
        self._link = link
        self._sessions: dict[str, LoadSession] = {}
        self._num_begun = 0
        link.listen(self._hear, self._lost)

    async def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds from the first request to the last token when all `prompts` (token ids) are
        continued by `num_tokens` at the same time. Raises `Unavailable` where the target does not
        go on."""
        started = asyncio.get_running_loop().time()
        async with self.running(prompts, num_tokens) as sessions:
            await asyncio.gather(*(session.reached(num_tokens) for session in sessions))
            return max(session.arrivals[-1] for session in sessions) - started

    @asynccontextmanager
    async def running(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> AsyncGenerator[list[LoadSession]]:
        """Sessions that continue `prompts` by up to `num_tokens` each, as long as this lasts, and
        are released then. Raises `Unavailable` where that takes too long."""
        sessions = [self._begin(prompt, num_tokens) for prompt in prompts]
        try:
            async with asyncio.timeout(DECODING_TIMEOUT_S):
                yield sessions
        except TimeoutError:
            raise Unavailable(f"the target decodes for over {DECODING_TIMEOUT_S:g} s") from None
        finally:
            for session in sessions:
                del self._sessions[session.session_id]
                self._link.release(session.session_id, _EPOCH)

    def _begin(self, prompt: Sequence[int], num_tokens: int) -> LoadSession:
        self._num_begun += 1
        session = LoadSession(f"{self._num_begun:032x}", prompt, num_tokens, self._link)
        self._sessions[session.session_id] = session
        session.ask(0)
        return session

    def _hear(self, answer: VerifyAnswer) -> None:
        session = self._sessions.get(answer.key.session_id)
        if session is not None:
            session.hear(answer)

    def _lost(self, error: Exception) -> None:
        for session in self._sessions.values():
            session.fail(error)


class LoadSession:
    """One prompt and what follows it."""

    def __init__(
        self,
        session_id: str,
        prompt: Sequence[int],
        num_tokens: int,
        link: Link[VerifyItem, VerifyAnswer],
    ) -> None:
        self.session_id = session_id
        self.num_tokens = num_tokens
        """After which it ends."""
        self.arrivals: list[float] = []
        """When each token came, on the loop's clock: those of one message together."""
        self._now: float | None = None
        """While a message is heard, when it came."""
        self._tokens = TokenSequence(prompt)
        self._prompt_length = len(prompt)
        self._link = link
        self._asked = 0
        """The round that was asked for last."""
        self._goals: dict[int, asyncio.Future[None]] = {}
        """By number of tokens."""
        self._error: Exception | None = None

    def reached(self, num_tokens: int) -> asyncio.Future[None]:
        """Is done when so many tokens have come; fails where no more will."""
        check(num_tokens <= self.num_tokens, f"it ends after {self.num_tokens} tokens")
        goal = self._goals.get(num_tokens)
        if goal is None:
            goal = self._goals[num_tokens] = asyncio.get_running_loop().create_future()
            if len(self.arrivals) >= num_tokens:
                goal.set_result(None)
            elif self._error is not None:
                goal.set_exception(self._error)
        return goal

    def hear(self, answer: VerifyAnswer) -> None:
        """Takes one answer; one to an earlier round is repeated and means nothing."""
        if answer.key.round != len(self.arrivals):
            return
        if isinstance(answer, Resync):
            self.ask(answer.cached_length)
        elif isinstance(answer, VerdictReply):
            self._tokens.extend(answer.verdict.correction)
            self.arrivals.append(self._message_time())
            num_tokens = len(self.arrivals)
            goal = self._goals.get(num_tokens)
            if goal is not None and not goal.done():
                goal.set_result(None)
            goes_on = num_tokens < self.num_tokens
            if goes_on and num_tokens - self._asked >= RUN_AHEAD_ROUNDS_MAX // 2:
                self.ask(len(self._tokens) - 1)
        else:
            self.fail(Unavailable(f"the target gave no verdict but {answer}"))

    def _message_time(self) -> float:
        """When the message came that is heard now. Its answers are heard in one turn of the
        loop."""
        if self._now is None:
            loop = asyncio.get_running_loop()
            self._now = loop.time()
            loop.call_soon(self._end_message)
        return self._now

    def _end_message(self) -> None:
        self._now = None

    def fail(self, error: Exception) -> None:
        """Nothing more will be heard."""
        self._error = error
        for goal in self._goals.values():
            if not goal.done():
                goal.set_exception(error)

    def ask(self, held: int) -> None:
        """Asks for the round that has been reached, of a target that holds `held` tokens."""
        self._asked = len(self.arrivals)
        head = RoundHead(
            session_id=self.session_id,
            tenant="",
            epoch=_EPOCH,
            round=self._asked,
            base_length=held,
            prefix_digest=self._tokens.digest(held),
            append=self._tokens.since(held),
            prompt_length=self._prompt_length,
            rule=Rule.GREEDY,
            seed=0,
            sampling=_GREEDY,
            sampling_hash=_GREEDY.hash(),
        )
        left = self.num_tokens - self._asked - 1
        self._link.send(VerifyItem(head, run_ahead=min(RUN_AHEAD_ROUNDS_MAX, left)))
