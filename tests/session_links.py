"""Replicas that answer as a script says, and a session's clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.routing.draft_client import DraftClient
from coordinator.routing.replica_pool import ReplicaPool, SessionRoute
from coordinator.routing.target_client import HeaderWriter, TargetClient, Timeouts
from outrider.clock import run_virtually
from outrider.errors import (
    Unavailable,
)
from outrider.messages import (
    ProposalReply,
    Refused,
    ReplicaDescription,
    VerdictReply,
)
from outrider.sessions.state import Session
from outrider.sessions.store import SessionRecord
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import (
    Proposal,
    SealedProposal,
)
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import SILENT, RequestObserver
from outrider.transport.link import LinkBytes

PATIENCE = Timeouts(
    target_answer_s=1.0,
    target_gone_s=4.0,
    target_retry_s=0.1,
    draft_answer_s=0.5,
    draft_retry_s=2.0,
)
PROMPT = (5, 6, 7, 8)


TOY = ReplicaDescription("toy", "w", "", 99, "float32", 0, (), 8)


class ScriptedLink:
    """A link whose replica answers as a script says, one entry for each item sent."""

    def __init__(self, *script: Callable[[Any], Any] | Exception | None) -> None:
        self.script = list(script)
        self.sent: list[Any] = []
        self.released: list[str] = []
        self.description = TOY
        self.away_until = 0.0
        self.is_closed = False
        self.num_bytes = LinkBytes()

    def listen(self, on_answer: Callable[[Any], None], on_lost: Callable[[Any], None]) -> None:
        self.on_answer, self.on_lost = on_answer, on_lost

    def send(self, item: Any) -> None:
        self.sent.append(item)
        answer = self.script.pop(0) if self.script else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            asyncio.get_running_loop().call_soon(lambda: self.on_answer(answer(item)))

    def release(self, session_id: str, epoch: int) -> None:
        self.released.append(session_id)

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        if self.away_until > asyncio.get_running_loop().time():
            raise Unavailable("away")
        return self.description

    async def close(self) -> None:
        self.is_closed = True


class SessionLookup:
    """Always proposes token 1."""

    def propose(self, num_draft_tokens: int, noise: RoundNoise) -> SealedProposal:
        return SealedProposal.of(Proposal((1,), (None,)))

    def close(self) -> None:
        pass


def verdict(item: Any, correction: int = 9) -> VerdictReply:
    num = len(item.proposal)
    return VerdictReply(
        item.head.key,
        Verdict((1.0,) * num, (correction,) * (num + 1)),
        cached_length=item.head.committed_length + num,
    )


def proposal(item: Any) -> ProposalReply:
    tokens = tuple(range(item.num_draft_tokens))
    length = item.head.committed_length
    return ProposalReply(item.head.key, SealedProposal(tokens), length, length + len(tokens))


def refuse(error: Any) -> Callable[[Any], Refused]:
    return lambda item: Refused(item.head.key, error.grpc_code, error.message)


def session(prompt: tuple[int, ...] = PROMPT, rule: Rule = Rule.GREEDY) -> Session:
    return Session(SessionRecord.new("0" * 32, "", "me", 3, rule, "{}", prompt))


def heads(of: Session, observer: RequestObserver = SILENT) -> HeaderWriter:
    return HeaderWriter(of, SamplingParams(temperature=0.0), 1000.0, observer)


_watching: set[Any] = set()


def berth(*links: ScriptedLink, weights: str = "") -> SessionRoute[Any, Any]:
    """A place with the first of some replicas, named r0, r1 ...; the others are there to go to."""
    pool: ReplicaPool[Any, Any] = ReplicaPool("target")
    for index, link in enumerate(links):
        pool.admit(f"r{index}", link, link.description)
    _watching.clear()
    _watching.add(asyncio.ensure_future(pool.watch()))  # Until the test's loop ends.
    return SessionRoute(pool, "0" * 32, 1, b"key", preferred="r0", weights=weights)


def with_target(link: ScriptedLink, test: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        one = session()
        return await test(TargetClient(berth(link), heads(one), PATIENCE), one)

    return run_virtually(main())


def with_draft(link: ScriptedLink, test: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        one = session()
        return await test(DraftClient(berth(link), heads(one), PATIENCE, SessionLookup()), one)

    return run_virtually(main())


NOISE = RoundNoise(3, Rule.GREEDY, len(PROMPT))


def described(description: ReplicaDescription = TOY, away_until: float = 0.0) -> ScriptedLink:
    link = ScriptedLink()
    link.description, link.away_until = description, away_until
    return link
