"""The safetensors files of a model's directory, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


@contextmanager
def open_weights(path: Path) -> Iterator[Mapping[str, Any]]:
    """The open file of every stored tensor."""
    from safetensors import safe_open

    with ExitStack() as stack:
        found = {}
        for file in weight_files(path):
            handle = stack.enter_context(safe_open(str(file), framework="pt"))
            found.update(dict.fromkeys(handle.keys(), handle))
        yield found


def read_weights(path: Path) -> dict[str, Any]:
    """Every stored tensor."""
    with open_weights(path) as files:
        return {key: file.get_tensor(key) for key, file in files.items()}


def weight_files(path: Path) -> list[Path]:
    """As the library picks them: some repositories hold the same weights twice."""
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return [path / file for file in sorted(set(index["weight_map"].values()))]
    return sorted(path.glob("*.safetensors"))


def stored_names(module: Any, wanted: Mapping[str, Any], stored: Iterable[str]) -> dict[str, str]:
    """The stored name of each tensor by the one that it has in the model, whose tensors' names are
    the keys of `wanted`: the library knows how they were named in earlier versions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        found for found in get_model_conversion_mapping(module) if isinstance(found, WeightRenaming)
    ]
    prefix = module.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, wanted)[0]: name for name in stored}
