"""An engine of a few tokens whose logits are a keyed hash of the prefix: instant, and exact to
recompute. It keeps the promises of `Engine`, eviction included, and can be told to fail."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.errors import BadRequest, check


def toy_logits(salt: int, prefix: Sequence[int], vocab_size: int) -> torch.Tensor:
    """The logits [V] after a prefix: about normal, with a deviation of 2."""
    random = np.random.default_rng([salt, len(prefix), *prefix[-4:]])
    return torch.from_numpy(random.normal(0.0, 2.0, vocab_size)).float()


class ToyEngine:
    """See `outrider.engine.interface.Engine`."""

    def __init__(
        self, vocab_size: int = 8, salt: int = 1, max_model_len: int = 64, max_num_seqs: int = 64
    ) -> None:
        self._info = ModelInfo(
            f"toy-{salt}", vocab_size, max_model_len, "float32", (), f"weights-{salt}", "toy"
        )
        self._salt = salt
        self._max_num_seqs = max_num_seqs
        self.held: OrderedDict[str, list[int]] = OrderedDict()
        self.batches: list[list[str]] = []
        """Sessions of each forward pass."""
        self.crash: Exception | None = None
        """Raised by the next forward pass, after it has changed its sequences."""
        self.poisoned: set[str] = set()
        """Sessions whose logits are NaN."""
        self.breaks_after: Callable[[Sequence[int]], bool] = lambda tokens: False
        """Prefixes after which logits are NaN, whatever the session."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        ids = [step.sequence_id for step in steps]
        check(len(set(ids)) == len(ids), "one step a sequence")
        for step in steps:
            check(0 <= step.num_logits <= len(step.token_ids) > 0, "bad number of logits")
            if max(step.token_ids) >= self._info.vocab_size:
                raise BadRequest("token_ids", "outside the vocabulary")
            if self.length(step.sequence_id) + len(step.token_ids) > self._info.max_model_len:
                raise BadRequest("token_ids", "too long")
        self.batches.append(ids)
        logits = [self._run(step) for step in steps]
        while len(self.held) > self._max_num_seqs:
            self.held.popitem(last=False)
        if self.crash is not None:
            crash, self.crash = self.crash, None
            raise crash
        return logits

    def _run(self, step: SequenceStep) -> torch.Tensor:
        tokens = self.held.setdefault(step.sequence_id, [])
        self.held.move_to_end(step.sequence_id)
        tokens.extend(step.token_ids)
        vocab_size = self._info.vocab_size
        first = len(tokens) - step.num_logits + 1
        rows = [
            toy_logits(self._salt, tokens[:end], vocab_size)
            for end in range(first, len(tokens) + 1)
        ]
        logits = torch.stack(rows) if rows else torch.empty(0, vocab_size)
        broken = step.sequence_id in self.poisoned or self.breaks_after(tokens)
        return logits * float("nan") if broken else logits

    def length(self, sequence_id: str) -> int:
        return len(self.held.get(sequence_id, ()))

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        tokens = self.held[sequence_id]
        check(length <= len(tokens), "cannot keep more than is held")
        tokens[length:] = [tokens[index] for index in path]

    def release(self, sequence_id: str) -> None:
        self.held.pop(sequence_id, None)

    def take_step_seconds(self) -> float:
        return 0.0
