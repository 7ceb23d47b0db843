"""An engine with few tokens, whose logits are a keyed hash of the prefix. It is reproducible, obeys
the contract of `Engine`, including eviction, and can be made to fail."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.interfaces.engine import ModelInfo, SequenceStep, check_steps
from outrider.kv_cache.block_pool import BlockPool

PAGE_SIZE = 4


def toy_logits(salt: int, prefix: Sequence[int], vocab_size: int) -> torch.Tensor:
    """The logits [V] after a prefix, roughly normal with standard deviation 2."""
    random = np.random.default_rng([salt, len(prefix), *prefix[-4:]])
    return torch.from_numpy(random.normal(0.0, 2.0, vocab_size)).float()


class ToyEngine:
    """See `outrider.interfaces.engine.Engine`."""

    def __init__(
        self,
        vocab_size: int = 8,
        salt: int = 1,
        max_model_len: int = 64,
        num_pages: int = 1024,
        pass_s: float = 0.0,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Each pass reports a duration of `pass_s`."""
        self.info = ModelInfo(
            f"toy-{salt}",
            vocab_size,
            max_model_len,
            "float32",
            eos_token_ids,
            f"weights-{salt}",
            "toy",
        )
        self._salt = salt
        self._pass_s = pass_s
        self.stated_seconds = 0.0
        self._pool = pool = BlockPool(num_pages, PAGE_SIZE)
        self.can_hold, self.fork, self.keep = pool.can_hold, pool.fork, pool.keep
        self.release, self.tokens, self.length = pool.release, pool.tokens, pool.length
        self.page_counts = pool.counts
        self._known: set[str] = set()
        self.batches: list[list[str]] = []  # sessions of each forward pass
        self.counts: list[list[int]] = []  # tokens of each session of each forward pass
        self.crash: Exception | None = None
        """Error that the next forward pass raises, after it has changed its sequences."""
        self.poisoned: set[str] = set()  # sessions whose logits are NaN
        self.breaks_after: Callable[[Sequence[int]], bool] = lambda tokens: False
        """Prefixes after which logits are NaN, in every session."""

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        ids = [step.sequence_id for step in steps]
        check_steps(steps, self.info, len(steps), self.length)
        self._pool.append(steps)
        self._pool.written(steps)
        self.stated_seconds += self._pass_s
        self.batches.append(ids)
        self.counts.append([len(step.token_ids) for step in steps])
        self._known.update(ids)
        logits = [self._run(step) for step in steps]
        if self.crash is not None:
            crash, self.crash = self.crash, None
            raise crash
        return logits

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[torch.Tensor]]:
        """Computes at once, as `EmulatedEngine` does."""
        logits = self.forward(steps)
        return lambda: logits

    def _run(self, step: SequenceStep) -> torch.Tensor:
        tokens = self.tokens(step.sequence_id).since(0)
        vocab_size, first = self.info.vocab_size, len(tokens) - step.num_logits + 1
        lengths = range(first, len(tokens) + 1)
        rows = [toy_logits(self._salt, tokens[:length], vocab_size) for length in lengths]
        logits = torch.stack(rows) if rows else torch.empty(0, vocab_size)
        broken = step.sequence_id in self.poisoned or self.breaks_after(tokens)
        return logits * float("nan") if broken else logits

    @property
    def held(self) -> dict[str, list[int]]:
        """The tokens of every sequence that is not empty."""
        ids = {name: list(self.tokens(name).ids) for name in self._known}
        return {name: tokens for name, tokens in ids.items() if tokens}

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        self._known.add(sequence_id)
        return self._pool.attach(sequence_id, token_ids, salt)
