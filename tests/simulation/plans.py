"""What the clients of a seed do: requests of many shapes."""

import random
from dataclasses import dataclass, replace

from outrider.grammar.constraint import Constraint
from outrider.interfaces.request import GenerateRequest
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.simulation.toy import SPEC

PROMPT_TOKENS_MAX = (12, 12, 40)
"""Bounds, drawn equally often. A prompt of 40 tokens has two whole pages."""

REPEATED_SHARE = 0.3
KEYED_SHARE = 0.2
LIMITED_SHARES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.7)
"""Shares of the sessions whose caller may run only some at a time."""
LOGPROBS = (None, None, None, 0, 2, 5)
DEADLINE_MS = (1_000, 15_000)
"""Without faults, most sessions end within a second."""
CONSTRAINT_SHARE = 0.1
IGNORE_EOS_SHARE = 0.95
LETTERS = "abcdé"
STOPS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    *[((), ())] * 12,
    *[(("da", "cc", "bé"), ()), (("aba", "aca", "dé", "abc"), ()), (("éd",), (2,))],
)
"""Stop strings and stop tokens. Some strings begin like others, or with half a letter."""


@dataclass(frozen=True)
class Plan:
    """One session of a seed."""

    request: GenerateRequest
    start_s: float
    leave_after: int | None
    """Events after which the client disconnects."""
    cancel_after: int | None
    """Events after which the client calls `Cancel`, while it reads on."""
    is_limited: bool
    """Whether the caller is `LIMITED`."""
    key: str = ""
    """Idempotency key, if any."""


def draw_plans(rng: random.Random) -> list[Plan]:
    """The plans of a seed. The last request may be the first again, with the same key or none."""
    limited_share = rng.choice(LIMITED_SHARES)
    plans = [draw_plan(rng, limited_share) for _ in range(rng.randint(2, 4))]
    kind = rng.random()
    if kind < REPEATED_SHARE:
        plans[-1] = replace(plans[-1], request=plans[0].request)
    elif kind < REPEATED_SHARE + KEYED_SHARE:
        # The second client would see the first one's deadline pass.
        request = replace(plans[0].request, deadline_ms=None)
        shared = Plan(request, plans[-1].start_s, None, None, False, "key")
        first = plans[0]
        plans[0] = replace(shared, start_s=first.start_s, leave_after=first.leave_after)
        plans[-1] = shared
    return plans


def draw_choices(rng: random.Random) -> Constraint:
    """A few texts, some of which begin like others."""
    texts = [""]
    for _ in range(6):
        beginning = rng.choice(texts)
        kept = beginning[: rng.randint(0, len(beginning))]
        texts.append(kept + "".join(rng.choices(LETTERS, k=rng.randint(1, 20))))
    return Constraint.of_choices(sorted(set(texts[1:])))


def draw_plan(rng: random.Random, limited_share: float) -> Plan:
    temperature = rng.choice((0.0, 1.0, 1.0, 1.0))
    rule = None if temperature == 0 else rng.choice((Rule.TOKEN, Rule.BLOCK, Rule.COUPLED))
    stop, stop_token_ids = rng.choice(STOPS)
    constraint = draw_choices(rng) if rng.random() < CONSTRAINT_SHARE else None
    num_prompt_tokens = rng.randint(1, rng.choice(PROMPT_TOKENS_MAX))
    request = GenerateRequest(
        prompt=tuple(rng.randrange(SPEC.vocab_size) for _ in range(num_prompt_tokens)),
        sampling=SamplingParams(
            temperature=temperature, top_k=rng.choice((0, 0, 3)), stop_token_ids=stop_token_ids
        ),
        stop=stop,
        ignore_eos=constraint is None and rng.random() < IGNORE_EOS_SHARE,
        constraint=constraint,
        max_tokens=rng.randint(16, 48),
        seed=rng.getrandbits(64),
        rule=rule,
        num_draft_tokens=rng.choice((0, 1, 3, 4)),
        logprobs=rng.choice(LOGPROBS),
        deadline_ms=rng.choice((*[None] * 7, rng.randint(*DEADLINE_MS))),
    )
    start_s, num_events = rng.uniform(0, 0.3), rng.randint(1, 10)
    ends = [(None, None)] * 6 + [(num_events, None), (None, num_events)]
    return Plan(request, start_s, *rng.choice(ends), rng.random() < limited_share)
