"""Steps on OpenVINO, compared with the module's own forward pass in float32."""

import logging
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from outrider.engine.cpu import openvino_decoder
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.kernels.cpu import KernelsUnavailable
from outrider.kernels.openvino import OpenVino, load_openvino
from outrider.models.few_bits import round_weights
from outrider.models.linear_layers import PackedLinear
from outrider.models.module_replacement import speed_up
from tests.support.models import MAX_MODEL_LEN, tiny_config, tiny_module, twin
from tests.support.paged_engines import VOCAB, dense, ids, openvino_kernels, run
from tests.support.pages import check_pages

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3")
CLOSE = 5e-5  # allowed difference of logits, relative to their norm
PAGE = OpenVino.page_size


def engine_of(module: Any, **options: Any) -> PagedEngine:
    kernels = openvino_kernels()
    speed_up(module, packs_linears=False)
    info = ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, "float32", (), "", "")
    options = {"max_num_seqs": 16, "kv_cache_memory_bytes": 2**21} | options
    return PagedEngine(module, info, kernels=kernels, **options)


def llama(**changes: Any) -> Any:
    return tiny_module(tiny_config("llama", VOCAB, **changes), dtype=torch.float32)


def check_rows(rows: torch.Tensor, library: Any, tokens: tuple[int, ...]) -> None:
    """Compares the logits of a sequence's last tokens with the library's."""
    expected = dense(library, tokens)[len(tokens) - len(rows) :]
    assert rows.shape == expected.shape
    assert (rows - expected).norm() <= CLOSE * expected.norm()


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_any_sizes_equal_the_modules_own_forward(
    family: str, is_deterministic: bool
) -> None:
    """Sequences are longer than any sliding window and than a page, and end at a page's end."""
    module = tiny_module(tiny_config(family, VOCAB), dtype=torch.float32)
    library = twin(module)
    engine = engine_of(module, deterministic=is_deterministic)
    assert engine.kernels_name.startswith("openvino 2026.")
    assert engine.page_counts().page_size == PAGE
    held: dict[str, tuple[int, ...]] = dict.fromkeys("abcd", ())
    for sizes in ((PAGE, 3, PAGE + 1, 1), (1, 2 * PAGE + 3, 1, PAGE), (5, 1, 2, 3), (1,)):
        steps = [
            SequenceStep(name, ids(size, 7 * size), size)
            for name, size in zip(held, sizes, strict=False)
        ]
        for step, rows in zip(steps, engine.forward(steps), strict=True):
            held[step.sequence_id] += step.token_ids
            check_rows(rows, library, held[step.sequence_id])
    assert len(run(engine, "a", ids(2), 0)) == 0


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_rows_are_those_of_the_tokens_held(is_deterministic: bool) -> None:
    """Random sequences share prefixes, branch, run side by side, are cut anywhere and are released.
    With `deterministic`, the logits of a text are bit-equal whatever has happened."""
    module = llama()
    library = twin(module)
    engine = engine_of(module, deterministic=is_deterministic)
    assert engine.kernels_name
    assert not engine._threads.varies
    assert engine.rows_are_equal == bool(engine.info.numerics) == is_deterministic
    chance = random.Random(20)
    held: dict[str, tuple[int, ...]] = {}
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    for number in range(30):
        for name in list(held):
            action = chance.randrange(8)
            if action == 0 or len(held[name]) > 90:
                engine.release(name)
                del held[name]
            elif action < 3:
                held[name] = held[name][: chance.randrange(len(held[name]) + 1)]
                engine.keep(name, len(held[name]))
            elif action == 3 and len(held) < 6:
                engine.fork(name, f"{number}'{name}")
                held[f"{number}'{name}"] = held[name]
        prompt = ids(70)[: chance.randrange(71)] + ids(chance.randrange(1, 9), number)
        held[str(number)] = prompt[: engine.attach(str(number), prompt)]
        steps = []
        for name, before in held.items():
            new = prompt[len(before) :] if name == str(number) else ids(1 + number % 4)
            steps.append(SequenceStep(name, new, len(new)))
        for step, rows in zip(steps, engine.forward(steps), strict=True):
            before = held[step.sequence_id]
            held[step.sequence_id] += step.token_ids
            check_rows(rows, library, held[step.sequence_id])
            for place, row in enumerate(rows if is_deterministic else ()):
                text = before + step.token_ids[: place + 1]
                assert torch.equal(row, seen.setdefault(text, row))
    assert engine.page_counts().prefix_hits > 50
    check_pages(engine)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["f32", "f16", "i8", "i4"])
