"""Messages for tests of the services, and a minimal coordinator that runs rounds."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any, Self

from draft_service.feature_drafter import FeatureDrafter
from draft_service.model_drafter import ModelDrafter, ParallelDrafter
from draft_service.service import DraftService
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.errors import LinkLost, check
from outrider.foundation.tokens import TokenSequence
from outrider.grammar.constraint import Constraint
from outrider.interfaces import messages
from outrider.interfaces.engine import take_stated_seconds
from outrider.replica.drivers import InlineDriver
from outrider.replica.step_loop import Worker
from outrider.replica.step_request import AnswerSender, StepRequest
from outrider.speculation.accept_reject import Outcome, decide
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from outrider.transport.codec import Codec
from outrider.transport.link import Link, MemoryLink
from target_service.service import TargetService
from tests.support.pages import check_pages

GREEDY = SamplingParams(temperature=0.0)
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.8, repetition_penalty=1.4)
RULES = [
    (Rule.TOKEN, SamplingParams()),
    (Rule.BLOCK, SamplingParams(top_p=0.9)),
    (Rule.COUPLED, SamplingParams()),
    (Rule.GREEDY, GREEDY),
    (Rule.TOKEN, PENALISED),
    (Rule.COUPLED, PENALISED),
]
"""Each rule, and sampling parameters that count tokens."""
PATIENCE_S = 20.0  # timeout that is only reached if an answer is lost


def session_name(number: int) -> str:
    return f"{number:032x}"


def item_message(codec: Codec[Any, Any], item: messages.RoundItem, hashed: bool = False) -> Any:
    return codec.request.FromString(codec.item_frame(item, hashed)).items[0]


def make_head(
    tokens: Sequence[int],
    base_length: int = 0,
    *,
    session: int = 1,
    round_index: int = 0,
    rule: Rule = Rule.GREEDY,
    sampling: SamplingParams | None = None,
    constraint: Constraint | None = None,
    **fields: Any,
) -> messages.RoundHead:
    """A head that refers to the first `base_length` tokens and contains the rest."""
    others = {"tenant": "", "epoch": 1, "seed": 7, "prompt_length": 1, "deadline_ms": 0}
    if sampling is None:
        sampling = GREEDY if rule is Rule.GREEDY else SamplingParams()
    sequence = TokenSequence(tokens)
    return messages.RoundHead(
        session_id=session_name(session),
        round=round_index,
        base_length=base_length,
        prefix_digest=sequence.digest(base_length),
        append=sequence.since(base_length),
        rule=rule,
        sampling=sampling,
        sampling_hash=sampling.hash(),
        constraint=constraint,
        constraint_hash=b"" if constraint is None else constraint.digest(),
        **(others | fields),
    )


def step_request(
    item: Any, draft_deadline: DraftDeadline = NO_DEADLINE, grammar: Any = None
) -> StepRequest[Any]:
    request = StepRequest(item, AnswerSender(lambda answers: None), 0.0, math.inf, grammar)
    request.draft_deadline = draft_deadline
    return request


def run_step(
    worker: Worker[Any, Any], items: Sequence[messages.RoundItem | StepRequest[Any]]
) -> list[Any]:
    """The answers to items of one step."""
    requests = [one if isinstance(one, StepRequest) else step_request(one) for one in items]
    return [*worker.launch(worker.prepare(requests))()]


def each_step(seconds: float) -> Callable[[], float]:
    """For an `InlineDriver`: every step takes this time, all of it between launch and end."""
    return cycle((seconds, 0.0)).__next__


class SeverableLink(MemoryLink):
    """A stream in one process that tests can break."""

    _unreachable: Exception | None = None

    def trouble(self) -> str:
        return super().trouble() or ("" if self._unreachable is None else str(self._unreachable))

    def sever(self, error: Exception, *, reachable: bool = True) -> None:
        """Breaks the stream and loses messages under way. The listener hears it in the event loop's
        next turn. Until `restore`, `send` raises as for an unreachable replica."""
        self._unreachable = None if reachable else error
        was_open = self._connection is not None
        self._disconnect()
        if was_open and self._has_listener:
            asyncio.get_running_loop().call_soon(self._tell_lost, error)

    def restore(self, service: Any = None) -> None:
        """Makes the replica reachable again. `service` is its service after a restart."""
        if service is not None and service is not self._service:
            check(self._connection is None, "sever the stream to the old service first")
            self._service = service
        self._unreachable = None

    def _tell_lost(self, error: Exception) -> None:
        if not self._closed:
            self._on_lost(error if isinstance(error, LinkLost) else LinkLost(str(error)))


class Listener:
    """Collects the answers and losses of a link, and waits for them."""

    def __init__(self, link: Link) -> None:
        self.answers: list[Any] = []
        self.lost: list[Exception] = []
        self._news = asyncio.Event()
        link.listen(self._heard, self._broken)

    def _heard(self, answer: Any) -> None:
        self.answers.append(answer)
        self._news.set()

    def _broken(self, error: Exception) -> None:
        self.lost.append(error)
        self._news.set()

    async def wait(self, num_answers: int = 0, num_lost: int = 0) -> list[Any]:
        """All answers, once there are this many answers and losses."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < num_answers or len(self.lost) < num_lost:
                self._news.clear()
                await self._news.wait()
        return self.answers


async def ask(link: Link, listener: Listener, item: Any) -> Any:
    before = len(listener.answers)
    link.send(item)
    return (await listener.wait(before + 1))[before]


