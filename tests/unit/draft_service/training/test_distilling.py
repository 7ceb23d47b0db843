"""`outrider distill` on tiny random targets: acceptance grows, and a killed run, once continued,
ends like an undisturbed one. Also what the command makes and prints."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file

from draft_service.training import teacher, training
from draft_service.training.distilling import DistillResult, distill
from draft_service.training.documents import Template
from draft_service.training.measuring import MeasuredAcceptance
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Target
from draft_service.training.training import Report
from outrider.cli.main import main
from outrider.config.deployment import TargetConfig
from outrider.errors import ConfigError, SettingError
from outrider.models.student import load_student
from tests.support.models import byte_level_tokenizer, save_tiny_model

WISHES: Final = {"layers": 1, "draft_vocab": 24, "tokens": 2500, "steps": 30, "seed": 3}
OPTIONS = DistillOptions(out=Path(), **WISHES)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Makes pieces so small that there are several of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.BATCH_TOKENS, "cpu", 512)
        patch.setattr(teacher, "_DOCUMENTS_OF_A_FILE", 32)
        patch.setattr(training, "_CHECKPOINT_S", 0.0)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = save_tiny_model(tmp_path_factory.mktemp("target"), eos_token_id=3)
    return Target(TargetConfig(model="tiny", directory=str(path)), Template((0, 5), (3, 6)), None)


def silent(stage: str, part: float, detail: str) -> None:
    """Ignores all reports."""


def run(target: Target, place: Path, report: Report = silent, **changes: object) -> DistillResult:
    options = replace(OPTIONS, **({"out": place / "out"} | changes))  # type: ignore[arg-type]
    return distill(options, target, place / "cache", report)


def weights(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "out" / "model.safetensors")


def check_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def whole(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, MeasuredAcceptance]:
    """An undisturbed student's run, and its acceptance."""
    place = tmp_path_factory.mktemp("whole")
    return place, run(target, place).measured[0]


def begun(target: Target, source: Path, place: Path, **changes: object) -> MeasuredAcceptance:
    """The acceptance after one step of a run that finds the texts and answers of another run."""
    shutil.copytree(source / "cache", place / "cache", dirs_exist_ok=True)
    return run(target, place, out=place / "begun", steps=1, **changes).measured[0]


def test_acceptance_grows_and_what_comes_out_is_a_drafter_with_its_card(
    target: Target, whole: tuple[Path, MeasuredAcceptance], tmp_path: Path
) -> None:
    place, last = whole
    first = begun(target, place, tmp_path)
    assert last.sampled > first.sampled + 0.03
    assert last.greedy >= first.greedy
    module, info = load_student(place / "out", target.directory, name="out", target="tiny")
    assert len(info.logit_token_ids) == OPTIONS.draft_vocab
    assert module(torch.tensor([[0, 5, 1]])).logits.shape == (1, 3, OPTIONS.draft_vocab)
    card = (place / "out" / "README.md").read_text()
    for words in (
        "Training had 30 steps over ",
        "The seed was 3.",
        "| written by | training documents | tokens of training documents | held-out documents |",
        "| the target | ",
        f"| {last.sampled:.3f} | ",
    ):
        assert words in card, words
    ratio = r"over (\S+) tokens, which is\n  (\S+) times the training data"
    [(read, times)] = re.findall(ratio, card)
    learned = re.findall(r"^\| (?:the target|others .*) \| \S+ \| (\S+) \|", card, re.MULTILINE)
    num_learned = sum(int(number.replace(",", "")) for number in learned)
    assert float(times) == pytest.approx(int(read.replace(",", "")) / num_learned, abs=0.005)
    assert sorted(path.name for path in place.iterdir()) == ["cache", "out"]


def test_acceptance_of_an_eagle3_head_grows(target: Target, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "target", eos_token_id=3, num_layers=7)
    taps = replace(target, config=replace(target.config, directory=str(path)))
    wishes = {"kind": "eagle3", "layers": None}
    last = run(taps, tmp_path, tokens=4000, steps=60, **wishes).measured[0]
    first = begun(taps, tmp_path, tmp_path / "other", tokens=4000, **wishes)
    assert last.sampled > first.sampled + 0.005  # It begins near its best.


