"""The GGUF file that other libraries are given: the target's weights, as the source has them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import paired_rows, save_tiny_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.bfloat16_gguf import bfloat16_gguf
from outrider.models.sources import converted

NUM_HEADS, NUM_KV_HEADS = 4, 2
QUERIES, KEYS = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("source") / "tiny.Q8_0.gguf")


@pytest.fixture(scope="module")
def target(source: Path) -> Path:
    return converted(source, source.parent)


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    return bfloat16_gguf(source, source.parent)


def _values(path: Path) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(str(path)).tensors
    }


def test_the_library_reads_the_target_from_it(target: Path, written: Path) -> None:
    """Bit for bit, and every tensor: through the library's own renaming and reordering of rows."""
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    found = load_gguf_checkpoint(
        str(written), return_tensors=True, model_to_load=module, torch_dtype=torch.bfloat16
    )["tensors"]
    expected = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rows_of_queries_and_keys_are_in_the_order_of_the_format(
    target: Path, written: Path
) -> None:
    """Against a reordering that is not the library's: what it does twice wrong would not show."""
    tensors, found = load_file(target / "model.safetensors"), _values(written)
    for name, stored, num_heads in (
        (QUERIES, "blk.1.attn_q.weight", NUM_HEADS),
        (KEYS, "blk.1.attn_k.weight", NUM_KV_HEADS),
    ):
        rows = tensors[name].float().numpy()
        assert np.array_equal(found[stored], paired_rows(rows, num_heads))
        assert not np.array_equal(found[stored], rows)


def test_every_value_is_that_of_the_source_up_to_rounding(source: Path, written: Path) -> None:
    """bfloat16 has 8 significant bits. Names, their order and shapes are the source's, and float16
    loses nothing of what is not tiny."""
    before, after = _values(source), _values(written)
    assert list(before) == list(after)
    for name in before:
        assert before[name].shape == after[name].shape
        assert (np.abs(before[name] - after[name]) <= np.abs(before[name]) * 2.0**-8).all()
        as_bfloat16 = torch.from_numpy(after[name].copy()).bfloat16().float().numpy()
        assert np.array_equal(as_bfloat16, after[name])


def test_matrices_are_float16_and_norms_float32(written: Path) -> None:
    for tensor in gguf.GGUFReader(str(written)).tensors:
        assert tensor.tensor_type.name == ("F32" if len(tensor.shape) == 1 else "F16")


def test_metadata_is_the_source_s_but_for_the_type(source: Path, written: Path) -> None:
    before, after = (
        {field.name: field.contents() for field in gguf.GGUFReader(str(path)).fields.values()}
        for path in (source, written)
    )
    assert after["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"general.file_type", "GGUF.tensor_count", "GGUF.kv_count"}


def test_it_is_written_once(source: Path, written: Path) -> None:
    modified = written.stat().st_mtime_ns
    assert bfloat16_gguf(source, source.parent) == written
    assert written.stat().st_mtime_ns == modified
