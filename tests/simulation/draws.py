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
from outrider.speculation.random_streams import RoundNoise


@contextmanager
def checked_draws(hear: Callable[[InvariantError], None]) -> Iterator[None]:
    """Reports two violations to `hear`: drafts after different prefixes draw with the same random
    number, and a draft shortens the proposal of a round without a time limit."""
    prefixes: dict[tuple[RoundNoise, int], tuple[int, ...]] = {}
    draw, propose = DraftSampler._draw, DraftClient._by_replica

    def checked_draw(
        self: DraftSampler, drafts: Sequence[AutoregressiveDraft], depths: Sequence[int], *rest: Any
    ) -> None:
        for draft, depth in zip(drafts, depths, strict=True):
            noise, prefix = draft.request.noise, tuple(draft.request.token_ids)
            known = prefixes.setdefault((noise, depth), prefix)
            if known != prefix and not noise.rule.absolute_noise:
                hear(InvariantError(f"{known} and {prefix} share draw {depth} of {noise}"))
        draw(self, drafts, depths, *rest)

    async def checked_proposal(
        self: DraftClient, index: int, length: RoundLength, start: float
    ) -> Drafted | None:
        found, num_wanted = await propose(self, index, length, start), length.num_draft_tokens
        if found is not None and not length.is_timed and len(found.proposal) < num_wanted:
            hear(InvariantError(f"{len(found.proposal)} of {num_wanted} untimed tokens came"))
        return found

    with (
        patch.object(DraftSampler, "_draw", checked_draw),
        patch.object(DraftClient, "_by_replica", checked_proposal),
    ):
        yield
