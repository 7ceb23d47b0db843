"""A draft that goes on from what the target's head read: rounds of both services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from models import flat_module, tiny_eagle, twin
from rounds import RULES, Listener, Replica, ask, make_head, outcome_of

from draft_service.eagle_drafter import EagleDrafter
from draft_service.service import DraftService
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.engine.interface import ModelInfo
from outrider.engine.paged_engine import PagedEngine
from outrider.hidden_states import Features
from outrider.limits import FEATURES_MAX
from outrider.messages import DraftItem, ProposalReply, Refused, Resync, VerdictReply, VerifyItem
from outrider.models.eagle import LoadedEagle
from outrider.replica.executors import InlineExecutor
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.logits_processing import DraftVocabulary, TokenHistory
from outrider.speculation.proposal import NOTHING_SEALED, Proposal, SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink

VOCAB, LENGTH = 24, 120
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
HEAD_IDS = tuple(range(0, VOCAB, 2))
SEED = 11
SESSIONS_MAX = 3
TOLERANCE = 1e-2
"""Of features in bfloat16, beside those of the library."""


@dataclass
class Pair:
    """A target that shows features, its module once more, and a draft that reads them."""

    module: Any
    eagle: LoadedEagle
    target: Replica
    draft: MemoryLink
    proposals: Listener

    async def verify(
        self, tokens: Sequence[int], proposal: SealedProposal, wants: bool = True, **head: Any
    ) -> VerdictReply:
        item = VerifyItem(
            make_head(tokens, seed=SEED, prompt_length=len(PROMPT), **head),
            proposal,
            wants_features=wants,
        )
        reply = await self.target.ask(item)
        assert isinstance(reply, VerdictReply), reply
        return reply

    async def propose(
        self, tokens: Sequence[int], features: Features | None, num: int = 3, **options: Any
    ) -> ProposalReply:
        siblings = options.pop("siblings", ())
        head = make_head(tokens, seed=SEED, prompt_length=len(PROMPT), **options)
        item = DraftItem(head, num, siblings=siblings, features=features)
        reply = await ask(self.draft, self.proposals, item)
        assert isinstance(reply, ProposalReply), reply
        return reply

    def features(self, tokens: Sequence[int], first: int, end: int | None = None) -> Features:
        """Of these places, by the library's own pass; as they travel."""
        hidden = self.module.base_model(torch.tensor([tokens])).last_hidden_state[0]
        rows = hidden[first : len(tokens) - 1 if end is None else end].detach().bfloat16()
        return Features(first, rows.shape[1], rows.view(torch.uint8).numpy().tobytes())

    def expected(
        self, tokens: Sequence[int], features: Features, rule: Rule, sampling: SamplingParams,
        num: int = 3,
    ) -> Proposal:  # fmt: skip
        """By the head's pass over all of these features at once."""
        first, width = features.first, features.width
        rows = torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16)
        pairs = rows.view(1, -1, width).double()
        num_pairs = pairs.shape[1]
        assert features.end == len(tokens) - 1
        noise, drafted, q = RoundNoise(SEED, rule, len(tokens)), list(tokens), []
        for depth in range(num):
            behind = torch.tensor([drafted[first + 1 :]])
            *_, guessed = self.eagle.module.unroll(pairs, behind, depth + 1)
            history = TokenHistory(PROMPT, tuple(drafted[len(PROMPT) :]))
            [(token_id, distribution)], _ = draw_from_logits(
                self.eagle.module.logits(guessed[:, num_pairs - 1]), sampling, [noise], [depth],
                history=history, vocabulary=DraftVocabulary.of(HEAD_IDS),
            )  # fmt: skip
            drafted.append(token_id)
            q.append(distribution)
        token_ids = tuple(drafted[len(tokens) :])
        return Proposal(token_ids, tuple(q) if rule.needs_q else ())


