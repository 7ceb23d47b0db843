"""The engine that runs vLLM's models and kernels on Outrider's own pages.

The engine uses vLLM's loader, quantisations, tensor parallelism, attention backends and caches, but
not its scheduler, block manager or engine core. A page is one block of every layer, even of layers
with a sliding window. So a sequence has one page table for all layers.

vLLM's modules move between releases, so this file has all imports of vLLM, and supports one minor
version at a time. `tests/vllm` checks every use of vLLM against the next release."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from vllm import __version__
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    graph_capture,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.ir import set_default_torch_wrap
from vllm.model_executor.determinism.batch_invariant import init_batch_invariance
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, record_kv_cache_layout
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
)
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.draft_layer import DraftLayer, draft_shapes
from outrider.engine.paged_sequences import PagedSequences, PageStore, newest_rows
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.interfaces.engine import SequenceStep
from outrider.kv_cache.block_pool import BlockPool, Copy
from outrider.kv_cache.storage import KVCache, memory_budget, page_bytes_of, pages_in
from outrider.limits import BATCHED_TOKENS_DEFAULT, NUM_DRAFT_TOKENS_MAX
from outrider.models.compatibility import (
    check_answers,
    check_features,
    dependent_at,
    self_check_tokens,
)
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.drafter_check import TOKENS_WRITTEN, DraftCheck, Reading, likeliest_tokens
from outrider.models.fingerprint import numerics_fingerprint
from outrider.models.loading import LoadOptions, describe_files, refusing, settled_dtype, use_device
from outrider.models.sharding import Ranks, least, of_leader

_CAPTURED_BYTES = 2**30  # device memory reserved for CUDA graphs, besides the model and its pages
_PAGE_SIZES = {"cpu": 32, "cuda": 16}
"""The number of tokens of a page, by device type. vLLM changes it for some kinds of attention."""
_PADDING_SLOT = -1
_CAPTURED_MAX = 512
"""Only steps of at most this many tokens are captured as CUDA graphs. The kernels of larger steps
take so long that a graph saves nothing."""
_NAME_BITS = 62
_RUNNING = Lock()
"""A step holds this lock. A process may run several engines, each on its own thread, but vLLM has
only one forward context and one CPU scratch memory in a process."""


@contextmanager
def _without_accelerator() -> Iterator[None]:
    """vLLM's loader calls `empty_cache`, which fails without a CUDA device."""
    empty_cache = torch.accelerator.empty_cache
    torch.accelerator.empty_cache = lambda: None
    try:
        yield
    finally:
        torch.accelerator.empty_cache = empty_cache


