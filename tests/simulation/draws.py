"""Conditions of the proof in docs/exactness.md that the law of few tokens would not show."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from coordinator.draft_length.policy import RoundLength
from coordinator.routing.draft_client import DraftClient
from coordinator.routing.drafts import Drafted
from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.errors import InvariantError
from outrider.speculation import draft_sampling
from outrider.speculation.gumbel_max import numbers


@contextmanager
def checked_draws(hear: Callable[[InvariantError], None]) -> Iterator[None]:
    """Reports two violations to `hear`: drafts after different prefixes draw with the same random
    number, and a draft shortens the proposal of a round without a time limit."""
    seen: dict[int, tuple[tuple[int, ...], int]] = {}
    """Random number -> the prefix after which a draft drew with it, and the draft token's index."""
    drawing: list[tuple[AutoregressiveDraft, int]] = []
    draw, number, propose = DraftSampler._draw, numbers, DraftClient._by_replica

    def checked_draw(
        self: DraftSampler, drafts: Sequence[AutoregressiveDraft], depths: Sequence[int], *rest: Any
    ) -> None:
        pairs = zip(drafts, depths, strict=True)
        drawing[:] = [(draft, depth) for draft, depth in pairs if draft.request.rule.needs_q]
        draw(self, drafts, depths, *rest)

    def checked_numbers(keys: Any, indices: Any) -> Any:
        found = number(keys, indices)
        for (draft, depth), drawn in zip(drawing, found[:, 0].tolist(), strict=True):
            own = tuple(draft.request.token_ids), depth
            if (known := seen.setdefault(drawn, own)) != own:
                hear(InvariantError(f"{known} and {own} share a random number"))
        return found

    async def checked_proposal(
        self: DraftClient, index: int, length: RoundLength, start: float
    ) -> Drafted | None:
        found, num_wanted = await propose(self, index, length, start), length.num_draft_tokens
        # A constraint may leave nothing to draft.
        is_whole = not length.is_timed and self._route.context.parameters.constraint is None
        if found is not None and is_whole and len(found.proposal) < num_wanted:
            hear(InvariantError(f"{len(found.proposal)} of {num_wanted} untimed tokens came"))
        return found

    with (
        patch.object(DraftSampler, "_draw", checked_draw),
        patch.object(draft_sampling, "numbers", checked_numbers),
        patch.object(DraftClient, "_by_replica", checked_proposal),
    ):
        yield
