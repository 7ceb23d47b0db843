"""A draft service over a toy engine, and the proposals to expect of it."""

from collections.abc import Sequence
from typing import Any

from outrider.foundation.tokens import TokenSequence
from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.proposal import DraftDistribution
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from tests.support.rounds import Replica
from tests.support.toy_engine import ToyEngine, toy_logits
from tests.support.verdict_laws import draft_token


def draft_over(engine: ToyEngine | None = None, **options: Any) -> Replica:
    return Replica("draft", engine or ToyEngine(salt=2, max_model_len=256), **options)


def expected_proposal(
    prefix: Sequence[int], count: int, rule: Rule, sampling: SamplingParams, prompt_length: int
) -> tuple[list[int], list[DraftDistribution | None]]:
    """Draws one token after another, each from newly computed logits."""
    noise = RoundNoise(7, rule, len(prefix), TokenSequence(prefix).digest())
    tokens = list(prefix)
    q = []
    for index in range(count):
        history = TokenHistory(tokens[:prompt_length], tokens[prompt_length:])
        row = target_probabilities(toy_logits(2, tokens, 8)[None], sampling, history)[0]
        token_id, distribution = draft_token(row, noise, index)
        tokens.append(token_id)
        q.append(distribution)
    return tokens[len(prefix) :], q
