"""Files of drafters that were made for one target: what all kinds have in common.

file                what it holds
`drafter.json`      which kind it is, and whose drafter (`TrainedDescription`)
`model.safetensors` every weight that is not the target's; matrices as int8 with one scale a row
                    (`NAME.scale`); `draft_token_ids`, ascending, the tokens whose rows of the
                    target's head it has
`README.md`         the model card
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from outrider.errors import ConfigError
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import read_weights, refusing

CONFIG_FILE: Final = "config.json"
DESCRIPTION_FILE: Final = "drafter.json"
WEIGHTS_FILE: Final = "model.safetensors"
FORMAT: Final = 3
TOKEN_IDS: Final = "draft_token_ids"  # noqa: S105 (a tensor's name)
_SCALE: Final = ".scale"
_INT8_MAX: Final = 127
_OF_TARGET: Final = frozenset({"embeddings", "head.weight"})
"""The parameters of a head that are its target's."""


class TrainedKind(StrEnum):
    """What a drafter of a directory is."""

    STUDENT = "student"
    """A small model of the target's architecture (`student.py`)."""
    MEDUSA = "medusa"
    """Heads on the target (`medusa.py`)."""
    EARLY_EXIT = "early-exit"
    """A head behind the target's first layers (`early_exit.py`)."""
    EAGLE = "eagle"
    """A head apart from the target, which reads what the target's own head read
    (`eagle.py`)."""


def allowed_kinds() -> str:
    """For messages."""
    return ", ".join(f"`{kind}`" for kind in TrainedKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """Whose drafter it is."""

    format: int
    """Of the directory; `FORMAT`."""
    kind: str
    """Of the drafter; a `TrainedKind`."""
    target: str
    """What the target was called; for people."""
    target_fingerprint: str
    """`tensors_fingerprint` of the only target that it is for."""
    vocab_size: int
    """Of that target."""
    draft_vocab_size: int
    """Rows of the drafter's head."""


def is_trained_drafter(directory: Path) -> bool:
    """Whether the directory holds a drafter that was made for one target, of whatever kind, and no
    model that stands alone."""
    return (directory / DESCRIPTION_FILE).is_file()


def read_description(directory: Path, name: str) -> TrainedDescription:
    """What `drafter.json` says. Raises `ConfigError` where it says it otherwise than it must."""
    path = directory / DESCRIPTION_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter {name}: {path} cannot be read: {error}") from error
    kinds = dict.fromkeys(("kind", "target", "target_fingerprint"), str)
    expected = {field.name: kinds.get(field.name, int) for field in fields(TrainedDescription)}
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f"drafter {name}: {path} is not of format {FORMAT}, which is read here")
    found = {key: type(value) for key, value in values.items()}
    if found != expected:
        wrong = sorted(key for key in found | expected if found.get(key) != expected.get(key))
        raise ConfigError(f"drafter {name}: {path}: {wrong[0]} is missing, wrong or not known")
    description = TrainedDescription(**values)
    if description.kind not in list(TrainedKind):
        raise ConfigError(
            f"drafter {name}: {path}: kind is {description.kind!r}; {allowed_kinds()} are known"
        )
    if not 0 < description.draft_vocab_size <= description.vocab_size:
        raise ConfigError(
            f"drafter {name}: {path}: draft_vocab_size is {description.draft_vocab_size}; 1 to "
            f"vocab_size, {description.vocab_size}, are allowed"
        )
    return description


def check_target(
    directory: Path, name: str, kind: TrainedKind, target_directory: Path, target: str
) -> TrainedDescription:
    """What the drafter in `directory` is. Raises `ConfigError` unless it is of this kind and was
    made for these weights."""
    description = read_description(directory, name)
    if description.kind != kind:
        raise ConfigError(
            f"drafter {name} is of the kind `{description.kind}`, and is named as a `{kind}`; a "
            "student goes by its directory alone, every other kind by `KIND:DIR`"
        )
    found = tensors_fingerprint(target_directory)
    if description.target_fingerprint != found:
        raise ConfigError(
            f"drafter {name} was made for the target {description.target} with weights "
            f"{description.target_fingerprint}, and takes embeddings and head from there; {target} "
            f"has weights {found}. Make one for it: outrider distill {target} --kind {kind} "
            "--out DIR"
        )
    return description


