"""Which layers copy, by what their heads look at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from draft_service.training.learners import copying_layers
from tests.models import tiny_config, tiny_module


class Looking:
    """A model whose layers look where they are told: at the token `before`, at the one `after` an
    earlier occurrence, or at themselves."""

    def __init__(self, *looks: str) -> None:
        self.looks = looks
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.used: list[str] = []

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return torch.nn.Embedding(1000, 1)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def base_model(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.used.append(self.config._attn_implementation)
        return SimpleNamespace(attentions=[self._weights(input_ids, look) for look in self.looks])

    def _weights(self, ids: torch.Tensor, look: str) -> torch.Tensor:
        """Of two heads, of which the first looks at the token itself."""
        num_texts, length = ids.shape
        weights = torch.zeros(num_texts, 2, length, length)
        places = torch.arange(length)
        weights[:, 0, places, places] = 1.0
        for text in range(num_texts):
            for place in range(length):
                weights[text, 1, place, self._place(ids[text].tolist(), place, look)] = 1.0
        return weights

    @staticmethod
    def _place(ids: list[int], place: int, look: str) -> int:
        if look == "before":
            return max(0, place - 1)
        earlier = [i for i in range(place) if ids[i] == ids[place]] if look == "after" else []
        return earlier[-1] + 1 if earlier else place


def test_the_pair_that_copies_is_found() -> None:
    model = Looking("itself", "before", "itself", "after", "itself")
    assert copying_layers(model) == (1, 3)
    assert model.used == ["eager"]
    assert model.config._attn_implementation == "sdpa"


def test_what_follows_an_occurrence_is_found_behind_what_came_before() -> None:
    """A layer can only look for what an earlier one has gathered."""
    assert copying_layers(Looking("after", "before", "itself", "after")) == (1, 3)
    assert copying_layers(Looking("after", "itself", "before")) is None
    assert copying_layers(Looking("before", "itself")) is None


def test_a_model_that_was_not_trained_copies_nothing() -> None:
    module = tiny_module(tiny_config("llama", 160))
    before = module.config._attn_implementation
    assert copying_layers(module) is None
    assert module.config._attn_implementation == before
