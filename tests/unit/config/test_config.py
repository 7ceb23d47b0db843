"""Settings: four layers, one precedence, and errors that name the key."""

import copy
from pathlib import Path

import pytest

from outrider.config.deployment import (
    CoordinatorConfig,
    DeploymentConfig,
    DraftConfig,
    TargetConfig,
    deployment_settings,
    load_config,
)
from outrider.errors import ConfigError, SettingError

EVERYWHERE = "0.0.0.0"  # noqa: S104 (a setting, not bound)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_configurations_own(tmp_path: Path) -> None:
    environment = {"OUTRIDER_CACHE": "/a", "OUTRIDER_STATE_DIR": "/b"}
    assert load_config({}, environment, _file(tmp_path, "# nothing\n")) == DeploymentConfig()


def test_a_later_layer_wins(tmp_path: Path) -> None:
    file = _file(tmp_path, "max-num-seqs: 3\nmax_model_len: 30\ndtype: float32\n")
    environment = {"OUTRIDER_MAX_MODEL_LEN": "40", "OUTRIDER_DTYPE": "float16", "PATH": "/bin"}
    config = load_config({"dtype": "bfloat16"}, environment, file)
    assert config.target.max_num_seqs == config.draft.max_num_seqs == 3
    assert (config.target.max_model_len, config.target.dtype) == (40, "bfloat16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seq: 3", "settings.yaml: max_num_seq: there is no such setting; did you mean"),
        ("dtype: int8", "settings.yaml: dtype: 'int8' is wrong; it must be one of auto"),
        ("draft_engine: x", "draft_engine: 'x' is wrong; it must be one of (empty), auto"),
        ("insecure: 1", "settings.yaml: insecure: 1 is wrong; it must be true or false"),
        ("a: [", "is not YAML"),
        ("x: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, {}, _file(tmp_path, text))
    assert says in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OUTRIDER_MAX_NUM_SEQ": "3"}, "OUTRIDER_MAX_NUM_SEQ: there is no such setting"),
        ({"OUTRIDER_MAX_NUM_SEQS": "5.5"}, "OUTRIDER_MAX_NUM_SEQS: '5.5' is wrong"),
        ({"OUTRIDER_MAX_NUM_SEQS": "0"}, "'0' is wrong; it must be a whole number from 1 to 4096"),
        ({"OUTRIDER_HTTP": "x"}, "OUTRIDER_HTTP: 'x' is wrong; it must be true or false"),
    ],
)
def test_a_bad_variable_is_refused_by_name(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"max_num_seqs": "4", "insecure": True}, environment)
    assert says in caught.value.message


def test_every_setting_is_documented() -> None:
    for setting in deployment_settings().values():
        assert setting.doc.endswith((".", ";", ")"))
        if setting.key.endswith("_ms"):
            assert " ms" in setting.doc
        if setting.key.endswith("_s"):
            assert " s." in setting.doc


@pytest.mark.parametrize("kind", [TargetConfig, DraftConfig, CoordinatorConfig])
def test_only_loopback_without_insecure(kind: type[TargetConfig]) -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        kind(host=host)
    for host in (EVERYWHERE, "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ConfigError, match=r"^host: .*--insecure"):
            kind(host=host)
        kind(host=host, insecure=True)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"device": "gpu"}, "--device"),
        ({"device": "cuda:x"}, "--device"),
        ({"engine": "vlm"}, "--engine"),
        ({"redis_key_prefix": "a{b"}, "--redis-key-prefix"),
        ({"deployment_name": "a b"}, "--deployment-name"),
        ({"autoscale_targets": "2"}, "--autoscale-targets"),
        ({"ngram_min": 5, "ngram_max": 4}, "ngram_min"),
        ({"draft_model": "eagle3:a/b", "look_ahead": 1}, "look_ahead"),
        ({"engine": "vllm", "draft_model": "eagle3:a/b", "eagle3_on": "draft"}, "eagle3_on"),
        ({"quantization": "fp8"}, "--quantization"),
        ({"draft_model": "eagle3:a/b", "draft_quantization": "int8"}, "draft_quantization"),
        ({"quantization": "int8", "engine": "emulated:verify_ms=1"}, "quantization"),
        ({"draft_quantization": "int4", "engine": "emulated:verify_ms=1"}, "draft_quantization"),
    ],
)
def test_invalid_values_and_combinations_are_refused(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: "):
        load_config(settings, {})


@pytest.mark.parametrize("prefix", ["", "draft_"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize(
    ("field", "value", "instead", "is_shared"),
    [
        ("dtype", "bfloat16", "auto", False),
        ("dtype", "float16", "auto", False),
        ("cpu_kernels", "amd-pace", "auto", True),
        ("cpu_kernels", "torch", "auto", True),
        ("tensor_parallel_size", 2, "1", False),
    ],
)
def test_rounded_weights_exclude_what_openvino_does_not_run(
    prefix: str, bits: str, field: str, value: object, instead: str, is_shared: bool
) -> None:
    """The error names both settings of the role, and the other role may have any value."""
    quantization, other = f"{prefix}quantization", field if is_shared else prefix + field
    settings = {"draft_model": "a/b", quantization: bits, other: value}
    said = f"^{quantization}: {bits} .* which {other} {value} rules out; give {other} {instead}$"
    with pytest.raises(SettingError, match=said) as bad:
        load_config(settings, {})
    assert bad.value.key == quantization
    load_config(settings | {other: "openvino" if is_shared else instead}, {})
    if not is_shared:
        free = field if prefix else f"draft_{field}"
        load_config({"draft_model": "a/b", quantization: bits, free: value}, {})


def test_an_error_about_a_setting_keeps_its_key_between_processes() -> None:
    """An actor raises it, and the process that started the actor adds where it was set."""
    error = copy.copy(SettingError("device", "is wrong"))
    assert (error.key, error.reason, str(error)) == ("device", "is wrong", "device: is wrong")
