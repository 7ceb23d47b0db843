"""A draft service over a drafter without a model."""

from __future__ import annotations

from draft_service.proposing import Proposer
from draft_service.service import DraftService
from outrider.constraints.grammars import Grammars
from outrider.constraints.matching import Matchers
from outrider.drafting.drafter import Drafter
from outrider.engine.executor import StepExecutor
from outrider.engine.interface import ModelInfo
from outrider.stepped_service import describe_model
from outrider.work import StepObserver

_INFO = ModelInfo("lookup", 0, 0, "", (), "", "")
"""It fits any target."""


def draft_without_model(
    drafter: Drafter,
    executor: StepExecutor,
    *,
    max_num_seqs: int,
    observer: StepObserver | None = None,
    grammars: Grammars | None = None,
) -> DraftService:
    """The service; by `grammars`, its proposals end where a session's constraint ends them."""
    proposer = Proposer(drafter, matchers=None if grammars is None else Matchers(grammars))
    description = describe_model(_INFO, max_num_seqs, None)
    return DraftService(proposer, executor, description, observer, grammars)
