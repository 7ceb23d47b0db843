"""An engine that runs any causal language model of the transformers library, one sequence at a
time, on slots that can be cut back.

Which attention to load a model with: for 1..17 new tokens over 300 cached ones of a 135M Llama with
grouped queries (bfloat16, CPU) a step takes 22..35 ms on two threads with `sdpa` and with `eager`
alike (within 3 %; on one thread `eager` is up to 10 % quicker). `sdpa` is the default, because it
holds no [heads, new, cached] matrix, which decides for long prompts. This engine's own share of a
step, against calling the module with the library's cache, is under 1 ms.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer

from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.slots import check_kept, check_steps, make_room
from outrider.errors import ConfigError, check
from outrider.limits import ENGINE_SEQUENCES_MAX

_CAPACITY_STEP: Final = 256
"""Slots are allocated in multiples of this."""
_GROWTH: Final = 1.5
"""A full layer grows at least by this factor, so that copying stays linear in the length."""
_ATTENTION_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layer whose whole state is one key and one value per token."""


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [1, heads, capacity, width] of one layer, of which `num_slots` are in use.

    The library's own layers copy everything held for each new token, and those for sliding windows
    forget slots that a rollback needs. This one writes in place, keeps every slot (the window is in
    the mask), and gives slots back by lowering a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_slots = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes dtype and device; `update` allocates."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes slots for new keys and values [1, heads, n, width]; returns those of all slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.num_slots, self.num_slots + key_states.shape[-2]
        self._keys = _with_capacity(self._keys, key_states, start, end)
        self._values = _with_capacity(self._values, value_states, start, end)
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self.num_slots = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.num_slots

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Keeps the first `length` slots and those of `path`, in that order."""
        if path and self._keys is not None and self._values is not None:
            with torch.inference_mode():
                index = torch.tensor(path, device=self._keys.device)
                end = length + len(path)
                # `index_select` copies first, so that source and destination may overlap.
                self._keys[:, :, length:end] = self._keys.index_select(2, index)
                self._values[:, :, length:end] = self._values.index_select(2, index)
        self.num_slots = min(self.num_slots, length + len(path))


def _with_capacity(
    buffer: torch.Tensor | None, states: torch.Tensor, held: int, needed: int
) -> torch.Tensor:
    """A buffer for `needed` slots that holds the first `held` of `buffer`."""
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    wanted = needed if buffer is None else max(needed, int(buffer.shape[2] * _GROWTH))
    capacity = -(-wanted // _CAPACITY_STEP) * _CAPACITY_STEP
    grown = states.new_empty((*states.shape[:2], capacity, states.shape[3]))
    if buffer is not None:
        grown[:, :, :held] = buffer[:, :, :held]
    return grown


class TransformersEngine:
    """Implements `Engine` with one cache per sequence; a step runs its sequences in turn.

    At most `max_num_seqs` sequences; the ones unused for longest make room for new ones and then
    have length 0. Sequences of the running call are never dropped.
    """

    def __init__(
        self, module: torch.nn.Module, info: ModelInfo, max_num_seqs: int = ENGINE_SEQUENCES_MAX
    ) -> None:
        check(max_num_seqs > 0, "max_num_seqs must be positive")
        check_rollback(module, info.name)
        self._module = module
        self._info = info
        self._max_num_seqs = max_num_seqs
        self._caches: OrderedDict[str, Cache] = OrderedDict()
        parameter = next(module.parameters())
        self._device = parameter.device
        self._dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self._selects_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def info(self) -> ModelInfo:
        """What runs here."""
        return self._info

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """See `Engine.forward`. Logits are float64 for a float64 model."""
        check_steps(steps, self._info, self._max_num_seqs, self.length)
        make_room(self._caches, steps, self._max_num_seqs)
        lengths = [self.length(step.sequence_id) for step in steps]
        try:
            return [self._run(step) for step in steps]
        except BaseException:
            # Memory may run out anywhere; then some layers have more slots than others.
            for step, length in zip(steps, lengths, strict=True):
                self._restore(step.sequence_id, length)
            raise

    def length(self, sequence_id: str) -> int:
        """Slots the sequence holds; 0 for an unknown one."""
        cache = self._caches.get(sequence_id)
        return cache.layers[0].num_slots if cache is not None and cache.layers else 0

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        """See `Engine.keep`. Keys stay rotated for the position they were run at, so a slot of
        `path` must have been run at the position it gets."""
        check_kept(self.length(sequence_id), length, path)
        cache = self._caches.get(sequence_id)
        if cache is not None:
            for layer in cache.layers:
                layer.keep(length, path)

    def release(self, sequence_id: str) -> None:
        """Forgets the sequence; unknown ones are ignored."""
        self._caches.pop(sequence_id, None)

    def take_step_seconds(self) -> float:
        """0: these steps take their own time."""
        return 0.0

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless every layer of a sequence holds as many slots."""
        check(len(self._caches) <= self._max_num_seqs, "more sequences than max_num_seqs")
        for sequence_id, cache in self._caches.items():
            lengths = {layer.num_slots for layer in cache.layers if layer.is_initialized}
            check(len(lengths) <= 1, f"{sequence_id}: layers hold {sorted(lengths)} slots")

    def _run(self, step: SequenceStep) -> torch.Tensor:
        cache = self._caches.get(step.sequence_id)
        if cache is None:
            cache = self._caches[step.sequence_id] = Cache(layer_class_to_replicate=_SlotLayer)
        selection = {"logits_to_keep": max(1, step.num_logits)} if self._selects_logits else {}
        with torch.inference_mode():
            ids = torch.tensor([step.token_ids], device=self._device)
            output = self._module(
                input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **selection
            )
            logits: torch.Tensor = output.logits[0]
        wanted = logits[logits.shape[0] - step.num_logits :]
        # The copy is made outside of inference mode, so that callers may change it in place.
        return wanted.to(self._dtype, copy=True)

    def _restore(self, sequence_id: str, length: int) -> None:
        cache = self._caches.get(sequence_id)
        if cache is None:
            return
        if length == 0:
            del self._caches[sequence_id]
            return
        for layer in cache.layers:
            layer.keep(length, ())


def check_rollback(module: Any, name: str) -> None:
    """Raises `ConfigError` for a model whose state is more than one key and value per token and
    layer (recurrent, convolutional, indexed, encoder-decoder): its steps could not be undone."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    recurrent = getattr(module, "_is_stateful", False)
    if kinds or recurrent or getattr(module.config, "is_encoder_decoder", False):
        kind = ", ".join(sorted(kinds)) or ("recurrent state" if recurrent else "encoder-decoder")
        raise ConfigError(
            f"model {name}: tokens cannot be taken back from its state ({kind}); "
            "only decoders made of attention layers can be served"
        )
