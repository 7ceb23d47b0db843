"""References: decoding without services, in a process of its own, with drafters as assistants."""

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    byte_level_tokenizer,
    save_tiny_drafter,
    save_tiny_model,
    tiny_config,
    tiny_module,
    twin,
)
from paged_engines import WatchedEngine

from benchmarks.measurement import Decoding, Side
from benchmarks.prompts import BenchPrompt
from benchmarks.references import (
    Decode,
    ReferenceModel,
    ReferenceProcess,
    _load_assistant,
    engine_decoder,
    library_decoder,
    load_side,
    reference,
    widened,
)
from outrider.engine.interface import ModelInfo
from outrider.errors import ConfigError, Unavailable
from outrider.models.loading import load_model
from outrider.models.student import load_drafter
from outrider.speculation.sampling_params import Rule


def decoders(eos: tuple[int, ...] = ()) -> tuple[Decode, Decode, WatchedEngine]:
    module = tiny_module(tiny_config("llama", 32))
    info = ModelInfo("tiny", 32, 128, "float32", eos, "w", "t")
    engine = WatchedEngine(module, info, max_num_seqs=1)
    return engine_decoder(engine), library_decoder(twin(module), eos), engine


def pair_of(target: Path, drafter: Path) -> ReferenceModel:
    return ReferenceModel(
        directory=str(target), dtype="auto", device="cpu", num_threads=1, drafter=str(drafter),
        drafter_name="drafter", drafter_dtype="auto",
    )  # fmt: skip


def assistant_of(target: Path, drafter: Path) -> Any:
    return _load_assistant(pair_of(target, drafter), load_model(target)[1])


VOCAB_SIZE = 32

PROMPT = BenchPrompt("The quick brown fox", "chat")


def decoding(max_tokens: int = 12, temperature: float = 0.0, seed: int = 0) -> Decoding:
    rule = Rule.TOKEN if temperature else Rule.GREEDY
    return Decoding(
        max_tokens=max_tokens, temperature=temperature, rule=rule, seed=seed, num_draft_tokens=0
    )


def test_both_references_write_the_same_tokens_at_temperature_zero() -> None:
    """In float32 they run the same model: a difference would be a fault in one of the loops. The
    engine keeps nothing."""
    torch.set_num_threads(1)
    engine, library, watched = decoders()
    for prompt in ((1, 2, 3), (7,), tuple(range(20))):
        found = engine(prompt, decoding(16))
        assert found == library(prompt, decoding(16))
        assert len(found) == 16
        assert watched.length("bench") == 0


def test_both_end_at_the_eos_and_include_it() -> None:
    torch.set_num_threads(1)
    free = decoders()[0]((1, 2, 3), decoding(16))
    eos = free[5]
    expected = free[: free.index(eos) + 1]
    engine, library, _ = decoders((eos,))
    assert engine((1, 2, 3), decoding(16)) == expected
    assert library((1, 2, 3), decoding(16)) == expected


def test_sampling_depends_on_the_seed_alone() -> None:
    torch.set_num_threads(1)
    engine, library, _ = decoders()
    for decoder in (engine, library):
        texts = [decoder((1, 2, 3), decoding(16, 1.0, seed)) for seed in (1, 1, 2)]
        assert texts[0] == texts[1]
        assert texts[0] != texts[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    directory = save_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab_size=320, seed=1, tokenizer=byte_level_tokenizer()
    )
    return ReferenceModel(directory=str(directory), dtype="float32", device="cpu", num_threads=1)


async def test_processes_decode_alike_refuse_by_name_and_end(model: ReferenceModel) -> None:
    """With and without the chat template; a prompt that is too long is refused and the next one
    answered; a process that is gone is reported."""
    async with ReferenceProcess(Side.ENGINE, model, raw=False) as engine:
        chat = await engine.generate(PROMPT, decoding())
        assert len(chat.token_ids) == chat.num_rounds == 12
        assert chat.seconds > 0
        with pytest.raises(ConfigError, match="the engine reference: "):
            await engine.generate(BenchPrompt("fox " * 400, "chat"), decoding())
        assert (await engine.generate(PROMPT, decoding())).token_ids == chat.token_ids
        process = engine._process
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="the engine reference was killed"):
            await engine.generate(PROMPT, decoding())
    question = {"prompt": PROMPT.text, "decoding": asdict(decoding())}
    for raw in (False, True):
        setup = {"side": Side.TRANSFORMERS, "raw": raw, "model": asdict(model)}
        async with reference(setup) as role:
            assert (tuple(role.answer(question)["token_ids"]) == chat.token_ids) is not raw


TOKEN_IDS = (1, 4, 5, 9, 20, 21, 31)

OTHERS = [token_id for token_id in range(VOCAB_SIZE) if token_id not in TOKEN_IDS]

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (7,), tuple(range(20)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_drafter(tmp_path_factory.mktemp("drafter"), target, TOKEN_IDS)


def test_its_distribution_is_the_drafter_s_and_zero_elsewhere(target: Path, drafter: Path) -> None:
    """Exactly the drafter's logits, and a probability of exactly zero for what has no row."""
    narrow, _ = load_drafter(drafter, target, name="drafter", target="target")
    ids = torch.tensor([PROMPTS[0]])
    expected, found = narrow(ids).logits, assistant_of(target, drafter)(ids).logits
    assert found.shape == (1, len(PROMPTS[0]), VOCAB_SIZE)
    assert torch.equal(found[..., list(TOKEN_IDS)], expected)
    shares = found.softmax(-1)
    assert (shares[..., OTHERS] == 0).all()
    torch.testing.assert_close(shares[..., list(TOKEN_IDS)], expected.softmax(-1))


def test_assisted_generation_writes_what_plain_generation_does(target: Path, drafter: Path) -> None:
    """At temperature 0 and in float32; the drafter, random as it is, proposes wrong tokens too."""
    torch.set_num_threads(1)
    model = pair_of(target, drafter)
    sides = (Side.TRANSFORMERS, Side.ASSISTED, Side.PROMPT_LOOKUP)
    plain, assisted, lookup = (load_side(side, model)[0] for side in sides)
    for prompt in PROMPTS:
        expected = plain(prompt, decoding())
        assert assisted(prompt, decoding()) == expected
        assert lookup(prompt, decoding()) == expected


def test_a_wider_model_than_the_target_is_refused_by_name() -> None:
    module = tiny_module(tiny_config("llama", VOCAB_SIZE + 1))
    with pytest.raises(ConfigError, match="wide has logits for 33 tokens, the target for 32"):
        widened(module, range(VOCAB_SIZE + 1), VOCAB_SIZE, "wide")
