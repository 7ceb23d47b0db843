"""The processes of other libraries, with fakes of these in environments of their own: what they are
told, what becomes of their tokens and errors, which of their settings is chosen, and their GGUF
file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from models import byte_level_tokenizer, save_tiny_model
from peer_stand_ins import EOS, make_environment, notes
from safetensors.torch import load_file
from tiny_gguf import save_tiny_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks import library_process
from benchmarks.libraries import (
    ENGINE,
    PEERS,
    TRANSFORMERS,
    Library,
    LibraryProcess,
    Setting,
    TargetInputs,
    bfloat16_gguf,
    fastest_settings,
    sweep_prompts,
)
from benchmarks.library_process import DECODERS, _decode
from benchmarks.measurement import Decoding
from benchmarks.options import PromptOptions
from benchmarks.prompts import BenchPrompt
from outrider.config import TargetConfig
from outrider.errors import BadRequest, ConfigError, Unavailable
from outrider.models.sources import converted

PROMPTS = [BenchPrompt(f"{first}", "chat") for first in (1, 11, EOS - 2)]

TOKEN_IDS = {prompt.text: [5, int(prompt.text)] for prompt in PROMPTS} | {"": []}

BY_NAME = {peer.name: peer for peer in PEERS}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers")
    for name in ("vllm", "llama-cpp"):
        make_environment(path, name)
    return path


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def inputs(environments: Path, token_ids: dict[str, list[int]] = TOKEN_IDS) -> TargetInputs:
    return TargetInputs(
        target=TargetConfig(directory="/model", dtype="bfloat16", device="cpu", num_threads=1),
        gguf="/model.gguf", context_tokens=77, batch=2, eos_token_ids=(EOS,), token_ids=token_ids,
        environments=environments,
    )  # fmt: skip


def decoding(max_tokens: int = 4, temperature: float = 0.0) -> Decoding:
    return Decoding(max_tokens, temperature)


def process(environments: Path, name: str, setting: Setting | None = None) -> LibraryProcess:
    library = BY_NAME[name]
    return LibraryProcess(library, setting or library.bindings[0], inputs(environments))


@pytest.mark.parametrize("name", ["vllm", "llama-cpp"])
async def test_tokens_come_back_up_to_the_eos_and_the_most_wanted(
    environments: Path, record: Path, name: str
) -> None:
    """The EOS is among them. What fails is refused, and the next one answered."""
    async with process(environments, name) as library:
        first = await library.generate(PROMPTS[0], decoding(4))
        with pytest.raises(ConfigError, match=f"{name}: .*an empty prompt"):
            await library.generate(BenchPrompt("", "chat"), decoding())
        ended = await library.generate(PROMPTS[2], decoding(9, 0.5))
    assert first.token_ids == (2, 3, 4, 5)
    assert ended.token_ids == (EOS - 1, EOS)
    assert first.first_token_s is not None
    assert 0 < first.first_token_s < first.seconds
    temperatures = [each["temperature"] for each in notes(record) if "temperature" in each]
    assert temperatures[0] == 0.0
    assert temperatures[-1] == 0.5


async def test_as_many_requests_run_at_a_time_as_are_asked_for(
    environments: Path, record: Path
) -> None:
    """The third one joins when one of two has ended; times are from the beginning of all."""
    async with process(environments, "vllm") as library:
        done = await library.generate_all([(prompt, decoding(4)) for prompt in PROMPTS], 2)
    assert [each.token_ids for each in done] == [
        (2, 3, 4, 5), (12, 13, 14, 15), (EOS - 1, EOS),
    ]  # fmt: skip
    running = [each["running"] for each in notes(record) if "running" in each]
    assert running == [["0"], ["0", "1"], ["2"]] or running == [["0"], ["0", "1"], ["1", "2"]]
    assert done[2].seconds > done[0].seconds
    assert len({each.started_s for each in done}) == 1


async def test_a_library_is_told_model_threads_and_drafts(environments: Path, record: Path) -> None:
    drafting = BY_NAME["llama-cpp"].bindings[0] | BY_NAME["llama-cpp"].drafting[1]
    async with process(environments, "llama-cpp", drafting):
        pass
    async with process(environments, "vllm", Setting({"RECORD": str(record)})):
        pass
    llama, vllm = notes(record)
    assert llama == {
        "model": "/model.gguf", "n_ctx": 154, "parallel": 2, "threads": 1, "types": ["simple"],
        "ngram": {"size_n": 3, "size_m": 5},
    }  # fmt: skip
    assert (vllm["model"], vllm["max_model_len"], vllm["max_num_seqs"]) == ("/model", 77, 2)
    assert (vllm["dtype"], vllm["enable_prefix_caching"]) == ("bfloat16", False)


async def test_a_sweep_takes_what_is_fastest_and_keeps_it(environments: Path, record: Path) -> None:
    """Of drafts of 3 tokens, which fail, 5 and 8, which are fast. Kept for the same model and
    number of threads."""
    peer = Library(
        name="vllm", decoder="vllm",
        speculative="n-gram", drafting=BY_NAME["vllm"].drafting,
    )  # fmt: skip
    told = inputs(environments, {prompt.text: [1] for prompt in sweep_prompts()})
    silent = lambda line: None  # noqa: E731
    found = await fastest_settings(peer, told, silent, again=False)
    assert found == {"plain": Setting(), "n-gram": peer.drafting[2]}
    tried = len(notes(record))
    assert await fastest_settings(peer, told, silent, again=False) == found
    assert len(notes(record)) == tried


async def test_a_mode_without_a_setting_that_works_is_left_out(
    environments: Path, record: Path
) -> None:
    failing = BY_NAME["vllm"].drafting[0]
    told = inputs(environments, {prompt.text: [1] for prompt in sweep_prompts()})
    lines: list[str] = []
    half = Library(
        name="vllm", decoder="vllm", speculative="n-gram",
        drafting=(failing, failing),
    )  # fmt: skip
    found = await fastest_settings(half, told, lines.append, again=True)
    assert found == {"plain": Setting()}
    assert any("n-gram does not work: vllm: RuntimeError: no such drafts" in line for line in lines)
    none = Library(name="vllm", decoder="vllm", bindings=(failing, failing))
    with pytest.raises(Unavailable, match="no such drafts"):
        await fastest_settings(none, told, lines.append, again=True)


def test_variables_name_cores_and_environment_and_what_is_preloaded(tmp_path: Path) -> None:
    """A library that is not there is not preloaded."""
    peer = Library(name="p", decoder="vllm", preloads=("libx.so", "liby.so"))
    (tmp_path / "p" / "lib").mkdir(parents=True)
    (tmp_path / "p" / "lib" / "libx.so").touch()
    setting = Setting({"BIND": "{cpus}", "CACHE": "{root}/cache"})
    found = peer.environment(setting, inputs(tmp_path))
    assert found["BIND"].isdecimal()
    assert found["CACHE"] == f"{tmp_path}/p/cache"
    assert found["LD_PRELOAD"] == f"{tmp_path}/p/lib/libx.so"


def test_every_peer_has_a_file_that_make_installs_it_from() -> None:
    root = Path(library_process.__file__).parent / "peer_environments"
    assert {path.stem for path in root.iterdir()} == {p.name for p in PEERS if not p.is_ours}
    assert {peer.decoder for peer in (*PEERS, ENGINE)} == set(DECODERS)


def test_the_process_imports_the_standard_library_alone() -> None:
    """In an interpreter without this repository and without any package."""
    found = subprocess.run(
        [sys.executable, "-I", "-S", library_process.__file__], input="", capture_output=True,
        text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    directory = save_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab_size=320, seed=1, tokenizer=byte_level_tokenizer()
    )
    return TargetConfig(directory=str(directory), dtype="float32", device="cpu", num_threads=1)


@pytest.mark.parametrize("raw", [False, True])
def test_engine_and_library_write_the_same_tokens_at_temperature_zero(
    tiny: TargetConfig, raw: bool
) -> None:
    """In float32 they run the same model: a difference would be a fault in one of the loops. Both
    end with the EOS. The engine keeps nothing of a prompt that it has refused."""
    torch.set_num_threads(1)
    chats = [BenchPrompt("The quick brown fox", "chat"), BenchPrompt("fox", "chat")]
    options = PromptOptions(raw=raw, max_tokens=16)
    setup = TargetInputs.load(tiny, chats, options)
    prompts = [setup.token_ids[prompt.text] for prompt in chats]
    request = {"prompts": prompts, "max_tokens": 12, "temperature": 0.0, "concurrency": 1}
    lookup = TRANSFORMERS.drafting[0].options
    sides = [
        DECODERS[name](setup.setup() | {"options": options})
        for name, options in (("engine", {}), ("transformers", {}), ("transformers", lookup))
    ]
    with pytest.raises(BadRequest):
        _decode(sides[0], request | {"prompts": [[1] * 100_000]})
    engine, plain, looked_up = (_decode(side, request) for side in sides)
    texts = [one["token_ids"] for one in engine]
    assert [one["token_ids"] for one in plain] == texts
    assert [one["token_ids"] for one in looked_up] == texts
    assert [len(text) for text in texts] == [12, 12]
    assert 0 < plain[0]["first_token_s"] < plain[0]["seconds"]
    eos = texts[0][5]
    for side in sides:
        side.setup["eos_token_ids"] = [eos]
        ended = _decode(side, request)[0]["token_ids"]
        assert ended == texts[0][: texts[0].index(eos) + 1]


async def test_the_engine_decodes_in_a_process_of_our_own(tiny: TargetConfig) -> None:
    """At temperature 1 as well; one that is gone is told."""
    [prompt] = prompts = [BenchPrompt("fox", "chat")]
    told = TargetInputs.load(tiny, prompts, PromptOptions(max_tokens=16))
    async with LibraryProcess(ENGINE, Setting(), told) as engine:
        done = await engine.generate(prompt, decoding(12, 1.0))
        assert len(done.token_ids) == done.num_rounds == 12
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="engine was killed"):
            await engine.generate(prompt, decoding())


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


def test_values_are_the_source_s_up_to_rounding_and_metadata_but_for_the_type(
    source: Path, written: Path
) -> None:
    """bfloat16 has 8 significant bits. Names, their order and shapes are the source's."""
    before, after = _values(source), _values(written)
    assert list(before) == list(after)
    for name in before:
        assert before[name].shape == after[name].shape
        assert (np.abs(before[name] - after[name]) <= np.abs(before[name]) * 2.0**-8).all()
    old, new = (
        {field.name: field.contents() for field in gguf.GGUFReader(str(path)).fields.values()}
        for path in (source, written)
    )
    assert new["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    changed = {name for name in old | new if old.get(name) != new.get(name)}
    assert changed <= {"general.file_type", "GGUF.tensor_count", "GGUF.kv_count"}
