"""What a target's head read, for a draft elsewhere that goes on from it."""

from __future__ import annotations

import torch

from outrider.engine.interface import Engine, FeatureEngine
from outrider.features import Features


def shown_by(engine: Engine) -> FeatureEngine | None:
    """The engine, if it shows what its head reads."""
    return engine if isinstance(engine, FeatureEngine) and engine.shows_features else None


def sealed_features(rows: torch.Tensor, first: int) -> Features:
    """Rows [n, D] of tokens from the place `first` on, as they travel."""
    numbers = rows.to("cpu", torch.bfloat16).contiguous()
    return Features(first, rows.shape[1], numbers.view(torch.uint8).numpy().tobytes())
