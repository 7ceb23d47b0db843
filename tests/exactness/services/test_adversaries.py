"""Adversaries decide what may vary: how long a draw takes, which message is lost, which answers are
in the history. They know tokens and random numbers, so that a fault changes the law by much.

The target tosses a fair coin for each token. Coordinator, draft and target are the real ones, in
one process on a virtual clock. Each test counts 0 and 1 among tokens that its fault would change.
It fails for fair coins with a probability of at most 1e-6. It finds a share that is wrong by
`detects` with a probability of at least 0.99, and asserts this."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.config.deployment import DraftConfig
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter, NgramDrafter
from outrider.drafters.suffix import SuffixConfig, SuffixDrafter
from outrider.errors import Incompatible
from outrider.grammar.token_mask import TokenMask
from outrider.interfaces.engine import SequenceStep, take_stated_seconds
from outrider.interfaces.messages import RoundHead, VerifyItem
from outrider.interfaces.request import GenerateRequest, RoundReport, Tokens
from outrider.models.draft_head import LoadedDraftHead
from outrider.replica.drivers import InlineDriver
from outrider.speculation.proposal import EncodedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service.lookups import TargetLookups
from target_service.service import TargetService
from target_service.verifier import SelfDrafter
from tests.exactness.law import FALSE_ALARM
from tests.support.coordinator_bench import Bench, running
from tests.support.rounds import Replica, SeverableLink, make_head, outcome_of
from tests.support.toy_engine import ToyEngine
from tests.support.verdict_laws import drafted

pytestmark = pytest.mark.virtual

RATIO_RULES = [Rule.TOKEN, Rule.BLOCK]
FAIR, POWER = 0.5, 0.99
PROMPT = (0, 1, 0, 0, 1)
TARGET_S, PASS_S, LONG_S = 1.0, 0.002, 0.5
LIMIT_MS = 100
"""Time limit of drafting. A pass of `LONG_S` exceeds it, and is over before the next round."""


def check_fair(coins: Sequence[int], detects: float, alpha: float = FALSE_ALARM) -> None:
    bound = binom.isf(alpha / 2, len(coins), FAIR)
    assert binom.sf(bound, len(coins), FAIR + detects) >= POWER
    found = f"{sum(coins)} of {len(coins)} coins are 1"
    assert binomtest(sum(coins), len(coins), FAIR).pvalue >= alpha, found


class Coins(ToyEngine):
    """The same row after every prefix: token 0 has the probability `zero`, else it is token 1."""

    def __init__(self, zero: float = FAIR, pass_s: float = 0.0) -> None:
        super().__init__(2, max_model_len=128, pass_s=pass_s)
        self.zero = zero
        self.row = torch.tensor([zero, 1.0 - zero]).log()

    def _run(self, step: SequenceStep) -> torch.Tensor:
        return self.row.expand(step.num_logits, -1).clone()


class NoLookup(LookupDrafter):
    """A fallback that proposes nothing."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def guess(self, request: Any) -> Guess:
        return NO_GUESS


def bench_of(
    target: Coins,
    draft: Coins,
    *,
    self_drafter: SelfDrafter | None = None,
    link: Any = None,
    target_lookup: LookupDrafter | None = None,
    **settings: Any,
) -> Any:
    """A coordinator, a target and a draft whose steps take the time that their engines state."""
    drivers = [InlineDriver(partial(take_stated_seconds, one)) for one in (target, draft)]
    clock = asyncio.get_running_loop().time
    service = TargetService(
        target,
        drivers[0],
        max_num_seqs=8,
        self_drafter=self_drafter,
        clock=clock,
        lookup=target_lookup or NgramDrafter(),
    )
    asked = {
        "target": service,
        "draft": DraftService(ModelDrafter(draft), drivers[1], max_num_seqs=8),
        "target_link": None if link is None else link(service),
        "fallback": NoLookup(),
        "draft_timeout_ms": LIMIT_MS,
        "deadline_ms": 3_600_000,
        "audit_share": 0,
        "look_ahead": 0,
    }
    return running(Bench(**asked | settings))


class Round(NamedTuple):
    tokens: tuple[int, ...]
    proposed: tuple[int, ...]
    is_ahead: bool
    """Whether the proposal was there before the round began."""


