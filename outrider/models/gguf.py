"""GGUF files to safetensors directories in bfloat16, once, in a cache shared between processes."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from outrider.errors import ConfigError
from outrider.files import locked
from outrider.models.fingerprint import file_fingerprint

CONVERSION_VERSION = 1
"""Grows when the same file would be converted differently; older results are not used then."""

_log = logging.getLogger(__name__)


def converted(gguf: Path, cache: Path) -> Path:
    """The safetensors directory of a GGUF file, converted now if the cache has none.

    Weights are dequantised to bfloat16; tokenizer, chat template and generation settings are kept.
    Raises `ConfigError` where the file is no model that can be read.
    """
    return made_once(cached_path(gguf, cache), lambda directory: _convert(gguf, directory))


def cached_path(gguf: Path, cache: Path, suffix: str = "") -> Path:
    """Where the cache keeps what is made of a GGUF file. The name holds the file's fingerprint, so
    a changed file is converted anew."""
    fingerprint = file_fingerprint(gguf)[:16]
    return cache / "models" / f"{gguf.stem}-{fingerprint}-bf16-v{CONVERSION_VERSION}{suffix}"


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, a file or a directory, made now if it is not there: `make` is given another path of
    the same name to write to. One process does it while others wait; what has its name is
    complete."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():  # another process may have been first
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
                made = Path(work) / path.name
                make(made)
                made.rename(path)
    return path


def _convert(gguf: Path, directory: Path) -> None:
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    # Commands report progress themselves. The reader of GGUF files has a bar of its own, which does
    # not obey the library's switch.
    transformers_logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm
    _log.info("converting %s to safetensors; this happens once", gguf.name)
    directory.mkdir()
    _write_model(gguf, directory)
    _write_tokenizer(gguf, directory)
    _log.info("converted %s", gguf.name)


def _write_model(gguf: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=module, torch_dtype=torch.bfloat16
        )["tensors"]
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"model {gguf}: this GGUF file cannot be read ({error})") from error
    result = module.load_state_dict(tensors, strict=False)
    tied = getattr(module, "_tied_weights_keys", None) or ()
    missing = [key for key in result.missing_keys if key not in tied]
    if missing or result.unexpected_keys:
        wrong = (missing or result.unexpected_keys)[0]
        raise ConfigError(
            f"model {gguf}: its tensors do not fit its architecture, first at {wrong}"
        )
    module.tie_weights()
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.save_pretrained(directory)


def _write_tokenizer(gguf: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"model {gguf}: its tokenizer cannot be read ({error})") from error
    tokenizer.save_pretrained(directory)
