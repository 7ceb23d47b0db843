"""Requests to look-ups, for tests."""

from collections.abc import Sequence

from outrider.drafters.drafter import DraftRequest
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams


def request(
    token_ids: Sequence[int],
    k: int = 4,
    *,
    session_id: str = "s",
    tenant: str = "",
    prompt_length: int = 1,
    rule: Rule = Rule.TOKEN,
    seed: int = 0,
    min_chance: float = 0.0,
) -> DraftRequest:
    return DraftRequest(
        session_id=session_id,
        tenant=tenant,
        token_ids=token_ids,
        prompt_length=prompt_length,
        num_draft_tokens=k,
        sampling=SamplingParams(),
        rule=rule,
        noise=RoundNoise(seed, rule, len(token_ids)),
        min_chance=min_chance,
    )
