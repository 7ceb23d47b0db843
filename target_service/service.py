"""The target's service answers items with verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from outrider.drafters.lookup import LookupDrafter
from outrider.grammar.compiler import Grammars
from outrider.interfaces.engine import Engine
from outrider.interfaces.messages import VerifyItem
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import BATCHED_TOKENS_DEFAULT, STREAM_INTERVAL_MS
from outrider.replica.drivers import StepDriver
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_loop import StepLoop
from outrider.replica.token_budget import TokenBudget
from target_service.lookups import TargetLookups
from target_service.run_ahead import RunAheads
from target_service.verifier import SelfDrafter, Verifier


class TargetService(SteppedService[VerifyItem]):
    """Answers verify items with verdicts of one engine."""

    def __init__(
        self,
        engine: Engine,
        driver: StepDriver,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = BATCHED_TOKENS_DEFAULT,
        costs: StepCosts | None = None,
        self_drafter: SelfDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
        stream_interval_ms: int = STREAM_INTERVAL_MS,
        lookup: LookupDrafter | None = None,
    ) -> None:
        """A step has at most `max_num_seqs` sessions and `max_num_batched_tokens` tokens. With
        `costs`, the time of a step is limited too, and a step may wait for sessions that are
        expected soon (`BatchingDelay`). A `self_drafter` must use this engine. `clock` measures the
        time of drafting in seconds. Without `grammars`, sessions with a constraint are refused.
        Verdicts of rounds that run ahead wait up to `stream_interval_ms`, because one message with
        several verdicts costs less than several messages. Without a `lookup`, items that ask for
        tokens of the target's look-up get verdicts without a proposal."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        lookups = None if lookup is None else TargetLookups(lookup)
        verifier = Verifier(engine, budget, self_drafter, clock, grammars, lookups)
        layer = getattr(engine, "draft_layer", None)
        description = replace(
            describe_model(engine.info, max_num_seqs, costs),
            drafts_itself=self_drafter is not None,
            looks_up=lookup is not None,
            shows_features=verifier.keeper is not None,
            draft_note="" if layer is None else layer.note,
        )
        info = engine.info
        self.run_aheads = RunAheads(
            info.max_model_len, info.eos_token_ids, held_s=stream_interval_ms / 1e3
        )
        steps = StepLoop(verifier, max_num_seqs, budget.round_seconds, self.run_aheads)
        super().__init__(steps, driver, description, grammars)