@asynccontextmanager
async def running() -> AsyncIterator[Pair]:
    module = flat_module(VOCAB, LENGTH)
    original = twin(module)
    eagle = tiny_eagle(original, HEAD_IDS)
    info = ModelInfo("tiny", VOCAB, LENGTH, "float64", (), "w", "t")
    engine = PagedEngine(module, info, shows_features=True)
    drafter = EagleDrafter(eagle, NgramDrafter(1, 16), sessions_max=SESSIONS_MAX)
    draft = DraftService.with_eagle(
        drafter, replace(info, name="eagle"), InlineExecutor(lambda: 0.0), max_num_seqs=8
    )
    link = MemoryLink(draft)
    async with Replica("target", engine, max_num_seqs=8) as target:
        yield Pair(original, eagle, target, link, Listener(link))
    await link.close()
    await draft.close()


@pytest.mark.parametrize(("rule", "sampling"), RULES)
async def test_what_is_drafted_round_after_round(rule: Rule, sampling: SamplingParams) -> None:
    """With draft tokens accepted and refused, from what each verdict has shown, past the length of
    the window: what the head draws that has seen all of it at once."""
    num_rounds = 2 * FEATURES_MAX // 3 if rule is Rule.TOKEN and not sampling.penalised else 8
    async with running() as pair:
        tokens, proposal, accepted = list(PROMPT), NOTHING_SEALED, []
        shown: Features | None = None
        for index in range(num_rounds):
            options: dict[str, Any] = {"rule": rule, "sampling": sampling, "round_index": index}
            length = len(tokens)
            reply = await pair.verify(tokens, proposal, **options)
            outcome = outcome_of(reply, proposal, rule, SEED, length)
            accepted.append(outcome.num_accepted)
            tokens += outcome.token_ids
            new = reply.features
            assert new is not None
            assert (new.first, new.end) == (length - 1, len(tokens) - 1)
            assert _close(new, pair.features(tokens, length - 1))
            shown = new if shown is None else shown.joined(new)
            proposal = (await pair.propose(tokens, new, **options)).proposal
            assert proposal.open() == pair.expected(tokens, shown, rule, sampling)
        assert rule is Rule.GREEDY or len(set(accepted)) > 1


def _close(ours: Features, theirs: Features) -> bool:
    a, b = (
        torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16).float()
        for features in (ours, theirs)
    )
    return bool((a - b).abs().max() < TOLERANCE * b.abs().max())


async def test_a_tree_shows_the_path_that_was_accepted() -> None:
    """The spine is the chain's; where a candidate beside it is accepted, its features are shown."""
    async with running() as pair:
        text, options = [*PROMPT, 7], {"rule": Rule.COUPLED}
        features = pair.features(text, len(PROMPT) - 1)
        tree = (await pair.propose(text, features, 2, siblings=(2, 1), **options)).proposal
        assert tree.parents == (-1, -1, -1, 0, 0)
        assert (
            tree.open().spine_ids
            == pair.expected(text, features, Rule.COUPLED, SamplingParams(), 2).token_ids
        )
        seen_beside = False
        for seed in range(40):
            head = make_head(text, seed=seed, session=seed + 3, **options)
            item = VerifyItem(head, tree, wants_features=True)
            reply = await pair.target.ask(item)
            outcome = outcome_of(reply, tree, Rule.COUPLED, seed, len(text))
            shown = pair.features([*text, *outcome.token_ids], len(text) - 1)
            assert _close(reply.features, shown)
            seen_beside |= any(place not in tree.tree.spine for place in outcome.path)
        assert seen_beside


async def test_sessions_are_drafted_for_together_each_from_its_own() -> None:
    """Of several lengths and rules, some without anything to go on from."""
    text = [*PROMPT, *(i * 7 % VOCAB for i in range(30))]
    asked = {1: (12, Rule.TOKEN, 0, 2), 2: (38, Rule.COUPLED, 20, 3), 3: (20, Rule.TOKEN, 18, 1)}
    async with running() as pair:
        for number, (length, rule, first, num) in asked.items():
            head = make_head(
                text[:length], session=number, rule=rule, seed=SEED, prompt_length=len(PROMPT)
            )
            pair.draft.send(DraftItem(head, num, features=pair.features(text[:length], first)))
        replies = {int(r.key.session_id, 16): r for r in await pair.proposals.wait(3)}
        for number, (length, rule, first, num) in asked.items():
            features = pair.features(text[:length], first)
            expected = pair.expected(text[:length], features, rule, SamplingParams(), num)
            assert replies[number].proposal.open() == expected


