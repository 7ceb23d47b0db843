"""The processes of other libraries, with a fake library, and the GGUF file that libraries read."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from outrider.bench import library_process
from outrider.bench.libraries import (
    ENGINE,
    PEERS,
    TRANSFORMERS,
    Library,
    LibraryProcess,
    TargetInputs,
    fastest_settings,
    known_settings,
    peer_gguf,
    precision_of,
    sweep_prompts,
)
from outrider.bench.library_process import DECODERS, _decode
from outrider.bench.measurement import bench_request
from outrider.bench.options import PromptOptions
from outrider.bench.prompts import BenchPrompt
from outrider.config.deployment import TargetConfig
from outrider.errors import BadRequest, ConfigError, Unavailable
from outrider.kernels import processor
from outrider.models.sources import converted
from tests.support.models import byte_level_tokenizer, save_tiny_model
from tests.support.peer_stand_ins import EOS, inputs, make_environment, notes
from tests.support.tiny_gguf import save_tiny_gguf

TEXTS = [f"{first}" for first in (1, 11, EOS - 2)]
TOKEN_IDS = {text: [5, int(text)] for text in TEXTS} | {"": []}
BY_NAME = {peer.name: peer for peer in PEERS}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers")
    make_environment(path, "vllm")
    return path


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


async def test_tokens_end_at_the_eos_or_the_most_wanted(environments: Path, record: Path) -> None:
    """After a failed request, the next one is answered. Two requests run at a time."""
    library = BY_NAME["vllm"]
    told = inputs(environments, token_ids=TOKEN_IDS)
    async with LibraryProcess(library, library.bindings[0], told) as process:
        with pytest.raises(ConfigError, match=r"vllm: .*an empty prompt"):
            await process.generate(bench_request("", 4))
        done = await process.generate_all([bench_request(text, 4, 0.5) for text in TEXTS], 2)
    assert [each.token_ids for each in done] == [(2, 3, 4, 5), (12, 13, 14, 15), (EOS - 1, EOS)]
    assert 0 < done[0].chunk_s[0] < done[0].seconds
    written = notes(record)
    assert [each["temperature"] for each in written if "temperature" in each][-1] == 0.5
    assert written[0]["cache"] == str(environments / "vllm" / "cache")
    assert written[0]["bind"].isdecimal()
    assert max(each.get("running", 0) for each in written) == 2
    assert written[0]["dtype"] == "float32"


async def test_a_sweep_takes_what_is_fastest_and_keeps_it(environments: Path, record: Path) -> None:
    """Drafts of 3 tokens fail, and drafts of 8 tokens are fast. A mode is left out if none of its
    settings works. The file of an earlier version is not used, nor one of another precision."""
    old = {"of": {"model": "/model", "threads": 1}, "settings": {"plain": {"environment": {}}}}
    (environments / "vllm" / "settings.json").write_text(json.dumps(old))
    drafting = BY_NAME["vllm"].drafting
    peer = Library(name="vllm", speculative="n-gram", drafting=drafting)
    told = inputs(environments, token_ids={prompt.text: [1] for prompt in sweep_prompts()})
    default = {"plain": {}, "n-gram": drafting[0]}
    assert known_settings(peer, told) == default
    lines: list[str] = []
    found = await fastest_settings(peer, told, lines.append)
    assert found == {"plain": {}, "n-gram": drafting[2]}
    assert known_settings(peer, told) == found
    assert known_settings(peer, replace(told, setup={**told.setup, "precision": "f"})) == default
    failing = drafting[:1]
    half = await fastest_settings(replace(peer, drafting=failing), told, lines.append)
    assert half == {"plain": {}}
    assert "vllm n-gram does not work: vllm: RuntimeError: no such drafts" in lines[-1]
    with pytest.raises(Unavailable, match="no such drafts"):
        await fastest_settings(replace(peer, bindings=failing), told, lines.append)


@pytest.mark.parametrize(
    ("stored", "dtype", "has_bfloat16", "expected"),
    [
        ("bfloat16", "auto", True, "bfloat16"),
        ("bfloat16", "auto", False, "float32"),
        ("float32", "auto", True, "float32"),
        ("float16", "auto", True, "float16"),
        ("float16", "auto", False, "float16"),
        ("float32", "bfloat16", True, "bfloat16"),
        ("float32", "bfloat16", False, "float32"),
        ("bfloat16", "float16", False, "float16"),
    ],
)
def test_peers_compute_in_the_targets_dtype_if_the_processor_supports_it(
    stored: str,
    dtype: str,
    has_bfloat16: bool,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor, "has_bfloat16", lambda: has_bfloat16)
    directory = save_tiny_model(tmp_path, dtype=getattr(torch, stored))
    target = TargetConfig(directory=str(directory), dtype=dtype, device="cpu")
    assert precision_of(target) == expected


@pytest.mark.parametrize(("precision", "name"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_openvino_gets_the_precision_for_its_cache_too(
    precision: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache in bfloat16 is refused by processors that have no instructions for it."""
    given: list[Any] = []
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        ContinuousBatchingPipeline=lambda *words: given.append(words),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    setup = inputs(Path()).setup
    DECODERS["openvino"]({**setup, "precision": precision, "options": {}})
    [(model, _, device, properties)] = given
    assert (model, device) == ("/model.gguf", "CPU")
    assert properties == {
        "INFERENCE_PRECISION_HINT": name,
        "KV_CACHE_PRECISION": name,
        "INFERENCE_NUM_THREADS": 1,
    }


