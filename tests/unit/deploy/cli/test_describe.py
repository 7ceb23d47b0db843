"""`outrider collect-env`, and the masking of secrets in it."""

import json

import pytest
from command_lines import reported

from deploy.cli.main import main
from deploy.cli.masking import MASK, masked_environment, masked_settings, masked_url


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:swordfish@h:6379/0",
        "rediss://:swordfish@[::1]:6379/0",
        "redis://h:6379/0?password=swordfish",
        "redis://:swordfish/x@h:6379/0",
        "redis://:12#swordfish@h",
        "redis://:1 swordfish@h",
        "redis://user:hun?swordfish",
    ],
)
def test_no_part_of_a_password_is_shown(url: str) -> None:
    """Of a well-formed URL, and of one whose password should have been quoted."""
    assert "swordfish" not in masked_url(url)
    for name in ("OUTRIDER_REDIS_URL", "OUTRIDER_TELEMETRY", "OUTRIDER_REDIS_ULR", "RAY_ADDRESS"):
        shown = masked_environment({name: url})[name]
        if name != "OUTRIDER_REDIS_URL" and " " in url:
            continue  # Two words, of which the second is no URL.
        assert "swordfish" not in shown
        assert "***" in shown


def test_the_place_stays_readable() -> None:
    """That is what a report is read for."""
    assert masked_url("redis://u:p@h.example:6379/0") == "redis://***@h.example:6379/0"
    assert masked_url("rediss://:p@[::1]:1/0?a=b") == "rediss://***@[::1]:1/0?***"
    same = "otlp=http://h:4317,prometheus=9100"
    assert masked_environment({"OUTRIDER_TELEMETRY": same}) == {"OUTRIDER_TELEMETRY": same}


def test_secrets_are_masked_and_settings_are_not() -> None:
    """Settings that are marked as secret, and other variables by their names."""
    known = {
        "OUTRIDER_NUM_DRAFT_TOKENS": "3", "OUTRIDER_REDIS_KEY_PREFIX": "a:",
        "OUTRIDER_STATE_DIR": "/state", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    secret = {
        "OUTRIDER_REDIS_PASSWORD": "swordfish", "HF_TOKEN": "swordfish",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer swordfish", "RAY_AUTH_MODE": "x",
    }  # fmt: skip
    others = {"AWS_SESSION": "swordfish", "HOME": "/swordfish"}
    shown = masked_environment(known | secret | others)
    assert shown == known | dict.fromkeys(secret, MASK)
    settings = {
        "redis_url": "swordfish", "redis_password": "swordfish", "max_num_seqs": 3,
        "telemetry": "otlp=http://me:swordfish@h:4317",
    }  # fmt: skip
    masked = {"max_num_seqs": 3, "telemetry": "otlp=http://***@h:4317"}
    assert masked_settings(settings) == masked


def test_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a report needs: versions, processor, memory, kernels, the Redis server."""
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://:swordfish@127.0.0.1:1")
    found, _ = reported(capsys, "collect-env")
    assert "swordfish" not in json.dumps(found)
    assert {"torch", "ray", "transformers", "grpcio"} <= set(found["packages"])
    assert found["machine"]["available_cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["machine"]["redis_server"].startswith("/")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert f"  torch: {found['packages']['torch']}\n" in text
    assert "swordfish" not in text
