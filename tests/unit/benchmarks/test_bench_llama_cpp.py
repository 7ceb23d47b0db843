"""llama.cpp's process and its questions, with a stand-in for the binding in an environment of its
own: what the process says to it, and what becomes of its answers and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import llama_cpp_process
from benchmarks.llama_cpp_side import LlamaCppModel, LlamaCppProcess, llama_cpp_version
from benchmarks.measurement import Decoding, Side
from benchmarks.prompts import BenchPrompt
from outrider.errors import ConfigError, SettingError
from outrider.speculation.sampling import Rule

BINDING = '''
__version__ = "9.8.7"
print("what a library prints when it is imported", flush=True)

class Llama:
    """Counts on from the last token of a prompt, and writes down what it is told."""

    def __init__(self, model_path, **options):
        if not model_path.endswith(".gguf"):
            raise ValueError(f"Failed to load model from file: {model_path}")
        self.record = open(model_path, "a")
        options["draft_model"] = getattr(options.get("draft_model"), "num_pred_tokens", None)
        self.note(options)

    def note(self, value):
        import json
        self.record.write(json.dumps(value) + "\\n")
        self.record.flush()

    def set_seed(self, seed):
        self.note({"seed": seed})

    def generate(self, tokens, **options):
        print("what a library prints while it decodes", flush=True)
        self.note({"tokens": tokens} | options)
        if not tokens:
            raise RuntimeError("llama_decode returned -1")
        token = tokens[-1]
        while True:
            token += 1
            yield token
'''
SPECULATIVE = """
class LlamaPromptLookupDecoding:
    def __init__(self, max_ngram_size=2, num_pred_tokens=10):
        self.num_pred_tokens = num_pred_tokens
"""
EOS = 40


def environment(path: Path, binding: str = BINDING) -> Path:
    """The interpreter of a new environment with that as its `llama_cpp`."""
    venv.create(path, with_pip=False, symlinks=True)
    python = path / "bin" / "python"
    [packages] = path.glob("lib/python*/site-packages")
    (packages / "llama_cpp").mkdir()
    (packages / "llama_cpp" / "__init__.py").write_text(binding)
    (packages / "llama_cpp" / "llama_speculative.py").write_text(SPECULATIVE)
    return python


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("llama"))


def model(python: Path, gguf: Path) -> LlamaCppModel:
    return LlamaCppModel(
        python=python, gguf=gguf, num_threads=3, context_tokens=77, eos_token_ids=(EOS,)
    )


def decoding(max_tokens: int = 4, temperature: float = 0.0, seed: int = 0) -> Decoding:
    rule = Rule.TOKEN if temperature > 1e-5 else Rule.GREEDY
    return Decoding(
        max_tokens=max_tokens, temperature=temperature, rule=rule, seed=seed, num_draft_tokens=0
    )


def length(prompt: BenchPrompt) -> list[int]:
    """A stand-in for a tokenizer: as many tokens as characters."""
    return list(range(1, len(prompt.text) + 1))


PROMPT = BenchPrompt("x" * 7, "chat")


@pytest.mark.parametrize(("side", "lookup"), [(Side.LLAMA_CPP, 0), (Side.LLAMA_CPP_LOOKUP, 2)])
async def test_the_binding_is_told_everything_and_its_tokens_come_back(
    python: Path, tmp_path: Path, side: Side, lookup: int
) -> None:
    """Threads, context and drafts when it loads; tokens, temperature and seed of every prompt. It
    stops at the EOS, which is among the tokens, and at the most tokens wanted."""
    gguf = tmp_path / "m.gguf"
    async with LlamaCppProcess(side, model(python, gguf), length) as process:
        first = await process.generate(PROMPT, decoding(4, 1e-6, seed=2**40 + 5))
        ended = await process.generate(BenchPrompt("x" * (EOS - 3), "chat"), decoding(9, 0.5))
    assert first.token_ids == (8, 9, 10, 11)
    assert ended.token_ids == (EOS - 2, EOS - 1, EOS)
    assert first.seconds > 0
    loaded, seed, asked, _, sampled = map(json.loads, gguf.read_text().splitlines())
    expected: dict[str, Any] = {
        "n_ctx": 77, "n_threads": 3, "n_threads_batch": 3, "verbose": False, "draft_model": None,
    }  # fmt: skip
    if lookup:
        expected |= {"draft_model": lookup, "logits_all": True}
    assert loaded == expected
    assert seed == {"seed": 5}
    nothing_else = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert asked == {"tokens": [1, 2, 3, 4, 5, 6, 7], "temp": 0.0} | nothing_else
    assert sampled["temp"] == 0.5


async def test_what_it_cannot_decode_is_refused_and_the_next_one_answered(
    python: Path, tmp_path: Path
) -> None:
    gguf = tmp_path / "m.gguf"
    async with LlamaCppProcess(Side.LLAMA_CPP, model(python, gguf), length) as process:
        with pytest.raises(ConfigError, match=r"llama\.cpp plain: RuntimeError: llama_decode"):
            await process.generate(BenchPrompt("", "chat"), decoding())
        assert (await process.generate(PROMPT, decoding(1))).token_ids == (8,)


async def test_a_file_that_it_cannot_load_is_refused(python: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.cpp plain: ValueError: Failed .*m\.bin"):
        async with LlamaCppProcess(Side.LLAMA_CPP, model(python, tmp_path / "m.bin"), length):
            pass


def test_the_version_is_the_last_thing_that_it_prints(python: Path) -> None:
    assert llama_cpp_version(python) == "9.8.7"


def test_an_environment_without_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Also one that has it, but broken."""
    broken = environment(tmp_path / "broken", "raise OSError('libllama.so: not found')")
    with pytest.raises(SettingError, match=r"libllama\.so: not found.*pip install llama-cpp"):
        llama_cpp_version(broken)
    with pytest.raises(SettingError, match=r"llama_cpp_python: .*No module named 'llama_cpp'"):
        llama_cpp_version(Path(sys.executable))
    with pytest.raises(SettingError, match=r"no Python that can import llama_cpp"):
        llama_cpp_version(tmp_path)


def test_it_imports_the_standard_library_alone() -> None:
    """In an interpreter without this repository and without any package."""
    path = llama_cpp_process.__file__
    found = subprocess.run(
        [sys.executable, "-I", "-S", path], input="", capture_output=True, text=True
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