async def test_a_session_that_made_room_is_asked_for_again() -> None:
    """With its tokens, behind which the coordinator sends all features that it has."""
    text = [*PROMPT, *(i * 5 % VOCAB for i in range(20))]
    async with running() as pair:
        await pair.propose(text[:20], pair.features(text[:20], 7))
        for other in range(SESSIONS_MAX):
            await pair.propose(text, pair.features(text, 5), session=10 + other)
        head = make_head(text[:21], 20, seed=SEED, prompt_length=len(PROMPT), round_index=1)
        asked = DraftItem(head, 3, features=pair.features(text[:21], 19))
        assert isinstance(await ask(pair.draft, pair.proposals, asked), Resync)


async def test_features_of_tokens_that_were_never_committed_are_forgotten() -> None:
    """As when a coordinator that has died had decided more than was stored."""
    first, second = ([*PROMPT, *(i * step % VOCAB for i in range(12))] for step in (5, 7))
    async with running() as pair:
        await pair.propose(first, pair.features(first, 7), rule=Rule.TOKEN)
        features = pair.features(second, 10)
        found = await pair.propose(second, features, rule=Rule.TOKEN, epoch=2)
        expected = pair.expected(second, features, Rule.TOKEN, SamplingParams())
        assert found.proposal.open() == expected


async def test_a_look_up_fills_in_where_there_is_nothing_to_go_on_from() -> None:
    """Without features, behind tokens that have none yet, or once the session was forgotten."""
    text = [1, 2, 3, 4, 1, 2, 3]
    async with running() as pair:
        copied = SealedProposal.of(Proposal((4, 1, 2)))
        assert (await pair.propose(text, None)).proposal == copied
        old = pair.features(text, 3, end=5)
        assert (await pair.propose(text, old, round_index=1)).proposal == copied
        newest = pair.features(text, 5)
        drafted = (await pair.propose(text, newest, round_index=2)).proposal
        assert all(token_id % 2 == 0 for token_id in drafted.token_ids)
        assert drafted == (await pair.propose(text, None, round_index=3)).proposal


@pytest.mark.parametrize("min_score", [None, 0.7])
async def test_who_drafts_says_nothing_of_what_is_drawn(min_score: float | None) -> None:
    """The head, or a look-up: before the first features, and where it is confident if asked to. The
    same for every seed, as `docs/exactness.md` needs."""
    choices, sampling = set(), SamplingParams()
    async with running() as pair:
        for text in ((1, 2, 3, 4, 1, 2, 3), (1, 2, 3, 4, 5, 6, 0), (2, 2, 2, 2, 2)):
            for features in (pair.features(text, len(text) - 2), None):
                found = set()
                for seed in range(20):
                    drafter = EagleDrafter(
                        pair.eagle, NgramDrafter(), min_score=min_score, sessions_max=2
                    )
                    noise = RoundNoise(seed, Rule.TOKEN, len(text))
                    asked = DraftRequest(
                        "s", "", text, 1, 3, sampling, Rule.TOKEN, noise, features=features
                    )
                    [proposal] = drafter.propose([asked])
                    found.add((bool(proposal.q) and proposal.q[0] is not None, len(proposal)))
                [(by_head, _)] = found
                choices.add((features is not None, by_head))
    assert (True, True) in choices
    assert ((True, False) in choices) is (min_score is not None)
    assert (False, True) not in choices


@pytest.mark.parametrize(
    ("features", "field"),
    [(Features(1, 4, bytes(8)), "features.width"), (Features(6, 32, bytes(64)), "features")],
)
async def test_features_that_cannot_be_are_refused(features: Features, field: str) -> None:
    """And harm no other session of the step."""
    async with running() as pair:
        text = (1, 2, 3, 4, 1, 2, 3)
        good = pair.features(text, 5)
        expected = (await pair.propose(text, good, session=9)).proposal
        for number, rows in ((1, features), (2, good)):
            head = make_head(text, session=number, seed=SEED, prompt_length=len(PROMPT) - 2)
            pair.draft.send(DraftItem(head, 3, features=rows))
        replies = {int(r.key.session_id, 16): r for r in await pair.proposals.wait(2)}
        assert isinstance(replies[1], Refused)
        assert replies[1].message.startswith(f"{field}:")
        assert replies[2].proposal == expected
