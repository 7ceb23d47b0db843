"""Events of an answer."""

from collections.abc import Sequence
from typing import Any

from outrider.interfaces import request
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule


def started(number: int = 1) -> request.Started:
    return request.Started(f"{number:032x}", "m", 1, Rule.TOKEN, num_prompt_tokens=5)


def tokens(
    first: int, ids: Sequence[int], text: str, logprobs: Sequence[Any] = ()
) -> request.Tokens:
    return request.Tokens(first, tuple(ids), text, (Origin.BONUS,) * len(ids), tuple(logprobs))


def finished(reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> request.Finished:
    return request.Finished(
        reason, request.Usage(5, 4), request.Metrics(5, 6, 2, 2.0, 1.0, 1.0, 2), stop
    )
