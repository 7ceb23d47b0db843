"""`outrider distill`: what it makes, what it says, and which flags are at fault."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch
from models import byte_level_tokenizer, save_tiny_model

from deploy.cli.main import main
from draft_service.training.distilling import Distilled
from draft_service.training.measuring import Measured, TemperatureRates
from draft_service.training.options import KINDS, DistillOptions
from outrider.errors import ConfigError, SettingError
from outrider.models.drafter_checkpoint import TrainedKind, check_target

FLAGS: Final = {
    TrainedKind.STUDENT: ["--layers", "1"],
    TrainedKind.MEDUSA: ["--kind", "medusa", "--heads", "2"],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time may learn from a target in a cache; other workers have such a target, too."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("target"), eos_token_id=3)


@pytest.mark.parametrize("kind", list(FLAGS))
def test_the_command_makes_one_that_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: TrainedKind
) -> None:
    """With a chat template, prompts, texts and conversations of its own; one JSON object. What
    comes out may learn on, by its directory."""
    model = save_tiny_model(
        tmp_path / "target", vocab_size=336, eos_token_id=0, tokenizer=byte_level_tokenizer()
    )
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    lines = [
        {"prompt": [1, 2, 10 + i], "answer": [i + 3] * 9, "temperature": 0.7} for i in range(40)
    ]
    (corpus / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n{"prompt": "How so?"}\n')
    measure = tmp_path / "measure.jsonl"
    measure.write_text('{"prompt": "Since when?"}\n{"prompt": "Where?"}\n')
    code = main(
        [
            "distill", str(model), "--out", str(tmp_path / "out"), *FLAGS[kind],
            "--draft-vocab", "64", "--tokens", "300", "--steps", "4", "--json",
            "--corpus", str(corpus), "--prompts", str(prompts), "--measure", str(measure),
        ]
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    assert found["steps"] == 4
    assert 0 < found["sampled"] < 1
    assert 0 < found["of_prompts"]["num_positions"] <= 4 * 128
    assert "training" not in captured.err
    check_target(tmp_path / "out", kind, name="out", target_directory=model, target_name="target")
    [written] = (tmp_path / "cache" / "distillation").glob("*/written-*/conversations.jsonl")
    conversations = [json.loads(line) for line in written.read_text().splitlines()]
    assert [c["temperature"] for c in sorted(conversations, key=lambda c: c["index"])][:3] == [
        0.0, 0.7, 1.0,
    ]  # fmt: skip
    again = [
        "distill", str(model), "--out", str(tmp_path / "next"), "--kind", kind, "--tokens", "300",
        "--steps", "2", "--start-from", str(tmp_path / "out"), "--corpus", str(corpus),
    ]  # fmt: skip
    assert main(again) == 0
    assert str(tmp_path / "next") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "9"], "--layers: 9 is more than the target's 2"),
        (["--heads", "2"], "--heads: a drafter of the kind `student` has none"),
        (["--kind", "medusa", "--heads", "9"], "--heads: 9 is wrong"),
        (["--kind", "early-exit", "--layers", "2"], "--layers: it cannot be left behind 2 of its"),
        (
            ["--kind", "medusa", "--start-from", "demo-drafter", "--heads", "2"],
            "--heads: the drafter that is",
        ),
        (["--draft-vocab", "1"], "--draft-vocab: 1 is wrong"),
        (["--start-from", "nowhere"], "--start-from: "),
        (["--start-from", "demo-drafter", "--layers", "2"], "--layers: the drafter that is"),
        (["--start-from", "hybrid:suffix,demo-drafter"], "a directory, a hub id or demo-drafter"),
        (["--start-from", "ngram"], "--start-from: 'ngram' is no drafter that can learn; it must"),
        (["--corpus", "nowhere"], "--corpus: nowhere is not a folder"),
        (["--prompts", "nowhere"], "--prompts: cannot read nowhere"),
        (["--measure", "nowhere"], "--measure: cannot read nowhere"),
        (["--device", "tpu"], "--device: 'tpu' is wrong"),
    ],
)
def test_errors_name_the_flag(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str],
    message: str,
) -> None:  # fmt: skip
    code = main(["distill", str(target), "--out", str(tmp_path / "out"), *flags])
    assert code == 2
    assert message in capsys.readouterr().err


def test_remote_code_of_the_drafter_is_trusted_as_that_of_the_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Or a drafter of such a target could not learn on."""
    asked: list[tuple[str, str, bool]] = []

    def resolved(name: str, *, trust_remote_code: bool = False, heads: bool = False) -> Path:
        asked.append(("resolved", name, trust_remote_code))
        return target

    def loaded(*where: Path, name: str, trust_remote_code: bool = False, **rest: object) -> None:
        asked.append(("loaded", name, trust_remote_code))
        raise ConfigError("that is enough")

    monkeypatch.setattr("outrider.models.sources.resolve_model", resolved)
    monkeypatch.setattr("draft_service.training.learners.load_drafter", loaded)
    for flags in ([], ["--trust-remote-code"]):
        code = main(["distill", "a/b", "--out", str(tmp_path / "o"), "--start-from", "c/d", *flags])
        assert code == 2
        assert "--start-from: that is enough" in capsys.readouterr().err
        trusts = bool(flags)
        assert asked == [
            ("resolved", "a/b", trusts), ("resolved", "c/d", trusts), ("loaded", "c/d", trusts),
        ]  # fmt: skip
        asked.clear()


def test_the_kinds_that_are_asked_for_are_those_that_are_stored() -> None:
    assert tuple(TrainedKind) == KINDS
    with pytest.raises(SettingError, match="'hydra' is wrong; it must be one of student, ") as bad:
        DistillOptions(out=Path(), kind="hydra")
    assert bad.value.key == "kind"


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        ([], ""),
        (["--kind", "medusa"], "medusa:"),
        (["--kind", "early-exit"], "early-exit:"),
    ],
)
def test_without_json_all_that_was_measured_is_printed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], flags: list[str], form: str,
) -> None:  # fmt: skip
    def measured(greedy: float, sampled: float) -> Measured:
        return Measured(tuple(
            TemperatureRates(t, 10, greedy, sampled) for t in (0.0, 1.0)
        ), (None,))  # fmt: skip

    found = Distilled(tmp_path / "o", measured(0.125, 0.25), measured(0.375, 0.5), 7, 90.0)
    monkeypatch.setattr("draft_service.training.distilling.distill", lambda *given: found)
    assert main(["distill", str(target), "--out", str(tmp_path / "o"), *flags]) == 0
    *lines, to_type = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{tmp_path / 'o'}: 7 steps in 1.5 minutes",
        "acceptance, held-out texts: 0.125 at temperature 0, 0.250 at 1",
        "acceptance, --measure: 0.375 at temperature 0, 0.500 at 1",
    ]
    program, *words = shlex.split(to_type)
    assert shutil.which(program) is not None
    form = form or "hybrid:suffix,"
    assert words == ["serve", str(target), "--draft-model", f"{form}{tmp_path / 'o'}"]
