"""Log-probabilities as the session store keeps them: a line of JSON for each token."""

from __future__ import annotations

import json
import math

from outrider.errors import DataLoss
from outrider.messages import PositionLogprobs


def write_logprobs(logprobs: PositionLogprobs) -> str:
    """A line of JSON for the store, which knows no infinity: an impossible token has null."""
    top = [[token_id, _finite(value)] for token_id, value in logprobs.top]
    return json.dumps([_finite(logprobs.logprob), top], allow_nan=False)


def read_logprobs(line: str) -> PositionLogprobs:
    """What `write_logprobs` wrote. Raises `DataLoss` for anything else."""
    try:
        logprob, top = json.loads(line)
        return PositionLogprobs(
            _number(logprob), tuple((int(token_id), _number(value)) for token_id, value in top)
        )
    except (ValueError, TypeError) as error:
        raise DataLoss(f"stored log-probabilities cannot be read: {error}") from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return -math.inf if value is None else float(value)
