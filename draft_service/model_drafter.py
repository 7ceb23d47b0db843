"""Drafts with a model, in K passes. Each pass draws a token for each session that still wants one.
PARD models draw several tokens from one pass (arXiv 2504.18583)."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.config.deployment import DraftConfig
from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.errors import ConfigError, check
from outrider.interfaces.engine import Engine, SequenceStep
from outrider.speculation.logits_processing import DraftVocabulary

logger = logging.getLogger(__name__)


class ModelDrafter:
    """Drafts with a model. After `extend`, the engine holds the committed tokens and all draft
    tokens except the last one, which was drawn but never run.

    A proposal has fewer tokens than requested if more would exceed `max_model_len`, or if its time
    limit is over. If a pass fails after the first draw, the drawn tokens are still proposed
    (`AutoregressiveDraft.end` says why)."""

    looks_ahead = True
    in_one_pass = False  # whether one pass gives the logits of all draft tokens
    reads_features = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vocabulary = DraftVocabulary.of(engine.info.logit_token_ids)
        self._sampler = DraftSampler(self.vocabulary)
        self.num_passes = 0  # number of passes in the last call of `extend`

    def extend(self, branches: Sequence[AutoregressiveDraft]) -> None:
        """Draws tokens for drafts of distinct sessions. Returns early if the time limit of a
        finished draft is over, because this draft is sent only after `extend` returns. The next
        call continues the other drafts. Returns late if a draft must be whole, because in a later
        step it might lack pages.

        The engine must hold each draft's committed and draft tokens, except those in `unseen`. A
        draft with draft tokens ends if the engine has lost a token (`lose_pages`). A draft that
        wants no tokens still runs its prefix. Raises an error of the first pass if no draft has
        draft tokens."""
        for branch in branches:
            if branch.token_ids and not self.holds(branch):
                branch.lose_pages()
        self.num_passes = 0
        with torch.inference_mode():
            growing = [
                branch
                for branch in branches
                if (branch.goes_on() if branch.token_ids else branch.unseen)
            ]
            self._grow(growing, branches)

    def holds(self, branch: AutoregressiveDraft) -> bool:
        """Whether the engine still holds all tokens that were run for a branch."""
        length = len(branch.request.token_ids) + len(branch.token_ids) - len(branch.unseen)
        return self.engine.length(branch.sequence_id) == length

    def begin(self, request: DraftRequest) -> AutoregressiveDraft:
        """Returns a draft without tokens. The engine must hold a proper prefix of the committed
        tokens. If a committed token after this prefix is outside the vocabulary, or if there are
        more than `max_model_len` committed tokens, the draft is finished and runs nothing."""
        info = self.engine.info
        committed = request.token_ids
        held = self.engine.length(request.session_id)
        check(held < len(committed), f"{held} slots are held for {len(committed)} committed tokens")
        # x_K is drawn from the row of the token before it and needs no slot.
        num_wanted = min(request.num_draft_tokens, info.max_model_len - len(committed) + 1)
        unseen = tuple(committed[held:])
        if len(committed) > info.max_model_len or max(unseen) >= info.vocab_size:
            return AutoregressiveDraft(request, 0)
        return AutoregressiveDraft(request, num_wanted, unseen)

    def advance(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        """Runs one pass. Each of the unfinished drafts `branches` gets one more token or an error.
        The pass also runs the steps `beside` of other sequences, and returns their logits. Raises
        the errors of the engine."""
        if not (branches or beside):
            return []
        with torch.inference_mode():
            logits = self._pass(branches, beside)
            self._draw(branches, logits[len(beside) :])
        return logits[: len(beside)]

    def can_advance(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep]
    ) -> bool:
        """Whether there are enough pages for the pass that `advance` would run."""
        return self.engine.can_hold([*beside, *map(self._step, branches)])

    def _pass(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        return self.engine.forward([*beside, *map(self._step, branches)])

    def _step(self, branch: AutoregressiveDraft) -> SequenceStep:
        num_logits = 1 if branch.num_wanted > 0 else 0
        return SequenceStep(branch.sequence_id, branch.unseen, num_logits)

    def _grow(
        self, active: list[AutoregressiveDraft], together: Sequence[AutoregressiveDraft]
    ) -> None:
        """Extends the `active` drafts to their end, one token in each pass. Returns earlier if the
        time limit of a finished draft in `together` is over (see `extend`)."""
        while active:
            self.num_passes += 1
            try:
                logits = self._pass(active)
            except Exception as error:
                if not any(branch.token_ids for branch in active):
                    raise
                # If the engine is lost, the first pass of the next step raises this error again.
                logger.exception("%d drafts end early", len(active))
                for branch in active:
                    self.end(branch, error)
                return
            # For a draft whose prefix has just run, the time limit is checked only here.
            going_on = [
                i for i, branch in enumerate(active) if branch.token_ids or branch.goes_on()
            ]
            active = self._draw([active[i] for i in going_on], [logits[i] for i in going_on])
            active = [branch for branch in active if branch.goes_on()]
            must_go_on = any(branch.must_be_whole for branch in active)
            if not must_go_on and any(
                other.deadline.is_over and other not in active for other in together
            ):
                return

    def _draw(
        self, branches: Sequence[AutoregressiveDraft], rows: Sequence[Tensor]
    ) -> list[AutoregressiveDraft]:
        """Draws a token for each branch from logits [1, V]. Returns the branches that got one."""
        drawn = self._sampler.draw(branches, rows)
        if len(drawn) < len(branches):
            for branch in branches:
                if branch.is_whole:
                    self._undo_last_pass(branch)
        return drawn

    def end(self, branch: AutoregressiveDraft, error: Exception) -> None:
        """Ends a draft after an error, and frees the slot of its last token."""
        branch.end(error)
        self._undo_last_pass(branch)

    def _undo_last_pass(self, branch: AutoregressiveDraft) -> None:
        if branch.token_ids:
            length = len(branch.request.token_ids) + len(branch.token_ids) - 1
            self.engine.keep(branch.sequence_id, length)


class ParallelDrafter(ModelDrafter):
    """A `ModelDrafter` whose proposals take one pass each. After the committed tokens, the pass
    runs K - 1 copies of the parallel token (see `parallel_token`). Their slots are then freed.
    Draft tokens x_1..x_K are drawn from the last K rows of logits."""

    in_one_pass = True

    def __init__(self, engine: Engine, token_id: int) -> None:
        """`token_id` is the parallel token. Raises `ConfigError` if it is not in the vocabulary."""
        super().__init__(engine)
        if not 0 <= token_id < engine.info.vocab_size:
            raise ConfigError(
                f"drafter {engine.info.name}: its parallel token {token_id} is not in "
                f"0..{engine.info.vocab_size - 1}"
            )
        self._token_id = token_id

    def _step(self, branch: AutoregressiveDraft) -> SequenceStep:
        masks = (self._token_id,) * max(0, branch.num_wanted - 1)
        return SequenceStep(branch.sequence_id, branch.unseen + masks, branch.num_wanted)

    def _pass(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        logits = super()._pass(branches, beside)
        for branch in branches:
            self.engine.keep(branch.sequence_id, len(branch.request.token_ids))
        return logits

    def _draw(
        self, branches: Sequence[AutoregressiveDraft], rows: Sequence[Tensor]
    ) -> list[AutoregressiveDraft]:
        left = list(zip(branches, rows, strict=True))
        while left:
            next_rows = [own if branch.draws_at_once else own[:1] for branch, own in left]
            self._sampler.draw([branch for branch, _ in left], next_rows)
            left = [(branch, own[1:]) for branch, own in left if branch.goes_on()]
        for branch in branches:
            # Look-ahead must not fork a draft (`is_seen`) if the engine lacks the draft tokens.
            branch.unseen = tuple(branch.token_ids)
            branch.rows.clear()
        return [branch for branch in branches if branch.token_ids]


def parallel_token(config: DraftConfig) -> int | None:
    """Returns the token that a PARD model reads in place of tokens that are not drawn yet, or None
    if the draft is not a PARD model."""
    from outrider.models.loading import refusing
    from outrider.models.published_drafters import PARD, read_config, recognise

    directory = Path(config.directory)
    if not config.directory or recognise(directory) != PARD:
        return None
    with refusing(f"drafter {directory}:"):
        return int(read_config(directory)["pard_token"])
