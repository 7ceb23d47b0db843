"""Completions from the real services are distributed as if the target had written them alone: tiny
random models, real gRPC between the services, real Redis, the joint law of all tokens by
enumeration.

Each cell: Pearson's chi-square, false alarm 1e-6, and enough samples to find a law at total
variation 0.05 (0.2 in the cells that always run) with probability 0.99, which the test asserts.
Completions that are too rare to be counted on their own are counted together. Among these, with a
probability of at most 0.01 (0.13 in the cells that always run), the test sees no differences.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider.drafters.names import LookupKind
from outrider.speculation.sampling_params import Rule
from tests.exactness.cells import (
    ACROSS,
    FEW_SAMPLES,
    PARAMS,
    POOLED_MAX,
    POOLED_OF_FEW,
    POWER,
    RULES,
    SOON,
    Cell,
    measure,
)

RESIDENT: dict[str, Any] = {"drafter": "none", "lookup": LookupKind.NGRAM, "lookup_on": "target"}
"""Look-ups in the target. The first round of a session has no proposal."""
RESIDENT_SUFFIX = RESIDENT | {"lookup": LookupKind.SUFFIX}
LATER: dict[str, Any] = {"num_skipped": 1, "max_tokens": 9}
HEADS = (("eagle3", (0, 2)), ("mtp", ()))
"""In the target, with the tokens that they draft."""
CELLS = [
    # The target's look-up, whose rounds run ahead of the coordinator. It reads earlier answers.
    Cell(Rule.TOKEN, 3, "top-p", **RESIDENT_SUFFIX, **LATER, num_samples=660, detects=SOON),
    # A draft that knows two tokens more than the target, which are never accepted.
    Cell(Rule.TOKEN, 2, "top-k", vocab_size=4, draft_vocab_size=6, num_samples=540, detects=SOON),
    # A head that is sent the target's features.
    Cell(Rule.TOKEN, 2, drafter="apart", token_ids=(0, 1), num_samples=660, detects=SOON),
    # An EAGLE-3 head on the target's pages, which knows two of its tokens.
    Cell(Rule.TOKEN, 3, "top-p", "eagle3", (0, 2), **ACROSS, num_samples=660, detects=SOON),
    # A target's own MTP layer, with latent attention and experts.
    Cell(Rule.TOKEN, 3, "top-p", "mtp", num_samples=660, detects=SOON),
    # A target on OpenVINO, with a head.
    Cell(
        Rule.BLOCK,
        3,
        "top-p",
        "eagle3",
        (0, 2),
        openvino=True,
        **ACROSS,
        num_samples=740,
        detects=SOON,
    ),
    # Rounds of heads that run ahead of the coordinator, behind earlier ones.
    *(
        Cell(Rule.BLOCK, 3, "top-p", drafter, ids, **LATER, num_samples=740, detects=SOON)
        for drafter, ids in HEADS
    ),
    # Ends that are masked for the first tokens of a completion alone, on both sides.
    Cell(Rule.BLOCK, 3, "late", vocab_size=4, draft_vocab_size=5, num_samples=740, detects=SOON),
    # A model that drafts in one pass.
    Cell(Rule.BLOCK, 3, "top-p", "parallel", draft_vocab_size=4, num_samples=740, detects=SOON),
    # A draft whose head has rows for two tokens of the target's, not its first ones.
    Cell(
        Rule.BLOCK,
        2,
        "biased",
        vocab_size=4,
        token_ids=(1, 3),
        **ACROSS,
        num_samples=740,
        detects=SOON,
    ),
]
FEW: dict[str, Any] = {"num_samples": 440, "detects": 0.23, "max_tokens": 5, "length_control": True}
ADAPTIVE_CELLS = [
    # A model drafts, K is chosen, and every seed comes twice, at the same time or one after the
    # other; a look-up that has seen the first answer goes before the model.
    Cell(Rule.TOKEN, 3, lookup=LookupKind.SUFFIX, repeated=True, **FEW),
    # The same with a grammar, of one kind of drafter after the other.
    Cell(Rule.BLOCK, 3, vocab_size=4, draft_vocab_size=4, grammar=True, **FEW),
    Cell(Rule.TOKEN, 3, drafter="parallel", vocab_size=4, draft_vocab_size=5, grammar=True, **FEW),
    # The target's look-up, with a grammar.
    Cell(Rule.BLOCK, 3, vocab_size=4, grammar=True, **RESIDENT, **FEW),
    *(
        Cell(Rule.TOKEN, 3, "plain", drafter, (0, 2, 3), vocab_size=4, grammar=True, **FEW)
        for drafter in ("apart", "eagle3")
    ),
]
"""Cells in which more than the target's answers decides what is drafted. They have few samples,
because such faults are large."""
RERUN: dict[str, Any] = {"num_samples": 6_500, "detects": 0.07}
WIDE: dict[str, Any] = {"max_tokens": 6, "num_samples": 13_500}
GRID = [
    # Suffix decoding over all that was written before, and a model where that is not confident; in
    # fewer samples among the adaptive cells.
    Cell(Rule.TOKEN, 2, "top-p", lookup=LookupKind.SUFFIX, num_samples=1_750, detects=0.15),
    *(
        Cell(rule, k, params, max_tokens=6 if k == 4 else 4)
        for rule, k, params in product(RULES, (0, 1, 2, 4), list(PARAMS)[:4])
    ),
    *(
        replace(cell, rule=rule, repeated=repeated, num_samples=6_500, detects=0.07)
        for cell, rule, repeated in product(ADAPTIVE_CELLS, RULES, (False, True))
    ),
    # 5 tokens have more than one drafted round, so a fault that one round passes on to the next
    # shows. It shows most with this draft.
    Cell(
        Rule.BLOCK,
        2,
        "top-k",
        draft_seed=12,
        num_tokens=5,
        max_tokens=6,
        num_samples=5_400,
        detects=0.07,
    ),
    *(
        Cell(rule, k, params, token_ids=token_ids, vocab_size=4, **WIDE)
        for rule, k, params, token_ids in product(
            RULES, (1, 4), ("penalised", "top-p", "biased"), ((1, 3), (0, 2, 3), (2,))
        )
    ),
    Cell(Rule.TOKEN, 2, vocab_size=8, draft_vocab_size=5, num_tokens=2, num_samples=13_500),
    Cell(
        Rule.BLOCK, 2, "top-p", vocab_size=8, draft_vocab_size=8, num_tokens=2, num_samples=13_500
    ),
    Cell(Rule.BLOCK, 4, vocab_size=4, num_samples=13_500),
    *(
        Cell(rule, 4, drafter=drafter, lookup=lookup, num_tokens=4, **WIDE)
        for rule, drafter, lookup in product(RULES, ("none", "model"), LookupKind)
    ),
    *(
        Cell(rule, 4, params, vocab_size=4, **resident, **WIDE)
        for resident in (RESIDENT, RESIDENT_SUFFIX)
        for rule, params in product(RULES, ("plain", "penalised", "late"))
    ),
    *(
        Cell(rule, 4, params, drafter, (0, 1, 3), vocab_size=4, **WIDE)
        for drafter in ("apart", "eagle3")
        for rule, params in product(RULES, ("plain", "penalised", "biased"))
    ),
    *(
        Cell(rule, 4, params, "parallel", draft_vocab_size=4, num_tokens=4, **WIDE)
        for rule, params in product(RULES, ("plain", "penalised"))
    ),
    *(
        Cell(
            rule,
            4,
            "late",
            drafter,
            (0, 1, 3) if drafter != "model" else (),
            vocab_size=4,
            draft_vocab_size=4,
            **WIDE,
        )
        for rule, drafter in product(RULES, ("model", "eagle3", "apart"))
    ),
    # Rounds of heads that run ahead, also with seeds that come twice.
    *(
        Cell(rule, 3, "penalised", drafter, ids, repeated=repeated, **LATER, **RERUN)
        for rule, repeated in product(RULES, (False, True))
        for drafter, ids in HEADS
    ),
    # Drafts that cross the end of a page.
    *(
        Cell(rule, 4, "top-p", drafter, (0, 2, 3), vocab_size=4, num_samples=13_500, **ACROSS)
        for rule, drafter in product(RULES, ("model", "eagle3", "apart"))
    ),
    Cell(Rule.TOKEN, 4, num_tokens=1, max_tokens=1, num_samples=7_600),
    Cell(Rule.BLOCK, 4, "top-k", num_tokens=6, max_tokens=6, num_samples=12_500),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [*CELLS, *ADAPTIVE_CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in GRID)],
    ids=str,
)
async def test_completions_follow_the_targets_law(cell: Cell, tmp_path: Path) -> None:
    result, num_accepted = await measure(cell, tmp_path)
    assert result.power(cell.detects) >= POWER
    is_few = cell.num_samples < FEW_SAMPLES
    assert result.pooled <= (POOLED_OF_FEW if is_few else POOLED_MAX)
    assert not result.rejects
    if cell.num_draft_tokens and cell.max_tokens > 2:
        assert num_accepted > (cell.num_samples / 8 if cell.length_control else 0)
