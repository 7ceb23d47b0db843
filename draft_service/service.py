"""The draft as a `ReplicaService`: takes items from streams, answers proposals."""

from __future__ import annotations

from draft_service.model_drafter import ModelDrafter
from draft_service.proposing import Proposer
from outrider.drafting.drafter import Drafter
from outrider.engine.executor import StepExecutor
from outrider.engine.interface import Engine
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.messages import DraftAnswer, DraftItem, ReplicaDescription
from outrider.stepped_service import SteppedService, describe_model
from outrider.stepping import StepObserver


class DraftService(SteppedService[DraftItem, DraftAnswer]):
    """Serves any number of streams with one drafter."""

    @classmethod
    def with_model(
        cls,
        engine: Engine,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        entries_max: int = DRAFT_SUPPORT_ENTRIES,
        observer: StepObserver | None = None,
    ) -> DraftService:
        """Drafts with a model; the engine must hold `max_num_seqs` sequences. A distribution
        keeps `entries_max` tokens at most."""
        proposer = Proposer(ModelDrafter(engine, entries_max), engine)
        return cls(proposer, executor, describe_model(engine.info, max_num_seqs), observer)

    @classmethod
    def without_model(
        cls,
        name: str,
        drafter: Drafter,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        observer: StepObserver | None = None,
    ) -> DraftService:
        """Drafts with something that needs no model, such as prompt lookup (`ngram`). It fits any
        tokenizer, and proposes nothing that was not in the session."""
        description = ReplicaDescription(
            model=name,
            weights_fingerprint="",
            tokenizer_fingerprint="",
            vocab_size=0,
            dtype="",
            max_model_len=0,
            eos_token_ids=(),
            max_num_seqs=max_num_seqs,
        )
        return cls(Proposer(drafter, None), executor, description, observer)
