"""Draws draft tokens from logits, for drafters with a model or a head."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.drafter import DraftRequest
from outrider.errors import OutOfPages, OutriderError
from outrider.grammar.token_mask import TokenMask
from outrider.speculation.draft_sampling import LikelyTokens, draw_from_logits
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    draft_mask,
    joined_rows,
    masked_logits,
)
from outrider.speculation.proposal import DraftDistribution, Proposal
from outrider.speculation.sampling_params import NO_HISTORY, TokenHistory

logger = logging.getLogger(__name__)


class AutoregressiveDraft:
    """A proposal whose tokens are being drawn."""

    carried: Tensor
    """[D]: the output of a head's last pass. The head's next pass reads this output in place of a
    hidden state that the target has not computed yet. Unset if no head drafts."""

    def __init__(
        self, request: DraftRequest, num_wanted: int | None = None, unseen: tuple[int, ...] = ()
    ) -> None:
        """Begins a proposal of `num_wanted` tokens, by default as many as requested."""
        self.request = request
        self.num_wanted = request.num_draft_tokens if num_wanted is None else num_wanted
        self.unseen = unseen  # the tokens that the model's next pass must run
        self.deadline = request.deadline
        self.num_due = 0
        """Number of tokens to draw even after the time limit: an abandoned draft of the same prefix
        has already drawn them, and may have influenced the time that is left."""
        self.token_ids: list[int] = []
        self.q: list[DraftDistribution | None] = []
        self.rows: list[LikelyTokens] = []
        """For each draw, the likely tokens of its row of logits. Shorter than `token_ids` if the
        likely tokens of some draws are unknown."""
        self.error: OutriderError | None = None
        """The error that ended the draft before its first token."""
        self.must_be_whole = False  # whether neither time nor a lack of pages may shorten it
        self.is_lost = False
        """Whether the draft lacks pages and must begin again (see `lose_pages`)."""

    @property
    def sequence_id(self) -> str:
        return self.request.session_id

    @property
    def is_whole(self) -> bool:
        """Whether the draft gets no more tokens."""
        is_ended = self.error is not None or self.is_lost
        return is_ended or len(self.token_ids) >= self.num_wanted

    def goes_on(self) -> bool:
        """Whether to draw another token. If no time is left, the draft ends. After each True,
        the caller must draw a token before it calls again."""
        is_due = len(self.token_ids) < self.num_due
        if not self.is_whole and not is_due and not self.deadline.allows_draw():
            self.stop()
        return not self.is_whole

    @property
    def newest(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.token_ids[-1]

    @property
    def draws_at_once(self) -> bool:
        """Whether a draw depends only on its row of logits, not on the tokens drawn before."""
        return not self.request.sampling.penalised and self.request.allowed is None

    @property
    def is_seen(self) -> bool:
        """Whether the draft has tokens, and `rows` is complete."""
        return 0 < len(self.token_ids) == len(self.rows)

    @property
    def history(self) -> TokenHistory:
        """The tokens that penalties count, draft tokens included."""
        if not self.request.sampling.penalised:
            return NO_HISTORY
        committed, length = self.request.token_ids, self.request.prompt_length
        return TokenHistory(committed[:length], (*committed[length:], *self.token_ids))

    def add(self, token_id: int, q: DraftDistribution | None) -> None:
        """Appends a drawn token."""
        self.token_ids.append(token_id)
        self.q.append(q)

    def stop(self) -> None:
        """Ends the draft with the tokens that it has."""
        self.num_wanted = len(self.token_ids)

    def lose_pages(self) -> None:
        """Ends the draft because it lacks pages. The tokens that it has are proposed. But a draft
        that must be whole proposes nothing, and must begin again."""
        if self.must_be_whole:
            self.is_lost = True
        else:
            self.stop()

    def end(self, error: Exception) -> None:
        """Ends the draft after an error. Drawn tokens are still proposed. One of them may have
        caused the error, and dropping a token because of its value would bias the output."""
        if isinstance(error, OutOfPages) and self.must_be_whole:
            self.lose_pages()
        elif self.token_ids:
            logger.info("a draft ends after %d tokens: %s", len(self.token_ids), error)
            self.stop()
        elif isinstance(error, OutriderError):
            self.error = error
        else:
            self.error = OutriderError(f"the draft's pass failed: {error!r}")

    @property
    def proposal(self) -> Proposal:
        q = tuple(self.q) if self.request.rule.needs_q else ()
        return Proposal(tuple(self.token_ids), q)


class DraftSampler:
    """Draws the next tokens of many drafts from a model's logits."""

    def __init__(self, vocabulary: DraftVocabulary | None) -> None:
        """`vocabulary` has the token of each column of the logits. None = all tokens."""
        self.vocabulary = vocabulary

    def draw(
        self, drafts: Sequence[AutoregressiveDraft], rows: Sequence[Tensor]
    ) -> list[AutoregressiveDraft]:
        """Draws one token from each row of a draft's logits [n, N]. Only a draft that
        `draws_at_once` may have several rows. If no token can be drawn from a row, or the grammar
        allows no further token, the draft ends. Returns the drafts that got a token."""
        lengths = [len(draft.token_ids) for draft in drafts]
        by_row: list[AutoregressiveDraft] = []
        depths: list[int] = []
        masks: list[TokenMask | None] = []
        left: list[Tensor] = []
        for draft, own, length in zip(drafts, rows, lengths, strict=True):
            mask = None
            if draft.request.allowed is not None:
                mask = draft_mask(draft.request.allowed, draft.token_ids, self.vocabulary)
                if mask is None:
                    draft.stop()
                    continue
            by_row += [draft] * len(own)
            depths += range(length, length + len(own))
            masks += [mask] * len(own)
            left.append(own)
        if left:
            self._draw(by_row, depths, masked_logits(joined_rows(left), masks, self.vocabulary))
        before = zip(drafts, lengths, strict=True)
        return [draft for draft, length in before if len(draft.token_ids) > length]

    def _draw(
        self, drafts: Sequence[AutoregressiveDraft], depths: Sequence[int], logits: Tensor
    ) -> None:
        """Draws token `depths[i]` of draft i from row i of `logits`. After an error, draws from
        each row alone, so that the error ends only the draft that caused it."""
        try:
            tokens, drawn_from = draw_from_logits(
                logits,
                [draft.request.sampling for draft in drafts],
                [draft.request.noise for draft in drafts],
                depths,
                [draft.history for draft in drafts],
                self.vocabulary,
            )
        except OutriderError as error:
            if len(drafts) == 1:
                drafts[0].end(error)
                return
            for draft, depth, row in zip(drafts, depths, torch.split(logits, 1), strict=True):
                if not draft.is_whole:
                    self._draw([draft], [depth], row)
            return
        for draft, (token_id, q), likely in zip(drafts, tokens, drawn_from, strict=True):
            draft.add(token_id, q)
            draft.unseen = (token_id,)
            if likely is not None:
                draft.rows.append(likely)
