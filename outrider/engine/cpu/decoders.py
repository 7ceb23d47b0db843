"""Decoders that run a model's steps on a CPU in place of the code of transformers."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.engine.cpu.fused_decoder import FusedDecoder
from outrider.engine.cpu.openvino_decoder import OpenVinoDecoder
from outrider.engine.gathered_attention import Steps
from outrider.kernels.cpu import PaceKernels
from outrider.kernels.openvino import OpenVino
from outrider.kv_cache.storage import BlockedKeysAndValues
from outrider.models.decoder_parts import CannotFuse, DecoderParts

CpuKernels = PaceKernels | OpenVino


class DecoderSteps(Steps, Protocol):
    """Runs steps on a decoder."""

    tapped: dict[int, Tensor]
    """The inputs [T, D] of tapped layers in the last step, by the layer's index."""


class CpuDecoder(Protocol):
    """Runs a model's layers and LM head."""

    page_size: int
    num_spare_pages: int  # pages of the cache that belong to no sequence
    rows_are_equal: bool
    """Whether every bit of a row's logits is known to be independent of a step's other rows."""

    @property
    def kernels_name(self) -> str: ...

    @property
    def numerics(self) -> object:
        """What decides bits, besides the kernels and the shapes of layers."""

    @property
    def note(self) -> str:
        """For operators: what is known of the rows."""

    def new_steps(self, caches: Sequence[BlockedKeysAndValues]) -> DecoderSteps:
        """`caches` must have `num_spare_pages` at their end."""

    def drop_sources(self) -> None:
        """Frees the module's weights that the decoder does not share. The module must not run any
        more."""

    def restore_sources(self) -> None:
        """Gives the module back its weights, which the decoder may have freed already. Called
        instead of `drop_sources` if the decoder is not used."""


def new_decoder(
    kernels: CpuKernels,
    parts: DecoderParts,
    *,
    max_model_len: int,
    thread_counts: Sequence[int],
    taps: Sequence[int],
    deterministic: bool,
) -> CpuDecoder:
    """`taps`: layers whose inputs a step keeps. Raises `CannotFuse`."""
    if isinstance(kernels, OpenVino):
        return OpenVinoDecoder(parts, kernels, taps=taps, pads_lone_tokens=deterministic)
    decoder = FusedDecoder(parts, kernels, max_model_len, thread_counts, taps=taps)
    if deterministic and not decoder.rows_are_equal:
        raise CannotFuse(decoder.note)
    return decoder
