"""An emulated target that drafts itself, as one with heads does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.engine.emulated import EmulatedEngine, EmulatedSpec
from outrider.engine.interface import SequenceStep
from outrider.speculation.drafting import draw_from_logits
from outrider.speculation.proposal import Proposal
from target_service.self_drafting import NextRound


class ShownEngine(EmulatedEngine):
    """Shows, for each row of logits, the last tokens that it follows from."""

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        rows = super().forward(steps)
        self._features = list(torch.split(self._contexts, [step.num_logits for step in steps]))
        return rows

    def features(self) -> list[torch.Tensor]:
        return self._features

    def _logits(self, contexts: Any) -> torch.Tensor:
        self._contexts = torch.from_numpy(contexts.astype(np.int64))
        return super()._logits(contexts)


class ShownDrafter:
    """Drafts what an emulated draft would, from such tokens."""

    def __init__(self, spec: EmulatedSpec) -> None:
        self._draft = EmulatedEngine(spec, "draft")

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        return [self._propose(entry) for entry in rounds]

    def _propose(self, entry: NextRound) -> Proposal:
        wanted = entry.wanted
        context = [*entry.features.tolist()[1:], wanted.newest]
        token_ids, q = [], []
        for depth in range(wanted.num_draft_tokens):
            logits = self._draft._logits(np.array([context], dtype=np.uint64))
            [(token_id, drawn_from)], _ = draw_from_logits(
                logits, wanted.sampling, [wanted.noise], [depth], history=wanted.history
            )
            token_ids.append(token_id)
            q.append(drawn_from)
            context = [*context[1:], token_id]
        return Proposal(tuple(token_ids), tuple(q) if wanted.rule.needs_q else ())
