"""What is refused of models before any of them is loaded, and what is warned of."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from models import (
    MAX_MODEL_LEN,
    byte_level_tokenizer,
    save_tiny_eagle,
    save_tiny_exit,
    save_tiny_heads,
    save_tiny_model,
)

from deploy.fleet.preflight import (
    check_before_start,
    check_ports,
    check_same_tokens,
    resolve_models,
    warnings,
)
from outrider.config import DraftConfig, TargetConfig, load_config
from outrider.errors import SettingError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("key", ["max_model_len", "draft_max_model_len"])
def test_a_length_above_the_models_own_is_refused_without_its_weights(tiny: Path, key: str) -> None:
    """The model's own is allowed, and so is not to say; one more is refused, with the bound."""
    models = {"model": str(tiny), "draft_model": str(tiny)}
    for length in (0, 1, MAX_MODEL_LEN):
        resolve_models(load_config({**models, key: length}, {}))
    with pytest.raises(SettingError, match=f"{MAX_MODEL_LEN + 1} .* {MAX_MODEL_LEN} tokens") as bad:
        resolve_models(load_config({**models, key: MAX_MODEL_LEN + 1}, {}))
    assert bad.value.key == key


def test_the_setting_of_a_bad_model_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"config\.json") as bad:
        resolve_models(load_config({"model": str(tiny), "draft_model": str(tmp_path)}, {}))
    assert bad.value.key == "draft_model"
    with pytest.raises(SettingError, match="emulated") as bad:
        resolve_models(load_config({"engine": "emulated:size=3"}, {}))
    assert bad.value.key == "engine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("n-gram", "did you mean ngram?"),
        ("hybrid:suffix,Demo-Drafter", "did you mean demo-drafter?"),
        ("quantised", "did you mean quantized?"),
        ("emulated", "an emulated target alone"),
    ],
)
def test_a_slip_in_a_drafters_name_is_not_asked_of_the_hub(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    """Unless a directory has that name. The hub keeps its names without a slash."""
    monkeypatch.chdir(tmp_path)
    models = {"model": str(tiny), "draft_model": name}
    with pytest.raises(SettingError, match=re.escape(says)) as bad:
        check_before_start(load_config(models, {}))
    assert bad.value.key == "draft_model"
    place = tmp_path / name.rpartition(",")[2]
    shutil.copytree(tiny, place)
    check_before_start(load_config(models, {}))
    for known in ("gpt2", "ctrl", "owner/ngrams"):
        check_before_start(load_config(models | {"draft_model": known}, {}))


@pytest.mark.parametrize("draft_model", ["quantized:8", "hybrid:ngram,quantized:4"])
def test_a_target_that_drafts_for_itself_lends_its_files(tiny: Path, draft_model: str) -> None:
    """Its length bounds the draft's too."""
    models = {"model": str(tiny), "draft_model": draft_model}
    config = resolve_models(load_config(models, {}))
    check_before_start(config)
    assert config.draft.directory == config.target.directory == str(tiny)
    assert config.draft.model == draft_model
    with pytest.raises(SettingError) as bad:
        resolve_models(load_config({**models, "draft_max_model_len": MAX_MODEL_LEN + 1}, {}))
    assert bad.value.key == "draft_max_model_len"


@pytest.mark.parametrize(
    ("engine", "drafter"),
    [("transformers", "ngram"), ("transformers", "small"), ("emulated:", "suffix")],
)
def test_coordinators_are_told_of_a_look_up_that_drafts_alone(
    tiny: Path, engine: str, drafter: str
) -> None:
    """A model has a replica of its own."""
    named = str(tiny) if drafter == "small" else drafter
    config = resolve_models(
        load_config({"model": str(tiny), "engine": engine, "draft_model": named}, {})
    )
    assert config.coordinator.lookup == (None if drafter == "small" else DraftConfig(model=named))


def test_coordinators_are_told_nothing_of_draft_replicas(tiny: Path) -> None:
    """Another setting of those replaces no coordinator; one of the look-up does."""
    models = {"model": str(tiny), "draft_model": f"hybrid:suffix,{tiny}"}

    def lookup(**settings: object) -> object:
        return resolve_models(load_config({**models, **settings}, {})).coordinator.lookup

    assert lookup(draft_num_threads=2, draft_port=7001, draft_dtype="float32") == lookup()
    assert lookup(suffix_depth=8) != lookup()


@pytest.mark.parametrize(
    ("kind", "other_kind", "save"),
    [("medusa", "early-exit", save_tiny_heads), ("early-exit", "medusa", save_tiny_exit)],
)
def test_a_target_has_the_heads_that_were_made_for_it(
    tiny: Path, tmp_path: Path, kind: str, other_kind: str, save: Callable[..., Path]
) -> None:
    """It gets their place, and the draft loads nothing; other targets and drafters are refused."""
    heads = save(tmp_path / "heads", tiny, (1, 2, 5))
    models = {"model": str(tiny), "draft_model": f"{kind}:{heads}", "draft_support_entries": 8}
    config = resolve_models(load_config(models, {}))
    check_before_start(config)
    assert (config.target.heads, config.target.heads_directory) == (str(heads), str(heads))
    assert config.target.heads_kind == kind
    assert (config.target.heads_support_entries, config.draft.directory) == (8, "")
    assert config.coordinator.lookup is None
    hybrid = resolve_models(
        load_config({**models, "draft_model": f"hybrid:ngram,{kind}:{heads}"}, {})
    )
    assert hybrid.target.heads == str(heads)
    assert hybrid.coordinator.lookup == DraftConfig(model=f"hybrid:ngram,{kind}:{heads}")
    other = save_tiny_model(tmp_path / "other", seed=9)
    for model, named, message in (
        (other, f"{kind}:{heads}", "was made for the target tiny"),
        (tiny, f"{kind}:{tiny}", r"no drafter\.json"),
        (tiny, f"{other_kind}:{heads}", f"kind `{kind}`, and is named as a `{other_kind}`"),
        (tiny, str(heads), f"draft heads go by `{kind}:"),
        (tiny, f"{kind}:{tmp_path / 'none'}", "no such file"),
    ):
        with pytest.raises(SettingError, match=message) as bad:
            resolve_models(load_config({"model": str(model), "draft_model": named}, {}))
        assert bad.value.key == "draft_model"


def test_a_draft_that_reads_features_has_a_target_that_shows_them(
    tiny: Path, tmp_path: Path
) -> None:
    eagle = save_tiny_eagle(tmp_path / "eagle", tiny, (1, 2, 5))
    models = {"model": str(tiny), "draft_model": f"hybrid:ngram,eagle:{eagle}"}
    config = resolve_models(load_config(models, {}))
    check_before_start(config)
    assert config.target.shows_features
    assert not resolve_models(load_config({"model": str(tiny)}, {})).target.shows_features
    assert (config.draft.directory, config.draft.target_directory) == (str(eagle), str(tiny))
    heads = save_tiny_heads(tmp_path / "heads", tiny, (1, 2, 5))
    for named, message in (
        (f"eagle:{heads}", "is of the kind `medusa`, and is named as a `eagle`"),
        (str(eagle), "draft heads go by `eagle:"),
        (f"eagle:{tiny}", r"no drafter\.json"),
    ):
        with pytest.raises(SettingError, match=message) as bad:
            resolve_models(load_config({**models, "draft_model": named}, {}))
        assert bad.value.key == "draft_model"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"look_ahead": 4}, "look_ahead"),
        ({"engine": "emulated:vocab_size=8"}, "draft_model"),
        ({"draft_model": "eagle:heads", "draft_tensor_parallel_size": 2},
         "draft_tensor_parallel_size"),
    ],
)  # fmt: skip
def test_what_reading_the_target_does_not_go_with_is_refused(
    settings: dict[str, object], key: str
) -> None:
    with pytest.raises(SettingError, match=r"(medusa|eagle):heads") as bad:
        load_config({"draft_model": "medusa:heads", **settings}, {})
    assert bad.value.key == key