class VllmEngine(PagedSequences):
    """A `DraftingEngine` that runs vLLM's models."""

    def __init__(
        self,
        path: Path,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kv_cache_memory_bytes: int,
        gpu_memory_utilization: float,
        num_gpus: float | None,
        ranks: Ranks | None = None,
        deterministic: bool = False,
        enforce_eager: bool = False,
        draft_layer: LoadedDraftHead | None = None,
        draft_check: DraftCheck | None = None,
        draft_reads_output: bool = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Loads the model in `path`, or this rank's share of it. A step has at most `max_num_seqs`
        sequences and `max_num_batched_tokens` tokens. If `kv_cache_memory_bytes` is 0,
        `memory_budget` determines the memory for pages. If `deterministic`, a token's logits do
        not depend on the other tokens of its step. If `enforce_eager` or `deterministic`, the model
        is not compiled.

        `draft_layer` is a drafting head on rank 0, and None on other ranks. With a head, all ranks
        need `draft_check`. If `draft_reads_output`, the head reads the model's output, otherwise
        the inputs of layers. Raises `ConfigError` if this engine cannot run the model or head."""
        self._device, self._ranks = use_device(**options), ranks
        self._deterministic = deterministic
        name, compiles = options.get("name", str(path)), not (enforce_eager or deterministic)
        captures = compiles and self._device.type == "cuda"
        # A step of a draft replica also runs drafted tokens. A step of a self-check may have
        # `BATCHED_TOKENS_DEFAULT` tokens.
        drafted = max_num_seqs * (NUM_DRAFT_TOKENS_MAX + 2)
        most = max(max_num_batched_tokens + drafted, BATCHED_TOKENS_DEFAULT)
        with refusing(f"model {name}:"):
            self._config = self._new_config(path, max_num_seqs, most, compiles, options)
            is_cpu = self._device.type == "cpu"
            loads: Any = _without_accelerator() if is_cpu else nullcontext()
            with set_current_vllm_config(self._config), loads:
                self._join_groups()
                self._model: Any = get_model(vllm_config=self._config).eval()
                if draft_check is not None:
                    self._take_head(draft_layer, name, draft_reads_output)
                if ranks is not None:
                    ranks.wait_for_all()
                reserve = _CAPTURED_BYTES if captures else 0
                budget = memory_budget(self._device, gpu_memory_utilization, num_gpus) - reserve
                self._use_caches(kv_cache_memory_bytes or max(0, budget), max_num_seqs, name)
        model = self._config.model_config
        stated = describe_files(
            path, model.hf_config, model.get_vocab_size(), str(model.dtype), **options
        )
        length = min(model.max_model_len, self._pool.num_pages * self._page_size)
        self.info = replace(stated, max_model_len=length)
        self._ids, self._positions = (
            torch.zeros(most, dtype=torch.int64, device=self._device) for _ in range(2)
        )
        self._sizes: list[int] = []  # the numbers of tokens of captured steps, ascending
        self._skips_compiled = False
        with refusing(f"model {name}:"):
            if draft_check is not None:
                self._use_draft_layer(draft_check, max_num_seqs, draft_reads_output)
            self._warm_up(draft_check is not None)
            if captures:
                self._capture(max_num_batched_tokens)
        if deterministic:
            self._check_rows(max_num_seqs)

    def _new_config(
        self, path: Path, max_num_seqs: int, num_tokens: int, compiles: bool, options: LoadOptions
    ) -> Any:
        compilation: dict[str, Any] = {"cudagraph_mode": "NONE"}
        if compiles and self._device.type == "cuda":
            size = min(_CAPTURED_MAX, num_tokens)
            compilation = {"cudagraph_mode": "PIECEWISE", "max_cudagraph_capture_size": size}
        config: Any = EngineArgs(
            model=str(path),
            dtype=settled_dtype(path, **options),
            max_model_len=options.get("max_model_len"),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=num_tokens,
            compilation_config=compilation,
            trust_remote_code=options.get("trust_remote_code", False),
            tensor_parallel_size=1 if self._ranks is None else self._ranks.size,
            enforce_eager=not compiles,
            block_size=_PAGE_SIZES[self._device.type],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            async_scheduling=False,
        ).create_engine_config()
        # vLLM's worker makes the next two calls, too. Without them, norms would not be compiled,
        # and a step of the demo target would take 4 ms longer.
        config.kernel_config.ir_op_priority.set_default()
        set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)
        return config

    def _join_groups(self) -> None:
        size, rank = (1, 0) if self._ranks is None else (self._ranks.size, self._ranks.rank)
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        if self._ranks is not None and self._device.type == "cpu":
            # The ranks of one machine share memory under this name.
            name = least(self._ranks, secrets.randbits(_NAME_BITS), self._device)
            os.environ["VLLM_DIST_IDENT"] = str(name)
        init_batch_invariance()
        index = self._device.index or 0
        try:
            init_distributed_environment(size, rank, local_rank=index, backend=dist.get_backend())
            ensure_model_parallel_initialized(size, 1)
        except RuntimeError as error:
            raise Unavailable(f"the ranks of a model do not find each other: {error}") from error

    def _use_caches(self, num_bytes: int, max_num_seqs: int, name: str) -> None:
        """Allocates the caches of all layers. For vLLM, layers with the same cache specification
        form a group."""
        config = self._config
        specs = get_kv_cache_spec(config)
        groups: dict[Any, list[str]] = defaultdict(list)
        for layer, spec in specs.items():
            if not isinstance(spec, AttentionSpec) or spec.tokens_per_state != 1:
                raise ConfigError(f"model {name}: tokens cannot be removed from {layer}'s state")
            groups[spec].append(layer)
        sizes = {spec.block_size for spec in groups}
        if len(sizes) != 1:
            raise ConfigError(f"model {name}: its layers have different page sizes {sorted(sizes)}")
        [self._page_size] = sizes
        model_bytes = sum(spec.page_size_bytes * len(layers) for spec, layers in groups.items())
        kept = []
        if self.draft_layer is not None:
            kept = draft_shapes(self.draft_layer.module, config.model_config.dtype, self._device)
        page_bytes = model_bytes + page_bytes_of(kept, self._page_size)
        longest = -(-config.model_config.max_model_len // self._page_size)
        num_pages = min(pages_in(num_bytes, page_bytes), max_num_seqs * longest)
        if self._ranks is not None:
            num_pages = least(self._ranks, num_pages, self._device)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        layouts = get_supported_kv_cache_layouts(
            {layers[layer_name].get_attn_backend() for layer_name in specs}
        )
        layout = next(supported for supported in layouts if not supported.is_block_outermost)
        record_kv_cache_layout(config.cache_config, layout.name)
        # The last page belongs to no sequence. `_hidden_of` writes a spare token to this page.
        num_blocks, offset, tensors = num_pages + 1, 0, []
        for spec, names in groups.items():
            layer_stride, block_stride, *_ = compute_layout_strides(
                spec, num_blocks, len(names), layout
            )
            tensors.append(
                KVCacheTensor(
                    size=num_blocks * model_bytes,
                    layers=[*names],
                    layer_stride=layer_stride,
                    block_stride=block_stride,
                    offset=offset,
                )
            )
            offset += num_blocks * spec.page_size_bytes * len(names)
        self._caches = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=tensors,
            kv_cache_groups=[KVCacheGroupSpec(names, spec) for spec, names in groups.items()],
        )
        self._groups, _, kernel_sizes = init_attn_backend(self._caches, config, self._device)
        tensors_by_layer = init_kv_cache(
            config.compilation_config.static_forward_context,
            self._caches,
            self._device,
            kernel_sizes,
            config,
            attn_groups=[group for groups in self._groups for group in groups],
        )
        self._draft_cache = KVCache(kept, num_pages, self._page_size)
        stores: list[PageStore] = [_Blocks(tensors_by_layer, num_blocks), self._draft_cache]
        self._use_pool(BlockPool(num_pages, self._page_size), stores, max_num_seqs)

    def _take_head(
        self, draft_layer: LoadedDraftHead | None, name: str, reads_output: bool
    ) -> None:
        """Converts a head to the model's dtype. Where head and model have equal weights, they share
        one tensor. Raises `ConfigError`, also on ranks without a head, if the model cannot return
        the hidden states that the head reads."""
        if not reads_output and not supports_eagle3(self._model):
            raise ConfigError(
                f"model {name}: an EAGLE-3 head needs the inputs of the model's layers, but vLLM's "
                f"{type(self._model).__name__} does not return them; give --engine transformers or "
                "another drafter"
            )
        self.draft_layer = draft_layer
        theirs = [parameter for parameter in self._model.parameters() if parameter.dim() == 2]
        for own in () if draft_layer is None else draft_layer.module.parameters():
            own.data = own.data.to(self._config.model_config.dtype)
            # vLLM pads some weights of the model to more rows.
            rows = [weight[: len(own)] for weight in theirs if weight.dtype == own.dtype]
            own.data = next((row for row in rows if torch.equal(row, own)), own.data)

    def _use_draft_layer(
        self, draft_check: DraftCheck, max_num_seqs: int, reads_output: bool
    ) -> None:
        num_layers = self._config.model_config.hf_text_config.num_hidden_layers
        if not reads_output:
            self._show(range(num_layers + 1))
        self._skips_compiled = True
        self.draft_layer = draft_check(self.draft_layer, self._read, self.info)
        self._skips_compiled = False
        if not reads_output:
            self._show(self._read_by_leader(num_layers))
        # The check's pages lack the head's keys and values, so a new pool drops these pages.
        pool = BlockPool(self._pool.num_pages, self._page_size)
        self._use_pool(pool, self._stores, max_num_seqs)
        if self.draft_layer is not None:
            head = self.draft_layer.module
            ascending = sorted(head.layer_ids)
            self._taps = [ascending.index(layer_id) for layer_id in head.layer_ids]
            """The index of each input that the head reads, in the list that the model returns."""
            self._draft = DraftLayer(head, self._draft_cache.layers)
            self._pairs = self._draft.pairs

    def _read_by_leader(self, num_layers: int) -> list[int]:
        """Returns, on each rank, the layers whose inputs the leader's head reads."""
        is_read = torch.zeros(num_layers + 1, dtype=torch.int64, device=self._device)
        if self.draft_layer is not None:
            is_read[[*self.draft_layer.module.layer_ids]] = 1
        if self._ranks is not None:
            is_read = of_leader(self._ranks, is_read)
        layer_ids: list[int] = is_read.nonzero()[:, 0].tolist()
        return layer_ids

    def _show(self, layer_ids: Sequence[int]) -> None:
        """Makes the model also return the inputs of these layers, in ascending order. An id that
        equals the number of layers means the output of the last layer."""
        self._model.set_aux_hidden_state_layers(tuple(layer_ids))
        # vLLM caches compiled models under a key that includes `additional_config`.
        self._config.additional_config["shown_layers"] = list(layer_ids)

    def _read(self, prompt: Sequence[int]) -> Reading:
        """The `Reader` of a `DraftCheck`. The model must return the inputs of all layers, or of no
        layer if the head reads the model's output."""
        texts, likeliest, tapped_rows = [], [], []
        new = torch.tensor(prompt, device=self._device)

        def run(step: HeldStep) -> Tensor:
            hidden, tapped = self._hidden_of(step)
            tapped_rows.append([rows[: len(new)].clone() for rows in tapped])
            return self._rows_of_logits(hidden)

        for _ in range(1 + TOKENS_WRITTEN):
            [logits] = self._logits(run, [SequenceStep("text", tuple(new.tolist()), len(new))])
            texts.append(new)
            likeliest.append(likeliest_tokens(logits, self._ranks))
            new = likeliest[-1][-1:]
        hidden = [torch.cat(rows) for rows in zip(*tapped_rows, strict=True)]
        return Reading(torch.cat(texts), hidden, torch.cat(likeliest), len(hidden) - 1)

    def _warm_up(self, is_shown: bool) -> None:
        """Compiles the model. Raises `ConfigError` if logits depend on how a text is cut into
        steps, as with MLA on CPUs. vLLM's cache may hold an outdated compiled model, so if a head
        was checked (`is_shown`), also compares the compiled model with the uncompiled model."""
        ids = self_check_tokens(self.info)
        self._skips_compiled = is_shown
        [expected] = self.forward([SequenceStep("first", ids, len(ids))])
        features = self._features
        self._skips_compiled = False
        self.release("first")
        try:
            # The dtype decides how much rounding is allowed.
            check_answers(self, expected.to(self._config.model_config.dtype))
            if self._draft is not None:
                check_features(self, features[0])
        except ConfigError as error:
            reason = "vLLM cannot run a text in parts on this device"
            raise ConfigError(f"model {self.info.name}: {reason} ({error})") from error
        for sequence in ("chunks", "whole"):
            self.release(sequence)

    def _capture(self, max_num_tokens: int) -> None:
        """Captures a CUDA graph of the compiled model for each step size in `_sizes`. The largest
        graph comes first, because the graphs share memory."""
        sizes = self._config.compilation_config.cudagraph_capture_sizes
        self._sizes = sorted(size for size in sizes if size <= max_num_tokens)
        set_cudagraph_capturing_enabled(True)
        with _RUNNING, graph_capture(self._device), torch.inference_mode():
            for size in reversed(self._sizes):
                for is_captured in (False, True):
                    self._call(None, None, size, is_captured)
        set_cudagraph_capturing_enabled(False)

    def _check_rows(self, max_num_seqs: int) -> None:
        num_rows = dependent_at(self, max_num_seqs)
        if num_rows is not None:
            raise SettingError(
                "deterministic",
                f"model {self.info.name}: with vLLM on this machine a token's logits depend on the "
                f"number of other tokens in its step (they change in a step of {num_rows} tokens)",
            )
        kinds = (
            self._config.model_config.dtype,
            __version__,
            self._page_size,
            torch.get_num_threads(),
            1 if self._ranks is None else self._ranks.size,
            sorted({group.backend.get_name() for groups in self._groups for group in groups}),
        )
        self.info = replace(self.info, numerics=numerics_fingerprint(self._device, *kinds))

    def forward(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        if not steps:
            return []
        return self._logits(self._run_whole, steps)

    def _logits(
        self, run: Callable[[HeldStep], Tensor], steps: Sequence[SequenceStep]
    ) -> list[Tensor]:
        with _RUNNING:
            rows, sizes = self._run(run, steps)
        return list(torch.split(rows.to(torch.float32, copy=True), sizes))

    def _run_whole(self, step: HeldStep) -> Tensor:
        hidden, tapped = self._hidden_of(step)
        if self._draft is not None:
            features = self._draft.write(step, [tapped[at] for at in self._taps])
            self._features = newest_rows(features, step)
        return self._rows_of_logits(hidden)

    def _rows_of_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor | None = self._model.compute_logits(hidden)
        # If there are several ranks, only the leader has logits.
        return hidden.new_empty((len(hidden), 0)) if logits is None else logits

    def _hidden_of(self, step: HeldStep) -> tuple[Tensor, list[Tensor]]:
        """Returns the LM head's input [L, D] at the wanted rows, and the second result of
        `_call`."""
        if self._deterministic and len(step.rows.token_ids) == 1:
            # Adds a spare token, because matrix products of a single row use other kernels.
            spare = HeldSequence(SequenceStep("", (0,), 0), 0, (self._pool.num_pages,))
            step = HeldStep([*step.sequences, spare], self._page_size)
        sequences, (ids, positions, slots, wanted) = step.sequences, step.rows
        counts = np.array([len(held.step.token_ids) for held in sequences])
        lengths = np.array([held.length for held in sequences]) + counts
        tables = np.zeros((len(sequences), max(len(held.pages) for held in sequences)), np.int64)
        for row, held in zip(tables, sequences, strict=True):
            row[: len(held.pages)] = held.pages
        num_tokens = len(ids)
        size = next((size for size in self._sizes if size >= num_tokens), num_tokens)
        slots = np.pad(slots, (0, size - num_tokens), constant_values=_PADDING_SLOT)
        starts = np.append(0, np.cumsum(counts))
        parts = (slots, ids, positions, wanted, starts, lengths, tables.reshape(-1))
        given = torch.from_numpy(np.concatenate(parts)).to(self._device)
        slots_, ids_, positions_, wanted_, *others = torch.split(
            given, [len(part) for part in parts]
        )
        starts_, lengths_, tables_ = (part.to(torch.int32) for part in others)
        self._ids[:num_tokens], self._positions[:num_tokens] = ids_, positions_
        num_groups = len(self._groups)
        attention = build_attn_metadata(
            self._groups,
            len(sequences),
            num_tokens,
            starts_,
            torch.from_numpy(starts.astype(np.int32)),
            int(counts.max()),
            lengths_,
            int(lengths.max()),
            [tables_.view(tables.shape)] * num_groups,
            [slots_] * num_groups,
            self._caches,
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths.astype(np.int32)),
            positions=positions_,
        )
        mapping = build_slot_mappings_by_layer([slots_] * num_groups, self._caches)
        hidden, tapped = self._call(attention, mapping, size, size in self._sizes)
        return hidden.index_select(0, wanted_), tapped

    def _call(
        self, attention: Any, mapping: Any, size: int, is_captured: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the first `size` tokens of the buffers. Returns the input of the LM head [size, D],
        and a list of the inputs of the layers that `_show` has set. If `_show` has set no layers,
        the list has only the input of the LM head."""
        context = set_forward_context(
            attention,
            self._config,
            num_tokens=size,
            slot_mapping=mapping,
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE if is_captured else CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(num_tokens=size) if is_captured else None,
            skip_compiled=self._skips_compiled,
        )
        with context:
            output: Any = self._model(input_ids=self._ids[:size], positions=self._positions[:size])
        return output if isinstance(output, tuple) else (output, [output])


class _Blocks:
    """A `PageStore` of vLLM's caches."""

    def __init__(self, caches: dict[str, Tensor], num_blocks: int) -> None:
        self._caches, self._num_blocks = list(caches.values()), num_blocks

    @property
    def num_bytes(self) -> int:
        # Several layers may share one cache.
        return sum({cache.data_ptr(): cache.nbytes for cache in self._caches}.values())

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        copy_kv_cache_blocks_inplace(
            self._caches, self._num_blocks, [KVCacheBlockCopy(*copy) for copy in copies]
        )
