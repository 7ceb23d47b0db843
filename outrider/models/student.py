"""A student is a small model that was trained for one target, and uses the target's embeddings and
output head (below: head).

file                what it holds
`config.json`       the student's architecture, with the target's vocabulary
`drafter.json`      the target for which the student was trained (`StudentDescription`)
`model.safetensors` `draft_token_ids`, the ascending ids of the tokens that the student may propose,
                    and all weights except embeddings and head. Matrices are stored as int8 with
                    one scale for each row (`NAME.scale`)
`README.md`         the model card

The student's head consists of the rows of the target's head for `draft_token_ids`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ConfigError, check
from outrider.interfaces.engine import ModelInfo
from outrider.models import loading
from outrider.models.fingerprint import tensors_fingerprint, tokenizer_fingerprint
from outrider.models.loading import WEIGHTS_FILE, LoadOptions, refusing

DESCRIPTION_FILE = "drafter.json"
_TOKEN_IDS = "draft_token_ids"  # noqa: S105 (a tensor's name)
_SCALE = ".scale"
_INT8_MAX = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentDescription:
    """The content of `drafter.json`. Files of older students also have other fields."""

    target: str
    target_fingerprint: str


def is_student(directory: Path) -> bool:
    """Whether the directory holds a student."""
    return (directory / DESCRIPTION_FILE).is_file()


def check_target(directory: Path, *, name: str, target_directory: Path, target_name: str) -> None:
    """Raises `ConfigError` unless the student in `directory` was trained for the weights in
    `target_directory`."""
    path = directory / DESCRIPTION_FILE
    with refusing(f"drafter {name}: {path}"):
        text = path.read_text(encoding="utf-8")
        description = TypeAdapter(StudentDescription).validate_json(text, strict=True)
    fingerprint = tensors_fingerprint(target_directory)
    if description.target_fingerprint != fingerprint:
        raise ConfigError(
            f"drafter {name} was trained for the target {description.target} (fingerprint "
            f"{description.target_fingerprint}), and uses embeddings and head of that target. "
            f"{target_name} has the fingerprint {fingerprint}. To train a drafter for "
            f"{target_name}, run: outrider distill {target_name} --out DIR"
        )


def load_student(
    path: Path, target_directory: Path, *, target: str, **options: Unpack[LoadOptions]
) -> tuple[nn.Module, ModelInfo]:
    """Like `load_model`, for a student in `path` whose target is in `target_directory`. The
    student's logits are [.., N], for the N `logit_token_ids` of the returned `ModelInfo`."""
    name = options.get("name", str(path))
    check_target(path, name=name, target_directory=target_directory, target_name=target)
    where = loading.use_device(**options)
    module = loading.empty_model(path, **options)
    info = loading.describe(module, path, **options)
    with refusing(f"drafter {name}:"):
        tensors = loading.read_weights(path)
        token_ids = tensors[_TOKEN_IDS].long()
        logit_ids = tuple(token_ids.tolist())
        if not logit_ids or any(a >= b for a, b in pairwise([-1, *logit_ids, info.vocab_size])):
            raise ValueError(f"{_TOKEN_IDS} must be ascending ids of the target's tokens")
        narrow_head(module, len(logit_ids))
        # Restores one weight at a time, because all weights together in float32 need more memory.
        weights = {
            key: _restored(key, tensors).to(values.dtype)
            for key, values in module.state_dict().items()
            if key in tensors
        }
        embeddings, rows = _target_weights(module, target_directory)
        shared = zip(_shared_with_target(module), (embeddings, rows[token_ids]), strict=True)
        loading.put_weights(module, weights | dict(shared), where)
    trust = options.get("trust_remote_code", False)
    tokenizer = loading.load_tokenizer(target_directory, trust_remote_code=trust)
    fingerprint = tokenizer_fingerprint(tokenizer)
    info = replace(info, tokenizer_fingerprint=fingerprint, logit_token_ids=logit_ids)
    return module.requires_grad_(False).to(where).eval(), info


def narrow_head(module: Any, num_rows: int) -> nn.Linear:
    """Replaces the model's head by a head with `num_rows` rows, which have no values yet. Returns
    the new head."""
    head = module.get_output_embeddings()
    check(isinstance(head, nn.Linear), "a student needs a linear layer as its head")
    has_bias, dtype = head.bias is not None, head.weight.dtype
    narrow = nn.Linear(head.in_features, num_rows, has_bias, device="meta", dtype=dtype)
    module.set_output_embeddings(narrow)
    return narrow


def save_student(
    directory: Path, module: Any, token_ids: Tensor, description: StudentDescription
) -> None:
    """Writes the files of a student, without embeddings and head. The student's head must consist
    of the rows of the target's head for `token_ids` [N]."""
    module.config.save_pretrained(directory)
    tensors, shared = {_TOKEN_IDS: token_ids.to(torch.int32)}, _shared_with_target(module)
    for name, values in module.state_dict().items():
        if name not in shared:
            tensors |= _stored(name, values.detach().cpu())
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors lets only the owner read its files.
    text = json.dumps(asdict(description), indent=2)
    (directory / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


def _stored(name: str, values: Tensor) -> dict[str, Tensor]:
    if values.dim() != 2:
        return {name: values.contiguous()}
    rows = values.float()
    scales = rows.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
    return {name: (rows / scales[:, None]).round_().to(torch.int8), name + _SCALE: scales}


def _restored(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    values = tensors[name]
    if values.dtype != torch.int8:
        return values
    scales = tensors[name + _SCALE]
    if scales.shape != values.shape[:1]:
        raise ValueError(f"{name + _SCALE} has shape {[*scales.shape]}, {name} {[*values.shape]}")
    return values.float() * scales[:, None]


def target_ends(directory: Path, *, drafter: str, **options: Unpack[LoadOptions]) -> Any:
    """Loads the model in `directory` with values only for embeddings and head. Raises a
    `ConfigError` that names the `drafter`."""
    where = loading.use_device(**options)
    empty = loading.empty_model(directory, takes_quantised=True, **options)
    check(empty.get_output_embeddings().bias is None, "a drafter needs a head without a bias")
    ends = (empty.get_input_embeddings(), empty.get_output_embeddings())
    with refusing(f"drafter {drafter}:"):
        for end, values in zip(ends, _target_weights(empty, directory), strict=True):
            end.weight = nn.Parameter(values.to(where, empty.dtype), requires_grad=False)
    return empty


def _target_weights(module: Any, target_directory: Path) -> tuple[Tensor, Tensor]:
    """Returns embeddings [V, D] and head [V, D] from the target's files. `module` is the target or
    a student. Its parameters need no values. Raises `ValueError`."""
    embeddings, head = _shared_with_target(module)
    with loading.open_weights(target_directory) as files:
        names = loading.stored_names(module, dict(module.named_parameters()), files)
        has_head = any(key.startswith(head.removesuffix("weight")) for key in names)
        weights = []
        # If the files hold no head, the target uses its embeddings as the head.
        for key in (embeddings, head if has_head else embeddings):
            if key not in names:
                raise ValueError(f"the target's files lack the weights {key}")
            values = files[names[key]].get_tensor(names[key])
            if values.dtype not in loading.DTYPES.values():
                raise ValueError(
                    f"the target's files have {key} as {values.dtype}; a drafter needs floating "
                    "point of 16 bits or more"
                )
            weights.append(values)
    return weights[0], weights[1]


def _shared_with_target(module: Any) -> tuple[str, str]:
    wanted = (module.get_input_embeddings().weight, module.get_output_embeddings().weight)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    embeddings, head = (names[id(parameter)] for parameter in wanted)
    return embeddings, head
