"""A CUDA device without one: tensors that have a device, a type and a shape, and no numbers.

What runs there runs on `FakeTensorMode`; what runs on the CPU runs as ever. `DeviceWatch` stands in
front of both and notes what a device would be asked to do.
"""

import ctypes
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils

from outrider.engine.cuda.table_steps import BLOCK_WORDS, DeviceBackend, TableStep
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo
from outrider.kv_cache.attention import LayerPages
from outrider.speculation import cuda_verdicts

CUDA = torch.device("cuda", 0)
_TOP = Path(__file__).parents[2]
_PRODUCT = tuple(str(_TOP / name) for name in ("outrider", "draft_service", "target_service"))
_LIBRARY = str(Path(transformers.__file__).parent)
_TESTS = str(_TOP / "tests")
_COMPOSITE = "CompositeImplicitAutograd"
_CUDA_SLOT, _META_SLOT, _NUM_SLOTS = 1, 14, 16
"""Index of each device type in torch's table of guards."""
_FREE = {"lift_fresh", "_unsafe_view", "resolve_conj", "resolve_neg", "detach_"}
"""Operators that start nothing on a device, in addition to views and `empty`."""


class DeviceWatch(TorchDispatchMode):
    """Counts, by the line of the product that asks for them,

    reads        copies to the CPU, and single numbers: each waits for the device
    sends        copies from the CPU
    operators    kernels and copies, reads and sends included; but for what the library's models
                 start themselves, which depends on its version

    Reads are answered with ones, integers with zeros. Tensors of several devices in one operator
    are `errors`."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []  # errors that were raised, even if the product caught them
        self.clear()

    def clear(self) -> None:
        self.reads: Counter[str] = Counter()
        self.sends: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Reads, sends, operators."""
        return self.reads.total(), self.sends.total(), self.operators.total()

    def counted(self, work: Callable[[], Any]) -> tuple[int, int, int]:
        """The counts of this work alone. Prints each with its place in the code."""
        self.clear()
        work()
        for name in ("reads", "sends", "operators"):
            print(name, dict(getattr(self, name)))
        return self.counts

    def check(self, condition: bool, what: str) -> None:
        if not condition:
            self.errors.append(f"{_place()}: {what}")
            raise RuntimeError(what)

    def launch(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.check(tensor.device == CUDA, f"{name} is given a tensor on {tensor.device}")
        self._note(name, self.operators)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # An operator that asks a tensor for its device.
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        given = {leaf.device for leaf in tensors if leaf.dim() > 0}
        named = {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        if isinstance(kwargs.get("device"), str):
            named.add(torch.device(kwargs["device"]))
        if all(device.type != "cuda" for device in (*named, *(one.device for one in tensors))):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        return self._on_device(func, args, kwargs, given, named)

    def _on_device(
        self, func: Any, args: Any, kwargs: Any, given: set[torch.device], named: set[torch.device]
    ) -> Any:
        name = func.__name__.split(".")[0]
        try:
            if name in ("_local_scalar_dense", "equal"):
                self._note(name, self.reads)
                with unset_fake_temporarily():
                    return name == "equal" or _answer((), args[0].dtype).item()
            if name in ("_to_copy", "copy_"):
                return self._copied(name, func, args, kwargs, given | named)
            if len(given) > 1 and name not in ("index", "index_put", "index_put_"):
                raise RuntimeError(f"{name} of tensors on {' and '.join(sorted(map(str, given)))}")
            if len(given) > 1:  # The device's own kernels read index tensors that are on the CPU.
                self._note(name, self.sends)
            if not (is_view(func) or name in _FREE or "empty" in name):
                self._note(name, self.operators)
            return func(*args, **kwargs)
        except Exception as error:
            self.errors.append(f"{_place()}: {error}")
            raise

    def _copied(
        self, name: str, func: Any, args: Any, kwargs: Any, devices: set[torch.device]
    ) -> Any:
        is_crossing = len({device.type for device in devices}) > 1
        source = args[1] if name == "copy_" else args[0]
        if not is_crossing:
            self._note(name, self.operators)
            return func(*args, **kwargs)
        if source.device.type == "cpu":
            self._note(name, self.sends)
            return func(*args, **kwargs)
        self._note(name, self.reads)
        with unset_fake_temporarily():
            if name == "copy_":
                return args[0].copy_(_answer(source.shape, source.dtype))
            return _answer(source.shape, source.dtype).to(kwargs.get("dtype") or source.dtype)

    def _note(self, name: str, kind: Counter[str]) -> None:
        place = f"{_place()} {name}"
        if kind is not self.operators or not _is_of_library():
            self.operators[place] += 1
        if kind is not self.operators:
            kind[place] += 1


def _answer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    is_integer = not (dtype == torch.bool or dtype.is_floating_point)
    return torch.full(tuple(shape), 0 if is_integer else 1, dtype=dtype)


def is_view(func: Any) -> bool:
    """Whether an operator returns its argument's memory unchanged."""
    return any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


def _is_of_library() -> bool:
    """Whether the innermost caller is a model of the library, not a line of the product."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith((*_PRODUCT, _LIBRARY)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_LIBRARY)


def _place() -> str:
    """The innermost line of the product on the stack, otherwise that of a test."""
    frame: FrameType | None = sys._getframe(1)
    test = "?"
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PRODUCT):
            return f"{Path(path).relative_to(_TOP)}:{frame.f_lineno}"
        if test == "?" and path.startswith(_TESTS) and path != __file__:
            test = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return test


_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
WATCH = DeviceWatch()
"""The mode of the one fake device. Tests share it, so that a tensor of one test can be used in
another."""


@contextmanager
def fake_device() -> Iterator[DeviceWatch]:
    """A CUDA device of fake tensors, for a torch that may not be built for CUDA. At the end, checks
    that there was no error."""
    WATCH.clear()
    WATCH.errors.clear()
    with ExitStack() as stack:
        stack.enter_context(_device_guards())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Not `patch.dict`, which would forget modules that are imported inside the block.
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setitem(sys.modules, _KERNELS.__name__, _KERNELS)
        for owner, name, new in (
            (FakeTensor, "data_ptr", lambda tensor: tensor.storage_offset() * tensor.itemsize),
            (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
            (Tensor, "pin_memory", lambda tensor, *_: tensor),
            (torch.cuda, "device", lambda _: nullcontext()),
            (cuda_verdicts, "_has_compiler", lambda: True),
            # The library skips some reads of tensors that it knows to have no numbers.
            (import_utils, "is_fake_tensor", lambda _: False),
        ):
            stack.enter_context(patch.object(owner, name, new))
        stack.enter_context(_FAKE)
        stack.enter_context(WATCH)
        yield WATCH
    assert WATCH.errors == []


@contextmanager
def _device_guards() -> Iterator[None]:
    """Indexing and copies first switch to the device of a tensor. A torch that is not built for
    CUDA cannot do so, and gets the guard of meta tensors, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * _NUM_SLOTS).in_dll(library, name)
    before = guards[_CUDA_SLOT]
    guards[_CUDA_SLOT] = guards[_META_SLOT]
    try:
        yield
    finally:
        guards[_CUDA_SLOT] = before


class _Kernel:
    """Replaces a Triton kernel: `kernel[grid](...)`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        WATCH.check(all(size > 0 for size in grid), f"{self._name} on a grid {grid}")
        return self._launch

    def _launch(self, *given: Any, **_: Any) -> None:
        WATCH.launch(self._name, *(each for each in given if isinstance(each, Tensor)))


_KERNELS = ModuleType("outrider.speculation.triton_kernels")
_KERNELS.__getattr__ = _Kernel


def attend(query: Tensor, layer: LayerPages, step: TableStep) -> Tensor:
    """Implements `DeviceBackend.attend`: checks shapes and types only."""
    cache = layer.cache
    _, num_heads, num_rows, width = query.shape
    key_heads, num_slots, key_width = cache.keys.shape
    words = (step.token_ids, step.position_ids, step.slots, step.logit_rows, step.blocks)
    WATCH.check(query.dtype == cache.keys.dtype == cache.values.dtype, "dtypes of attention")
    WATCH.check(width == key_width and num_heads % key_heads == 0, "heads of attention")
    WATCH.check(cache.values.shape[:2] == (key_heads, num_slots), "slots of keys and values")
    sizes = [num_rows] * 3 + [len(step.logit_rows), len(step.blocks) * BLOCK_WORDS]
    WATCH.check([each.numel() for each in words] == sizes, "sizes of a step's tables")
    WATCH.check(all(each.dtype == torch.int64 for each in (*words, step.pages)), "64-bit words")
    WATCH.launch("attend", query, cache.keys, cache.values, *words, step.pages)
    return query.new_empty((1, num_rows, num_heads, cache.values.shape[2]))


BACKEND = DeviceBackend(attend, 264)
VOCAB = 4_096


def fake_engine(module: Any, backend: DeviceBackend | None, **options: Any) -> PagedEngine:
    """An engine for a module on the device, for use inside `fake_device`."""
    info = ModelInfo("tiny", VOCAB, 128, "float32", (), "", "")
    engine = PagedEngine(
        module, info, max_num_seqs=1024, kv_cache_memory_bytes=2**26, backend=backend, **options
    )
    assert engine._backend is backend
    return engine


def to_device(module: Any) -> Any:
    """The module with its tensors on the device. For use inside `fake_device`."""
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved = tensor.detach().to(CUDA)
                    is_own = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(moved, requires_grad=False) if is_own else moved
    return module
