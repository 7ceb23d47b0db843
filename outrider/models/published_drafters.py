"""Recognises the kind of a published drafter by its files.

kind     recognised by
eagle3   `speculators_model_type`; or a tensor `fc` and a layer with a `hidden_norm`
mtp      `speculators_model_type`; or tensors of MTP layers, but no layer 0 (whole models have one)
pard     `pard_token` in the configuration of a causal language model

Drafters of other known kinds are refused."""

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.modeling_utils import load_state_dict

from outrider.drafters.names import EAGLE3, MTP
from outrider.models.fingerprint import PICKLED_FILE
from outrider.models.loading import open_weights, read_weights, refusing
from outrider.models.sources import CONFIG_FILE
from outrider.models.student import is_student

PARD = "pard"
SERVED = (
    "EAGLE-3 heads, PARD models and causal language models can be served; `outrider distill` "
    "trains further drafters"
)
_UNSERVED = re.compile(
    "dflash|dspark|eagle(?!3|_)|medusa|mlpspeculator|pard2|ptd_token|mask_hidden", re.IGNORECASE
)
"""Matches architectures, keys of `config.json` and tensors of drafters that are not served."""
_KIND_NAMES = {"ptd_token": "P-EAGLE", "mask_hidden": "P-EAGLE"}
"""Maps a match of `_UNSERVED` to a drafter's kind, if the match is not the kind's own name."""


def recognise(directory: Path) -> str | None:
    """Returns the kind of the published drafter in `directory` (`EAGLE3`, `MTP` or `PARD`). Returns
    None if `directory` has a student (`student.py`), or no known drafter. Raises `ConfigError` for
    kinds that are not served, and for files that cannot be read."""
    if is_student(directory) or not (directory / CONFIG_FILE).is_file():
        return None
    with refusing(f"drafter {directory}:"):
        stated = read_config(directory)
        with open_weights(directory) as files:
            names = set(files or read_tensors(directory))
        if unserved := _unserved_kind(stated, names):
            raise ValueError(f"it is of the kind {unserved}, which is not served; {SERVED}")
    if declared := stated.get("speculators_model_type"):
        return str(declared)
    if "pard_token" in stated:
        return PARD
    if _has_eagle3_layer(names):
        return EAGLE3
    has_mtp = "mtp.fc.weight" in names or any(name.endswith(".eh_proj.weight") for name in names)
    # A model's layer 0 may have any prefix, as in `model.language_model.layers.0`.
    is_model = any("layers.0." in name and not name.startswith("mtp.") for name in names)
    return MTP if has_mtp and not is_model else None


def _unserved_kind(stated: dict[str, Any], names: set[str]) -> str:
    declared = stated.get("speculators_model_type")
    if declared is not None and declared not in (EAGLE3, MTP):
        return str(declared)
    marks = (*(stated.get("architectures") or ()), str(stated.get("spd_type")), *stated, *names)
    if match := next(filter(None, map(_UNSERVED.search, marks)), None):
        return _KIND_NAMES.get(match[0].lower(), match[0])
    return "EAGLE" if "fc.weight" in names and not _has_eagle3_layer(names) else ""


def _has_eagle3_layer(names: set[str]) -> bool:
    layers = ("midlayer", "layers.0")
    return "fc.weight" in names and any(f"{layer}.hidden_norm.weight" in names for layer in layers)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a drafter's `config.json`. Raises `OSError` or `ValueError`."""
    stated = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    if not isinstance(stated, dict):
        raise ValueError(f"{path / CONFIG_FILE} holds no JSON object")
    return stated


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns every tensor of a published drafter by name, from safetensors or `PICKLED_FILE`. Runs
    no code of `PICKLED_FILE`. Raises `ValueError`, or errors of safetensors."""
    pickled = path / PICKLED_FILE
    if any(path.glob("*.safetensors")) or not pickled.is_file():
        return read_weights(path)
    try:
        tensors = load_state_dict(pickled)
    except Exception as error:  # If the file contains code, the unpickler raises its own errors.
        raise ValueError(f"{pickled} cannot be read as plain tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise ValueError(f"{pickled} holds no table of tensors")
    return tensors