@pytest.mark.parametrize(("stage", "part"), [("writing", 0.5), ("reading", 0.4), ("training", 0.6)])
def test_a_run_that_is_killed_ends_as_one_that_was_not(
    target: Target, whole: tuple[Path, MeasuredAcceptance], tmp_path: Path, stage: str, part: float
) -> None:
    def kill(now: str, done: float, detail: str) -> None:
        if now == stage and done >= part:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path, kill)
    assert not (tmp_path / "out").exists()
    heard: dict[str, float] = {}
    run(target, tmp_path, lambda now, done, detail: heard.setdefault(now, done) and None)
    assert heard[stage] > part / 2  # It did not begin again.
    check_same(weights(tmp_path), weights(whole[0]))


def test_another_dtype_finds_nothing_of_the_former(target: Target, tmp_path: Path) -> None:
    def folders(dtype: str) -> set[str]:
        changed = replace(target, config=replace(target.config, dtype=dtype))
        run(changed, tmp_path, out=tmp_path / dtype, steps=1, tokens=1500)
        return {path.name for path in tmp_path.glob("cache/distillation/*/*-*")}

    first = folders("auto")
    assert sorted(name.partition("-")[0] for name in first) == ["answers", "student", "written"]
    assert folders("float32") == first  # The target has this dtype.
    assert len(folders("bfloat16")) == 6


def test_two_runs_for_one_target_do_not_mix(target: Target, tmp_path: Path) -> None:
    stages: set[str] = set()

    def meanwhile(stage: str, part: float, detail: str) -> None:
        if stage not in stages:
            stages.add(stage)
            with pytest.raises(ConfigError, match="another `outrider distill` of this target"):
                run(target, tmp_path, out=tmp_path / "second", steps=2)

    run(target, tmp_path, meanwhile, steps=2)
    assert stages == {"writing", "reading", "training", "measuring"}


