"""What the command line refuses by itself, and what it makes of what it is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.main import main
from deploy.cli.settings import given_flags, public_settings
from outrider.config import DeploymentConfig, load_config


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("serve", "--no-such-flag"), "--no-such-flag"),
        (("serve", "--max-num-seqs", "none"), "--max-num-seqs"),
        (("serve", "--dtype", "int3"), "--dtype"),
        (("serve", "demo", "--model", "other"), "--model"),
        (("serve", "--host", "192.0.2.1"), "--insecure"),
        (("serve", "--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("generate",), "PROMPT"),
        (("generate", "x", "--rule", "magic"), "--rule"),
        (("generate", "x", "--top-k", "some"), "--top-k"),
        (("generate", "x", "--temperature", "nan"), "temperature"),
        (("generate", "x", "--system", "y"), "--chat"),
        (("generate", "x", "--server", "nowhere"), "--server"),
        (("generate", "x", "--server", "127.0.0.1:0"), "--server"),
        (("generate", "x", "--server", "127.0.0.1:1", "--dtype", "auto"), "dtype"),
        (("generate", "x", "--server", "127.0.0.1:1", "--seed", "-1"), "seed"),
        (("generate", "x", "--server", "127.0.0.1:1", "--max-tokens", str(2**40)), "max_tokens"),
        (("bench",), "WHAT"),
        (("bench", "speedup", "--num-prompts", "0"), "num_prompts"),
        (("bench", "speedup", "--num-draft-tokens", "17"), "num_draft_tokens"),
    ],
)
def test_a_bad_argument_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], names: str
) -> None:
    """Exit code 2, one line that names the argument, nothing on standard output."""
    try:
        code: object = main(words)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("outrider: error: ")
    assert err.count("\n") == 1
    assert names in err


def test_a_bad_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is checked like flags."""
    monkeypatch.setenv("OUTRIDER_MAX_NUM_SEQ", "3")
    assert main(["serve"]) == 2
    assert "OUTRIDER_MAX_NUM_SEQ" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and one line for a server that is not there."""
    assert main(["generate", "x", "--server", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("outrider: error: ")
    assert err.count("\n") == 1


def test_nothing_to_stop_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """`stop` says so."""
    assert main(["stop"]) == 0
    assert capsys.readouterr().err == "nothing runs\n"


def test_what_is_recorded_keeps_secrets_out() -> None:
    """A record holds every setting but those that may hold a password."""
    config = load_config({"redis_url": "redis://:swordfish@h", "redis_password": "swordfish"}, {})
    recorded = public_settings(config)
    assert "swordfish" not in str(recorded)
    assert recorded["max_num_seqs"] == DeploymentConfig().target.max_num_seqs
    assert recorded["draft_model"] == "ngram"


def test_flags_that_were_not_given_set_nothing(tmp_path: Path) -> None:
    """So that the environment and the file can."""
    import argparse

    from deploy.cli.settings import add_setting_flags

    parser = argparse.ArgumentParser()
    add_setting_flags(parser, "settings")
    assert given_flags(parser.parse_args(["--config", str(tmp_path)])) == {}
    given = given_flags(parser.parse_args(["--insecure", "--max-num-seqs", "3"]))
    assert given == {"insecure": True, "max_num_seqs": "3"}


def test_help_is_quick_to_load() -> None:
    """Reading the command line imports no model library, no Ray and no Redis client."""
    program = (
        "import sys\n"
        "from deploy.cli.main import main\n"
        "try:\n"
        "    main(['serve', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'ray', 'redis', 'grpc', 'numpy'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(heavy)) or 0)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    assert "--draft-model" in completed.stdout
