"""References: decoding without services, in a process of its own."""

import os
import signal
from pathlib import Path

import pytest
import torch
from models import byte_level_tokenizer, save_tiny_model, tiny_config, tiny_module, twin
from paged_engines import WatchedEngine

from benchmarks.measurement import Decoding, Side
from benchmarks.prompts import BenchPrompt
from benchmarks.reference_process import EngineDecoder, LibraryDecoder
from benchmarks.references import ReferenceModel, ReferenceProcess, reference_environment
from outrider.engine.interface import ModelInfo
from outrider.errors import ConfigError, Unavailable
from outrider.speculation.sampling_params import Rule

VOCAB_SIZE = 32
PROMPT = BenchPrompt("The quick brown fox", "chat")


def decoding(max_tokens: int = 12, temperature: float = 0.0, seed: int = 0) -> Decoding:
    rule = Rule.TOKEN if temperature else Rule.GREEDY
    return Decoding(
        max_tokens=max_tokens, temperature=temperature, rule=rule, seed=seed, num_draft_tokens=0
    )


def request(max_tokens: int, temperature: float = 0.0, seed: int = 0) -> dict[str, object]:
    rule = Rule.TOKEN if temperature else Rule.GREEDY
    return {
        "max_tokens": max_tokens, "temperature": temperature, "rule": rule.value, "seed": seed,
    }  # fmt: skip


def decoders(eos: tuple[int, ...] = ()) -> tuple[EngineDecoder, LibraryDecoder, WatchedEngine]:
    module = tiny_module(tiny_config("llama", VOCAB_SIZE))
    info = ModelInfo("tiny", VOCAB_SIZE, 128, "float32", eos, "w", "t")
    engine = WatchedEngine(module, info, max_num_seqs=1)
    return EngineDecoder(engine), LibraryDecoder(twin(module), eos), engine


def test_both_references_write_the_same_tokens_at_temperature_zero() -> None:
    """In float32 they run the same model: a difference would be a fault in one of the loops."""
    torch.set_num_threads(1)
    engine, library, _ = decoders()
    for prompt in ((1, 2, 3), (7,), tuple(range(20))):
        found = engine.decode(prompt, request(16))
        assert found == library.decode(prompt, request(16))
        assert len(found) == 16


def test_both_end_at_the_eos_and_include_it() -> None:
    torch.set_num_threads(1)
    free = decoders()[0].decode((1, 2, 3), request(16))
    eos = free[5]
    expected = free[: free.index(eos) + 1]
    engine, library, _ = decoders((eos,))
    assert engine.decode((1, 2, 3), request(16)) == expected
    assert library.decode((1, 2, 3), request(16)) == expected


def test_sampling_depends_on_the_seed_alone() -> None:
    torch.set_num_threads(1)
    engine, library, _ = decoders()
    for decoder in (engine, library):
        texts = [decoder.decode((1, 2, 3), request(16, 1.0, seed)) for seed in (1, 1, 2)]
        assert texts[0] == texts[1]
        assert texts[0] != texts[2]


def test_the_engine_keeps_nothing_of_a_prompt() -> None:
    torch.set_num_threads(1)
    decoder, _, engine = decoders()
    first = decoder.decode((1, 2, 3), request(8))
    assert engine.length("bench") == 0
    assert decoder.decode((1, 2, 3), request(8)) == first


def test_threads_bounded_by_others_are_not_bounded_in_a_reference() -> None:
    found = reference_environment({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2", "PATH": "/bin"})
    assert found == {"PATH": "/bin"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    directory = save_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab_size=320, seed=1, tokenizer=byte_level_tokenizer()
    )
    return ReferenceModel(directory=str(directory), dtype="float32", device="cpu", num_threads=1)


async def test_processes_decode_alike_refuse_by_name_and_end(model: ReferenceModel) -> None:
    """Both references in processes of their own: the same tokens, with and without the chat
    template; a prompt that is too long is refused and the next one answered; a process that is
    gone is reported."""
    async with ReferenceProcess(Side.ENGINE, model, raw=False) as engine:
        chat = await engine.generate(PROMPT, decoding())
        assert len(chat.token_ids) == chat.num_rounds == 12
        assert chat.seconds > 0
        with pytest.raises(ConfigError, match="the engine reference: "):
            await engine.generate(BenchPrompt("fox " * 400, "chat"), decoding())
        assert (await engine.generate(PROMPT, decoding())).token_ids == chat.token_ids
    async with ReferenceProcess(Side.TRANSFORMERS, model, raw=False) as library:
        assert (await library.generate(PROMPT, decoding())).token_ids == chat.token_ids
    async with ReferenceProcess(Side.TRANSFORMERS, model, raw=True) as raw:
        assert (await raw.generate(PROMPT, decoding())).token_ids != chat.token_ids
        process = raw._process
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="transformers reference"):
            await raw.generate(PROMPT, decoding())
    with pytest.raises(Unavailable, match="has not been started"):
        await raw.generate(PROMPT, decoding())


async def test_a_model_that_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    missing = ReferenceModel(
        directory=str(tmp_path / "none"), dtype="float32", device="cpu", num_threads=1
    )
    with pytest.raises(ConfigError, match=r"the engine reference: .*none"):
        async with ReferenceProcess(Side.ENGINE, missing, raw=False):
            pass
