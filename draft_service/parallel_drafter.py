"""Drafts with a model that draws several tokens from one pass: PARD, arXiv 2504.18583."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from draft_service.model_drafter import ModelDrafter
from outrider.config import DraftConfig
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import ConfigError
from outrider.models.loading import refusing
from outrider.models.published_drafters import DrafterFormat, read_config, recognise


def parallel_token(config: DraftConfig) -> int | None:
    """Returns the token that a PARD model reads in place of tokens that are not drawn yet, or None
    if the draft is not a PARD model."""
    directory = Path(config.directory)
    if not config.directory or recognise(directory) is not DrafterFormat.PARD:
        return None
    with refusing(f"drafter {directory}:"):
        return int(read_config(directory)["pard_token"])


class ParallelDrafter(ModelDrafter):
    """A `ModelDrafter` whose proposals take one pass each. After the committed tokens, the pass
    runs K - 1 copies of the parallel token, whose slots are then freed. Draft tokens x_1..x_K are
    drawn from the last K rows of logits."""

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
            # No draft token has been run, so the draft cannot be the `basis` of look-ahead.
            branch.unseen = tuple(branch.token_ids)
            branch.rows.clear()
        return [branch for branch in branches if branch.token_ids]
