"""The model that a coordinator serves, as clients see it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.decoding.detokenizer import Completion
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import TargetPool
from outrider.interfaces.messages import ReplicaDescription

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText


class ServedModel:
    """The targets' model, its name for clients, and its tokenizer."""

    def __init__(self, targets: TargetPool, name: str, text: TokenizerText | None) -> None:
        """`name` is the model's name in requests; empty = the targets' name. Without the tokenizer
        `text`, requests must contain token ids."""
        self._targets = targets
        self._name = name
        self.text = text
        self._first: ReplicaDescription

    def begin(self, target: ReplicaDescription) -> None:
        """Takes the first target's description."""
        self._first = replace(target, model=self._name or target.model)

    @property
    def name(self) -> str:
        """The model's name in requests. Must not be read before `begin`."""
        return self._first.model

    @property
    def description(self) -> ReplicaDescription:
        """The first target's description, but with `name`, and with `max_model_len` of the newest
        target. Must not be read before `begin`."""
        newest = self._targets.newest() or self._first
        return replace(self._first, max_model_len=newest.max_model_len)

    def completion(self, parameters: GenerationParameters) -> Completion:
        """Returns an empty completion."""
        stream = None if self.text is None else self.text.stream(parameters.shown_tokens)
        return Completion(parameters, self._first.eos_token_ids, stream)
