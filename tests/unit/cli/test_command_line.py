"""How the command line is parsed, and how its errors are reported."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from outrider.cli.main import main, outrider, parse
from outrider.cli.options import error_line, own_config
from outrider.config.deployment import CoordinatorConfig, deployment_settings
from outrider.errors import BadRequest, SettingError, Unauthenticated
from tests.support.command_lines import refusal


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("servr",), "Did you mean 'serve'? (see outrider --help)"),
        (("generate", "--max-token", "hi", "x"), "did you mean --max-tokens? (see"),
        (("chat", "--helpp"), "No such option '--helpp'; did you mean --help? (see outrider chat"),
        (("--versoin",), "No such option '--versoin'; did you mean --version? (see outrider --"),
        (("chat", "--zzz"), "No such option '--zzz' (see outrider chat --help)"),
        (("serve", "--dtype", "BFloat16"), "one of auto, bfloat16, float16, float32, float64; did"),
        (("serve", "demo", "--model", "other"), "--model"),
        (("serve", "--telemetry", "nowhere"), "error: --telemetry: "),
        (("generate", ""), "error: PROMPT: is empty; it must be"),
        (("generate", "x", "--token-ids", "1"), "error: --token-ids: cannot go with PROMPT"),
        (("generate", "--token-ids", "1,-2"), "error: --token-ids: '1,-2' is wrong"),
        (("generate", "--token-ids", f"1,{2**40}"), "error: --token-ids (number 2): "),
        (("generate", "x", "--temperature", "nan"), "error: --temperature: "),
        (("generate", "x", "--rule", "block"), "error: --rule: block needs --temperature above 0"),
        (("generate", "x", "--system", "y"), "error: --system: needs --chat"),
        (("generate", "x", "--server", "127.0.0.1:1", "--dtype", "auto"), "error: --dtype: "),
        (
            ("generate", "x", "--server", "127.0.0.1:1", "--stop", "a", "--stop", "\ud800"),
            "error: --stop (number 2): ",
        ),
        (("generate", "\ud800", "--server", "127.0.0.1:1"), "error: PROMPT: "),
    ],
)
def test_a_bad_argument_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], names: str
) -> None:
    err = refusal(capsys, *words)
    assert err.startswith("outrider: error: ")
    assert names in err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), "Usage: outrider "),
        (("bench",), "Usage: outrider bench "),
        (("serve", "--help"), "Usage: outrider serve [OPTIONS] [TARGET]\n"),
        (("scale", "--help"), "Usage: outrider scale [OPTIONS] ROLE=N...\n"),
    ],
)
def test_help_is_shown_where_it_is_asked_for_or_a_command_is_missing(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], shown: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert stopped.value.code == (0 if "--help" in words else 2)
    assert (out or err).startswith(shown)


def test_an_interrupt_while_a_command_is_loaded_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider, "_load", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as stopped:
        main(["status"])
    assert stopped.value.code == 130
    assert "".join(capsys.readouterr()).strip() == ""


def test_what_is_wrong_is_called_what_it_was_set_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its flag; without a flag by its variable; otherwise by file and key. A value that is wrong
    by itself is reported first."""

    def told(*words: str) -> str:
        assert main(words) == 2
        return capsys.readouterr().err.partition("outrider: error: ")[2]

    file = tmp_path / "settings.yaml"
    file.write_text("telemetry: a\n", "utf-8")
    words = ("serve", "--config", str(file))
    assert told(*words).startswith(f"{file}: telemetry: 'a' ")
    assert told("serve", "--config", "none").startswith("--config: cannot read none: No such file")
    monkeypatch.setenv("OUTRIDER_TELEMETRY", "b")
    assert told(*words).startswith("OUTRIDER_TELEMETRY: 'b' ")
    assert told(*words, "--telemetry", "c").startswith("--telemetry: 'c' ")
    monkeypatch.delenv("OUTRIDER_TELEMETRY")
    monkeypatch.setenv("OUTRIDER_PORT", "0")  # A deployment may run beside this test.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = told("serve", "--grpc-port", "0", "--target-port", port)
        assert found.startswith("--target-port: cannot listen on")
        monkeypatch.setenv("OUTRIDER_GRPC_PORT", port)
        assert told("serve").startswith("OUTRIDER_GRPC_PORT: cannot listen on")
        found = told("serve", "--draft-model", "./nowhere")
        assert found.startswith("--draft-model: model ./nowhere: ")
    assert told("serve", "./nowhere").startswith("TARGET: model ./nowhere: no such file")


def test_no_error_names_a_flag_that_was_not_given() -> None:
    taken, missing = SettingError("port", "is taken"), BadRequest("server", "'' is wrong")
    long = BadRequest("sampling.top_p", "is too much")

    def said(*words: str) -> list[str]:
        arguments = parse(["generate", "x", *words])
        return [error_line(error, arguments) for error in (taken, missing, long)]

    unknown = Unauthenticated("authorization: there is no such API key")
    way = f"{unknown.message} (set OUTRIDER_API_KEY, or give --api-key)"
    assert error_line(unknown, parse(["generate", "x"])) == way
    assert said() == ["port: is taken", "server: '' is wrong", "sampling.top_p: is too much"]
    named = ["--port: is taken", "--server: '' is wrong", "--top-p: is too much"]
    assert said("--port", "1", "--server=h:1", "--top-p", "4") == named


def test_a_deployment_of_ones_own_is_as_serve_would_start_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But by default it takes any free port and serves no HTTP."""

    def config_of(*words: str) -> CoordinatorConfig:
        return own_config(parse(["chat", *words])).coordinator

    file = tmp_path / "settings.yaml"
    file.write_text("grpc_port: 1234\n", "utf-8")
    assert config_of().grpc_port == 0
    assert config_of("--config", str(file)).grpc_port == 1234
    assert config_of("--grpc-port", "50051").grpc_port == 50051  # Also the default's own value.
    for words, asked in (((), False), (("--http",), True), (("--port", "8000"), True)):
        assert config_of(*words).http is asked
    monkeypatch.setenv("OUTRIDER_GRPC_PORT", "2345")
    assert config_of("--config", str(file)).grpc_port == 2345


@pytest.mark.parametrize("command", ["serve", "upgrade", "generate", "chat"])
def test_help_shows_the_common_options_and_all_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shown = []
    for flag in ("--help", "--help=all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        shown.append(capsys.readouterr().out)
    common, found = ({*re.findall(r"^  (?:-\w, )?(--[\w-]+)", one, re.M)} for one in shown)
    flags = {one.flag for one in deployment_settings().values()}
    assert common | flags <= found
    assert {"--draft-model", "--config", "--help"} <= common
    assert len(common & flags) <= 14
    assert f"--help=all shows {len(found - common)} more options." in shown[0]


def test_a_second_signal_ends_a_command_whose_deployment_does_not_stop() -> None:
    program = (
        "import asyncio\n"
        "from outrider.cli.main import main\n"
        "from outrider.fleet import launcher\n"
        "async def stuck(deployment):\n"
        "    try:\n"
        "        print(flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "    finally:\n"
        "        print(flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "launcher.Deployment.__aenter__ = stuck\n"
        "main(['generate', '--engine', 'emulated:', '--token-ids', '1'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        for _ in range(2):
            assert child.stdout.readline() == b"\n"
            child.terminate()
        assert child.wait(10) == -signal.SIGTERM
