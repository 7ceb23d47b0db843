"""A student: a small model that was trained for one target, and shares embeddings and head with it.

file                what it holds
`config.json`       the student's own architecture; its vocabulary is the target's
`model.safetensors` all weights except embeddings and head

Beside these lie the files that every trained drafter has (`drafter_checkpoint.py`).
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.engine.interface import ModelInfo
from outrider.errors import ConfigError, check
from outrider.models.drafter_checkpoint import (
    CONFIG_FILE,
    DESCRIPTION_FILE,
    TOKEN_IDS,
    WEIGHTS_FILE,
    TrainedDescription,
    check_target,
    checked_token_ids,
    put_weights,
    stored,
)
from outrider.models.fingerprint import tokenizer_fingerprint
from outrider.models.loading import (
    DTYPES,
    LoadOptions,
    describe,
    empty_model,
    load_tokenizer,
    open_weights,
    read_weights,
    refusing,
    stored_names,
    use_device,
)


def load_drafter(
    path: Path, target_directory: Path, *, target: str, **options: Unpack[LoadOptions]
) -> tuple[nn.Module, ModelInfo]:
    """The drafter in `path` with embeddings and head of the target in `target_directory`; otherwise
    as `load_model`. Its logits are [.., N], for the `logit_token_ids` of its description. Raises
    `ConfigError`, also if it was made for another target."""
    name = options.get("name", str(path))
    description = check_target(
        path, name=name, target_directory=target_directory, target_name=target
    )
    where = use_device(**options)
    module = empty_model(path, **options)
    info = describe(module, path, **options)
    narrow_head(module, description.draft_vocab_size)
    with refusing(f"drafter {name}:"):
        if info.vocab_size != description.vocab_size:
            raise ConfigError(
                f"drafter {name}: {DESCRIPTION_FILE} has vocab_size {description.vocab_size}, "
                f"{CONFIG_FILE} {info.vocab_size}"
            )
        tensors = read_weights(path)
        token_ids = checked_token_ids(tensors, description)
        embeddings, rows = target_weights(module, target_directory, name)
        shared = _shared_with_target(module)
        given = tensors | dict(zip(shared, (embeddings, rows[token_ids]), strict=True))
        put_weights(module, dict(module.named_parameters()), given, where, name)
    tokenizer = load_tokenizer(
        target_directory, trust_remote_code=options.get("trust_remote_code", False)
    )
    fingerprint = tokenizer_fingerprint(tokenizer)
    logit_ids = tuple(token_ids.tolist())
    info = replace(info, tokenizer_fingerprint=fingerprint, logit_token_ids=logit_ids)
    return module.requires_grad_(False).to(where).eval(), info


def narrow_head(module: Any, num_rows: int) -> nn.Linear:
    """Replaces the model's head by one of `num_rows` rows without values, and returns that."""
    head = module.get_output_embeddings()
    check(isinstance(head, nn.Linear), "the head of a drafter is a linear layer")
    weight: Tensor = head.weight
    narrow = nn.Linear(
        weight.shape[1], num_rows, bias=head.bias is not None, device="meta", dtype=weight.dtype
    )
    module.set_output_embeddings(narrow)
    return narrow


def save_drafter(
    directory: Path, module: Any, token_ids: Tensor, description: TrainedDescription
) -> None:
    """Writes configuration, description and weights of a drafter whose head has the target's rows
    of `token_ids` [N]. Embeddings and head are left out."""
    module.config.save_pretrained(directory)
    tensors, shared = {TOKEN_IDS: token_ids.to(torch.int32)}, _shared_with_target(module)
    for name, weight in module.named_parameters():
        if name not in shared:
            tensors |= stored(name, weight.detach().cpu())
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors lets only the owner read it.
    text = json.dumps(asdict(description), indent=2)
    (directory / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


def target_ends(directory: Path, *, drafter: str, **options: Unpack[LoadOptions]) -> Any:
    """The model in `directory`, in which only embeddings and head have values. Errors name
    `drafter`, which needs these. Raises `ConfigError`."""
    where = use_device(**options)
    empty = empty_model(directory, takes_quantised=True, **options)
    check(empty.get_output_embeddings().bias is None, "drafters are made for heads without a bias")
    with refusing(f"drafter {drafter}:"):
        ends = (empty.get_input_embeddings(), empty.get_output_embeddings())
        weights = target_weights(empty, directory, drafter)
        for end, values in zip(ends, weights, strict=True):
            end.weight = nn.Parameter(values.to(where, empty.dtype), requires_grad=False)
    return empty


def target_weights(module: Any, target_directory: Path, name: str) -> tuple[Tensor, Tensor]:
    """Embeddings [V, D] and head [V, D] from the target's files. `module` is the target's, or a
    drafter's of the same architecture, with or without values. Raises `ConfigError`."""
    embeddings, head = _shared_with_target(module)
    with open_weights(target_directory) as files:
        names = stored_names(module, dict(module.named_parameters()), files)
        has_head = any(key.startswith(head.removesuffix("weight")) for key in names)
        # A target without a head in its files uses its embeddings.
        found = (embeddings, head if has_head else embeddings)
        if lacking := [key for key in found if key not in names]:
            raise ConfigError(f"drafter {name}: the target's files lack the weights {lacking[0]}")
        values = {key: files[names[key]].get_tensor(names[key]) for key in found}
    for key, tensor in values.items():
        if tensor.dtype not in DTYPES.values():
            raise ConfigError(
                f"drafter {name}: the target's files have {key} as {tensor.dtype}; a drafter needs "
                "it in floating point of 16 bits or more"
            )
    return values[found[0]], values[found[1]]


def _shared_with_target(module: Any) -> tuple[str, str]:
    """The names of the embeddings and of the head."""
    wanted = (module.get_input_embeddings().weight, module.get_output_embeddings().weight)
    names = {id(found): name for name, found in module.named_parameters()}
    embeddings, head = (names[id(parameter)] for parameter in wanted)
    return embeddings, head
