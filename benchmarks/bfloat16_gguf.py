"""The weights of a target that comes from a GGUF file, rounded to bfloat16, as a GGUF file: what a
library runs that reads GGUF files and is to run the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from outrider.models.sources import cached_path, made_once

_ROTATIONS: Final = "rope_"
"""Begins the names of tensors that are no weights and stay as they are."""


def bfloat16_gguf(gguf: Path, cache: Path) -> Path:
    """`gguf` with every weight as the target has it, rounded to bfloat16, made now if the cache has
    none. Tensors of two dimensions and more are stored as float16, since not every reader knows
    bfloat16: it holds the same numbers, but for those under 2**-17 in magnitude, which lose bits.
    Those of one dimension are stored as float32, as llama.cpp wants them. Metadata, names, shapes
    and the order of rows are the file's.

    The target's own weights are the same: `gguf_conversion` dequantises the file and rounds to
    bfloat16 likewise, and how it renames tensors and reorders their rows does not change values.
    """
    path = cached_path(gguf, cache, ".f16.gguf")
    return made_once(path, lambda path: _write(gguf, path))


def _write(gguf: Path, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

    reader = GGUFReader(str(gguf))
    writer = GGUFWriter(str(path), reader.get_field("general.architecture").contents())
    _copy_metadata(reader, writer)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()  # the file has them from the innermost on
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.F16
        num_bytes = tensor.n_elements * (4 if kind == GGMLQuantizationType.F32 else 2)
        writer.add_tensor_info(tensor.name, shape, None, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one at a time is in memory
        writer.write_tensor_data(_rounded(tensor))
    writer.close()


def _copy_metadata(reader: Any, writer: Any) -> None:
    """All but what the writer says itself, and the type of the weights."""
    from gguf import GGUFValueType

    own = ("general.architecture", "general.alignment", "general.file_type")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in own:
            continue
        kind = field.types[0]
        of_entries = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, of_entries)


def _rounded(tensor: Any) -> Any:
    """Its values as an array of float32 or float16."""
    import numpy as np
    import torch
    from gguf import dequantize

    # A copy: what is memory-mapped cannot be written to, and torch takes only what can be.
    values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
    if tensor.name.startswith(_ROTATIONS):
        return values.numpy()
    rounded = values.to(torch.bfloat16)
    return (rounded.float() if rounded.dim() == 1 else rounded.to(torch.float16)).numpy()
