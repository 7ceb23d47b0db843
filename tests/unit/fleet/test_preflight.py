"""Checks of models and ports before a start, and warnings."""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.config.deployment import DeploymentConfig, DraftConfig, TargetConfig, load_config
from outrider.errors import SettingError
from outrider.fleet.preflight import (
    check_before_start,
    check_ports,
    check_same_tokens,
    resolve_models,
    warnings,
)
from tests.support.models import (
    MAX_MODEL_LEN,
    byte_level_tokenizer,
    save_tiny_eagle3,
    save_tiny_model,
    save_tiny_raw_eagle3,
)
from tests.support.mtp_models import MtpReference, mtp_target

EMULATED = {"engine": "emulated:vocab_size=100", "draft_model": "emulated", "port": 0}
HEAD = {"draft_model": "eagle3:a"}
APART = HEAD | {"eagle3_on": "draft"}


def resolved(model: Path, **settings: object) -> DeploymentConfig:
    return resolve_models(load_config({"model": str(model), **settings}, {}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model without a tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("key", "good", "said"),
    [
        ("max_model_len", MAX_MODEL_LEN, f"at most {MAX_MODEL_LEN} tokens"),
        ("draft_max_model_len", MAX_MODEL_LEN, f"at most {MAX_MODEL_LEN} tokens"),
        ("tensor_parallel_size", 2, "1, 2 do"),
        ("draft_tensor_parallel_size", 2, "1, 2 do"),
    ],
)
def test_a_length_and_ranks_that_a_model_cannot_have_are_refused(
    tiny: Path, key: str, good: int, said: str
) -> None:
    draft = str(tiny)
    assert resolved(tiny, draft_model=draft, **{key: good}).draft.directory == str(tiny)
    with pytest.raises(SettingError, match=f"^{key}: .*{said}"):
        resolved(tiny, draft_model=draft, **{key: good + 1})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_model": "n-gram"}, "draft_model: .*did you mean ngram?"),
        ({"draft_model": "hybrid:suffix,Demo-Drafter"}, "draft_model: .*did you mean demo-drafter"),
        ({"draft_model": "emulated"}, "draft_model: .*only for an emulated target"),
        ({"engine": "emulated:size=3"}, "engine: "),
        ({"engine": "vllm"}, "^engine: .*not installed"),
        ({"draft_engine": "vllm"}, "^draft_engine: .*not installed"),
        ({"chat_template": "Hermes"}, "^chat_template: .*allowed: a file, or hermes"),
        ({"target_port": 4701, "num_targets": 2, "draft_port": 4702}, "^draft_port: .*target_port"),
        ({"grpc_port": 65_535, "num_coordinators": 2}, "^grpc_port: .*too high for the ports of 2"),
        ({"grpc_port": 47001, "port": 47002, "num_coordinators": 2}, "^port: .* port of grpc_port"),
        ({"grpc_port": 47001, "health_port": 47001}, "^health_port: .* port of grpc_port"),
        # A file that holds nothing of this kind.
        ({"api_key_file": __file__}, r"^api_key_file: .*preflight\.py: Invalid JSON"),
        ({"ssl_certfile": __file__, "ssl_keyfile": __file__}, "^ssl_certfile: .*no certificate"),
        ({"internal_tls_dir": "/nowhere"}, "^internal_tls_dir: .*cannot read"),
        # A head that reads the target.
        (APART | {"tensor_parallel_size": 2}, "^tensor_parallel_size: .*eagle3:a"),
        (APART | {"draft_tensor_parallel_size": 2}, "^draft_tensor_parallel_size: .*eagle3:a"),
        (HEAD | {"engine": "emulated:vocab_size=8"}, "^draft_model: .*eagle3:a"),
    ],
)
def test_a_slip_is_told_before_a_start(
    tiny: Path, settings: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that may exist at the hub is no slip. Nor is vLLM beside an emulated target, where it
    has no model to run."""
    monkeypatch.setattr("outrider.replica.vllm_release.vllm_version", lambda: None)
    with pytest.raises(SettingError, match=says):
        check_before_start(load_config({"model": str(tiny)} | settings, {}))
    check_before_start(load_config({"model": str(tiny), "draft_model": "owner/ngrams"}, {}))
    check_before_start(load_config({"engine": "emulated:", "draft_engine": "vllm"}, {}))


def test_coordinators_are_told_of_a_look_up_and_nothing_of_draft_replicas(tiny: Path) -> None:
    """So only a change of the look-up replaces coordinators."""

    def lookup(**settings: object) -> object:
        return resolved(tiny, **settings).coordinator.lookup

    here = {"lookup_on": "coordinator"}
    assert lookup(draft_model="ngram", **here) == DraftConfig(model="ngram")
    own = lookup(draft_model="suffix", engine="emulated:", **here)
    assert own == DraftConfig(model="suffix")
    assert lookup(draft_model=str(tiny), ngram_max=4) == DraftConfig(model="model", ngram_max=4)
    hybrid = f"hybrid:suffix,{tiny}"
    before = lookup(draft_model=hybrid)
    link = tiny.with_name("another-name")
    link.symlink_to(tiny)
    assert lookup(draft_model=f"hybrid:suffix,{link}") == before
    assert lookup(draft_model=f"hybrid:ngram,{link}") != before
    assert lookup(draft_model=hybrid, draft_num_threads=2, draft_port=7001) == before
    assert lookup(draft_model=hybrid, suffix_depth=8) != before


@pytest.mark.real_model
def test_a_shipped_head_is_known_by_its_files() -> None:
    found = resolve_models(load_config({"model": "demo", "draft_model": "demo-head"}, {}))
    assert found.draft.model == "eagle3:demo-head"


def test_a_head_may_run_on_draft_replicas(tiny: Path, tmp_path: Path) -> None:
    head = save_tiny_eagle3(tmp_path / "head", tiny, (1, 2, 5))
    for given in (str(head), f"hybrid:ngram,{head}"):
        config = resolved(tiny, draft_model=given, eagle3_on="draft")
        target, draft = config.target, config.draft
        assert (target.head_kind, target.head_directory) == ("eagle3", str(head))
        assert target.shows_features
        assert (draft.directory, draft.target_directory) == (str(head), str(tiny))
        assert bool(config.coordinator.lookup.drafter.lookup) == given.startswith("hybrid")
        assert not resolved(tiny, draft_model=given).target.shows_features
    for other in ("suffix", str(tiny)):
        with pytest.raises(SettingError, match=f"^eagle3_on: .*{other} is no EAGLE-3 head; give t"):
            resolved(tiny, draft_model=other, eagle3_on="draft")


@pytest.mark.parametrize("model", ["ngram", "suffix"])
def test_look_ups_draft_on_the_target_by_default(model: str, tiny: Path) -> None:
    """The tenant's history is there, too."""
    given = {"draft_model": model, "ngram_max": 5, "suffix_tokens_per_tenant": 7}
    config = resolved(tiny, **given)
    lookup = config.target.lookup
    assert (lookup.model, lookup.ngram_max, lookup.suffix_tokens_per_tenant) == (model, 5, 7)
    assert config.coordinator.lookup_on == "target"
    assert config.coordinator.lookup == replace(lookup, suffix_tokens_per_tenant=0)
    config = resolved(tiny, **given, lookup_on="coordinator")
    assert config.coordinator.lookup_on == "coordinator"
    assert (config.target.lookup.drafter.lookup, config.coordinator.lookup) == (None, lookup)


def test_other_drafters_do_not_look_up_on_the_target(tiny: Path) -> None:
    for other in (str(tiny), f"hybrid:ngram,{tiny}"):
        config = resolved(tiny, draft_model=other)
        assert config.coordinator.lookup_on == "coordinator"
        assert config.target.lookup.drafter.lookup is None
        with pytest.raises(SettingError, match=f"^lookup_on: .*is {other}; give coordinator, or"):
            resolved(tiny, draft_model=other, lookup_on="target")


@pytest.mark.parametrize("save", [save_tiny_eagle3, save_tiny_raw_eagle3])
def test_a_published_head_is_known_by_its_files(
    tiny: Path, tmp_path: Path, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory, or in a hub repository that has been fetched. Other models are no heads."""
    head = save(tmp_path / "head", tiny, (1, 2, 5))
    hub = {"owner/head": str(head)}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: hub[name])
    for name in (str(head), "owner/head"):
        for kind in ("", "eagle3:", "hybrid:ngram,", "hybrid:ngram,eagle3:"):
            config = resolved(tiny, draft_model=kind + name)
            target, named = config.target, f"{kind.removesuffix('eagle3:')}eagle3:{name}"
            assert config.draft.model in (kind + name, named)
            assert config.draft.drafter.kind == target.head_kind == "eagle3"
            assert (target.head, target.head_directory) == (name, str(head))
            assert config.draft.directory == ""
            assert bool(config.coordinator.lookup.drafter.lookup) == kind.startswith("hybrid")
    for settings, message in (
        ({"look_ahead": 2}, "^look_ahead: .*once the outcome is known"),
        ({"draft_model": f"eagle3:{tiny}"}, "^draft_model: .*not those of an EAGLE-3 head"),
        ({"draft_model": "eagle3:"}, "^draft_model: .*the head is missing"),
    ):
        with pytest.raises(SettingError, match=message):
            resolved(tiny, **{"draft_model": str(head), **settings})
    for kind, message in (
        ("dflash", "kind dflash, which is not served"),
        ("mtp", "only from the target's own files"),
    ):
        stated = {"speculators_model_type": kind, "draft_vocab_size": 3}
        (head / "config.json").write_text(json.dumps(stated))
        with pytest.raises(SettingError, match=f"^draft_model: .*{message}"):
            resolved(tiny, draft_model=str(head))


def test_mtp_layers_are_the_targets_own(tiny: Path, tmp_path: Path) -> None:
    path = MtpReference(mtp_target("glm4_moe")).save(tmp_path)
    on_ranks: dict[str, object] = {"engine": "vllm", "tensor_parallel_size": 2}
    for given, settings in (("mtp", {}), ("hybrid:suffix,mtp", {}), ("mtp", on_ranks)):
        target = resolved(path, draft_model=given, **settings).target
        assert (target.head, target.head_kind) == ("mtp", "mtp")
        assert target.head_directory == target.directory == str(path)
    for settings, message in (
        (
            {"model": str(tiny)},
            "^draft_model: .*model_type is 'llama'; only MTP layers of deepseek",
        ),
        ({"tensor_parallel_size": 2}, "^tensor_parallel_size: .*rank; give 1, or --engine vllm"),
    ):
        with pytest.raises(SettingError, match=message):
            resolve_models(load_config({"model": str(path), "draft_model": "mtp", **settings}, {}))


def test_every_replica_is_told_where_the_targets_tokenizer_is(tiny: Path, tmp_path: Path) -> None:
    """Also with a look-up, as a constraint may cut its proposals."""
    spoken = save_tiny_model(tmp_path / "spoken", vocab_size=320, tokenizer=byte_level_tokenizer())
    for model, told in ((spoken, str(spoken)), (tiny, "")):
        for draft_model in ("ngram", str(model)):
            config = resolved(model, draft_model=draft_model)
            places = (config.target, config.draft, config.coordinator)
            assert [place.tokenizer_directory for place in places] == [told] * 3
            assert sum("--token-ids" in line for line in warnings(config)) == (not told)


def test_a_target_follows_another_whose_tokens_mean_the_same(tiny: Path, tmp_path: Path) -> None:
    def target(model: Path, **settings: object) -> TargetConfig:
        return resolved(model, **settings).target

    tokenizer = byte_level_tokenizer()
    spoken = target(save_tiny_model(tmp_path / "a", vocab_size=320, tokenizer=tokenizer))
    alike = save_tiny_model(tmp_path / "b", vocab_size=320, tokenizer=tokenizer, seed=9)
    check_same_tokens(spoken, target(alike))
    wider = save_tiny_model(tmp_path / "c", vocab_size=328, tokenizer=tokenizer)
    other = save_tiny_model(tmp_path / "d", vocab_size=320, tokenizer=byte_level_tokenizer(300))
    for model in (wider, other, tiny):
        with pytest.raises(SettingError, match=r"model: .*another vocabulary or tokenizer"):
            check_same_tokens(spoken, target(model))
    with pytest.raises(SettingError, match=r"engine: .*another vocabulary or tokenizer"):
        check_same_tokens(spoken, target(tiny, engine="emulated:vocab_size=320"))
    check_same_tokens(replace(spoken, directory=str(tmp_path / "gone")), target(wider))


def behind_a_free_port() -> socket.socket:
    """A socket that listens on a port on which the port before it is free."""
    while True:
        taken = socket.create_server(("127.0.0.1", 0))
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", taken.getsockname()[1] - 1)).close()
            return taken
        taken.close()


def test_every_port_that_a_role_counts_up_to_must_be_free() -> None:
    with behind_a_free_port() as taken:
        port = taken.getsockname()[1]
        settings = EMULATED | {"grpc_port": 0, "target_port": port - 1, "num_targets": 2}
        said = re.escape(f"target_port: cannot listen on 127.0.0.1:{port}: ")
        with pytest.raises(SettingError, match=f"{said}.*another port with --target-port"):
            check_ports(load_config(settings, {}))
    settings = {"host": "192.0.2.1", "insecure": True, "grpc_port": 47002}
    with pytest.raises(SettingError, match=r"^host: cannot listen on 192\.0\.2\.1:47002: "):
        check_ports(load_config(EMULATED | settings, {}))


def test_a_target_alone_is_found_without_the_model_library(tmp_path: Path) -> None:
    """The import takes seconds and about 190 MiB."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    code = (
        "import sys; from outrider.fleet.preflight import resolve_models; "
        "from outrider.config.deployment import load_config; "
        f"found = resolve_models(load_config({{'model': {str(tmp_path)!r}}}, {{}})); "
        "print(found.target.directory, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(tmp_path), "False"]
