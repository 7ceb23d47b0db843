"""Checks whether committed tokens look as if they were drawn from the target's distribution.

Let p_i be the target's distribution of token x_i, given all earlier tokens. If x_i is drawn from
p_i, the mean of its surprise -log p_i(x_i) is the entropy of p_i. Let S be the sum of surprise_i -
entropy_i, and V the sum of the variances of -log p_i. S is a martingale, even if the tokens decide
where a session ends. For many tokens, S / sqrt(V) is approximately standard normal. This quotient
drifts away from 0 if the tokens come from a distribution with another mean surprise.

Greedy tokens are compared with the likeliest token. An audit uses the same transforms as verdicts,
so it detects wrong noise, acceptance or corrections, but not a wrong transform."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import check
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.logits_processing import adjusted_logits, target_probabilities
from outrider.speculation.sampling_params import NO_HISTORY, SamplingParams, TokenHistory

NEAR_TIE = 2.0**-6
"""A greedy token is a near tie if its logit is at most `NEAR_TIE` * max(1, |m|) below the largest
logit m. Neighbouring bfloat16 numbers differ by up to 2^-7 of their size."""
_P_MIN = 1e-300  # replaces p = 0 in a division 0 / p


def audit(
    logits: Tensor,
    token_ids: Sequence[int],
    params: SamplingParams,
    history: TokenHistory = NO_HISTORY,
) -> AuditSums:
    """Compares token i with row i of `logits` [N, V], which are on the CPU. Raises `InvariantError`
    for rows that `target_probabilities` refuses."""
    num, vocab_size = logits.shape
    check(len(token_ids) == num, f"{len(token_ids)} tokens do not fit {num} rows of logits")
    inside = [index for index in range(num) if token_ids[index] < vocab_size]
    p = target_probabilities(logits, params, history)
    chosen = torch.tensor([token_ids[index] for index in inside])
    if params.greedy:
        rows = adjusted_logits(logits, params, history).double()[inside]
        chosen_logits, largest = rows.gather(1, chosen[:, None])[:, 0], rows.amax(dim=1)
        is_other = chosen != rows.argmax(dim=1)
        is_tie = largest - chosen_logits <= NEAR_TIE * largest.abs().clamp(min=1.0)
        is_impossible = chosen_logits == -torch.inf
        return AuditSums(
            num,
            num - len(inside) + int((is_other & is_impossible).sum()),
            int((is_other & ~is_impossible & ~is_tie).sum()),
            int((is_other & is_tie).sum()),
        )
    at = torch.zeros(num, dtype=torch.float64)
    at[inside] = p[inside, chosen]
    possible = at > 0
    terms = torch.special.entr(p)  # -p log p, and 0 for p = 0; needs only one pass over p
    entropy = terms.sum(dim=1)
    terms.square_().div_(p.clamp_(min=_P_MIN))  # p log^2 p
    variance = (terms.sum(dim=1) - entropy.square()).clamp(min=0.0)
    return AuditSums(
        num_tokens=num,
        num_impossible=num - int(possible.sum()),
        surprise=float(-at[possible].log().sum()),
        entropy=float(entropy[possible].sum()),
        variance=float(variance[possible].sum()),
    )
