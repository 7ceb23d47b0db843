"""From a body to requests of the coordinator: what chat and completions have in common.

Nothing is checked here that the coordinator checks: it names its own fields, and `Asked.renamed`
gives them the names that the body has for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.errors import BadRequest
from outrider.limits import MAX_TOKENS_DEFAULT, SEED_BITS
from outrider.request import GenerateRequest, Prompt
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import Rule, SamplingParams

from .bodies import GenerationBody, Speculation
from .output_format import output_format

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
_NAMES: Final[Mapping[str, str]] = {
    "rule": "speculation.rule",
    "num_draft_tokens": "speculation.num_draft_tokens",
    "draft_deadline_ms": "speculation.draft_deadline_ms",
}
"""What fields of the coordinator's are called in every body, where it is not the same."""
PROMPT: Final = "prompt"
"""What a body calls the field that may have several prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a body asks for in its own kind's words."""

    prompts: Sequence[Prompt]
    max_tokens: int | None
    logprobs: int | None
    names: Mapping[str, str]
    """What the body calls fields of the coordinator's; `_NAMES` beside."""
    default_max_tokens: int = MAX_TOKENS_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body, translated."""

    requests: tuple[GenerateRequest, ...]
    """`n` for each prompt, all of the first prompt first."""
    n: int
    streams: bool
    usage_at_end: bool
    usage_always: bool
    histograms: bool
    token_ids: bool
    """Whether the answer tells its tokens, too."""
    names: Mapping[str, str]

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are told."""
        return self.requests[0].logprobs is not None

    def renamed(self, error: BadRequest, index: int) -> BadRequest:
        """The error of one of the requests, with the name that the body has for its field."""
        name = _renamed(error.field, self.names)
        if len(self.requests) > self.n and re.match(rf"{PROMPT}\b", name):
            name = f"{PROMPT}[{index // self.n}]{name.removeprefix(PROMPT)}"
        return BadRequest(name, error.reason)


def translate(body: GenerationBody, wishes: Wishes, draw_seed: Callable[[], int]) -> Asked:
    """The requests that a body asks for. Raises `BadRequest` for fields that contradict each
    other, and for what is not served. `draw_seed` is for a body that names no seed."""
    wanted = output_format(body)
    _check_min_tokens(body, wishes.max_tokens)
    options = body.stream_options
    if options is not None and not body.stream:
        raise BadRequest("stream_options", "is for streams; set stream to true, or leave it out")
    n = body.n or 1
    speculation = body.speculation or Speculation()
    sampling = _sampling(body)
    rule = speculation.rule
    if rule is None and body.seed is None:
        rule = Rule.TOKEN  # A seed that is drawn here is none that the caller asked for.
    requests = tuple(
        GenerateRequest(
            prompt=prompt,
            model=body.model or "",
            sampling=sampling,
            max_tokens=wishes.max_tokens,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            seed=choice_seed(seed, choice),
            rule=rule,
            num_draft_tokens=_num_draft_tokens(speculation),
            deadline_ms=body.deadline_ms,
            logprobs=wishes.logprobs,
            include_rounds=bool(speculation.histograms),
            draft_deadline_ms=speculation.draft_deadline_ms,
            constraint=None if wanted is None else wanted.constraint,
            default_max_tokens=wishes.default_max_tokens,
        )
        for prompt in wishes.prompts
        for seed in (draw_seed() if body.seed is None else body.seed % 2**SEED_BITS,)
        for choice in range(n)
    )
    return Asked(
        requests=requests,
        n=n,
        streams=bool(body.stream),
        usage_at_end=bool(options and options.include_usage),
        usage_always=bool(options and options.continuous_usage_stats),
        histograms=bool(speculation.histograms),
        token_ids=bool(body.return_token_ids),
        names={
            **_NAMES,
            **wishes.names,
            **({"stop[0]": "stop"} if isinstance(body.stop, str) else {}),
            **({} if wanted is None else wanted.names),
        },
    )


def _sampling(body: GenerationBody) -> SamplingParams:
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    biases = sorted((_token_id(token), bias) for token, bias in (body.logit_bias or {}).items())
    return SamplingParams(**given, logit_bias=tuple(biases))


def _token_id(text: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", text):
        raise BadRequest("logit_bias", f"{text[:20]!r} is not a token id")
    return int(text)


def _num_draft_tokens(speculation: Speculation) -> int | None:
    if speculation.enabled is not False:
        return speculation.num_draft_tokens
    if speculation.num_draft_tokens:
        raise BadRequest("speculation.num_draft_tokens", "must be 0, or be left out, with enabled "
                         "false")  # fmt: skip
    return 0


def _check_min_tokens(body: GenerationBody, max_tokens: int | None) -> None:
    """So many are sure to come where nothing but `max_tokens` ends an answer."""
    least = body.min_tokens or 0
    if least and not (body.ignore_eos and not body.stop and least <= (max_tokens or 0)):
        raise BadRequest(
            "min_tokens", "is served only with ignore_eos true, without stop, up to max_tokens"
        )


def _renamed(field: str, names: Mapping[str, str]) -> str:
    field = field.removeprefix("sampling.")
    for known in sorted(names, key=len, reverse=True):
        if re.match(rf"{re.escape(known)}(?!\w)", field):
            return names[known] + field[len(known) :]
    return field