async def play(
    bench: Bench,
    seed: int,
    rule: Rule = Rule.TOKEN,
    *,
    heard: list[Round] | None = None,
    tenant: str = "",
    **fields: Any,
) -> list[Round]:
    """The rounds of a session, in `heard` as they come. The first one has no proposal."""
    rounds = [] if heard is None else heard
    asked = {"prompt": PROMPT, "num_draft_tokens": 1, "deadline_ms": 3_600_000} | fields
    request = GenerateRequest(**asked, seed=seed, rule=rule, include_rounds=True)
    async for event in bench.service.streams.generate(request, tenant):
        if isinstance(event, RoundReport):
            report = event
        elif isinstance(event, Tokens):
            ids, is_ahead = report.proposed_token_ids, report.look_ahead_hit
            rounds.append(Round(event.token_ids, ids, is_ahead))
    return rounds


class TellingDraft(Coins):
    """In rounds whose first random number another session may have shown, the pass takes long if
    this number refuses token 0, which is likely."""

    seed = 0
    rule = Rule.TOKEN
    told_from: dict[str, int] | None = None
    """The committed length from which on this holds, by sequence; by default 0. None = never."""

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        rows = super().forward(steps)
        for step in steps if self.told_from is not None else ():
            length = self.length(step.sequence_id)
            [number] = RoundNoise(self.seed, self.rule, length).accept_uniforms(1)
            is_told = length >= self.told_from.get(step.sequence_id, 0)
            self.stated_seconds += LONG_S * (is_told and number > FAIR / self.zero)
        return rows


@pytest.mark.parametrize(("rule", "together"), [(Rule.TOKEN, False), (Rule.BLOCK, True)])
async def test_times_that_a_session_with_the_same_seed_may_have_shown(
    rule: Rule, together: bool
) -> None:
    """They delay drafts of a second session; or those of a first one, as soon as a second one has
    begun. If these drafts had a time limit, 0.72 of their rounds would begin with 0."""
    draft, coins = TellingDraft(zero=0.9, pass_s=PASS_S), []
    draft.rule = rule
    async with bench_of(Coins(pass_s=TARGET_S), draft) as bench:
        for seed in range(50):
            draft.seed, draft.told_from = seed, None
            rounds: list[Round] = []
            first = asyncio.create_task(play(bench, seed, rule, heard=rounds, max_tokens=24))
            await (asyncio.sleep(2.5 * TARGET_S) if together else first)
            draft.told_from = {name: len(held) + 1 for name, held in draft.held.items()}
            num_begun = len(rounds) + 2  # A round is running, and its event may be on its way.
            second = await play(bench, seed, rule, max_tokens=24)
            await first
            coins += [one.tokens[0] for one in (rounds[num_begun:] if together else second[1:])]
    check_fair(coins, detects=0.17)


@pytest.mark.parametrize("lookup_on", ["coordinator", "target"])
async def test_an_answer_to_the_same_seed_steers_no_look_up(lookup_on: str) -> None:
    """In the second round the first session of a seed gets the proposal 1. If a second session read
    the first one's answer, it would get the token that the first one committed: 1 if a number
    accepts it, or else 0, which the same number refuses. So it would commit 1 in any case."""
    own = SuffixConfig(tokens_per_tenant=0 if lookup_on == "target" else 1000)
    settings: dict[str, Any] = {"drafts": {}, "lookup": DraftConfig(), "lookup_on": lookup_on}
    settings |= {"fallback": SuffixDrafter(own), "target_lookup": SuffixDrafter()}
    asked: dict[str, Any] = {"prompt": (0, 1), "num_draft_tokens": 2, "max_tokens": 4}
    async with bench_of(Coins(), Coins(), **settings) as bench:
        for _ in ("first", "second"):
            rounds = [await play(bench, seed, tenant=f"t{seed}", **asked) for seed in range(80)]
            check_fair([session[1].tokens[0] for session in rounds], detects=0.45)


