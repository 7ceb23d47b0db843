"""What decides who drafts, and how much, says nothing of the numbers that the proposal is tested
with: the same for every seed. Comments in the drafters claim it, and `docs/exactness.md` builds on
it. Each test plays one situation under many seeds, which draw different tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from looking_ahead import PROMPT as AHEAD_PROMPT
from looking_ahead import Draft, item
from rounds import ask, make_head, session_name
from test_eagle_rounds import running as eagle_pair
from test_page_pressure import Setting
from test_self_drafting import KINDS, MEDUSA, PROMPT, drafter_of, tiny_engine
from toy_engine import ToyEngine

from draft_service import worker as proposing
from draft_service.eagle_drafter import EagleDrafter
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.engine.interface import SequenceStep
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
        at = Setting("draft", ToyEngine(num_pages=4))
        link, listener = at.connect()
        heads = [
            make_head([number] * size, session=number, rule=Rule.TOKEN, seed=seed)
            for number, size in ((1, 9), (2, 7))
        ]
        found = [(await ask(link, listener, DraftItem(head, 3))).proposal for head in heads]
        lengths.add(tuple(len(proposal) for proposal in found))
        tokens.add(found[0].token_ids)
        await at.close()
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_runs_the_same_products_for_its_drafts_whatever_it_draws(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = tiny_engine(kind)
    engine.forward([SequenceStep("s", PROMPT[:-1], num_logits=1)])
    features: list[torch.Tensor] = []
    if kind == MEDUSA:
        assert engine.draft_heads is not None
        module = engine.draft_heads.module
        features = [torch.full((module.embeddings.shape[1],), 0.5, dtype=torch.float64)]
        place, name = module, "advance"
    else:
        place, name = engine, "forward_shallow"
    shapes: list[tuple[int, ...]] = []
    run = getattr(place, name)

    def counted(*args: Any) -> Any:
        rows = run(*args)
        shapes.append(tuple(torch.cat(list(rows)).shape))
        return rows

    monkeypatch.setattr(place, name, counted)
    drafter = drafter_of(engine)
    found, tokens = set(), set()
    for seed in SEEDS:
        shapes.clear()
        noise = RoundNoise(seed, Rule.TOKEN, len(PROMPT))
        request = DraftRequest("s", "", PROMPT, len(PROMPT), 3, SamplingParams(), Rule.TOKEN, noise)
        with torch.inference_mode():
            [proposal] = drafter.propose([request], features)
        found.add((tuple(shapes), len(proposal)))
        tokens.add(proposal.token_ids)
    assert len(found) == 1
    assert len(tokens) > len(SEEDS) / 2
