"""Files of drafters that were trained for one target: what all kinds have in common.

file                what it holds
`drafter.json`      the kind and the target (`TrainedDescription`)
`model.safetensors` all weights that are not the target's, matrices as int8 with one scale per row
                    (`NAME.scale`); `draft_token_ids`, ascending: the tokens that the drafter may
                    propose, whose rows of the target's head it uses
`README.md`         the model card
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final, Generic, Literal, TypedDict, TypeVar, Unpack

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import read_weights, refusing

CONFIG_FILE = "config.json"
DESCRIPTION_FILE = "drafter.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT: Final = 3
TOKEN_IDS = "draft_token_ids"  # noqa: S105 (a tensor's name)
_DOWN = "down.weight"
"""Suffix of the weights [D, M] that map from a head's inner width back to D."""
_SCALE = ".scale"
_INT8_MAX = 127
_OF_TARGET = frozenset({"embeddings", "head.weight"})
"""The parameters of a head that it shares with its target."""


class TrainedKind(StrEnum):
    """The kind of a trained drafter."""

    STUDENT = "student"
    """A small model of the target's architecture (`student.py`)."""
    MEDUSA = "medusa"
    """Heads on the target (`medusa.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """The content of `drafter.json`."""

    format: Literal[3]
    """`FORMAT`, the only one that can be read."""
    kind: TrainedKind
    target: str
    """The target's name, for messages."""
    target_fingerprint: str
    """`tensors_fingerprint` of the target."""
    vocab_size: int
    """The target's own."""
    draft_vocab_size: int
    """Rows of the drafter's head."""

    __pydantic_config__ = ConfigDict(extra="forbid")


class Whose(TypedDict):
    """A drafter's name, and the target that it is loaded for."""

    name: str
    target_directory: Path
    target_name: str


def is_trained_drafter(directory: Path) -> bool:
    """Whether the directory holds a drafter that was trained for one target, of any kind."""
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


def check_target(directory: Path, kind: TrainedKind, **whose: Unpack[Whose]) -> TrainedDescription:
    """The description of the drafter in `directory`. Raises `ConfigError` unless it is of this kind
    and was made for these weights."""
    name, target = whose["name"], whose["target_name"]
    description = read_description(directory, name)
    if description.kind != kind:
        raise ConfigError(
            f"drafter {name} is of the kind `{description.kind}`, and is named as a `{kind}`; a "
            "student goes by its directory alone, every other kind by `KIND:DIR`"
        )
    found = tensors_fingerprint(whose["target_directory"])
    if description.target_fingerprint != found:
        raise ConfigError(
            f"drafter {name} was made for the target {description.target} with tensors "
            f"{description.target_fingerprint}, and takes embeddings and head from there; {target} "
            f"has tensors {found}. Make one for it: outrider distill {target} --kind {kind} "
            "--out DIR"
        )
    return description


def save_head(
    directory: Path,
    module: nn.Module,
    token_ids: Tensor,
    description: TrainedDescription,
    shared: Collection[str] = _OF_TARGET,
) -> None:
    """Writes the description and the weights of a drafter that may propose `token_ids` [N].
    Leaves out the `shared` weights, which are the target's."""
    tensors = {TOKEN_IDS: token_ids.to(torch.int32)}
    for name, weight in module.named_parameters():
        if name not in shared:
            tensors |= stored(name, weight.detach().cpu())
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors lets only the owner read it.
    text = json.dumps(asdict(description), indent=2)
    (directory / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


class TargetHead(nn.Module):
    """A drafter that reads a target's hidden states, and has rows of the target's head [N, D]."""

    def __init__(self, head: nn.Parameter) -> None:
        super().__init__()
        with torch.device("meta"):
            self.head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.head.weight = head

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., N], float32, of the drafter's own hidden states [.., D]."""
        logits: Tensor = self.head(hidden)
        return logits.float()


Head = TypeVar("Head", bound=TargetHead)


@dataclass(frozen=True)
class LoadedHead(Generic[Head]):
    """Medusa heads for one target."""

    module: Head
    token_ids: tuple[int, ...]
    """[N], ascending: the tokens of its logits."""


def load_head(
    directory: Path,
    kind: TrainedKind,
    rows: Tensor,
    make: Callable[[nn.Parameter, int, int], Head],
    **whose: Unpack[Whose],
) -> LoadedHead[Head]:
    """The head in `directory` for a target whose own head is `rows` [V, D]. `make` creates the
    module without values from its part of `rows`, its inner width and its number of heads. Raises
    `ConfigError`, also if it was made for another target."""
    name = whose["name"]
    with refusing(f"drafter {name}:"):
        description = check_target(directory, kind, **whose)
        if description.vocab_size != len(rows):
            raise ConfigError(
                f"drafter {name}: {DESCRIPTION_FILE} has vocab_size {description.vocab_size}, its "
                f"target {len(rows)}"
            )
        tensors = read_weights(directory)
        token_ids = checked_token_ids(tensors, description)
        downs = [values for key, values in tensors.items() if key.endswith(_DOWN)]
        module = make(head_of(rows, token_ids), downs[0].shape[-1] if downs else 1, len(downs))
        own = [key for key, _ in module.named_parameters() if key not in _OF_TARGET]
        put_weights(module, own, tensors, rows.device, name)
    return LoadedHead(module.requires_grad_(False).eval(), tuple(token_ids.tolist()))


def head_of(rows: Tensor, token_ids: Tensor) -> nn.Parameter:
    """[N, D]: the rows of a target's head [V, D] for `token_ids` [N]."""
    return nn.Parameter(rows.detach()[token_ids.to(rows.device)], requires_grad=False)


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
