"""`outrider collect-env`, and the masking of secrets in settings."""

import pytest

from outrider.cli.main import main
from outrider.cli.output import masked_settings
from tests.support.command_lines import reported


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("otlp=http://h:4317,prometheus=9100", "otlp=http://h:4317,prometheus=9100"),
        ("otlp=http://me:swordfish@h:4317", "otlp=http://***@h:4317"),
        ("http://:sword@fish@h?key=swordfish", "http://***@h?***"),
        ("redis://:12#sword/fish@[::1]:1/0", "redis://***@[::1]:1/0"),
        (f"is or-{'x' * 43}", "is ***"), ("Authorization: Bearer swordfish", "Authorization: ***"),
    ],
)  # fmt: skip
def test_secrets_in_settings_are_masked_and_the_rest_is_not(text: str, shown: str) -> None:
    settings = {"max_num_seqs": 3, "telemetry": text}
    assert masked_settings(settings) == {"max_num_seqs": 3, "telemetry": shown}


def test_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = reported(capsys, "collect-env")
    assert {"torch", "ray", "transformers", "grpcio"} <= set(found["packages"])
    assert found["machine"]["available_cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["machine"]["redis_server"].startswith("/")
    assert main(["collect-env"]) == 0
    assert f"  torch: {found['packages']['torch']}\n" in capsys.readouterr().out
