"""Loads a causal language model and its tokenizer from a local directory of safetensors."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outrider.errors import ConfigError, SettingError
from outrider.interfaces.engine import ModelInfo
from outrider.kernels import processor
from outrider.models import fingerprint
from outrider.models.sources import check_weights, resolve_model

WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


@contextmanager
def open_weights(path: Path) -> Iterator[Mapping[str, Any]]:
    """Maps the name of every stored tensor to its open file. Opens only the files that transformers
    would load, because other files in a directory may hold copies of the weights."""
    if (path / WEIGHTS_FILE).is_file():
        files = {path / WEIGHTS_FILE}
    elif (path / _INDEX_FILE).is_file():
        index = json.loads((path / _INDEX_FILE).read_text(encoding="utf-8"))
        files = {path / name for name in index["weight_map"].values()}
    else:
        files = set(path.glob("*.safetensors"))
    with ExitStack() as stack:
        handles = {}
        for file in sorted(files):
            handle = stack.enter_context(safe_open(str(file), framework="pt"))
            handles.update(dict.fromkeys(handle.keys(), handle))
        yield handles


def read_weights(path: Path) -> dict[str, Any]:
    """Maps the name of every stored tensor to the tensor."""
    with open_weights(path) as files:
        return {key: file.get_tensor(key) for key, file in files.items()}


def stored_names(module: Any, wanted: Mapping[str, Any], stored: Iterable[str]) -> dict[str, str]:
    """Maps the name of each tensor in the model to its name in the files. The files may use the
    names of an earlier version of transformers. The keys of `wanted` are the names in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        conversion
        for conversion in get_model_conversion_mapping(module)
        if isinstance(conversion, WeightRenaming)
    ]
    prefix = module.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, wanted)[0]: name for name in stored}


_DTYPE_NAMES = ("bfloat16", "float32", "float16", "float64")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
"""The values of `--dtype` except `auto` (see `settled_dtype`)."""
MAX_MODEL_LEN_DEFAULT = 2048
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

_ATTENTION = "sdpa"
_LOADING_ERRORS = (
    ValueError,
    OSError,
    ImportError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    AssertionError,
    SafetensorError,
    StrictDataclassError,
)

_log = logging.getLogger(__name__)


@contextmanager
def refusing(what: str, quantization: str = "") -> Iterator[None]:
    """Turns errors of loading broken or unknown files into a `ConfigError`. If the weights have a
    `quantization`, the message says that vLLM may run them."""
    try:
        yield
    except _LOADING_ERRORS as error:
        reason = " ".join(str(error).split())
        if quantization:
            reason += f"; `--engine vllm` may run its quantised weights ({quantization})"
        raise ConfigError(f"{what} cannot be loaded: {reason}") from error


def quantization_of(config: Any) -> str:
    """Returns the quantisation that a checkpoint's configuration states; empty = none."""
    stated = getattr(config, "quantization_config", None) or {}
    stated = stated if isinstance(stated, dict) else stated.to_dict()
    return str(stated.get("quant_method", "unnamed")) if stated else ""


class LoadOptions(TypedDict, total=False):
    """How a model is loaded."""

    name: str  # in messages; by default the model's directory
    dtype: str  # a key of `DTYPES`, or `auto` (the default)
    device: str
    num_threads: int | None  # torch's threads in the whole process; None = unchanged
    max_model_len: int | None  # None = the length that the model's configuration states
    trust_remote_code: bool


def load_model(path: Path, **options: Unpack[LoadOptions]) -> tuple[nn.Module, ModelInfo]:
    """Loads the model in `path`, in evaluation mode on its device. Raises `ConfigError`."""
    name = options.get("name", str(path))
    check_weights(path, name)
    where = use_device(**options)
    transformers.utils.logging.disable_progress_bar()
    _log.info("loading %s on %s", name, where)
    module: Any
    remote = options.get("trust_remote_code", False)
    quantization = quantization_of(_config(path, remote))
    # transformers chooses layers for quantised weights by the device. Some of these layers cannot
    # be moved to another device.
    place = {"device_map": {"": str(where)}} if quantization and where.type != "cpu" else {}
    with refusing(f"model {name}:", quantization):
        module, loading = transformers.AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=settled_dtype(path, **options),
            attn_implementation=_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=remote,
            output_loading_info=True,
            **place,
        )
        if missing := loading["missing_keys"]:  # transformers has filled these with random numbers.
            raise ValueError(f"its files lack the weights {min(missing)}")
        if quantization_of(module.config) and getattr(module, "hf_quantizer", None) is None:
            # Without a quantizer, transformers has loaded the quantised numbers as weights.
            raise ValueError("transformers does not know how its weights are quantised")
    module = module.requires_grad_(False).eval()
    module = module if quantization else module.to(where)
    return module, describe(module, path, **options)


