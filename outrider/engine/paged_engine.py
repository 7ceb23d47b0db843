"""The engine for causal language models of the transformers library."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine.batch import HeldStep, shipped, slots_at
from outrider.engine.cpu.decoders import CpuDecoder, CpuKernels, DecoderSteps, new_decoder
from outrider.engine.cpu.openvino_decoder import OpenVinoDecoder
from outrider.engine.cuda.table_steps import DeviceBackend, TableSteps
from outrider.engine.draft_layer import DraftLayer, draft_shapes
from outrider.engine.gathered_attention import GatheredSteps, Steps
from outrider.engine.paged_sequences import PagedSequences, newest_rows
from outrider.errors import ConfigError, InvariantError, SettingError, check
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.kernels.openvino import OpenVino
from outrider.kernels.threads import StepThreads, find_short_tokens
from outrider.kv_cache.attention import LayerPages, find_layers
from outrider.kv_cache.block_pool import BlockPool
from outrider.kv_cache.storage import KVCache, LayerShape, page_bytes_of, pages_in
from outrider.limits import ENGINE_SEQUENCES_MAX, KV_CACHE_BYTES_DEFAULT, PAGE_SIZE
from outrider.models import compatibility
from outrider.models.decoder_parts import CannotFuse, DecoderParts
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.fingerprint import numerics_fingerprint
from outrider.models.linear_layers import align_activations, block_rows
from outrider.models.module_replacement import pack_linears
from outrider.models.target_layers import TappedLayer, tap_layers, tapped_layers

_SHORT_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_log = logging.getLogger(__name__)


class PagedEngine(PagedSequences):
    """A `DraftingEngine` and `FeatureKeeper`. The engine replaces the attention of its module, so
    no other code may call the module."""

    feature_width = 0

    def __init__(
        self,
        module: nn.Module,
        info: ModelInfo,
        *,
        max_num_seqs: int = ENGINE_SEQUENCES_MAX,
        kv_cache_memory_bytes: int = KV_CACHE_BYTES_DEFAULT,
        contended_threads: int | None = None,
        own_cores: bool = False,
        deterministic: bool = False,
        backend: DeviceBackend | None = None,
        least: Callable[[int], int] = int,
        draft_layer: LoadedDraftHead | None = None,
        drafts_apart: bool = False,
        kernels: CpuKernels | None = None,
    ) -> None:
        """A step has at most `max_num_seqs` sequences. The pages take at most
        `kv_cache_memory_bytes`. There are at most as many pages as `max_num_seqs` sequences of full
        length need. If all pages together hold fewer than `max_model_len` tokens, the engine lowers
        this limit. A *self-check* compares the engine's logits with those of the unchanged module.

        contended_threads  number of threads for small steps while other processes use the cores.
                           If set, *short* steps (`find_short_tokens`) always run on one thread.
                           None = all steps run on all threads
        own_cores          whether the threads of a step that uses all cores stay on cores of their
                           own
        deterministic      whether the same prefix always has bit-equal logits: alone or beside
                           other sequences, run in one step or in several, cached or not
        backend            attention kernels of a device; not used if their self-check fails on any
                           rank
        least              returns the minimum of its argument over all ranks, so that all ranks
                           agree on the number of pages and on the results of self-checks
        draft_layer        a drafting head for this model; None on all ranks but rank 0
        drafts_apart       whether the head drafts on draft replicas; the engine then supports
                           `held_features`, but not `forward_draft`
        kernels            kernels for whole steps on a CPU; not used if their self-check fails

        Raises `ConfigError` if the model cannot run on pages, or cannot run deterministically."""
        check(max_num_seqs > 0, "max_num_seqs must be positive")
        self._module: Any = module
        parameter = next(module.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._threads = StepThreads(contended_threads, own_cores=own_cores)
        self._logits_dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._backend = None if deterministic else backend
        self._deterministic, self._least, self._kernels = deterministic, least, kernels
        self._decoder: CpuDecoder | None = None
        self.kernels_note = ""
        """Why the steps do not run on `kernels`. Empty if they do."""
        self.draft_layer = draft_layer
        self._drafts_apart = drafts_apart
        self._taps: dict[int, TappedLayer] = {}
        """Wrappers of the layers that the head reads, by index. A decoder does not call them."""
        self.rows_are_equal = False
        """Whether every bit of a row's logits is independent of the other rows of its step."""
        self._draft_shapes: list[LayerShape] = []
        self._selects_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        try:
            compatibility.check_supported(module, info)
            if deterministic and self._device.type == "cpu":
                align_activations(module)
            self._build(info, max_num_seqs, kv_cache_memory_bytes)
        except ConfigError as error:
            if type(error) is not ConfigError:  # A `SettingError` must keep its key.
                raise
            raise ConfigError(f"model {info.name}: {error}") from error
        if isinstance(self._decoder, OpenVinoDecoder):
            self._threads = StepThreads(None)  # OpenVINO's number of threads is fixed.
        elif contended_threads is not None:
            self._use_fewer_threads()

    def _build(self, info: ModelInfo, max_num_seqs: int, kv_cache_memory_bytes: int) -> None:
        expected = self._dense_answers(info)
        self._layers = find_layers(self._module, info.max_model_len)
        self.info, self._max_num_seqs = info, compatibility.SELF_CHECK_SEQUENCES
        self._decoder = self._new_decoder(info)
        if self.draft_layer is not None:
            head = self.draft_layer.module
            watched = tap_layers(self._module, head.layer_ids)
            self._taps = dict(zip(head.layer_ids, watched, strict=True))
            self.feature_width = head.width if self._drafts_apart else 0
            self._draft_shapes = draft_shapes(head, self._dtype, self._device, self._drafts_apart)
        self._try(*expected)
        self._max_num_seqs = max_num_seqs
        if self._deterministic and not self.rows_are_equal:
            self._make_independent(kv_cache_memory_bytes)
        num_pages = self._num_pages(kv_cache_memory_bytes)
        self._use_pages(num_pages)
        if self._decoder is not None:
            self._decoder.drop_sources()
        longest = num_pages * self._page_size
        self.info = replace(info, max_model_len=min(info.max_model_len, longest))
        if self.rows_are_equal:
            numerics = numerics_fingerprint(
                self._device,
                self._dtype,
                self.kernels_name,
                None if self._decoder is None else self._decoder.numerics,
                self._threads.counts,
                self._layers[0].query_heads,
                self._page_size,
            )
            self.info = replace(self.info, numerics=numerics)
        _log.info(
            "model %s: %d pages of %d tokens for keys and values, %.1f MiB",
            info.name,
            num_pages,
            self._page_size,
            self.kv_cache_bytes / 2**20,
        )

    @property
    def _page_tokens(self) -> int:
        """The number of tokens of a page from the next `_use_pages` on."""
        return PAGE_SIZE if self._decoder is None else self._decoder.page_size

    def _num_pages(self, num_bytes: int) -> int:
        """The number of pages that `num_bytes` hold, at most as many as sequences can need."""
        shapes = [layer.shape for layer in self._layers] + self._draft_shapes
        size = self._page_tokens
        spare = 0 if self._decoder is None else self._decoder.num_spare_pages
        room = max(1, pages_in(num_bytes, page_bytes_of(shapes, size)) - spare)
        longest = -(-self.info.max_model_len // size)
        return self._least(min(room, self._max_num_seqs * longest))

    def _dense_answers(self, info: ModelInfo) -> tuple[Tensor, Tensor | None]:
        """Returns the unchanged module's logits [T, V] of the self-check's tokens. Also returns the
        features [T, D], or None without a draft layer."""
        ids = compatibility.self_check_tokens(info)
        if self.draft_layer is None:
            return compatibility.dense_logits(self._module, ids), None
        head = self.draft_layer.module
        with tapped_layers(self._module, head.layer_ids) as taps:
            logits = compatibility.dense_logits(self._module, ids)
            read = torch.cat([tap.rows_read() for tap in taps], -1)
        with torch.inference_mode():
            return logits, head.fuse(read)

    def _new_decoder(self, info: ModelInfo) -> CpuDecoder | None:
        """Returns a decoder that runs the model on the engine's kernels. Returns None without
        kernels, or if they cannot run the model, or not deterministically if the engine must."""
        kernels = self._kernels
        if kernels is None:
            return None
        head = self.draft_layer
        try:
            parts = DecoderParts(self._module, self._layers, info.max_model_len)
            decoder = new_decoder(
                kernels,
                parts,
                max_model_len=info.max_model_len,
                thread_counts=self._threads.counts,
                taps=() if head is None else head.module.layer_ids,
                deterministic=self._deterministic,
            )
        except CannotFuse as error:
            self._drop_decoder(str(error))
            return None
        self.rows_are_equal = decoder.rows_are_equal
        _log.info("model %s: its steps run on %s; %s", info.name, kernels.name, decoder.note)
        return decoder

    def _drop_decoder(self, reason: str) -> None:
        if self._kernels is None:
            return
        if self._decoder is not None:
            self._decoder.restore_sources()
        self._decoder, self.rows_are_equal = None, False
        self.kernels_note = f"{self._kernels.name}: {reason}"
        _log.info("model %s: its steps do not run on %s", self.info.name, self.kernels_note)
        if isinstance(self._kernels, OpenVino):
            pack_linears(self._module)

    def _make_independent(self, num_bytes: int) -> None:
        changes: list[Callable[[], object]] = [self._block_rows]
        if self._decoder is not None:
            changes.append(partial(self._drop_decoder, "logits depend on a step's other tokens"))
        while True:
            num_pages = -(-compatibility.CROWD_SLOTS // self._page_tokens)
            self._use_pages(min(self._num_pages(num_bytes), num_pages))
            num_rows = compatibility.dependent_at(self, self._max_num_seqs)
            self.rows_are_equal = bool(self._least(num_rows is None))
            if self.rows_are_equal:
                return
            if not changes:
                break
            changes.pop()()
        raise SettingError(
            "deterministic",
            f"model {self.info.name}: on this machine a token's logits depend on the number of "
            f"other tokens in its step (they change in a step of {num_rows} tokens)",
        )

    def _block_rows(self) -> None:
        _log.info("model %s: linear layers compute rows in small blocks", self.info.name)
        block_rows(self._module)

    def _try(self, logits: Tensor, features: Tensor | None) -> None:
        """Runs the self-check with kernels, if there are any. If it fails, removes the kernels,
        and runs it without them."""

        def compare() -> None:
            compatibility.check_answers(self, logits)
            if features is not None:
                compatibility.check_features(self, features)

        def use_pages() -> None:
            pages_each = -(-len(logits) // self._page_tokens)
            self._use_pages(compatibility.SELF_CHECK_SEQUENCES * pages_each)

        use_pages()
        if not isinstance(self._steps, GatheredSteps):
            checks: list[Callable[[], None]] = [compare]
            if isinstance(self._steps, TableSteps):
                checks.insert(0, self._steps.try_kernel)
            # Only rank 0 has logits to compare. `least` tells the result to all ranks.
            if all(self._least(self._passes(check)) for check in checks):
                return
            self._drop_decoder("its self-check failed")
            self._backend, self.rows_are_equal = None, False
            use_pages()
        compare()

    def _passes(self, run_check: Callable[[], None]) -> bool:
        try:
            run_check()
        except Exception:  # noqa: BLE001 (if kernels are not the cause, the next check also fails)
            failed = "model %s: the fast kernels failed their self-check, so steps run without them"
            _log.warning(failed, self.info.name, exc_info=True)
            return False
        return True

    def _use_pages(self, num_pages: int) -> None:
        shapes = [layer.shape for layer in self._layers]
        size, decoder = self._page_tokens, self._decoder
        spare = 0 if decoder is None else decoder.num_spare_pages
        cache = KVCache(shapes, num_pages + spare, size, decoder is not None)
        drafting = KVCache(self._draft_shapes, num_pages, size)
        if self.draft_layer is not None:
            self._draft = DraftLayer(self.draft_layer.module, drafting.layers)
            self._pairs = self._draft.pairs
        self._use_pool(BlockPool(num_pages, size), [cache, drafting], self._max_num_seqs)
        self._steps = self._new_steps(cache.layers)

    def _new_steps(self, caches: Sequence[Any]) -> Steps:
        if self._decoder is not None:
            return self._decoder.new_steps(caches)
        pages = {
            layer.block: LayerPages(cache, layer.window, layer.scaling, layer.softcap)
            for layer, cache in zip(self._layers, caches, strict=True)
        }
        if self._backend is None:
            return GatheredSteps(
                self._call, pages, self._device, self._dtype, fixed_shapes=self._deterministic
            )
        shared_heads, key_heads = max(
            (layer.query_heads // layer.shape.num_heads, layer.shape.num_heads)
            for layer in self._layers
        )
        return TableSteps(self._backend, self._call, pages, shared_heads, key_heads, self._device)

    @property
    def kernels_name(self) -> str:
        """The name of the kernels that run whole steps on a CPU. Empty without such kernels."""
        return "" if self._decoder is None else self._decoder.kernels_name

    def forward(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        """See `Engine.forward`. The logits of a float64 model are float64."""
        if not steps:
            return []
        rows, sizes = self._run(self._run_whole, steps)
        # Copies outside of inference mode, so that callers may change the logits in place.
        return list(torch.split(rows.to(self._logits_dtype, copy=True), sizes))

    def held_features(self, ranges: Sequence[tuple[str, int, int]]) -> Tensor:
        if self._draft is None or not self.feature_width:
            raise InvariantError("this engine keeps no features")
        slots = []
        for name, first, end in ranges:
            check(0 <= first <= end <= self.length(name), f"{name} does not hold {first}..{end}")
            slots.append(slots_at(self._pool.pages(name), np.arange(first, end), self._page_size))
        with torch.inference_mode():
            return self._draft.features_at(*shipped([np.concatenate(slots)], self._device))

    def _run(
        self, run: Callable[[HeldStep], Tensor], steps: Sequence[SequenceStep], whole: bool = True
    ) -> tuple[Tensor, list[int]]:
        if not self._threads.varies:
            self._threads.use_all()
            return super()._run(run, steps, whole)
        num_tokens = sum(len(step.token_ids) for step in steps)
        num_held = sum(self.length(step.sequence_id) for step in steps)
        with self._threads.step(num_tokens, num_held, whole):
            return super()._run(run, steps, whole)

    def _use_fewer_threads(self) -> None:
        """Lets steps run on fewer threads from now on. Runs steps to find the short ones."""
        free, longest = self.page_counts().num_free, self.info.max_model_len

        def run_step(num_tokens: int) -> None:
            num = min(num_tokens, self._max_num_seqs, free)
            names = [f"short-{index}" for index in range(num)]
            self.forward([SequenceStep(name, (0,) * (num_tokens // num), 1) for name in names])
            for name in names:
                self.release(name)

        page_tokens = min(self._page_size, longest)  # Each sequence fits into a page.
        counts = [
            num for num in _SHORT_COUNTS if num <= page_tokens * min(self._max_num_seqs, free)
        ]
        short_tokens = find_short_tokens(counts, run_step)
        self._threads.use_fewer(short_tokens)
        if short_tokens:
            place = "model %s: steps of up to %d tokens run on one thread"
            _log.info(place, self.info.name, short_tokens)

    def _run_whole(self, step: HeldStep) -> Tensor:
        rows = self._steps.run(step)
        if self._draft is not None:
            if self._decoder is not None:
                steps = cast(DecoderSteps, self._steps)
                tapped = [steps.tapped[index] for index in self._taps]
            else:
                tapped = [watched.rows_read() for watched in self._taps.values()]
            self._features = newest_rows(self._draft.write(step, tapped), step)
        return rows

    def _call(self, token_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        selection = {"logits_to_keep": logit_rows} if self._selects_logits else {}
        output = self._module(
            input_ids=token_ids,
            position_ids=position_ids,
            use_cache=False,
            return_dict=True,
            **selection,
        )
        wanted = slice(None) if self._selects_logits else logit_rows
        logits: Tensor = output.logits[0][wanted]
        return logits
