"""The model that a drafter is made for, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.interface import ModelInfo
from outrider.models.loading import load_model

from .documents import Encode
from .writing import Template


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a drafter is made for."""

    name: str
    directory: Path
    template: Template
    encode: Encode | None
    """None for a target without a tokenizer."""
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> tuple[Any, ModelInfo]:
        """A module of its own for each stage. Raises `ConfigError`."""
        return load_model(
            self.directory, name=self.name, dtype=self.dtype, device=self.device,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
