"""Emulated targets that show what their logits or their first layers' are made of, and who drafts
from that: such a target itself, as one with heads or an early exit does, or a head in a draft."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draft_service.eagle_drafter import EagleDrafter
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.engine.interface import SequenceStep, check_steps
from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.models.eagle import EagleHead, LoadedEagle
from outrider.models.early_exit import LoadedExit
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.proposal import Proposal
from target_service.self_drafting import ExitDrafter
from tests.simulation.toy import QuickEngine


class ShownEngine(QuickEngine):
    """Shows, for each row of logits, the last tokens that it follows from."""

    shows_features = True

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        rows = super().forward(steps)
        self._features = list(torch.split(self._rows_contexts, [step.num_logits for step in steps]))
        return rows

    def features(self) -> list[torch.Tensor]:
        return self._features

    def _logits(self, contexts: Any) -> torch.Tensor:
        self._rows_contexts = torch.from_numpy(contexts.astype(np.int64))
        return super()._logits(contexts)


class ShownDrafter:
    """Drafts what an emulated draft would, from such tokens."""

    reads_features = True

    def __init__(self, spec: EmulatedSpec, engine: ShownEngine) -> None:
        self._draft = QuickEngine(spec, "draft")

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        return [*map(self._propose, requests, hidden_states)]

    def _propose(self, wanted: DraftRequest, hidden_states: torch.Tensor) -> Proposal:
        context = [*hidden_states.tolist()[1:], wanted.token_ids[-1]]
        history = AutoregressiveDraft(wanted).history
        token_ids, q = [], []
        for depth in range(wanted.num_draft_tokens):
            logits = self._draft._logits(np.array([context], dtype=np.uint64))
            [(token_id, drawn_from)], _ = draw_from_logits(
                logits, wanted.sampling, [wanted.noise], [depth], history=history
            )
            token_ids.append(token_id)
            q.append(drawn_from)
            context = [*context[1:], token_id]
        return Proposal(tuple(token_ids), tuple(q) if wanted.rule.needs_q else ())


class ShallowEngine(QuickEngine):
    """Its first layers put out, for each row, the last tokens that it follows from."""

    def forward_shallow(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        self._pool.append(steps, whole=False)
        return [torch.tensor(self._contexts(step)) for step in steps]


class EmulatedExit(torch.nn.Module):
    """Puts out what an emulated draft would, of such tokens."""

    def __init__(self, spec: EmulatedSpec) -> None:
        super().__init__()
        self._draft = QuickEngine(spec, "draft")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._draft._logits(hidden.numpy().astype(np.uint64))


def exit_drafter(spec: EmulatedSpec, engine: ShallowEngine) -> ExitDrafter:
    module: Any = EmulatedExit(spec)
    exit_head = LoadedExit(module, tuple(range(spec.vocab_size)), 1)
    return ExitDrafter(exit_head, engine, DRAFT_SUPPORT_ENTRIES)


class CheckedEagle(EagleDrafter):
    """A random head over two tokens of context. What it hears of a place must be of its token."""

    def __init__(self, spec: EmulatedSpec, sessions_max: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)

        width = 2
        module = EagleHead(numbers(spec.vocab_size, width), numbers(spec.vocab_size - 1, width), 4)
        for linear in module.layer.children():
            linear.weight = numbers(*linear.weight.shape)
        loaded = LoadedEagle(module.eval(), tuple(range(spec.vocab_size - 1)))
        super().__init__(loaded, NgramDrafter(), sessions_max=sessions_max)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            features = request.features
            if features is not None:
                rows = torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16)
                newest = rows.view(len(features), -1)[:, -1].long().tolist()
                check(
                    newest == list(request.token_ids[features.first : features.end]),
                    "features are of the tokens that they are said to be of",
                )
        return super().propose(requests)
