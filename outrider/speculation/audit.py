"""Checks whether committed tokens look as if they were drawn from the target's distribution.

Under the target's distribution p_i, given all earlier tokens, the surprise -log p_i(x_i) of a token
has the mean H(p_i) and the variance of -log p_i under p_i. Both are known without the token. So the
sum of surprise minus entropy is a martingale, even though a session's tokens decide where it ends.
For many tokens, this sum divided by the square root of the summed variances is approximately
standard normal. If the tokens come from another distribution, the mean of surprise minus entropy is
the cross entropy minus the entropy of p. It is negative for a sharper distribution and usually
positive for others. A distribution that differs from p but has the same mean surprise is not
detected.

Greedy tokens are compared with the likeliest token. An audit uses the same transforms as verdicts,
in float64. So it detects wrong noise, acceptance or residuals, but no wrong transform.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import check
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.logits_processing import (
    NO_HISTORY,
    TokenHistory,
    adjusted_logits,
    target_probabilities,
)
from outrider.speculation.sampling_params import SamplingParams

NEAR_TIE = 2.0**-6
"""How far rounding can move two bfloat16 logits apart, as neighbouring values differ by up to 2^-7
of themselves. It is relative to the largest logit, or absolute if that logit is below 1. A greedy
token whose logit is within this distance of the largest counts as a near tie."""
_P_MIN = 1e-300
"""Replaces p = 0 in a division of 0 by p."""


def audit(
    logits: Tensor,
    token_ids: Sequence[int],
    params: SamplingParams,
    history: TokenHistory = NO_HISTORY,
) -> AuditSums:
    """Audits a chain of tokens: token i against row i of `logits` [N, V] (any float type, on the
    CPU, unchanged). Penalties count the history as in a verification. Raises `InvariantError` for
    rows that `target_probabilities` refuses."""
    num, vocab_size = logits.shape
    check(len(token_ids) == num, f"{len(token_ids)} tokens and {num} rows")
    inside = [index for index in range(num) if token_ids[index] < vocab_size]
    p = target_probabilities(logits, params, history)
    chosen = torch.tensor([token_ids[index] for index in inside])
    if params.greedy:
        rows = adjusted_logits(logits, params, history).double()[inside]
        found, largest = rows.gather(1, chosen[:, None])[:, 0], rows.amax(dim=1)
        is_other = chosen != rows.argmax(dim=1)
        is_tie = largest - found <= NEAR_TIE * largest.abs().clamp(min=1.0)
        is_impossible = found == -torch.inf
        return AuditSums(
            num,
            num - len(inside) + int((is_other & is_impossible).sum()),
            int((is_other & ~is_impossible & ~is_tie).sum()),
            int((is_other & is_tie).sum()),
        )
    at = torch.zeros(num, dtype=torch.float64)
    at[inside] = p[inside, chosen]
    possible = at > 0
    terms = torch.special.entr(p)  # -p log p, 0 for p = 0, in one pass: V is large.
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
