"""Fingerprints of weights, tokenizers and numerics, by which services compare their models."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from outrider.errors import ConfigError

if TYPE_CHECKING:
    import torch

_BLOCK_BYTES = 4096
_BLOCKS_PER_FILE = 64
_BLOCKS_PER_TENSOR = 4
_HEADER_BYTES_MAX = 100 * 2**20  # the safetensors format allows no larger header
PICKLED_FILE = "pytorch_model.bin"
"""The weights file of EAGLE-3 heads that are published in PyTorch's format, not in safetensors."""
_digest = partial(hashlib.blake2b, digest_size=16)
_COUNTS = frozenset({"cpu_name", "num_logical_cores", "num_physical_cores", "num_sockets"})
"""The entries of `torch.cpu.get_capabilities` that describe neither instructions nor caches."""
_VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)


def numerics_fingerprint(device: torch.device, *details: object) -> str:
    """Returns a fingerprint of everything on which seeded output depends, except the weights: the
    versions of torch, transformers and outrider, the GPU's name (on a CPU, its instructions and
    caches), and `details`."""
    import torch

    if device.type == "cuda":
        machine: object = torch.cuda.get_device_name(device)
    else:
        capabilities = torch.cpu.get_capabilities()
        machine = sorted((name, capabilities[name]) for name in capabilities.keys() - _COUNTS)
    versions = (torch.__version__, version("transformers"), version("outrider"))
    text = repr((versions, machine, details))
    return _digest(text.encode()).hexdigest()


def file_fingerprint(path: Path) -> str:
    """Returns a fingerprint of a file's size and of some blocks that are spread evenly over the
    file. A forged file can have the same fingerprint."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = _digest(size.to_bytes(8, "little"))
        _add_range(digest, file, 0, size, _BLOCKS_PER_FILE)
    return digest.hexdigest()


def weights_fingerprint(directory: Path) -> str:
    """Returns a fingerprint of the configuration and of all tensors."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    essentials = {k: v for k, v in config.items() if k not in _VOLATILE_CONFIG_KEYS}
    text = json.dumps(essentials, sort_keys=True) + tensors_fingerprint(directory)
    return _digest(text.encode()).hexdigest()


def tensors_fingerprint(directory: Path) -> str:
    """Returns a fingerprint of the names, dtypes, shapes and sampled blocks of all tensors. How
    the tensors are divided among files makes no difference. If there are no safetensors, returns
    the fingerprint of `PICKLED_FILE`."""
    entries: dict[str, bytes] = {}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths and (pickled := directory / PICKLED_FILE).is_file():
        return file_fingerprint(pickled)
    for path in paths:
        try:
            entries |= _tensor_digests(path)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a safetensors file ({error})") from error
    return _digest(b"".join(entries[name] for name in sorted(entries))).hexdigest()


def _tensor_digests(path: Path) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_BYTES_MAX:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(file.read(length))
        start = file.tell()
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                digest = _digest(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                _add_range(digest, file, start + begin, start + end, _BLOCKS_PER_TENSOR)
                digests[name] = digest.digest()
    return digests


def _add_range(
    digest: hashlib.blake2b, file: BinaryIO, begin: int, end: int, num_blocks: int
) -> None:
    last = max(0, end - begin - _BLOCK_BYTES)
    for start in sorted({last * i // (num_blocks - 1) for i in range(num_blocks)}):
        file.seek(begin + start)
        digest.update(file.read(min(_BLOCK_BYTES, end - begin)))


TokenizerTable = dict[str, str]
"""Maps "id N" to the spelling of token N, and "merge N" to the N-th pair that a byte-pair encoding
merges. The table does not say which tokens end a text. So a base model may draft for its
instruction-tuned variant, even if their EOS tokens differ."""


def tokenizer_table(tokenizer: Any) -> TokenizerTable:
    tokens = sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
    table = {f"id {token_id}": token for token, token_id in tokens}
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        for rank, pair in enumerate(json.loads(backend.to_str())["model"].get("merges", [])):
            table[f"merge {rank}"] = pair if isinstance(pair, str) else " ".join(pair)
    return table


def tokenizer_fingerprint(tokenizer: Any | None) -> str:
    """Returns a fingerprint of a tokenizer's table, or an empty text if there is no tokenizer."""
    if tokenizer is None:
        return ""
    content = json.dumps([*tokenizer_table(tokenizer).items()])
    return _digest(content.encode()).hexdigest()


def compare_tokenizers(
    target_name: str, target: TokenizerTable | None, draft_name: str, draft: TokenizerTable | None
) -> None:
    """If the tables differ, raises `ConfigError` with both names and one difference. A table of
    None means that the model has no tokenizer."""
    if target == draft:
        return
    if target is None or draft is None:
        reason = f"{target_name if target is None else draft_name} has no tokenizer"
    else:
        key = next(key for key in target | draft if target.get(key) != draft.get(key))
        ours, theirs = (repr(each[key]) if key in each else "missing" for each in (target, draft))
        reason = f"{key} is {ours} in the target, {theirs} in the draft"
    raise ConfigError(
        f"draft model {draft_name} does not share the tokenizer of target {target_name}: {reason}"
    )