def test_what_the_manual_asks_for_is_preloaded_if_it_exists(tmp_path: Path) -> None:
    peer = Library(name="p", preloads=("libx.so", "not-there.so"))
    (tmp_path / "p" / "lib").mkdir(parents=True)
    (tmp_path / "p" / "lib" / "libx.so").touch()
    assert peer.environment(tmp_path) == {"LD_PRELOAD": f"{tmp_path}/p/lib/libx.so"}


def test_every_peer_has_a_file_that_make_installs_it_from() -> None:
    root = Path(library_process.__file__).parent / "peer_environments"
    assert {path.stem for path in root.iterdir()} == {p.name for p in PEERS if not p.is_ours}
    assert {peer.name for peer in (*PEERS, ENGINE)} == set(DECODERS)


def test_the_process_imports_the_standard_library_alone() -> None:
    command = [sys.executable, "-I", "-S", library_process.__file__]
    assert subprocess.run(command, input=b"", capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    directory = save_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab_size=320, seed=1, tokenizer=byte_level_tokenizer()
    )
    return TargetConfig(directory=str(directory), dtype="float32", device="cpu", num_threads=1)


@pytest.mark.parametrize("raw", [False, True])
def test_engine_and_library_write_the_same_greedy_tokens(tiny: TargetConfig, raw: bool) -> None:
    """In float32, a difference would be an error in one of the loops. All loops stop at the EOS."""
    chats = [BenchPrompt("The quick brown fox", "chat"), BenchPrompt("fox", "chat")]
    setup = TargetInputs.load(tiny, chats, PromptOptions(raw=raw, max_tokens=16))
    prompts = [setup.token_ids[prompt.text] for prompt in chats]
    request: dict[str, Any] = {
        "prompts": prompts,
        "eos_token_ids": setup.eos_token_ids,
        "max_tokens": 12,
        "temperature": 0.0,
        "concurrency": 1,
    }
    lookup = TRANSFORMERS.drafting[0]
    sides = [
        DECODERS[name]({**setup.setup, "options": options})
        for name, options in (("engine", {}), ("transformers", {}), ("transformers", lookup))
    ]
    with pytest.raises(BadRequest):
        _decode(sides[0], request | {"prompts": [[1] * 100_000]})
    texts: Any = ([one["token_ids"] for one in _decode(side, request)] for side in sides)
    engine, *others = texts
    assert others == [engine, engine]
    assert [len(text) for text in engine] == [12, 12]
    eos = engine[0][5]
    for side in sides:
        ended = _decode(side, request | {"eos_token_ids": [eos]})[0]["token_ids"]
        assert ended == engine[0][: engine[0].index(eos) + 1]


async def test_the_engine_decodes_in_a_process_of_our_own(tiny: TargetConfig) -> None:
    told = TargetInputs.load(tiny, [BenchPrompt("fox", "chat")], PromptOptions(max_tokens=16))
    asked = bench_request("fox", 12, 1.0)
    async with LibraryProcess(ENGINE, {}, told) as engine:
        done = await engine.generate(asked)
        assert len(done.token_ids) == done.num_rounds == 12
        engine.kill()
        with pytest.raises(Unavailable, match="engine was killed"):
            await engine.generate(asked)


def test_the_library_reads_the_target_from_the_gguf_file(tmp_path: Path) -> None:
    """The weights are bit-equal after the library's own renaming and reordering of rows."""
    source = save_tiny_gguf(tmp_path / "tiny.Q8_0.gguf")
    target, written = converted(source, tmp_path), peer_gguf(source, tmp_path, "none")
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    found = load_gguf_checkpoint(
        str(written), return_tensors=True, model_to_load=module, torch_dtype=torch.bfloat16
    )["tensors"]
    expected = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_libraries_read_matrices_of_as_many_bits(
    quantization: str, kind: str, tmp_path: Path
) -> None:
    """The weights differ from those of the target by less than a step of the type."""
    source = save_tiny_gguf(tmp_path / "tiny.F32.gguf")
    plain = GGUFReader(str(peer_gguf(source, tmp_path, "none"))).tensors
    few = GGUFReader(str(peer_gguf(source, tmp_path, quantization))).tensors
    steps = {"Q8_0": 1 / 127, "Q4_0": 1 / 8}
    for whole, rounded in zip(plain, few, strict=True):
        expected = dequantize(whole.data, whole.tensor_type)
        found = dequantize(rounded.data, rounded.tensor_type)
        is_matrix = whole.tensor_type.name == "F16"
        assert rounded.tensor_type.name == (kind if is_matrix else "F32")
        allowed = steps[kind] * np.abs(expected).max() if is_matrix else 0
        assert np.abs(found - expected).max() <= allowed
