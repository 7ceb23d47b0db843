"""What a target's head read, for a draft elsewhere that goes on from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.interface import Engine, FeatureEngine
from outrider.hidden_states import BYTES_OF_A_NUMBER, Features


def shown_by(engine: Engine) -> FeatureEngine | None:
    """The engine, if it shows what its head reads."""
    return engine if isinstance(engine, FeatureEngine) and engine.shows_features else None


def sealed_features(rows: Sequence[torch.Tensor], firsts: Sequence[int]) -> list[Features]:
    """Rows [n, D] of tokens from each of the places `firsts` on, as they travel."""
    if not rows:
        return []
    numbers = torch.cat([*rows]).to("cpu", torch.bfloat16).view(torch.uint8).numpy()
    sizes = np.cumsum([len(part) for part in rows])[:-1]
    return [
        Features(first, part.shape[1] // BYTES_OF_A_NUMBER, part.tobytes())
        for first, part in zip(firsts, np.split(numbers, sizes), strict=True)
    ]