def test_a_weight_is_narrowed_only_if_nothing_is_lost(
    kind: str, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights in bfloat16 fit into float16 only with a factor. With 4 bits, the LM head has
    8. Embeddings are looked up in 16 or 32 bits. The module keeps no matrix."""
    graphs = []
    compiled = OpenVino.compile
    monkeypatch.setattr(
        OpenVino, "compile", lambda *given: graphs.append(given[1]) or compiled(*given)
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    module = with_weights(kind, llama(tie_word_embeddings=is_tied, **sizes))
    library = twin(module)
    engine = engine_of(module)
    check_rows(run(engine, "a", ids(40), 40), library, ids(40))
    nodes = graphs[0].get_ordered_ops()
    matrices = [constant_type(node, 1) for node in nodes if node.get_type_name() == "MatMul"]
    assert matrices == [kind] * (2 * 4) + ["i8" if kind == "i4" else kind]
    embedding = next(node for node in nodes if node.get_type_name() == "Gather")
    assert constant_type(embedding, 0) == ("f16" if kind == "f16" else "f32")
    assert len(graphs) == 1
    kept = {name for name, values in module.named_parameters() if not values.is_meta}
    assert {name for name in kept if "norm" not in name and "bias" not in name} == set()


def with_weights(kind: str, module: Any) -> Any:
    """Changes the weights so that they fit into this type, with a factor, and into no smaller."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16() if kind == "f16" else parameter * (1 + 2**-12))
    if kind == "f16":
        module.model.layers[1].mlp.down_proj.weight.data[0, 0] = 2**-20 * 1.0078125
    if kind.startswith("i"):
        round_weights(module, int(kind[1:]))
    return module


def constant_type(node: Any, index: int) -> str:
    """The type of the constant that an input of a node is computed from."""
    source = node.input_value(index).get_node()
    while source.get_type_name() != "Constant":
        source = source.input_value(0).get_node()
    return str(source.get_element_type().get_type_name())


@pytest.mark.parametrize(
    ("kind", "sizes"), [("f32", [202]), ("f16", [67, 67, 68]), ("i8", [67, 67, 68])]
)
def test_long_steps_run_in_passes_if_weights_are_narrow(
    kind: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes begin and end inside sequences, and inside the tokens whose logits are wanted."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    module = with_weights(kind, llama(**widths))
    library = twin(module)
    engine = engine_of(module)
    passes = []
    rows_of = openvino_decoder._rows

    def recorded(*given: Any) -> Any:
        passes.append(rows_of(*given))
        return passes[-1]

    monkeypatch.setattr(openvino_decoder, "_rows", recorded)
    texts = {"a": ids(90), "b": ids(1), "c": ids(61, 3), "d": ids(50, 5)}
    wanted = {"a": 80, "b": 1, "c": 30, "d": 0}
    steps = [SequenceStep(name, text, wanted[name]) for name, text in texts.items()]
    found = dict(zip(texts, engine.forward(steps), strict=True))
    assert [len(each.own) for each in passes] == sizes
    for name, text in texts.items():
        assert len(found[name]) == wanted[name]
        check_rows(found[name], library, text)
        check_rows(run(engine, name, ids(4, 9), 4), library, text + ids(4, 9))


@pytest.mark.parametrize("bits", [0, 8])
def test_wide_layers_are_deterministic_with_weights_in_float32(bits: int) -> None:
    """In 16 and in 8 bits, products of 96 rows and more would round differently."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
    module = llama(**sizes).bfloat16().float()
    if bits:
        round_weights(module, bits)
    library = twin(module)
    engine = engine_of(module, deterministic=True, kv_cache_memory_bytes=2**23)
    assert engine.kernels_name
    text = ids(120)
    whole = run(engine, "whole", text, len(text))
    check_rows(whole, library, text)
    parts = [run(engine, "parts", text[begin : begin + 7], 7) for begin in range(0, 119, 7)]
    assert torch.equal(torch.cat(parts), whole[:119])


def test_threads_that_run_steps_keep_the_priority_with_which_they_start() -> None:
    code = """
import os, sys
from pathlib import Path
from outrider.kernels.openvino import load_openvino
threads = lambda: {int(entry.name) for entry in Path("/proc/self/task").iterdir()}
kernels = load_openvino()
before = threads()
kernels.start_threads(2)
started = threads() - before
os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
kernels.start_threads(2)
assert started and threads() - before == started, (started, threads() - before)
assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in started} == {int(sys.argv[1])}
"""
    openvino_kernels()
    if sys.platform != "linux":
        pytest.skip("threads have no priority of their own")
    own = str(os.getpriority(os.PRIO_PROCESS, 0))
    subprocess.run([sys.executable, "-c", code, own], check=True, timeout=120)


@pytest.mark.parametrize("is_small", [False, True])
def test_small_models_run_on_one_thread(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_small:
        monkeypatch.setattr(openvino_decoder, "_SMALL_WEIGHTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    decoder: Any = engine_of(llama())._decoder
    found = decoder.graph.get_property("INFERENCE_NUM_THREADS")
    assert found == (1 if is_small else 2)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "not those of a Llama"),
        ("gemma2", {}, "its LM head"),
        ("llama", {"hidden_act": "tanh"}, "an unsupported activation"),
    ],
)
def test_others_run_on_torch_and_are_named(
    family: str, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module = tiny_module(tiny_config(family, VOCAB, **changes), dtype=torch.float32)
    library = twin(module)
    engine = engine_of(module)
    assert not engine.kernels_name
    assert "model tiny: its steps do not run on openvino" in caplog.text
    assert reason in caplog.text
    check_rows(run(engine, "a", ids(40), 40), library, ids(40))


@pytest.mark.parametrize("kind", ["f32", "f16", "i8", "i4"])
def test_a_model_that_fails_the_self_check_runs_on_torch(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The planted fault exchanges pages. The module has its weights again, although they were freed
    while the graph was built."""
    plain = openvino_decoder._rows

    def exchanged(*given: Any) -> Any:
        rows = plain(*given)
        rows.inputs["block_indices"] = rows.inputs["block_indices"][::-1]
        return rows

    monkeypatch.setattr(openvino_decoder, "_rows", exchanged)
    module = with_weights(kind, llama(hidden_size=64, intermediate_size=128, head_dim=16))
    library = twin(module)
    engine = engine_of(module)
    assert not engine.kernels_name
    assert "the fast kernels failed their self-check" in caplog.text
    assert isinstance(module.model.layers[0].mlp.down_proj, PackedLinear)
    check_rows(run(engine, "a", ids(40), 40), library, ids(40))


def test_a_missing_or_unknown_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_openvino.cache_clear()
    try:
        monkeypatch.setattr("outrider.kernels.openvino.VERSIONS", ("1999.1", "1999.2"))
        with pytest.raises(KernelsUnavailable, match=r"is installed, not 1999.1 or 1999.2"):
            load_openvino()
        monkeypatch.setattr("outrider.kernels.openvino.PACKAGE", "no-such-package")
        with pytest.raises(KernelsUnavailable, match="no-such-package is not installed"):
            load_openvino()
    finally:
        load_openvino.cache_clear()
