"""A drafter that was made for one target: a directory in Hugging Face style that stores what it
does not share with that target.

file                what it holds
`config.json`       the drafter's own architecture; its vocabulary is the target's
`drafter.json`      whose drafter it is (`TrainedDescription`)
`model.safetensors` every weight but those of embeddings and head, which are the target's; matrices
                    as int8 with one scale a row (`NAME.scale`); `draft_token_ids`, ascending, the
                    tokens whose rows of the target's head it has
`README.md`         the model card, with `loss.svg`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

from outrider.engine.empty_models import empty_model
from outrider.engine.fingerprints import tensors_fingerprint, tokenizer_table
from outrider.engine.interface import ModelInfo
from outrider.engine.loading import (
    LOADING_ERRORS,
    describe,
    load_tokenizer,
    resolve_device,
    set_threads,
)
from outrider.engine.weight_files import open_weights, stored_names
from outrider.errors import ConfigError, check

CONFIG_FILE: Final = "config.json"
DESCRIPTION_FILE: Final = "drafter.json"
WEIGHTS_FILE: Final = "model.safetensors"
FORMAT: Final = 2
_TOKEN_IDS: Final = "draft_token_ids"  # noqa: S105 (a tensor's name)
_SCALE: Final = ".scale"
_INT8_MAX: Final = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """Whose drafter it is."""

    format: int
    """Of the directory; `FORMAT`."""
    target: str
    """What the target was called; for people."""
    target_fingerprint: str
    """`tensors_fingerprint` of the only target that it is for."""
    vocab_size: int
    """Of that target."""
    draft_vocab_size: int
    """Rows of the drafter's head."""


def is_trained_drafter(directory: Path) -> bool:
    """Whether the directory holds a drafter of this kind, and no model that stands alone."""
    return (directory / DESCRIPTION_FILE).is_file()


def read_description(directory: Path, name: str) -> TrainedDescription:
    """What `drafter.json` says. Raises `ConfigError` where it says it otherwise than it must."""
    path = directory / DESCRIPTION_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter {name}: {path} cannot be read: {error}") from error
    kinds = {"target": str, "target_fingerprint": str}
    expected = {field.name: kinds.get(field.name, int) for field in fields(TrainedDescription)}
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f"drafter {name}: {path} is not of format {FORMAT}, which is read here")
    found = {key: type(value) for key, value in values.items()}
    if found != expected:
        wrong = sorted(key for key in found | expected if found.get(key) != expected.get(key))
        raise ConfigError(f"drafter {name}: {path}: {wrong[0]} is missing, wrong or not known")
    description = TrainedDescription(**values)
    if not 0 < description.draft_vocab_size <= description.vocab_size:
        raise ConfigError(
            f"drafter {name}: {path}: draft_vocab_size is {description.draft_vocab_size}; 1 to "
            f"vocab_size, {description.vocab_size}, are allowed"
        )
    return description


def check_target(directory: Path, name: str, target_directory: Path, target: str) -> None:
    """Raises `ConfigError` unless the drafter in `directory` was made for these weights."""
    description = read_description(directory, name)
    found = tensors_fingerprint(target_directory)
    if description.target_fingerprint != found:
        raise ConfigError(
            f"drafter {name} was made for the target {description.target} with weights "
            f"{description.target_fingerprint}, and takes embeddings and head from there; {target} "
            f"has weights {found}. Make one for it: outrider distill {target} --out DIR"
        )


