"""Files of students, which were trained for one target (`student.py`).

file                what it holds
`drafter.json`      the target (`TrainedDescription`)
`model.safetensors` all weights that are not the target's, matrices as int8 with one scale per row
                    (`NAME.scale`); `draft_token_ids`, ascending: the tokens that the drafter may
                    propose, whose rows of the target's head it uses
`README.md`         the model card
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.models.fingerprint import tensors_fingerprint

CONFIG_FILE = "config.json"
DESCRIPTION_FILE = "drafter.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT: Final = 3
TOKEN_IDS = "draft_token_ids"  # noqa: S105 (a tensor's name)
_SCALE = ".scale"
_INT8_MAX = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """The content of `drafter.json`."""

    format: Literal[3]
    """`FORMAT`, the only one that can be read."""
    kind: Literal["student"]

    target: str
    """The target's name, for messages."""
    target_fingerprint: str
    """`tensors_fingerprint` of the target."""
    vocab_size: int
    """The target's own."""
    draft_vocab_size: int
    """Rows of the drafter's head."""

    __pydantic_config__ = ConfigDict(extra="forbid")


def is_trained_drafter(directory: Path) -> bool:
    """Whether the directory holds a student."""
    return (directory / DESCRIPTION_FILE).is_file()


def read_description(directory: Path, name: str) -> TrainedDescription:
    """The content of `drafter.json`. Raises `ConfigError` if it is invalid."""
    path = directory / DESCRIPTION_FILE
    wrong = f"drafter {name}: {path}"
    try:
        text = path.read_text(encoding="utf-8")
        description = TypeAdapter(TrainedDescription).validate_json(text, strict=True)
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(map(str, found["loc"]))
        given = "" if found["type"] == "missing" else f", not {found['input']!r}"
        raise ConfigError(
            f"{wrong}: {key} is missing, wrong or not known: {found['msg']}{given}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{wrong} cannot be read: {error}") from error
    if not 0 < description.draft_vocab_size <= description.vocab_size:
        raise ConfigError(
            f"{wrong}: draft_vocab_size is {description.draft_vocab_size}; 1 to vocab_size, "
            f"{description.vocab_size}, are allowed"
        )
    return description


def check_target(
    directory: Path, *, name: str, target_directory: Path, target_name: str
) -> TrainedDescription:
    """The description of the drafter in `directory`. Raises `ConfigError` unless it was made for
    these weights."""
    description = read_description(directory, name)
    found = tensors_fingerprint(target_directory)
    if description.target_fingerprint != found:
        raise ConfigError(
            f"drafter {name} was made for the target {description.target} with tensors "
            f"{description.target_fingerprint}, and takes embeddings and head from there; "
            f"{target_name} has tensors {found}. Make one for it: outrider distill {target_name} "
            "--out DIR"
        )
    return description


def as_stored(values: Tensor) -> Tensor:
    """A weight after it has been stored and loaded, in its own dtype."""
    return restored("", stored("", values)).to(values.dtype)


def stored(name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors of a weight in a drafter's file: for a matrix, int8 and a scale for each row."""
    if values.dim() != 2:
        return {name: values.contiguous()}
    rows = values.float()
    scales = rows.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
    return {name: (rows / scales[:, None]).round_().to(torch.int8), name + _SCALE: scales}


def restored(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight of a drafter's file. Raises `ValueError` unless each row has a scale."""
    values = tensors[name]
    if values.dtype != torch.int8:
        return values
    scales = tensors[name + _SCALE]
    if scales.shape != values.shape[:1]:
        raise ValueError(f"{name + _SCALE} is {[*scales.shape]} for {[*values.shape]} values")
    return values.float() * scales[:, None]


def checked_token_ids(tensors: Mapping[str, Tensor], description: TrainedDescription) -> Tensor:
    """The tokens [N] of the head's rows. Raises `ValueError` for impossible ones."""
    token_ids = tensors[TOKEN_IDS]
    shape, num, size = [*token_ids.shape], description.draft_vocab_size, description.vocab_size
    if shape != [num] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{TOKEN_IDS} are {token_ids.dtype} {shape}, not {num} whole numbers")
    if any(a >= b for a, b in pairwise([-1, *token_ids.tolist(), size])):
        raise ValueError(f"{TOKEN_IDS} do not ascend from 0 or more to below {size}")
    return token_ids.long()


def put_weights(
    module: nn.Module,
    names: Iterable[str],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    drafter: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Gives a module these weights from a drafter's file, on the device, with their parameters'
    dtype or another one. Raises `ConfigError` for weights that are missing, do not fit, or are not
    finite."""
    found: dict[str, Tensor] = {}
    for name in names:
        if name not in tensors:
            raise ConfigError(f"drafter {drafter}: its files lack the weights {name}")
        parameter = module.get_parameter(name)
        values = restored(name, tensors)
        if values.shape != parameter.shape:
            shapes = f"{[*values.shape]}; {[*parameter.shape]} is needed"
            raise ConfigError(f"drafter {drafter}: {name} is {shapes}")
        found[name] = values.to(device, dtype or parameter.dtype)
        if not found[name].isfinite().all():
            raise ConfigError(f"drafter {drafter}: {name} is not finite")
    module.load_state_dict(found, strict=False, assign=True)
