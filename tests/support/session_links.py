"""Scripted replicas, and the clients with which a session calls them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.draft_length.policy import RoundLength
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.draft_client import DraftClient
from coordinator.routing.replica_pool import ReplicaPool, SessionContext
from coordinator.routing.target_client import TargetClient
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import Guess, LookupDrafter
from outrider.errors import Unavailable
from outrider.foundation.tokens import digest_after
from outrider.interfaces.messages import (
    Prefix,
    ProposalReply,
    Refused,
    ReplicaDescription,
    VerdictReply,
    VerifyItem,
)
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState, Counters, SessionRecord
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import SILENT, RequestObserver

CONFIG = CoordinatorConfig(target_gone_ms=4_000, target_start_ms=20_000, draft_timeout_ms=500)
ANSWER_S, GONE_S, START_S = 0.5, 4.0, 20.0
"""With these settings: timeout of a draft, and waits for a target that is gone or starts."""
PROMPT = (5, 6, 7, 8)
TOY = ReplicaDescription("toy", "w", "", 99, "float32", 0, (), 8)


class ScriptedLink:
    """A link whose replica answers each item with the next entry of a script."""

    def __init__(self, *script: Callable[[Any], Any] | Exception | None) -> None:
        self.script = list(script)
        self.sent: list[Any] = []
        self.released: list[str] = []
        self.learned: list[Prefix | None] = []
        self.description = TOY
        self.away_until = 0.0
        self.is_closed = False
        self.num_bytes = Counter[str]()

    def listen(self, on_answer: Callable[[Any], None], on_lost: Callable[[Any], None]) -> None:
        self.on_answer, self.on_lost = on_answer, on_lost

    def send(self, item: Any) -> None:
        self.sent.append(item)
        answer = self.script.pop(0) if self.script else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            asyncio.get_running_loop().call_soon(lambda: self.on_answer(answer(item)))

    def release(self, session_id: str, epoch: int, learned: Prefix | None = None) -> None:
        self.released.append(session_id)
        self.learned.append(learned)

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        if self.away_until > asyncio.get_running_loop().time():
            raise Unavailable("away")
        return self.description

    async def close(self) -> None:
        self.is_closed = True


class OneToken(LookupDrafter):
    """A look-up that always proposes token 1."""

    def guess(self, request: DraftRequest) -> Guess:
        return Guess((1,))


def verdict(item: Any, correction: int = 9) -> VerdictReply:
    num = len(item.proposal)
    found = Verdict((1.0,) * num, (correction,) * (num + 1))
    head = item.head
    return VerdictReply(
        head.key,
        found,
        head.committed_length + num,
        committed_length=head.committed_length,
        prefix_digest=head.committed_digest,
        proposal_digest=digest_after(head.committed_digest, item.proposal.token_ids),
    )


def later(item: VerifyItem, round_index: int, *tokens: int) -> VerifyItem:
    """The item of a later round, after these further tokens."""
    head = replace(item.head, round=round_index, append=(*item.head.append, *tokens))
    return replace(item, head=head)


def proposal(item: Any) -> ProposalReply:
    tokens = tuple(range(item.num_draft_tokens))
    length = item.head.committed_length
    return ProposalReply(item.head.key, EncodedProposal(tokens), length, length + len(tokens))


def refuse(error: Any) -> Callable[[Any], Refused]:
    return lambda item: Refused(item.head.key, error.grpc_code, error.message)


def session(
    prompt: tuple[int, ...] = PROMPT, rule: Rule = Rule.GREEDY, name: str = "0", seed: int = 3
) -> Session:
    return Session(SessionRecord.new(name * (32 // len(name)), "", "me", seed, rule, "{}", prompt))


def context_of(of: Session, observer: RequestObserver = SILENT, **fields: Any) -> SessionContext:
    record = of.record
    is_greedy = record.rule is Rule.GREEDY
    given = {
        "prompt": of.tokens.since(0, of.prompt_length),
        "sampling": SamplingParams(temperature=0.0) if is_greedy else SamplingParams(),
        "max_tokens": 99,
        "stop": (),
        "ignore_eos": False,
        "seed": record.seed,
        "rule": record.rule,
        "num_draft_tokens": 8,
        "deadline_ms": 1_000_000,
        "logprobs": None,
        "include_rounds": False,
    }
    return SessionContext(of, GenerationParameters(**(given | fields)), 1e6, observer)


_watching: set[Any] = set()


def pool_of(*links: ScriptedLink, role: Any = "target") -> ReplicaPool:
    """A pool of replicas r0, r1, ... that watches unreachable replicas."""
    pool = ReplicaPool(role)
    for index, link in enumerate(links):
        pool.admit(f"r{index}", link, link.description)
    _watching.clear()
    _watching.add(asyncio.ensure_future(pool.watch()))  # The tasks end with the test's event loop.
    return pool


def target_of(
    *links: ScriptedLink, one: Session | None = None, pool: Any = None, **fields: Any
) -> TargetClient:
    """A session's target client, which begins with the first of these replicas."""
    one = one or session()
    one.target = CacheState("r0", 0)
    return TargetClient(pool or pool_of(*links), context_of(one, **fields), CONFIG)


async def play(target: TargetClient, one: Session, index: int, run_ahead: int = 0) -> VerdictReply:
    """A round without a proposal, which commits token 9."""
    reply = await target.verify(index, EMPTY_ENCODED_PROPOSAL, run_ahead)
    target.settle(reply, one.length)
    one.decide((9,), Counters())
    return reply


def draft_of(
    *links: ScriptedLink,
    one: Session | None = None,
    pool: Any = None,
    config: CoordinatorConfig = CONFIG,
    lookup: Any = None,
    **fields: Any,
) -> DraftClient:
    """A session's draft client, which begins with the first of these replicas."""
    one = one or session()
    one.draft = CacheState("r0", 0)
    pool, context = pool or pool_of(*links, role="draft"), context_of(one, **fields)
    return DraftClient(pool, context, lookup or OneToken(lambda _: None), config)


def asked(num_draft_tokens: int, **fields: Any) -> RoundLength:
    return RoundLength(num_draft_tokens, 0, **fields)


NOISE = RoundNoise(3, Rule.GREEDY, len(PROMPT))


def described(description: ReplicaDescription = TOY, away_until: float = 0.0) -> ScriptedLink:
    link = ScriptedLink()
    link.description, link.away_until = description, away_until
    return link