def load_drafter(
    path: Path,
    target_directory: Path,
    *,
    name: str,
    target: str,
    dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    attn_implementation: str = "sdpa",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, ModelInfo]:
    """The drafter in `path` with embeddings and head of the target in `target_directory`; otherwise
    as `load_model`. Its logits are [.., N], for the `logit_token_ids` of what it is. Raises
    `ConfigError`, also for a target that it was not made for."""
    check_target(path, name, target_directory, target)
    description = read_description(path, name)
    where = resolve_device(device)
    set_threads(num_threads)
    module = empty_model(path, name, dtype, attn_implementation, trust_remote_code)
    info = describe(
        module, path, name, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    narrow_head(module, description.draft_vocab_size)
    try:
        if info.vocab_size != description.vocab_size:
            raise ConfigError(
                f"drafter {name}: {DESCRIPTION_FILE} has vocab_size {description.vocab_size}, "
                f"{CONFIG_FILE} {info.vocab_size}"
            )
        token_ids = _fill(module, path, target_directory, name, description)
    except LOADING_ERRORS as error:
        raise ConfigError(f"drafter {name}: cannot be loaded: {error}") from error
    tokenizer = load_tokenizer(target_directory, trust_remote_code=trust_remote_code)
    fingerprint = "" if tokenizer is None else tokenizer_table(tokenizer).fingerprint
    info = replace(info, tokenizer_fingerprint=fingerprint, logit_token_ids=token_ids)
    return module.requires_grad_(False).to(where).eval(), info


def narrow_head(module: Any, num_rows: int) -> nn.Linear:
    """Gives the model a head of so many rows without values, and returns it."""
    head = module.get_output_embeddings()
    check(isinstance(head, nn.Linear), "the head of a drafter is a linear layer")
    weight: torch.Tensor = head.weight
    narrow = nn.Linear(
        weight.shape[1], num_rows, bias=head.bias is not None, device="meta", dtype=weight.dtype
    )
    module.set_output_embeddings(narrow)
    return narrow


def save_drafter(
    directory: Path, module: Any, token_ids: torch.Tensor, description: TrainedDescription
) -> None:
    """Writes configuration, description and weights of a drafter whose head has the target's rows
    of `token_ids` [N]; its embeddings and its head are left out."""
    tensors: dict[str, torch.Tensor] = {_TOKEN_IDS: token_ids.to(torch.int32)}
    shared = _shared_with_target(module)
    for name, values in module.named_parameters():
        if name not in shared:
            tensors |= _stored(name, values.detach().cpu())
    module.config.save_pretrained(directory)
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # The library lets nobody else read it.
    text = json.dumps(asdict(description), indent=2)
    (directory / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """What is left of a weight once it has been stored and loaded, in its own dtype."""
    stored = _stored("", values)
    return _restored("", stored).to(values.dtype)


def _stored(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    if values.dim() != 2:
        return {name: values.contiguous()}
    rows = values.float()
    scales = rows.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
    return {name: (rows / scales[:, None]).round_().to(torch.int8), name + _SCALE: scales}


def _restored(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Raises `ValueError` unless each row has its scale."""
    values = tensors[name]
    if values.dtype != torch.int8:
        return values
    scales = tensors[name + _SCALE]
    if scales.shape != values.shape[:1]:
        raise ValueError(f"{name + _SCALE} is {[*scales.shape]} for {[*values.shape]} values")
    return values.float() * scales[:, None]


def _shared_with_target(module: Any) -> tuple[str, str]:
    """The names of the embeddings and of the head, which is a part of the target's."""
    wanted = (module.get_input_embeddings().weight, module.get_output_embeddings().weight)
    names = {id(found): name for name, found in module.named_parameters()}
    embeddings, head = (names[id(parameter)] for parameter in wanted)
    return embeddings, head


def _checked_token_ids(
    tensors: Mapping[str, torch.Tensor], description: TrainedDescription
) -> torch.Tensor:
    """The tokens [N] of the head's rows. Raises `ValueError` for such as cannot be."""
    token_ids = tensors[_TOKEN_IDS]
    shape, num, vocab_size = (
        [*token_ids.shape], description.draft_vocab_size, description.vocab_size,
    )  # fmt: skip
    if shape != [num] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{_TOKEN_IDS} are {token_ids.dtype} {shape}, not {num} whole numbers")
    found = token_ids.tolist()
    if found[0] < 0 or found[-1] >= vocab_size or any(a >= b for a, b in pairwise(found)):
        raise ValueError(f"{_TOKEN_IDS} do not ascend from 0 or more to below {vocab_size}")
    return token_ids.long()


def _fill(
    module: Any, path: Path, target_directory: Path, name: str, description: TrainedDescription
) -> tuple[int, ...]:
    """Gives every parameter its values; the tokens of the head's rows."""
    wanted = dict(module.named_parameters())
    embeddings, head = _shared_with_target(module)
    with open_weights(path) as files:
        tensors = {key: file.get_tensor(key) for key, file in files.items()}
    token_ids = _checked_token_ids(tensors, description)
    with open_weights(target_directory) as files:
        stored = stored_names(module, wanted, files)
        if embeddings not in stored:
            raise ConfigError(f"drafter {name}: the target's files lack the weights {embeddings}")
        values = {embeddings: files[stored[embeddings]].get_tensor(stored[embeddings])}
        # A target without a head in its files has its embeddings for one.
        heads = stored.get(head, stored[embeddings])
        values[head] = files[heads].get_tensor(heads)[token_ids]
    for key, parameter in wanted.items():
        if key not in values:
            if key not in tensors:
                raise ConfigError(f"drafter {name}: its files lack the weights {key}")
            values[key] = _restored(key, tensors)
        if values[key].shape != parameter.shape:
            raise ConfigError(f"drafter {name}: {key} does not fit its configuration")
        owner, _, attribute = key.rpartition(".")
        new = nn.Parameter(values[key].to(parameter.dtype), requires_grad=False)
        setattr(module.get_submodule(owner), attribute, new)
    return tuple(token_ids.tolist())
