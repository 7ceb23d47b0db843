"""Drafts with an EAGLE-3 head that runs apart from its target. The target sends the hidden states
that the head reads, called features."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.drafters.drafter import DraftRequest
from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.draft_layer import PairLayer, pair_shape
from outrider.engine.paged_sequences import PagedSequences
from outrider.errors import BadRequest, InvariantError
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.kv_cache.block_pool import BlockPool
from outrider.kv_cache.storage import KVCache, page_bytes_of, pages_in
from outrider.limits import PAGE_SIZE
from outrider.models.eagle3 import LoadedEagle3


class HeadEngine(PagedSequences):
    """An engine that runs a head. A new token needs the feature of the token before it."""

    def __init__(
        self, head: LoadedEagle3, info: ModelInfo, *, max_num_seqs: int, kv_cache_memory_bytes: int
    ) -> None:
        """Allocates pages for `max_num_seqs` sequences of maximal length. If these pages would take
        more than `kv_cache_memory_bytes`, allocates fewer."""
        weight = head.module.embed_tokens.weight
        shape = pair_shape(head.module, weight.dtype, weight.device)
        longest = max_num_seqs * -(-info.max_model_len // PAGE_SIZE)
        num_pages = min(pages_in(kv_cache_memory_bytes, page_bytes_of([shape], PAGE_SIZE)), longest)
        self.info = replace(info, max_model_len=min(info.max_model_len, num_pages * PAGE_SIZE))
        cache = KVCache([shape], num_pages, PAGE_SIZE)
        self._pairs = self._layer = PairLayer(head.module, cache.layers[0])
        self._use_pool(BlockPool(num_pages, PAGE_SIZE), [cache], max_num_seqs)

    def run(self, steps: Sequence[SequenceStep], features: Tensor) -> Tensor:
        """Like `Engine.forward`, for T new tokens. `features` [T, D] has the feature of the token
        before each new token. For the first token of a sequence, this feature is arbitrary. A step
        asks for one row of logits or none. Returns the head's output [L, D] for the L steps that
        ask for a row."""
        ends = [end - 1 for end in accumulate(len(step.token_ids) for step in steps)]
        wanted = [index for index, step in enumerate(steps) if step.num_logits]
        newest = [ends[index] for index in wanted]
        others = sorted({*range(len(features))} - {*newest})

        def run(step: HeldStep) -> Tensor:
            sequences, size = step.sequences, step.page_size
            if others:  # If a step asks for a row, `draft` below writes the slot of its last token.
                before = [
                    _but_last(sequence) if sequence.step.num_logits else sequence
                    for sequence in sequences
                ]
                before = [sequence for sequence in before if sequence.step.token_ids]
                self._layer.write(HeldStep(before, size), features[others])
            if not wanted:
                return features[:0]
            last = HeldStep([_last(sequences[index]) for index in wanted], size)
            return self._layer.draft(last, [*features[newest]])

        return self._run(run, steps)[0]


def _but_last(held: HeldSequence) -> HeldSequence:
    step = held.step._replace(token_ids=held.step.token_ids[:-1], num_logits=0)
    return held._replace(step=step)


def _last(held: HeldSequence) -> HeldSequence:
    *before, newest = held.step.token_ids
    step = held.step._replace(token_ids=(newest,))
    return HeldSequence(step, held.length + len(before), held.pages)


class FeatureDrafter(ModelDrafter):
    """A `ModelDrafter` with a head. If features of committed tokens are missing, drafts nothing."""

    looks_ahead = False
    reads_features = True
    engine: HeadEngine

    def __init__(self, head: LoadedEagle3, engine: HeadEngine) -> None:
        super().__init__(engine)
        self._head = head.module

    def extend(self, branches: Sequence[AutoregressiveDraft]) -> None:
        """Like `ModelDrafter.extend`. Drops the draft tokens of finished drafts from the engine.
        Their keys and values are inexact: the head ran them on its own outputs, not on features."""
        super().extend(branches)
        for branch in branches:
            if branch.is_whole:
                self.engine.keep(branch.sequence_id, len(branch.request.token_ids))

    def begin(self, request: DraftRequest) -> AutoregressiveDraft:
        """Like `ModelDrafter.begin`. The draft runs the committed tokens with known features, and
        draws only if no feature is missing. Raises `BadRequest` if features do not fit the head."""
        draft, features = super().begin(request), request.features
        nothing = AutoregressiveDraft(request, 0)
        if features is None or not draft.unseen:
            return nothing
        held = self.engine.length(request.session_id)
        width, length = self._head.width, request.noise.committed_length
        if features.width != width:
            raise BadRequest("features.width", f"got {features.width}; the head needs {width}")
        if features.end >= length:
            raise BadRequest(
                "features", f"end at position {features.end - 1}; the last allowed is {length - 2}"
            )
        unseen = draft.unseen[: max(0, features.end + 1 - held)]
        if not unseen or features.first >= max(1, held):
            return nothing
        num_wanted = draft.num_wanted if len(unseen) == len(draft.unseen) else 0
        return AutoregressiveDraft(request, num_wanted, unseen)

    def _pass(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        fresh = [branch for branch in branches if not branch.token_ids]
        begun = [branch for branch in branches if branch.token_ids]
        hidden = []
        if fresh:
            rows = torch.cat([self._rows(branch) for branch in fresh])
            weight = self._head.embed_tokens.weight
            hidden.append(self.engine.run([*map(self._step, fresh)], rows.to(weight)))
        if begun:
            carried = [branch.carried for branch in begun]
            hidden.append(self.engine.forward_draft([*map(self._step, begun)], carried))
        rows = torch.cat(hidden)
        drawing = [branch for branch in (*fresh, *begun) if branch.num_wanted > 0]
        for branch, row in zip(drawing, self._head.carry(rows), strict=True):
            branch.carried = row
        logits = self._head.logits(rows)
        rows_by_branch = {id(branch): logits[row : row + 1] for row, branch in enumerate(drawing)}
        return [rows_by_branch.get(id(branch), logits[:0]) for branch in branches]

    def _rows(self, branch: AutoregressiveDraft) -> Tensor:
        """[T, D], bfloat16: for each token to run, the feature of the token before it."""
        features, held = branch.request.features, self.engine.length(branch.sequence_id)
        if features is None:
            raise InvariantError("a pass without features")
        rows = torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16)
        rows = rows.view(len(features), features.width)
        places = torch.arange(held, held + len(branch.unseen)) - 1
        return rows[places.clamp(min=0) - features.first]
