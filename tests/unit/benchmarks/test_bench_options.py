"""What options of benchmarks take and refuse."""

from __future__ import annotations

import pytest

from deploy.cli.main import main, parse


@pytest.mark.parametrize(
    ("name", "option", "fine", "wrong"),
    [
        ("speedup", "num-prompts", ("1", "100000"), ("0", "100001", "1.5")),
        ("speedup", "temperature", ("0", "2.0"), ("-0.01", "2.01", "nan", "inf", "x")),
        ("speedup", "concurrency", ("1", "4096,1"), ("0", "4,4097", "")),
        ("speedup", "rule", ("token", "block", "coupled"), ("greedy",)),
        ("overhead", "parts", ("rounds", "rounds, capacity"), ("all", "rounds,all")),
    ],
)
def test_every_limit_holds_on_both_sides_and_names_its_option(
    name: str,
    option: str,
    fine: tuple[str, ...],
    wrong: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, and nothing on standard output."""
    for value in fine:
        parse(["bench", name, f"--{option}", value])
    for value in wrong:
        try:
            code: object = main(["bench", name, f"--{option}", value])
        except SystemExit as stopped:
            code = stopped.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert f"error: --{option}: " in err
        assert " is wrong; it must be " in err