def test_a_target_without_a_tokenizer_is_warned_of(tiny: Path, tmp_path: Path) -> None:
    """And one that has one is not."""
    config = resolve_models(load_config({"model": str(tiny)}, {}))
    [warning] = warnings(config)
    assert "\n" not in warning
    assert "--token-ids" in warning
    speaking = save_tiny_model(tmp_path / "speaking")
    byte_level_tokenizer(32).save_pretrained(speaking)
    config = resolve_models(load_config({"model": str(speaking)}, {}))
    assert not [*warnings(config)]


@pytest.mark.parametrize("key", ["tensor_parallel_size", "draft_tensor_parallel_size"])
def test_a_number_of_ranks_that_a_model_cannot_have_is_refused(tiny: Path, key: str) -> None:
    """With the setting's name and the numbers that do."""
    models = {"model": str(tiny), "draft_model": str(tiny)}
    resolve_models(load_config({**models, key: 2}, {}))
    with pytest.raises(SettingError, match="1, 2 do") as bad:
        resolve_models(load_config({**models, key: 3}, {}))
    assert bad.value.key == key


def test_a_target_follows_another_whose_tokens_mean_the_same(tiny: Path, tmp_path: Path) -> None:
    def target(model: Path, **settings: object) -> TargetConfig:
        return resolve_models(load_config({"model": str(model), **settings}, {})).target

    tokenizer = byte_level_tokenizer()
    spoken = target(save_tiny_model(tmp_path / "a", vocab_size=320, tokenizer=tokenizer))
    check_same_tokens(spoken, spoken)
    alike = save_tiny_model(tmp_path / "b", vocab_size=320, tokenizer=tokenizer, seed=9)
    check_same_tokens(spoken, target(alike))
    wider = save_tiny_model(tmp_path / "c", vocab_size=328, tokenizer=tokenizer)
    other = save_tiny_model(tmp_path / "d", vocab_size=320, tokenizer=byte_level_tokenizer(300))
    emulated = target(tiny, engine="emulated:vocab_size=320")
    for one, key in ((wider, "model"), (other, "model"), (tiny, "model"), (None, "engine")):
        with pytest.raises(SettingError, match=r"another vocabulary or tokenizer") as bad:
            check_same_tokens(spoken, emulated if one is None else target(one))
        assert bad.value.key == key
    gone = replace(spoken, directory=str(tmp_path / "gone"))
    check_same_tokens(gone, target(wider))