def test_prompts_to_measure_with_are_not_learned_from(
    target: Target, whole: tuple[Path, MeasuredAcceptance], tmp_path: Path
) -> None:
    """Each is answered at both temperatures; the drafter is the same as without them. A prompt that
    is learned from or too long is refused before anything runs."""
    prompts = ((0, 5, 9, 3, 6), (0, 5, 11, 12, 3, 6), (0, 5, 13, 3, 6))
    for key, said, changes in (
        ("measure", "prompt 2 is also prompt 1 of --prompts", {"prompts": prompts[1:2]}),
        ("measure", "prompt 4 has 128 tokens; 1 to 127 are", {"measure": (*prompts, (1,) * 128)}),
    ):
        with pytest.raises(SettingError, match=said) as bad:
            run(target, tmp_path / "refused", **({"measure": prompts} | changes))
        assert bad.value.key == key
    shutil.copytree(whole[0] / "cache", tmp_path / "cache")
    for earlier in (tmp_path / "cache").rglob("spent.json"):
        earlier.write_text("90000.0")
    made = run(target, tmp_path, measure=prompts)
    assert 0 < made.seconds < 90_000  # Without those of the earlier run.
    _, found = made.measured
    [file] = (tmp_path / "cache").glob("distillation/*/measured-*/conversations.jsonl")
    answered = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(tuple(a["prompt"]) for a in answered) == sorted(2 * prompts)
    assert sorted(a["temperature"] for a in answered) == [0.0] * 3 + [1.0] * 3
    sizes = [len(a["answer"]) for a in answered]
    assert found.measured_tokens == sum(size for size in sizes if size > 1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| answers to --measure | {found.measured_tokens} | {found.greedy:.3f} |" in card
    check_same(weights(tmp_path), weights(whole[0]))


def test_too_few_texts_are_refused_before_they_are_read(target: Target, tmp_path: Path) -> None:
    spelled = replace(target, encode=lambda text: [int(digit) for digit in text.strip()])
    file, stages = tmp_path / "a.jsonl", set[str]()
    for lines, tokens, said in (
        (12, 0, "only 12 texts were written or given; at least 32 are needed; raise --tokens, or"),
        (2, 20, r"only \d+ texts were written or given; "),
    ):
        file.write_text(lines * '{"text": "12345"}\n')
        with pytest.raises(SettingError, match=said) as bad:
            run(
                spelled,
                tmp_path,
                lambda stage, part, detail: stages.add(stage),
                corpus=(file,),
                tokens=tokens,
            )
        assert bad.value.key == "tokens"
    assert stages == {"writing"}


def test_a_drafter_learns_on(
    target: Target, whole: tuple[Path, MeasuredAcceptance], tmp_path: Path
) -> None:
    before = weights(whole[0])
    start = {"start_from": str(whole[0] / "out"), "layers": None, "draft_vocab": None}
    first = begun(target, whole[0], tmp_path, **start)
    last = run(target, tmp_path, **start).measured[0]
    assert first.sampled == pytest.approx(whole[1].sampled, abs=0.02)
    assert last.sampled > first.sampled
    assert f"the drafter `{start['start_from']}`, whose" in (tmp_path / "out/README.md").read_text()
    after = weights(tmp_path)
    assert torch.equal(after["draft_token_ids"], before["draft_token_ids"])
    assert any(not torch.equal(values, before[name]) for name, values in after.items())
    check_same(weights(whole[0]), before)


def test_wrong_places_are_refused_before_the_target_is_sought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    none = f"--corpus: {tmp_path / 'none'} is not a folder"
    for out, message in (("full", "--out: "), ("new", none)):
        wrong = ["--out", str(tmp_path / out), "--corpus", str(tmp_path / "none")]
        assert main(["distill", str(tmp_path / "no-target"), *wrong]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "loading" not in said


def test_the_command_makes_a_head_that_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a chat template, prompts and texts; prints one JSON object, or the next command. The
    result can be trained further."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = save_tiny_model(
        tmp_path / "target",
        vocab_size=336,
        eos_token_id=0,
        num_layers=7,
        tokenizer=byte_level_tokenizer(),
    )
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [{"text": f"{i} quick brown foxes jump over the lazy dog. "} for i in range(60)]
    (corpus / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, words in (("prompts", ("Why?", "How so?")), ("measure", ("Since when?", "Where?"))):
        records = [json.dumps({"prompt": text}) for text in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(records))
    command = ["distill", str(model), "--corpus", str(corpus), "--tokens", "300", "--kind"]
    code = main(
        [
            *command,
            "eagle3",
            "--out",
            str(tmp_path / "out"),
            "--json",
            "--draft-vocab",
            "64",
            "--steps",
            "4",
            "--prompts",
            str(tmp_path / "prompts.jsonl"),
            "--measure",
            str(tmp_path / "measure.jsonl"),
        ]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    assert found["training_steps"] == 4
    assert 0 < found["acceptance"]["sampled"] < 1
    assert 0 < found["acceptance_on_prompts"]["measured_tokens"] <= 4 * 128
    assert "training" not in captured.err
    again = [
        *command,
        "eagle3",
        "--out",
        str(tmp_path / "again"),
        "--steps",
        "2",
        "--start-from",
        str(tmp_path / "out"),
    ]
    assert main(again) == 0
    *table, to_type = capsys.readouterr().out.splitlines()
    assert {"acceptance:", "measured", "tokens"} <= {*" ".join(table).split()}
    assert to_type.endswith(f"outrider serve {model} --draft-model eagle3:{tmp_path / 'again'}")
    assert main([*again[:7], "student", "--out", str(tmp_path / "x"), *again[10:]]) == 2
    assert "--start-from: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "9"], "--layers: 9 is more than the target's 2"),
        (
            ["--kind", "eagle3", "--layers", "2"],
            "--layers: cannot be set for a drafter of the kind `eagle3`",
        ),
        (["--kind", "eagle"], "student, eagle3; did you mean eagle3?"),
        (["--kind", "eagle3"], "--kind: an EAGLE-3 head needs a target with at least 7 layers; "),
        (["--draft-vocab", "1"], "--draft-vocab: '1' is wrong"),
        (["--start-from", "demo-drafter", "--layers", "2"], "--layers: cannot be set: the"),
        (["--measure", "nowhere"], "--measure: cannot read nowhere"),
    ],
)
def test_errors_name_the_flag(
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    code = main(["distill", str(target.directory), "--out", str(tmp_path / "out"), *flags])
    assert code == 2
    assert message in capsys.readouterr().err
