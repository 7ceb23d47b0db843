"""The load generator of `bench engine`: many sessions that decode plainly at one target.

Each session asks as a coordinator does for plain decoding: the target may run rounds ahead of the
answers, and is asked again, from the round reached, before its allowance ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from outrider.errors import Unavailable
from outrider.limits import RUN_AHEAD_ROUNDS_MAX
from outrider.messages import Resync, RoundHead, VerdictReply, VerifyAnswer, VerifyItem
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.tokens import TokenSequence
from outrider.wire.link import Link

DECODING_TIMEOUT_S: Final = 1_800.0
_GREEDY: Final = SamplingParams(temperature=0.0)
_EPOCH: Final = 1


class Load:
    """Sessions on one link, any number at a time."""

    def __init__(self, link: Link[VerifyItem, VerifyAnswer]) -> None:
        """Listens on `link`, which nobody else uses."""
        self._link = link
        self._sessions: dict[str, _Session] = {}
        self._num_begun = 0
        link.listen(self._hear, self._lost)

    async def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds from the first request to the last token when all `prompts` (token ids) are
        continued by `num_tokens` at the same time. Raises `Unavailable` where the target does not
        go on."""
        started = time.perf_counter()
        sessions = [self._begin(prompt, num_tokens) for prompt in prompts]
        try:
            async with asyncio.timeout(DECODING_TIMEOUT_S):
                await asyncio.gather(*(session.done for session in sessions))
        except TimeoutError:
            raise Unavailable(f"the target decodes for over {DECODING_TIMEOUT_S:g} s") from None
        finally:
            for session in sessions:
                del self._sessions[session.session_id]
                self._link.release(session.session_id, _EPOCH)
        return time.perf_counter() - started

    def _begin(self, prompt: Sequence[int], num_tokens: int) -> _Session:
        self._num_begun += 1
        session = _Session(f"{self._num_begun:032x}", prompt, num_tokens, self._link)
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


class _Session:
    """One prompt and what follows it."""

    def __init__(
        self,
        session_id: str,
        prompt: Sequence[int],
        num_tokens: int,
        link: Link[VerifyItem, VerifyAnswer],
    ) -> None:
        self.session_id = session_id
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tokens = TokenSequence(prompt)
        self._prompt_length = len(prompt)
        self._num_tokens = num_tokens
        self._link = link
        self._round = 0
        self._asked = 0
        """The round that was asked for last."""

    def hear(self, answer: VerifyAnswer) -> None:
        """A verdict brings the next token; one that is known already changes nothing."""
        if self.done.done() or answer.key.round != self._round:
            return
        if isinstance(answer, Resync):
            self.ask(answer.cached_length)
        elif isinstance(answer, VerdictReply):
            self._tokens.extend(answer.verdict.correction)
            self._round += 1
            if self._round == self._num_tokens:
                self.done.set_result(None)
            elif self._round - self._asked >= RUN_AHEAD_ROUNDS_MAX // 2:
                self.ask(len(self._tokens) - 1)
        else:
            self.fail(Unavailable(f"the target gave no verdict but {answer}"))

    def fail(self, error: Exception) -> None:
        """Nothing more will be heard."""
        if not self.done.done():
            self.done.set_exception(error)

    def ask(self, held: int) -> None:
        """Asks for the round that has been reached, of a target that holds `held` tokens."""
        self._asked = self._round
        head = RoundHead(
            session_id=self.session_id,
            tenant="",
            epoch=_EPOCH,
            round=self._round,
            base_length=held,
            prefix_digest=self._tokens.digest(held),
            append=self._tokens.since(held),
            prompt_length=self._prompt_length,
            rule=Rule.GREEDY,
            seed=0,
            sampling=_GREEDY,
            sampling_hash=_GREEDY.hash(),
        )
        left = self._num_tokens - self._round - 1
        self._link.send(VerifyItem(head, run_ahead=min(RUN_AHEAD_ROUNDS_MAX, left)))
