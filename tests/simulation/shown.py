"""Emulated targets whose features are read, by a draft layer on the target or a head on a draft."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from outrider.config.emulated_spec import EmulatedSpec
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.drafters.drafter import DraftRequest
from outrider.errors import check
from outrider.interfaces.engine import SequenceStep, check_steps
from outrider.limits import PAGE_SIZE
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.eagle3 import Eagle3Config, Eagle3Head, LoadedEagle3
from target_service.verifier import SelfDrafter
from tests.simulation.toy import QuickEngine


class PairEngine(QuickEngine):
    """An emulated target with a draft layer. The features of a row of logits are the tokens that it
    follows from. The layer returns the tokens that a drafted token follows from: the newest one of
    the features, and the pair's token."""

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        rows = super().forward(steps)
        self._shown = list(torch.split(self._rows_contexts, [step.num_logits for step in steps]))
        return rows

    def features(self) -> list[torch.Tensor]:
        return self._shown

    def forward_draft(
        self, steps: Sequence[SequenceStep], features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        self._pool.append(steps, whole=False)
        pairs = zip(steps, features, strict=True)
        return torch.tensor([[*given.tolist()[1:], step.token_ids[0]] for step, given in pairs])

    def _logits(self, contexts: Any) -> torch.Tensor:
        self._rows_contexts = torch.from_numpy(contexts.astype(np.int64))
        return super()._logits(contexts)


class EmulatedLayer(torch.nn.Module):
    """Returns the logits of an emulated draft for such tokens."""

    def __init__(self, spec: EmulatedSpec) -> None:
        super().__init__()
        self._draft = QuickEngine(spec, "draft")

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._draft._logits(hidden.numpy().astype(np.uint64))


def pair_drafter(spec: EmulatedSpec, engine: PairEngine) -> SelfDrafter:
    layer: Any = EmulatedLayer(spec)
    return SelfDrafter(LoadedDraftHead(layer, tuple(range(spec.vocab_size))), engine)


class KeepingEngine(QuickEngine):
    """Keeps the token of each slot as its features."""

    feature_width = 2

    def held_features(self, ranges: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        tokens = [
            token for name, first, end in ranges for token in self.tokens(name).since(first, end)
        ]
        check(len(tokens) == sum(end - first for _, first, end in ranges), "it holds them")
        return torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, self.feature_width)


class CheckedHead(FeatureDrafter):
    """A random head that checks that the features of a position are those of its token."""

    def __init__(self, spec: EmulatedSpec, max_num_seqs: int) -> None:
        width, token_ids = KeepingEngine.feature_width, tuple(range(spec.vocab_size - 1))
        layer = LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=width,
            num_attention_heads=1,
            head_dim=width,
            num_key_value_heads=1,
            intermediate_size=4,
        )
        config = Eagle3Config(
            layer=layer, draft_vocab_size=len(token_ids), layer_ids=(0,), target_width=width
        )
        module = Eagle3Head(config).requires_grad_(False).eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(generator=generator)
        head = LoadedEagle3(module, token_ids)
        info = replace(QuickEngine(spec, "draft", 1).info, logit_token_ids=token_ids)
        slot_bytes = 2 * width * 4
        engine = HeadEngine(
            head,
            info,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=spec.num_pages * PAGE_SIZE * slot_bytes,
        )
        super().__init__(head, engine)

    def begin(self, request: DraftRequest) -> AutoregressiveDraft:
        features = request.features
        if features is not None:
            rows = torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16)
            kept = rows.view(len(features), -1)[:, -1].long().tolist()
            known = request.token_ids[features.first : features.end]
            # Not an `OutriderError`, which would only refuse the session.
            assert kept[: len(known)] == list(known), f"{kept} sent as features of {known}"
        return super().begin(request)