def describe(module: Any, path: Path, **options: Unpack[LoadOptions]) -> ModelInfo:
    """Describes the model in `path`, of which `module` is an instance. The parameters of `module`
    need no values. Raises `ConfigError`."""
    head = getattr(module.get_output_embeddings(), "weight", None)
    vocab_size = module.config.get_text_config().vocab_size if head is None else len(head)
    return describe_files(path, module.config, vocab_size, str(module.dtype), **options)


def describe_files(
    path: Path, config: Any, vocab_size: int, loaded_dtype: str, **options: Unpack[LoadOptions]
) -> ModelInfo:
    """Describes the model in `path` by its configuration. Raises `ConfigError`."""
    name = options.get("name", str(path))
    tokenizer = load_tokenizer(path, trust_remote_code=options.get("trust_remote_code", False))
    stated, length = _stated_length(config), options.get("max_model_len")
    if length is None:
        length = stated or MAX_MODEL_LEN_DEFAULT
    elif stated is not None and length > stated:
        raise SettingError("max_model_len", f"{length} given; model {name} allows 1..{stated}")
    eos = stated_eos_token_ids(path, tokenizer, config)
    dtype = loaded_dtype.removeprefix("torch.")
    if note := _dtype_note(path, dtype, **options):
        _log.log(
            logging.WARNING if dtype == "bfloat16" else logging.INFO, "model %s: %s", name, note
        )
    return ModelInfo(
        name=name,
        vocab_size=vocab_size,
        max_model_len=length,
        dtype=dtype,
        dtype_note=note,
        eos_token_ids=tuple(token_id for token_id in eos if token_id < vocab_size),
        weights_fingerprint=fingerprint.weights_fingerprint(path),
        tokenizer_fingerprint=fingerprint.tokenizer_fingerprint(tokenizer),
    )


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any | None:
    """Returns the tokenizer in a directory, or None if there is none. Raises `ConfigError`."""
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        return None
    with refusing(f"model {path}: its tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )


def stated_length(path: Path, *, trust_remote_code: bool = False) -> int | None:
    """Returns the model's greatest length, if `config.json` states it. Raises `ConfigError`."""
    return _stated_length(_config(path, trust_remote_code))


def stated_tokens(path: Path, *, trust_remote_code: bool = False) -> tuple[int, str]:
    """Returns the stated width of a model's logits (0 if not stated), and the fingerprint of its
    tokenizer. Raises `ConfigError`."""
    config = _config(path, trust_remote_code).get_text_config()
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    width = int(getattr(config, "vocab_size", None) or 0)
    return width, fingerprint.tokenizer_fingerprint(tokenizer)


def stated_eos_token_ids(path: Path, *sources: Any) -> tuple[int, ...]:
    """Returns the ids that any file of a model states as EOS tokens, in ascending order. `sources`
    are the tokenizer and the configurations that the caller has loaded already."""
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        with suppress(*_LOADING_ERRORS):
            sources += (kind.from_pretrained(str(path), local_files_only=True),)
    token_ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            token_ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(i for i in token_ids if i >= 0))


def check_same_tokenizer(target: str, draft: str, *, trust_remote_code: bool = False) -> None:
    """Raises `ConfigError` unless the models of these names have the same tokenizer."""
    tables = []
    for name in (target, draft):
        path = resolve_model(name, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        tables.append(tokenizer and fingerprint.tokenizer_table(tokenizer))
    fingerprint.compare_tokenizers(target, tables[0], draft, tables[1])


def use_device(**options: Unpack[LoadOptions]) -> torch.device:
    """Returns the model's device, and sets torch's number of threads. If the device is a CUDA
    device, makes it the calling thread's current device. Raises `SettingError`."""
    where = resolve_device(options.get("device", "auto"))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if (num_threads := options.get("num_threads")) is not None:
        torch.set_num_threads(num_threads)
    return where


def resolve_device(device: str, rank: int = 0) -> torch.device:
    """Returns the device of a rank. `auto` means `cuda` if there is a CUDA device, otherwise `cpu`.
    `cuda` without an index means one of the process's visible devices, chosen by `rank`. A Ray
    actor sees only the devices that Ray has assigned to it. A CUDA device in the result has an
    index. Raises `SettingError`."""
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if num_visible else "cpu"
    where = torch.device(device)
    if where.type != "cuda":
        return where
    if not num_visible:
        raise SettingError("device", f"{device!r} given, but no CUDA device can be used here")
    index = rank % num_visible if where.index is None else where.index
    if index >= num_visible:
        raise SettingError(
            "device",
            f"{device!r} given, but a replica sees {num_visible} CUDA devices, counted from 0",
        )
    return torch.device("cuda", index)


def _config(path: Path, trust_remote_code: bool) -> Any:
    with refusing(f"model {path}: its config.json"):
        return transformers.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )


def _stated_length(config: Any) -> int | None:
    text_config = config.get_text_config()
    return next((int(v) for k in _LENGTH_KEYS if (v := getattr(text_config, k, None))), None)


def empty_model(
    path: Path, *, takes_quantised: bool = False, **options: Unpack[LoadOptions]
) -> Any:
    """Returns a model whose parameters have no values yet. Buffers, such as rotary frequencies,
    have values. Without `takes_quantised`, raises `ConfigError` if the files are quantised."""
    name, remote = options.get("name", str(path)), options.get("trust_remote_code", False)
    with refusing(f"model {name}:"):
        config = _config(path, remote)
        if not takes_quantised and (quantization := quantization_of(config)):
            raise ValueError(
                f"its weights are quantised ({quantization}); this works neither on several ranks "
                "(use `--engine vllm`), nor with `--eagle3-on draft`, nor in `distill`'s drafters"
            )
        with parameters_on_meta():
            dtype = loaded_dtype(path, **options)
            module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=remote
            )
        if (path / "generation_config.json").is_file():
            module.generation_config = transformers.GenerationConfig.from_pretrained(str(path))
    return module


def settled_dtype(path: Path, **options: Unpack[LoadOptions]) -> str:
    """Returns the dtype in which to load the model in `path`: a key of `DTYPES`, or `auto` for the
    dtype of the stored weights. If the option is `auto`, and the device is a CPU that would emulate
    bfloat16, returns `float32` for weights in bfloat16 or float32 (with `auto`, vLLM would round
    float32 to bfloat16). The layers of quantised weights may support only some dtypes, so for
    these weights `auto` stays `auto`. Raises `ConfigError` and `SettingError`."""
    dtype = options.get("dtype", "auto")
    if dtype != "auto" or not _lacks_bfloat16(**options):
        return dtype
    config = _config(path, options.get("trust_remote_code", False))
    is_quantised = bool(quantization_of(config))
    is_float = not is_quantised and _stored_dtype(path, config) in (torch.bfloat16, torch.float32)
    return "float32" if is_float else dtype


def loaded_dtype(path: Path, **options: Unpack[LoadOptions]) -> torch.dtype:
    """Returns the dtype in which `load_model` loads the model in `path`. Raises `ConfigError` and
    `SettingError`."""
    settled = settled_dtype(path, **options)
    if settled != "auto":
        return DTYPES[settled]
    return _stored_dtype(path, _config(path, options.get("trust_remote_code", False)))


def _lacks_bfloat16(**options: Unpack[LoadOptions]) -> bool:
    is_cpu = resolve_device(options.get("device", "auto")).type == "cpu"
    return is_cpu and not processor.has_bfloat16()


def _dtype_note(path: Path, loaded: str, **options: Unpack[LoadOptions]) -> str:
    """Returns a note for operators if the processor emulates bfloat16, and the weights in memory or
    in the files are in bfloat16. Otherwise returns an empty text."""
    if loaded not in ("bfloat16", "float32") or not _lacks_bfloat16(**options):
        return ""
    if loaded == "bfloat16":
        return "this processor emulates bfloat16; float32 may be faster"
    config = _config(path, options.get("trust_remote_code", False))
    is_chosen = options.get("dtype", "auto") == "auto"
    if is_chosen and _stored_dtype(path, config) == torch.bfloat16:
        return "float32 in place of bfloat16, which this processor would emulate"
    return ""


def _stored_dtype(path: Path, config: Any) -> torch.dtype:
    stated = getattr(config.get_text_config(), "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    with open_weights(path) as files:
        first = next(iter(files))
        dtype: torch.dtype = files[first].get_tensor(first).dtype
        return dtype


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In this context, a parameter moves to the meta device as soon as a module registers it, so
    its memory is never written."""

    def emptied(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    # PyTorch's documentation allows the hook to return a parameter, but the annotation does not.
    hook = nn.modules.module.register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def put_weights(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Gives all parameters of a drafter's module their values from `tensors`. If `dtype` is None,
    each parameter keeps its own dtype. Buffers may be missing, and then keep their values. Raises
    `ValueError` or `RuntimeError` if weights are missing, unknown, of wrong shape or not finite."""
    state, parameters = module.state_dict(), dict(module.named_parameters())
    new_state = {name: values for name, values in state.items() if name not in parameters}
    for name, values in tensors.items():
        if name in parameters and not values.is_floating_point():
            raise ValueError(f"{name} is stored as {values.dtype}")
        new_state[name] = values.to(device, dtype or (state[name].dtype if name in state else None))
    module.load_state_dict(new_state, assign=True)
    check_finite(new_state)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, values in tensors.items():
        if not values.isfinite().all():
            raise ValueError(f"{name} is not finite")