def save_files(
    directory: Path, tensors: Mapping[str, torch.Tensor], description: TrainedDescription
) -> None:
    """Writes the description and the weights, as they are to be stored."""
    save_file(dict(tensors), str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # The library lets nobody else read it.
    text = json.dumps(asdict(description), indent=2)
    (directory / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


def save_head(
    directory: Path,
    module: nn.Module,
    token_ids: torch.Tensor,
    description: TrainedDescription,
    **others: torch.Tensor,
) -> None:
    """Writes the description, `others`, and what is not the target's of a head whose logits are of
    `token_ids` [N]."""
    tensors = {TOKEN_IDS: token_ids.to(torch.int32), **others}
    save_files(directory, tensors | stored_weights(module, own_names(module)), description)


Head = TypeVar("Head", bound=nn.Module)


@dataclass(frozen=True)
class LoadedHead(Generic[Head]):
    """A head, or heads, made for one target."""

    module: Head
    token_ids: tuple[int, ...]
    """[N], ascending: of its logits."""
    num_layers: int = 0
    """Of the target, that stand before an exit head."""


def load_head(
    directory: Path,
    kind: TrainedKind,
    vocab_size: int,
    down: str,
    make: Callable[[dict[str, torch.Tensor], int, torch.Tensor], Head],
    *,
    name: str,
    target_directory: Path,
    target_name: str,
) -> LoadedHead[Head]:
    """The head in `directory` for the target in `target_directory` of so many tokens. `make` gives
    one without values, of the stored tensors, its inner width, which is that of the weight `down`,
    and the tokens [N] of its logits. Raises `ConfigError`, also for a target that it was not made
    for."""
    with refusing(f"drafter {name}:"):
        description = check_target(directory, name, kind, target_directory, target_name)
        if description.vocab_size != vocab_size:
            raise ConfigError(
                f"drafter {name}: {DESCRIPTION_FILE} has vocab_size {description.vocab_size}, its "
                f"target {vocab_size}"
            )
        tensors = read_weights(directory)
        token_ids = checked_token_ids(tensors, description)
        if down not in tensors or tensors[down].dim() != 2:
            raise ConfigError(f"drafter {name}: its files lack the weights {down}")
        module = make(tensors, tensors[down].shape[1], token_ids)
        head: Any = module.get_submodule("head")
        put_weights(module, tensors, head.weight.device, name)
    return LoadedHead(module.requires_grad_(False).eval(), tuple(token_ids.tolist()))


def head_of(rows: torch.Tensor, token_ids: torch.Tensor) -> nn.Parameter:
    """[N, D]: the rows of a target's head [V, D] for `token_ids` [N]."""
    return nn.Parameter(rows.detach()[token_ids.to(rows.device)], requires_grad=False)


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """What is left of a weight once it has been stored and loaded, in its own dtype."""
    return restored("", stored("", values)).to(values.dtype)


def stored(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a weight is in a drafter's file: of a matrix int8 and a scale for each row."""
    if values.dim() != 2:
        return {name: values.contiguous()}
    rows = values.float()
    scales = rows.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
    return {name: (rows / scales[:, None]).round_().to(torch.int8), name + _SCALE: scales}


def stored_weights(module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """What these parameters of a module are in a drafter's file."""
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= stored(name, module.get_parameter(name).detach().cpu())
    return tensors


def restored(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A weight of a drafter's file. Raises `ValueError` unless each row has its scale."""
    values = tensors[name]
    if values.dtype != torch.int8:
        return values
    scales = tensors[name + _SCALE]
    if scales.shape != values.shape[:1]:
        raise ValueError(f"{name + _SCALE} is {[*scales.shape]} for {[*values.shape]} values")
    return values.float() * scales[:, None]


def checked_token_ids(
    tensors: Mapping[str, torch.Tensor], description: TrainedDescription
) -> torch.Tensor:
    """The tokens [N] of the head's rows. Raises `ValueError` for such as cannot be."""
    token_ids = tensors[TOKEN_IDS]
    shape, num, vocab_size = (
        [*token_ids.shape], description.draft_vocab_size, description.vocab_size,
    )  # fmt: skip
    if shape != [num] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{TOKEN_IDS} are {token_ids.dtype} {shape}, not {num} whole numbers")
    found = token_ids.tolist()
    if found[0] < 0 or found[-1] >= vocab_size or any(a >= b for a, b in pairwise(found)):
        raise ValueError(f"{TOKEN_IDS} do not ascend from 0 or more to below {vocab_size}")
    return token_ids.long()


def own_names(module: nn.Module) -> list[str]:
    """The weights of a head that are not its target's."""
    return [name for name, _ in module.named_parameters() if name not in _OF_TARGET]


def put_weights(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    drafter: str,
    given: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Puts on the device what a drafter's file has of the module's own weights or, where they are
    `given`, of all. Raises `ConfigError` for such as are missing, misfit, or not finite."""
    names = own_names(module) if given is None else [name for name, _ in module.named_parameters()]
    for name in names:
        parameter = module.get_parameter(name)
        if given is not None and name in given:
            values = given[name]
        elif name in tensors:
            values = restored(name, tensors)
        else:
            raise ConfigError(f"drafter {drafter}: its files lack the weights {name}")
        if values.shape != parameter.shape or not values.isfinite().all():
            raise ConfigError(f"drafter {drafter}: {name} does not fit, or is not finite")
        owner, _, attribute = name.rpartition(".")
        new = nn.Parameter(values.to(device, parameter.dtype), requires_grad=False)
        setattr(module.get_submodule(owner), attribute, new)
