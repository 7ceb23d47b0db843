"""Trap: two sessions with one seed, of which the second is drafted what the first was answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness.law import fit
from verdict_laws import score

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.suffix import SuffixDrafter
from outrider.speculation.accept_reject import decide
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

PROMPT = (7, 8, 9)
P = (0.2, 0.3, 0.5)
NUM_SEEDS = 1_500


def play(proposal: Proposal, noise: RoundNoise) -> int:
    rows = torch.tensor(P, dtype=torch.float64).expand(len(proposal) + 1, -1)
    verdict = score(rows, proposal, noise)
    uniforms = noise.accept_uniforms(len(proposal))
    return decide(verdict, proposal.token_ids, noise.rule, uniforms).token_ids[0]


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
def test_what_a_seed_was_answered_before_does_not_bias_it(rule: Rule, is_forgotten: bool) -> None:
    """The second session has the target's law with suffix decoding, whose history holds what the
    first was answered under the same seed, also where a session of another tenant has pushed that
    seed out of those that are remembered; under token and block it has not if it is drafted just
    that answer. False alarm 1e-6 for each."""

    def request(name: str, token_ids: tuple[int, ...], seed: int, tenant: str = "") -> DraftRequest:
        noise = RoundNoise(seed, rule, len(token_ids))
        return DraftRequest(
            session_id=name, tenant=tenant, token_ids=token_ids, prompt_length=len(PROMPT),
            num_draft_tokens=1, sampling=SamplingParams(), rule=rule, noise=noise,
        )  # fmt: skip

    drafted: list[Any] = []
    copied: list[Any] = []
    for seed in range(NUM_SEEDS):
        noise = RoundNoise(seed, rule, len(PROMPT))
        q = (None,) if rule.needs_q else ()
        answer = play(Proposal((1,), q), noise)
        drafter = SuffixDrafter(seeds_max=1)
        drafter.propose([request("first", (*PROMPT, answer), seed)])
        drafter.release("first")
        if is_forgotten:
            drafter.propose([request("another", PROMPT, seed, tenant="another")])
        proposal = drafter.propose([request("second", PROMPT, seed)])[0]
        drafted.append((play(proposal, noise),))
        copied.append((play(Proposal((answer,), q), noise),))
        if rule is Rule.COUPLED:
            assert proposal.token_ids == (() if is_forgotten else (answer,))
    law = {(token_id,): p for token_id, p in enumerate(P)}
    assert not fit(drafted, law).rejects
    assert fit(copied, law).rejects == rule.needs_q
