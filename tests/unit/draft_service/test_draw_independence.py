"""What decides who drafts, and how much, says nothing of the numbers that the proposal is tested
with: the same for every seed. Comments in the drafters claim it, and `docs/exactness.md` builds on
it. Each test plays one situation under many seeds, which draw different tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from looking_ahead import PROMPT as AHEAD_PROMPT
from looking_ahead import Draft, item
from rounds import make_head, session_name
from test_draft_service import Setting
from test_eagle_rounds import running as eagle_pair
from toy_engine import ToyEngine

from draft_service import worker as proposing
from draft_service.eagle_drafter import EagleDrafter
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.messages import DraftItem
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

SEEDS = range(1, 21)
TEXTS = ((1, 2, 3, 4, 1, 2, 3), (1, 2, 3, 4, 5, 6, 0), (2, 2, 2, 2, 2), (0, 5, 3, 5, 1, 5))


def request(token_ids: tuple[int, ...], seed: int, **more: Any) -> DraftRequest:
    return DraftRequest(
        f"s{seed}", "", token_ids, 1, 3, SamplingParams(), Rule.TOKEN,
        RoundNoise(seed, Rule.TOKEN, len(token_ids)), **more,
    )  # fmt: skip


@pytest.mark.parametrize("num_passes", [4, 5, 6])
async def test_how_far_a_late_outcome_is_drafted_says_nothing_of_its_tokens(
    num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LookAhead` answers an outcome that has half of its tokens as it is."""
    monkeypatch.setattr(proposing, "PASSES_MAX", 1)
    lengths, tokens = set(), set()
    for seed in SEEDS:
        draft = Draft()
        _, *pushed = await draft.send(item(AHEAD_PROMPT, seed=seed))
        outcome = pushed[0].assumed
        num_heard = len(draft.listener.answers)
        draft.link.send(item(AHEAD_PROMPT, session=2, count=6, seed=seed))
        await draft.listener.wait(num_heard + 1)
        name = f"{session_name(2)}/"
        while (
            sum(any(one.startswith(name) for one in batch) for batch in draft.engine.batches)
            < num_passes
        ):
            await asyncio.sleep(0)
        num_heard = len(draft.listener.answers)
        text = (*AHEAD_PROMPT, *outcome)
        draft.link.send(item(text, len(AHEAD_PROMPT), session=2, round_index=1, count=6, seed=seed))
        late = (await draft.listener.wait(num_heard + 1))[num_heard]
        lengths.add(len(late.proposal))
        tokens.add(late.proposal.token_ids)
        await draft.settled()
        await draft.service.close()
    assert lengths == {num_passes}
    assert len(tokens) > len(SEEDS) / 2


async def test_who_finds_no_pages_says_nothing_of_any_draw() -> None:
    """`Proposer` answers such a session an empty proposal."""
    lengths, tokens = set(), set()
    for seed in SEEDS:
        at = Setting(ToyEngine(num_pages=4))
        heads = [
            make_head([number] * size, session=number, rule=Rule.TOKEN, seed=seed)
            for number, size in ((1, 9), (2, 7))
        ]
        found = [(await at.proposed(DraftItem(head, 3))).proposal for head in heads]
        lengths.add(tuple(len(proposal) for proposal in found))
        tokens.add(found[0].token_ids)
        await at.service.close()
    assert lengths == {(3, 0)}
    assert len(tokens) > len(SEEDS) / 2


@pytest.mark.parametrize("min_score", [None, 0.7])
async def test_a_head_that_reads_features_drafts_whatever_it_would_draw(
    min_score: float | None,
) -> None:
    """Or a look-up does: before the first features, and where it is confident if asked to."""
    choices = set()
    async with eagle_pair() as pair:
        for text in TEXTS:
            for is_shown in (True, False):
                found = set()
                for seed in SEEDS:
                    drafter = EagleDrafter(
                        pair.eagle, NgramDrafter(), min_score=min_score, sessions_max=2
                    )
                    features = pair.features(text, len(text) - 2) if is_shown else None
                    [proposal] = drafter.propose([request(text, seed, features=features)])
                    found.add((bool(proposal.q) and proposal.q[0] is not None, len(proposal)))
                [(by_head, _)] = found
                choices.add((is_shown, by_head))
    assert (True, True) in choices
    assert ((True, False) in choices) is (min_score is not None)
    assert (False, True) not in choices
