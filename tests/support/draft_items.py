"""Items for a draft that looks ahead."""

from collections.abc import Sequence
from typing import Any

from outrider.interfaces.messages import DraftItem
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.rounds import GREEDY, make_head

PLAIN = SamplingParams(temperature=0.9)


def item(
    tokens: Sequence[int],
    base_length: int = 0,
    *,
    rule: Rule = Rule.TOKEN,
    count: int = 3,
    look_ahead: int = 8,
    held: tuple[int, ...] | None = None,
    budget_us: int = 0,
    **head: Any,
) -> DraftItem:
    """Without `budget_us`, the item belongs to a session with a repeated seed."""
    sampling = head.pop("sampling", GREEDY if rule is Rule.GREEDY else PLAIN)
    made = make_head(tokens, base_length, rule=rule, sampling=sampling, **head)
    return DraftItem(made, count, look_ahead, held, budget_us=budget_us)