def drafter_over(engine: Any, parallel_token: int | None = None) -> Any:
    """A drafter over an engine, in one pass with a parallel token, or the given one."""
    if parallel_token is not None:
        return ParallelDrafter(engine, parallel_token)
    return engine if isinstance(engine, FeatureDrafter) else ModelDrafter(engine)


class Replica:
    """A target or a draft over an engine in this process, and a link to it."""

    def __init__(self, role: str, engine: Any, step_s: float | None = None, **options: Any) -> None:
        make: Any = TargetService
        served = engine
        if role == "draft":
            make = DraftService
            served = drafter_over(engine, options.pop("parallel_token", None))
            engine = served.engine
        seconds = partial(take_stated_seconds, engine) if step_s is None else each_step(step_s)
        self.engine = engine
        driver = options.pop("driver", None) or InlineDriver(seconds)
        self.service: Any = make(served, driver, **({"max_num_seqs": 64} | options))
        self.link, self.listener = self.connect()

    def connect(self) -> tuple[SeverableLink, Listener]:
        link = SeverableLink(self.service)
        return link, Listener(link)

    async def ask(self, item: Any) -> Any:
        return await ask(self.link, self.listener, item)

    async def settle(self) -> list[Any]:
        """All answers, once no item waits, runs or is under way."""
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(5):  # Messages and answers take some turns of the event loop.
                await asyncio.sleep(0)
                await self.service.drain()
        return list(self.listener.answers)

    async def send(self, *items: Any) -> list[Any]:
        """The answers that arrive until the replica has nothing left to do."""
        before = len(self.listener.answers)
        for item in items:
            self.link.send(item)
        return (await self.settle())[before:]

    async def close(self) -> None:
        """Checks that the replica holds nothing any more."""
        check_pages(self.engine)
        await self.service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()


def outcome_of(
    reply: messages.VerdictReply, proposal: EncodedProposal, rule: Rule, seed: int, length: int
) -> Outcome:
    """The coordinator's decision after this many committed tokens."""
    uniforms = RoundNoise(seed, rule, length).accept_uniforms(len(proposal))
    return decide(reply.verdict, proposal.token_ids, rule, uniforms)


def proposal_of_head(
    logits_after: Callable[[Sequence[int]], Any],
    tokens: Sequence[int],
    prompt_length: int,
    noise: RoundNoise,
    sampling: SamplingParams,
    num: int,
    head_ids: Sequence[int],
) -> Proposal:
    """Draws one token after another from logits [1, N] over the token ids `head_ids`."""
    text, q = [*tokens], []
    noise = replace(noise, prefix_digest=TokenSequence(tokens).digest())
    for depth in range(num):
        history = TokenHistory(text[:prompt_length], text[prompt_length:])
        [(token_id, distribution)], _ = draw_from_logits(
            logits_after(text),
            [sampling],
            [noise],
            [depth],
            [history],
            DraftVocabulary.of(head_ids),
        )
        text.append(token_id)
        q.append(distribution)
    return Proposal(tuple(text[len(tokens) :]), tuple(q) if noise.rule.needs_q else ())


@dataclass
class Player:
    """Runs the rounds of one session against a target and, optionally, a draft."""

    prompt: tuple[int, ...]
    rule: Rule
    sampling: SamplingParams
    target: tuple[Link, Listener]
    draft: tuple[Link, Listener] | None = None
    session: int = 1
    epoch: int = 1
    seed: int = 7
    constraint: Constraint | None = None
    round_index: int = 0
    held: dict[str, int] = field(default_factory=lambda: {"target": 0, "draft": 0})
    tokens: list[int] = field(default_factory=list)
    num_accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def _head(self, side: str) -> messages.RoundHead:
        return make_head(
            self.tokens,
            min(self.held[side], len(self.tokens) - 1),
            session=self.session,
            epoch=self.epoch,
            round_index=self.round_index,
            rule=self.rule,
            sampling=self.sampling,
            seed=self.seed,
            prompt_length=len(self.prompt),
            constraint=self.constraint,
        )

    async def play(self, num_draft_tokens: int) -> None:
        proposal: EncodedProposal = EMPTY_ENCODED_PROPOSAL
        if self.draft is not None and num_draft_tokens > 0:
            item = messages.DraftItem(self._head("draft"), num_draft_tokens)
            drafted = await ask(*self.draft, item)
            assert isinstance(drafted, messages.ProposalReply), drafted
            proposal = drafted.proposal
            self.held["draft"] = drafted.cached_length
        reply = await ask(*self.target, messages.VerifyItem(self._head("target"), proposal))
        assert isinstance(reply, messages.VerdictReply), reply
        outcome = outcome_of(reply, proposal, self.rule, self.seed, len(self.tokens))
        before = len(self.tokens)
        accepted_end = before + outcome.num_accepted
        self.held = {
            "target": min(accepted_end, reply.cached_length),
            "draft": min(accepted_end, self.held["draft"]),
        }
        self.tokens.extend(outcome.token_ids)
        self.num_accepted += outcome.num_accepted
        self.round_index += 1


class Pair:
    def __init__(self, target: Replica, draft: Replica) -> None:
        self.target, self.draft = target, draft

    def player(self, *known: Any, **more: Any) -> Player:
        links = [(one.link, one.listener) for one in (self.target, self.draft)]
        return Player(*known, *links, **more)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        for one in (self.target, self.draft):
            await one.__aexit__(*error)
