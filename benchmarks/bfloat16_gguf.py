"""The weights of a target that comes from a GGUF file, in bfloat16, as a GGUF file: what llama.cpp
runs where it is to run the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from outrider.engine.gguf_conversion import cached_path, made_once

_ROTATIONS: Final = "rope_"
"""Begins the names of tensors that are no weights and stay as they are."""


def bfloat16_gguf(gguf: Path, cache: Path) -> Path:
    """`gguf` with every weight as the target has it, made now if the cache has none: tensors of two
    dimensions and more in bfloat16, those of one in float32, as llama.cpp wants them, but rounded
    to bfloat16. Metadata, names, shapes and the order of rows are the file's.

    The target's own weights are the same: `gguf_conversion` dequantises the file and rounds to
    bfloat16 likewise, and how it renames tensors and reorders their rows does not change values.
    """
    return made_once(cached_path(gguf, cache, ".gguf"), lambda path: _write(gguf, path))


def _write(gguf: Path, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    reader = GGUFReader(str(gguf))
    writer = GGUFWriter(str(path), reader.get_field("general.architecture").contents())
    _copy_metadata(reader, writer)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()  # the file has them from the innermost on
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.BF16
        num_bytes = tensor.n_elements * (4 if kind == GGMLQuantizationType.F32 else 2)
        writer.add_tensor_info(tensor.name, shape, None, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one at a time is in memory
        writer.write_tensor_data(_rounded(tensor))
    writer.close()


def _copy_metadata(reader: Any, writer: Any) -> None:
    """All but what the writer says itself, and with the new type of the weights."""
    from gguf import GGUFValueType, LlamaFileType

    own = ("general.architecture", "general.alignment", "general.file_type")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in own:
            continue
        kind = field.types[0]
        of_entries = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, of_entries)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)


def _rounded(tensor: Any) -> Any:
    """Its values as an array of float32 or, as torch stores bfloat16, of int16."""
    import numpy as np
    import torch
    from gguf import dequantize

    # A copy: what is memory-mapped cannot be written to, and torch takes only what can be.
    values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
    if tensor.name.startswith(_ROTATIONS):
        return values.numpy()
    rounded = values.to(torch.bfloat16)
    if rounded.dim() == 1:
        return rounded.float().numpy()
    return rounded.view(torch.int16).numpy()
