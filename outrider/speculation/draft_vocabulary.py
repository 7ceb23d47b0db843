"""A draft whose head has rows for a part of the target's vocabulary alone.

Its logits stay in that small space: [R, N], column c for the token `token_ids[c]`. What a request
says of tokens is brought there, what is drawn or sent is brought back, and noise is keyed by the
target's ids all along. A token without a column has q = 0, which is exact under every rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import check
from outrider.speculation.logits_processing import TokenHistory
from outrider.speculation.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The tokens that have a column."""

    token_ids: npt.NDArray[np.int64]
    """[N], ascending: so the lowest column of a tie is the lowest id, and lists stay in order."""
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        ascends = bool((np.diff(self.token_ids) > 0).all())
        check(len(self.token_ids) > 0 and ascends, "the tokens of a reduced vocabulary ascend")

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> DraftVocabulary | None:
        """That of these tokens; None where none are listed, for every column is its token."""
        return cls(np.array(token_ids, dtype=np.int64)) if token_ids else None

    def table(self, device: torch.device) -> torch.Tensor:
        """`token_ids` on the device; the same tensor each time, there as long as `self` is."""
        if device not in self._tables:
            self._tables[device] = torch.from_numpy(self.token_ids).to(device)
        return self._tables[device]

    def columns(
        self, token_ids: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of `token_ids` have a column, by their index, and those columns."""
        wanted = np.asarray(token_ids, dtype=np.int64)
        places = self.token_ids.searchsorted(wanted)
        places[places == len(self.token_ids)] = 0
        known = np.flatnonzero(self.token_ids[places] == wanted)
        return known, places[known]

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same parameters for columns: biases of tokens without one change nothing."""
        if not params.logit_bias:
            return params
        known, columns = self.columns([token_id for token_id, _ in params.logit_bias])
        biases = (params.logit_bias[index][1] for index in known.tolist())
        return replace(params, logit_bias=tuple(zip(columns.tolist(), biases, strict=True)))

    def history(self, history: TokenHistory) -> TokenHistory:
        """The tokens that penalties count, as columns."""
        parts = (history.prompt_ids, history.output_ids)
        prompt, output = (tuple(self.columns(part)[1].tolist()) for part in parts)
        check(not history.drafted_ids, "a drafter counts what it has drafted as output")
        return TokenHistory(prompt, output)
