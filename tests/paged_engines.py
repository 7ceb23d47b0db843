"""Makes paged engines for tests, and checks what each of them must keep with every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from models import MAX_MODEL_LEN
from reference_kernels import ReferenceKernels
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.batch import _SEGMENT_TOKENS_MAX, _SLOTS_UNIT, SPLIT_SLOTS, tree_of
from outrider.engine.cuda.backend import DeviceBackend
from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.limits import KV_CACHE_BYTES_DEFAULT
from outrider.models.module_replacement import NativeRMSNorm, speed_up

VOCAB = 32


class _Copies(TorchDispatchMode):
    """Bytes of what operators copy out of some tensors, as long as it is there."""

    def __init__(self, origins: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._origins = {tensor.untyped_storage().data_ptr() for tensor in origins}
        self._found: dict[StorageWeakRef, int] = {}
        self.most_bytes = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if self._reads(args) and isinstance(result, torch.Tensor) and not self._reads(result):
            storage = result.untyped_storage()
            self._found[StorageWeakRef(storage)] = storage.nbytes()
            self.most_bytes = max(self.most_bytes, self.bytes_left())
        return result

    def bytes_left(self) -> int:
        self._found = {key: num for key, num in self._found.items() if not key.expired()}
        return sum(self._found.values())

    def _reads(self, values: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        # Weights that are packed have no storage.
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
        return any(tensor.untyped_storage().data_ptr() in self._origins for tensor in dense)


class WatchedEngine(PagedEngine):
    """With every step: its tensors hold the bytes of its pages, which are no more than it was
    given; beside them a step copies no more than one layer's attention reads, and leaves nothing of
    that behind."""

    def __init__(self, module: Any, info: ModelInfo, **options: Any) -> None:
        super().__init__(module, info, **options)
        given = options.get("kv_cache_memory_bytes", KV_CACHE_BYTES_DEFAULT)
        assert self.kv_cache_bytes <= given, f"{self.kv_cache_bytes} bytes; {given} were given"
        self.check_bytes()

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        with _Copies(self._tensors()) as copies:
            logits = super().forward(steps)
        most, workspace = copies.most_bytes, self._workspace_bytes(steps)
        assert most <= workspace, f"a step copied {most} bytes; {workspace} are its workspace"
        assert copies.bytes_left() == 0, f"{copies.bytes_left()} bytes of copies outlived a step"
        self.check_bytes()
        return logits

    def check_bytes(self) -> None:
        held = sum(tensor.untyped_storage().nbytes() for tensor in self._tensors())
        num_pages = self.page_counts().num_pages + self._num_spare_pages
        expected = num_pages * self._page_size * sum(self._slot_bytes())
        assert held == expected, f"{held} bytes are held; the pages have {expected}"

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]

    def _slot_bytes(self) -> list[int]:
        """Of each layer."""
        num_pages = self.page_counts().num_pages + self._num_spare_pages
        return [
            (layer.keys.nbytes + layer.values.nbytes) // (num_pages * self._page_size)
            for layer in self._cache.layers
        ]

    def _workspace_bytes(self, steps: Sequence[SequenceStep]) -> int:
        """Of a step that has been run: for each segment its sequence's slots, in whole units or
        splits, or up to twice as many, but not more than the longest one has."""
        whole = SPLIT_SLOTS if self._deterministic else _SLOTS_UNIT
        slots = [
            -(-(self.length(step.sequence_id) + _apart(step)) // whole) * whole
            for step in steps
            for _ in range(0, len(step.token_ids), _SEGMENT_TOKENS_MAX)
        ]
        num_slots = sum(min(2 * num, max(slots)) for num in slots)
        if self.kernels_name:
            num_slots += sum(map(self._path_slots, steps))
        return max(self._slot_bytes()) * num_slots

    def _path_slots(self, step: SequenceStep) -> int:
        """Slots of the pages that the paths of a tree do not share."""
        leaves = set(range(len(step.parents))) - set(step.parents)
        num_pages = 1 + -(-len(step.parents) // self._page_size)
        return len(leaves) * num_pages * self._page_size


def _apart(step: SequenceStep) -> int:
    """Places between a tree's tokens, less those that its siblings would have in a chain."""
    return int(tree_of(step.parents).places.max()) + 1 - len(step.parents) if step.parents else 0


class EngineMaker:
    """Remembers what it makes."""

    def __init__(self, fused: bool = False) -> None:
        """`fused`: engines run on `ReferenceKernels` where they can."""
        self.made: list[WatchedEngine] = []
        self.fused = fused

    def __call__(
        self,
        module: Any,
        *,
        max_num_seqs: int = 16,
        num_bytes: int = 2**22,
        page_size: int = 16,
        max_model_len: int = MAX_MODEL_LEN,
        contended_threads: int | None = None,
        deterministic: bool = False,
        backend: DeviceBackend | None = None,
        logit_token_ids: tuple[int, ...] = (),
    ) -> WatchedEngine:
        dtype = str(module.dtype).removeprefix("torch.")
        kernels = None
        if self.fused:
            kernels = fuse(module)
        info = ModelInfo("tiny", VOCAB, max_model_len, dtype, (), "", "", logit_token_ids)
        engine = WatchedEngine(
            module,
            info,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=num_bytes,
            page_size=page_size,
            contended_threads=contended_threads,
            deterministic=deterministic,
            backend=backend,
            kernels=kernels,
        )
        self.made.append(engine)
        return engine


def fuse(module: Any) -> ReferenceKernels:
    """Kernels that the module's layers are replaced for. In float64 its norms and its GELU are
    exact, as the kernels' are, where the library's are for less."""
    for parent in list(module.modules() if module.dtype == torch.float64 else ()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            if kind.endswith("RMSNorm"):
                eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
                offset = float("Gemma" in kind)
                setattr(parent, name, NativeRMSNorm(child.weight, eps, offset))
            elif kind == "GELUTanh":
                setattr(parent, name, torch.nn.GELU())
    kernels = ReferenceKernels(module.dtype)
    speed_up(module, kernels=kernels)
    return kernels


@contextmanager
def checked_engines(fused: bool = False) -> Iterator[EngineMaker]:
    """In the end every engine's pages are in order."""
    maker = EngineMaker(fused)
    yield maker
    for engine in maker.made:
        engine.check_integrity()
        engine.check_bytes()


def ids(num: int, seed: int = 1) -> tuple[int, ...]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (num,), generator=generator).tolist())


def run(
    engine: PagedEngine,
    name: str,
    tokens: tuple[int, ...],
    rows: int,
    parents: tuple[int, ...] = (),
) -> torch.Tensor:
    """One step of one sequence."""
    return engine.forward([SequenceStep(name, tokens, rows, parents)])[0]


def dense(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] of a module that no engine has."""
    with torch.no_grad():
        ids = torch.tensor([tokens], device=module.device)
        return module(input_ids=ids, use_cache=False).logits[0]


def gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference."""
    assert actual.shape == expected.shape
    return (actual - expected).abs().max().item()