def test_every_replica_is_told_where_the_targets_tokenizer_is(tiny: Path, tmp_path: Path) -> None:
    """A draft that only copies, too: it is cut where a constraint ends it."""
    spoken = save_tiny_model(tmp_path / "spoken", vocab_size=320, tokenizer=byte_level_tokenizer())
    for model, told in ((spoken, str(spoken)), (tiny, "")):
        for draft_model in ("ngram", str(model)):
            config = resolve_models(
                load_config({"model": str(model), "draft_model": draft_model}, {})
            )
            places = (config.target, config.draft, config.coordinator)
            assert [place.tokenizer_directory for place in places] == [told] * 3


EMULATED = {
    "engine": "emulated:vocab_size=100",
    "draft_model": "emulated",
    "grpc_port": 0,
    "port": 0,
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port in use behind two free ones, below those that the system gives to any program."""
    for port in range(20_002, 32_000, 3):
        try:
            for free in (port - 2, port - 1):
                socket.create_server(("127.0.0.1", free)).close()
            server = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with server:
            yield port
        return
    pytest.fail("no three ports in a row are free")


def test_every_port_that_a_role_counts_up_to_must_be_free(taken_port: int) -> None:
    settings = {"target_port": taken_port - 2, "num_targets": 2}
    check_ports(load_config(EMULATED | settings, {}))
    with pytest.raises(SettingError, match=f"cannot listen on 127.0.0.1:{taken_port}") as bad:
        check_ports(load_config(EMULATED | settings | {"num_targets": 3}, {}))
    assert bad.value.key == "target_port"


def test_a_host_of_another_machine_is_blamed_in_the_ports_place() -> None:
    settings = {"host": "192.0.2.1", "insecure": True, "target_port": 47001}
    with pytest.raises(SettingError, match=r"cannot listen on 192\.0\.2\.1:47002: ") as bad:
        check_ports(load_config(EMULATED | settings | {"grpc_port": 47002}, {}))
    assert bad.value.key == "host"
    assert "another port" not in bad.value.reason


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        (
            {"target_port": 47001, "num_targets": 2, "draft_port": 47002},
            "draft_port",
            "target_port",
        ),
        ({"target_port": 47001, "draft_port": 47001}, "draft_port", "a port of target_port, too"),
        ({"grpc_port": 65_535, "num_coordinators": 2}, "grpc_port", "no ports for 2"),
        ({"grpc_port": 47001, "port": 47002, "num_coordinators": 2}, "port", "a port of grpc_port"),
    ],
)
def test_roles_count_up_to_ports_of_their_own(
    settings: dict[str, object], key: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=reason) as bad:
        check_before_start(load_config(EMULATED | settings, {}))
    assert bad.value.key == key
