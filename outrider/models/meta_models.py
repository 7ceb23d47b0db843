"""A model of the transformers library whose parameters have no values yet: for whoever fills it
otherwise than from a directory as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.models.loading import DTYPES, LOADING_ERRORS
from outrider.models.weight_files import open_weights


def empty_model(
    path: Path, name: str, dtype: str, attn_implementation: str, trust_remote_code: bool
) -> Any:
    """A model whose parameters have no values yet, while its other tensors (rotations, scales),
    which are in no file, have."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with parameters_on_meta():
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=_resolve_stored_dtype(config, dtype, path),
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        if (path / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(str(path))
    except LOADING_ERRORS as error:
        raise ConfigError(f"model {name}: cannot be loaded: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model {name}: its configuration has a quantization_config, which no model that "
            "several ranks share, nor a drafter that was made for a target, may have"
        )
    return module


def _resolve_stored_dtype(config: Any, dtype: str, path: Path) -> torch.dtype:
    """`auto` is what the configuration states, else what the first stored tensor has."""
    if dtype != "auto":
        return DTYPES[dtype]
    stated = getattr(config.get_text_config(), "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    with open_weights(path) as files:
        first = next(iter(files))
        found: torch.dtype = files[first].get_tensor(first).dtype
        return found


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, every new parameter loses its values as soon as a module registers it, so that the
    memory it was given has never been written to."""

    def emptied(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    # Its annotation says that a hook returns nothing; its documentation, what it may return.
    hook = nn.modules.module.register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