@pytest.mark.parametrize("together", [False, True])
async def test_the_targets_look_up_drafts_for_no_repeated_seed(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has indexed may depend on the other session. A first session, too, has its drafts
    from the coordinator as soon as a second one has begun."""
    looked_up: list[tuple[str, int]] = []
    propose = TargetLookups.propose

    def noted(self: TargetLookups, head: RoundHead, *rest: Any) -> Any:
        looked_up.append((head.session_id, head.committed_length))
        return propose(self, head, *rest)

    monkeypatch.setattr(TargetLookups, "propose", noted)
    lookup = DraftConfig(model="ngram")
    settings: dict[str, Any] = {"drafts": {}, "fallback": None, "lookup": lookup}
    asked: dict[str, Any] = {"prompt": (0, 1, 0, 1), "num_draft_tokens": 2, "max_tokens": 60}
    target = Coins(pass_s=TARGET_S)
    async with bench_of(target, Coins(), **settings, lookup_on="target") as bench:
        rounds: list[Round] = []
        first = asyncio.create_task(play(bench, 1, heard=rounds, **asked))
        await (asyncio.sleep(12 * TARGET_S) if together else first)
        num_looked_up = len(looked_up)
        assert num_looked_up > 5
        assert len({name for name, _ in looked_up}) == 1
        second = await play(bench, 1, **asked)
        await first
        assert any(one.proposed for one in second)
        assert len(looked_up) <= num_looked_up + 2 * together  # A round was running.


class CoinHead(Coins):
    """A target with a head that tosses the same coins. The pass that runs a drawn 1 exceeds the
    time limit, so a proposal ends with the token after the first 1."""

    def features(self) -> list[torch.Tensor]:
        return [torch.zeros(num, 1) for num in self.num_rows]

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        self.num_rows = [step.num_logits for step in steps]
        return super().forward(steps)

    def forward_draft(self, steps: Sequence[SequenceStep], carried: Any) -> torch.Tensor:
        self._pool.append(steps, whole=False)
        pairs = zip(steps, carried, strict=True)
        self.stated_seconds += LONG_S * any(
            one.any() and 1 in step.token_ids for step, one in pairs
        )
        return torch.ones(len(steps), 1)

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.row.expand(len(hidden), -1)


async def test_a_short_proposal_of_a_head_is_used() -> None:
    """If only whole ones were used, 0.75 of the rounds would begin with 0."""
    target: Any = CoinHead(pass_s=TARGET_S)
    drafter = SelfDrafter(LoadedDraftHead(target, (0, 1)), target)
    asked: dict[str, Any] = {"num_draft_tokens": 3, "max_tokens": 24}
    async with bench_of(target, Coins(), self_drafter=drafter) as bench:
        rounds = [await play(bench, seed, **asked) for seed in range(75)]
    check_fair([one.tokens[0] for session in rounds for one in session[1:]], detects=0.17)


class TellingHead(CoinHead):
    """A target with a head that likes token 0 more than the target does. In rounds whose second
    random number another session may have shown, the head has time for one token only if this
    number refuses token 0."""

    seed = 0
    told_from: dict[str, int] | None = None
    """See `TellingDraft`."""
    likely = Coins(zero=0.9)

    def forward_draft(self, steps: Sequence[SequenceStep], carried: Any) -> torch.Tensor:
        self._pool.append(steps, whole=False)
        for step, one in zip(steps, carried, strict=True):
            length = self.length(step.sequence_id)
            if self.told_from is None or one.any():
                continue  # `length` is the committed length only if no token is drawn yet.
            _, number = RoundNoise(self.seed, Rule.TOKEN, length).accept_uniforms(2)
            is_told = length >= self.told_from.get(step.sequence_id, 0)
            self.stated_seconds += LONG_S * (is_told and number > FAIR / self.likely.zero)
        return torch.ones(len(steps), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.likely.row.expand(len(hidden), -1)


@pytest.mark.parametrize("together", [False, True])
async def test_times_of_a_head_that_a_session_with_the_same_seed_may_have_shown(
    together: bool,
) -> None:
    """As above, for rounds that the target runs ahead. Of a first session, those that it has run
    ahead when the second one begins are run again. With a time limit, 0.72 of the tokens after an
    accepted one would be 0."""
    target: Any = TellingHead(pass_s=TARGET_S)
    drafter, coins = SelfDrafter(LoadedDraftHead(target, (0, 1)), target), list[int]()
    async with bench_of(target, Coins(), self_drafter=drafter, run_ahead_rounds=16) as bench:
        for seed in range(100):
            target.seed, target.told_from = seed, None
            rounds: list[Round] = []
            asked: dict[str, Any] = {"num_draft_tokens": 2, "max_tokens": 30}
            first = asyncio.create_task(play(bench, seed, heard=rounds, **asked))
            await (asyncio.sleep(2.5 * TARGET_S) if together else first)
            target.told_from = {name: len(held) + 2 for name, held in target.held.items()}
            num_begun = len(rounds) + 2
            asked["max_tokens"] = 1 if together else 30  # So its passes do not delay the first one.
            second = await play(bench, seed, **asked)
            await first
            # When the second one begins, the target may run these rounds of the first one ahead.
            again = rounds[num_begun : num_begun + 6] if together else second[1:]
            coins += [one.tokens[1] for one in again if len(one.tokens) > 1]
    check_fair(coins, detects=0.2)


class ForgetfulLink(SeverableLink):
    """Loses a message with a proposal of 1. Then the coordinator sends it again."""

    def __init__(self, service: Any) -> None:
        super().__init__(service)
        self.lost: set[tuple[str, int]] = set()

    def send(self, item: Any) -> None:
        place = item.head.session_id, item.head.committed_length
        if 1 in item.proposal.token_ids and place not in self.lost:
            self.lost.add(place)
        else:
            super().send(item)


async def test_a_proposal_that_is_sent_again_is_whole() -> None:
    """If a repetition had fewer tokens, 0.75 of the second rounds would begin with 0."""
    links: list[ForgetfulLink] = []

    def link(service: Any) -> ForgetfulLink:
        links.append(ForgetfulLink(service))
        return links[0]

    num = 250
    async with bench_of(Coins(pass_s=TARGET_S), Coins(pass_s=PASS_S), link=link) as bench:
        rounds = [await play(bench, seed, max_tokens=3) for seed in range(num)]
    assert len(links[0].lost) > num / 3
    check_fair([session[1].tokens[0] for session in rounds], detects=0.24)


@pytest.mark.parametrize("rule", RATIO_RULES)
async def test_what_is_drafted_ahead_does_not_repeat_the_round(rule: Rule) -> None:
    """The draft tosses a fair coin, too. After a round that was not foreseen, one that was: their
    draft tokens with the same index are equal by chance only, not always."""
    coins = []
    target, draft = Coins(zero=0.8, pass_s=TARGET_S), Coins(pass_s=PASS_S)
    async with bench_of(target, draft, look_ahead=2) as bench:
        for seed in range(20):
            rounds = await play(bench, seed, rule, num_draft_tokens=3, max_tokens=60)
            for before, after in pairwise(rounds[1:]):
                if after.is_ahead and not before.is_ahead:
                    pairs = zip(before.proposed, after.proposed, strict=False)
                    coins += [int(a == b) for a, b in pairs]
    check_fair(coins, detects=0.3)


class Turns:
    """A constraint that allows all tokens, but cannot be followed after a 1."""

    def mask_after(self, drafted: Sequence[int]) -> TokenMask:
        if 1 in drafted:
            raise Incompatible("too hard")
        return TokenMask(np.packbits([True, True], bitorder="little"))


@pytest.mark.parametrize("rule", RATIO_RULES)
async def test_a_round_ends_where_its_constraint_cannot_be_followed(rule: Rule) -> None:
    """The next round then fails, as without drafts. If the target went on without a mask, more
    tokens would follow a 1."""
    seen, row = Counter[int](), Coins(zero=0.3).row
    async with Replica("target", Coins()) as target:
        target.service._worker._admission.allowed = lambda *_: Turns()
        for seed in range(200):
            noise = RoundNoise(seed, rule, len(PROMPT))
            proposal = EncodedProposal.of(drafted(row.expand(3, -1), SamplingParams(), noise))
            head = make_head(PROMPT, session=seed, seed=seed, rule=rule)
            reply = await target.ask(VerifyItem(head, proposal))
            tokens = outcome_of(reply, proposal, rule, seed, len(PROMPT)).token_ids
            assert 1 not in tokens[:-1]
            seen[tokens.index(1) if 1 in tokens else len(tokens)] += 1
            target.service.release(head.session_id, 1)
    check_fair([0] * seen[0] + [1] * (seen.total() - seen[0]), detects=0.27)
