"""Flags for the fields of a request, and the fields that they give."""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

from outrider import limits
from outrider.errors import BadRequest
from outrider.speculation.sampling_params import Rule, SamplingParams

OWN_FLAGS: Final = ("seed", "num_draft_tokens", "deadline_ms")
"""Settings of a deployment that are flags of the request instead."""


def add_request_flags(parser: argparse.ArgumentParser, max_tokens: int) -> Any:
    """A flag for every field but the prompt; the group they are in. `max_tokens` is the default."""
    request = parser.add_argument_group("request")
    request.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"at most so many [{max_tokens}]"
    )
    request.add_argument("--temperature", type=float, default=0.0, help="0..2; 0 is greedy [0]")
    request.add_argument("--top-p", type=float, default=1.0, help="(0, 1] [1]")
    request.add_argument("--top-k", type=int, default=0, help="0 or -1 = off [0]")
    request.add_argument("--min-p", type=float, default=0.0, help="0..1 [0]")
    request.add_argument("--presence-penalty", type=float, default=0.0, help="-2..2 [0]")
    request.add_argument("--frequency-penalty", type=float, default=0.0, help="-2..2 [0]")
    request.add_argument("--repetition-penalty", type=float, default=1.0, help="(0, 10] [1]")
    request.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help=f"end before this text; up to {limits.STOP_STRINGS_MAX} times",
    )  # fmt: skip
    request.add_argument("--ignore-eos", action="store_true", help="go on past the model's own end")
    request.add_argument("--seed", type=int, help="repeat this request's randomness")
    request.add_argument(
        "--rule", choices=[rule.value for rule in Rule],
        help="acceptance rule [greedy at temperature 0, coupled with a seed, else token]",
    )  # fmt: skip
    request.add_argument(
        "--num-draft-tokens", type=int, metavar="K", help="draft tokens a round; 0 = plain decoding"
    )
    request.add_argument("--deadline-ms", type=int, help="end after so long, ms")
    request.add_argument(
        "--draft-deadline-ms", type=int,
        help="time that a round gives its draft, ms [--draft-timeout-ms of the deployment]",
    )  # fmt: skip
    return request


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as fields of a `GenerateRequest`. Raises `BadRequest` for a number that
    is none; all other limits are the coordinator's."""
    for name in ("temperature", "top_p", "min_p"):
        if not math.isfinite(getattr(arguments, name)):
            raise BadRequest(name, "must be a finite number")
    return {
        "sampling": SamplingParams(
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            min_p=arguments.min_p,
            presence_penalty=arguments.presence_penalty,
            frequency_penalty=arguments.frequency_penalty,
            repetition_penalty=arguments.repetition_penalty,
        ),
        "max_tokens": arguments.max_tokens,
        "stop": tuple(arguments.stop),
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        "rule": None if arguments.rule is None else Rule(arguments.rule),
        "num_draft_tokens": arguments.num_draft_tokens,
        "deadline_ms": arguments.deadline_ms,
        "draft_deadline_ms": arguments.draft_deadline_ms,
    }
