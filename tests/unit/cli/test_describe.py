"""`outrider collect-env`, and the masking of secrets in settings."""

import platform

import pytest
import torch

from outrider.cli.describe import INSTRUCTIONS, LIBRARIES, shown_variables
from outrider.cli.main import main
from outrider.cli.output import masked_settings
from outrider.kernels import cpu, openvino
from tests.support.command_lines import reported
from tests.support.reference_kernels import ReferenceKernels


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("otlp=http://h:4317,prometheus=9100", "otlp=http://h:4317,prometheus=9100"),
        ("otlp=http://me:swordfish@h:4317", "otlp=http://***@h:4317"),
        ("http://:sword@fish@h?key=swordfish", "http://***@h?***"),
        ("redis://:12#sword/fish@[::1]:1/0", "redis://***@[::1]:1/0"),
        (f"is or-{'x' * 43}", "is ***"),
        ("Authorization: Bearer swordfish", "Authorization: ***"),
    ],
)
def test_secrets_in_settings_are_masked_and_the_rest_is_not(text: str, shown: str) -> None:
    settings = {"max_num_seqs": 3, "telemetry": text}
    assert masked_settings(settings) == {"max_num_seqs": 3, "telemetry": shown}


def test_what_a_bug_report_needs_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("OUTRIDER_API_KEY", "swordfish")

    def unavailable() -> None:
        raise cpu.KernelsUnavailable("openvino is not installed")

    monkeypatch.setattr(cpu, "load_pace", lambda: ReferenceKernels(torch.bfloat16))
    monkeypatch.setattr(openvino, "load_openvino", unavailable)
    found, _ = reported(capsys, "collect-env")
    assert [*found] == ["versions", "processor", "gpus", "settings", "machine", "packages"]
    versions, processor = found["versions"], found["processor"]
    assert versions["python"] == platform.python_version()
    for name in ("outrider", "torch", "transformers", "ray"):
        assert versions[name] == found["packages"][name]
    for name in LIBRARIES:
        assert versions[name] == found["packages"].get(name, "none")
    assert processor["available_cores"] >= 1
    assert processor["memory_gib"] > 0
    assert processor["name"]
    assert {*processor["instructions"]} <= {*INSTRUCTIONS}
    assert processor["cpu_kernels"] == {
        "amd-pace": "for bfloat16",
        "openvino": "none: openvino is not installed",
    }
    assert found["machine"]["redis_server"].startswith("/")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("versions:\n  outrider: ")
    assert f"  torch: {versions['torch']}\n" in text
    assert "  OUTRIDER_MAX_NUM_SEQS: '7'\n" in text
    assert "swordfish" not in text


def test_settings_of_the_environment_are_shown_without_secrets() -> None:
    environment = {
        "OUTRIDER_API_KEY": "swordfish",
        "OUTRIDER_APIKEY": "swordfish",
        "OUTRIDER_REDIS_PASSWORD": "swordfish",
        "OUTRIDER_TELEMETRY": "otlp=http://me:swordfish@h:4317",
        "OUTRIDER_STATE_DIR": "/x",
        "OUTRIDER_DTYPE": "float32",
        "HF_TOKEN": "swordfish",
        "HF_HOME": "/hub",
        "AWS_SECRET": "swordfish",
        "PATH": "/bin",
    }
    assert shown_variables(environment) == {
        "HF_HOME": "/hub",
        "HF_TOKEN": "***",
        "OUTRIDER_APIKEY": "***",
        "OUTRIDER_API_KEY": "***",
        "OUTRIDER_DTYPE": "float32",
        "OUTRIDER_REDIS_PASSWORD": "***",
        "OUTRIDER_STATE_DIR": "/x",
        "OUTRIDER_TELEMETRY": "otlp=http://***@h:4317",
    }
