"""What a refused flag of vLLM says."""

from pathlib import Path

import pytest

from outrider.cli.bench import bench
from outrider.cli.main import outrider
from outrider.cli.vllm_flags import BENCH_SERVE, SAME, SERVE, hint
from outrider.limits import LOGPROBS_MAX
from tests.support.command_lines import refusal

SERVE_OPTIONS, BENCH_OPTIONS = (
    {flag for one in command.params for flag in one.opts}
    for command in (outrider._load("serve"), bench._load("serve"))
)


def test_the_flags_that_are_the_same_exist_and_those_with_a_hint_do_not() -> None:
    assert {*SAME} <= SERVE_OPTIONS
    assert not {*SERVE} & SERVE_OPTIONS
    assert not {*BENCH_SERVE} & BENCH_OPTIONS
    assert len(SAME) + len(SERVE) >= 40
    assert f"up to {LOGPROBS_MAX} " in SERVE["--max-logprobs"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "m", "--enable-prefix-caching"), "equal prefixes always share pages"),
        (("serve", "m", "--no-enable-prefix-caching"), "equal prefixes always share pages"),
        (("serve", "m", "--enable_prefix_caching"), "equal prefixes always share pages"),
        (("serve", "m", "--swap-space=4"), "no weights, keys or values are moved"),
        (("serve", "m", "-tp", "2"), "'-tp': give `--tensor-parallel-size` (see outrider serve "),
        (("serve", "m", "-p", "8000"), "No such option '-p'"),
        (("bench", "serve", "--dataset-name", "sharegpt"), "give `--prompts FILE`"),
        (("bench", "serve", "--enable-prefix-caching"), "No such option"),
        (("serve", "m", "--surprise"), "No such option '--surprise'"),
    ],
)
def test_a_refused_flag_says_what_to_do_instead(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert says in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("enable-prefix-caching", "there is no such setting: a tenant's equal prefixes always"),
        ("no_enable_prefix_caching", "there is no such setting: a tenant's equal prefixes always"),
        ("max_num_seq", "there is no such setting; did you mean max_num_seqs?"),
        ("surprise", "there is no such setting\n"),
    ],
)
def test_a_refused_key_of_a_file_says_what_to_do_instead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, says: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{key}: true\n")
    told = refusal(capsys, "serve", "m", "--config", str(file))
    assert f"{file}: {key.replace('-', '_')}: {says}" in told


def test_hints_name_flags_that_exist() -> None:
    for known, options in ((SERVE, SERVE_OPTIONS), (BENCH_SERVE, BENCH_OPTIONS | SERVE_OPTIONS)):
        for words in known.values():
            named = {word.strip("`,;()") for word in words.split()}
            assert {word for word in named if word.startswith("--")} <= options


def test_no_other_command_has_hints() -> None:
    assert hint("outrider generate", "--block-size") == ""
