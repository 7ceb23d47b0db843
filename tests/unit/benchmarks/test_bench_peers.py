"""Options of `bench peers`, its arithmetic, and the whole of it over a side that decodes nothing
and a tiny model's real peers."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
from bench_sides import ScriptedSide
from models import save_tiny_drafter
from rich.console import Console
from test_bench_llama_cpp import environment
from tiny_gguf import save_tiny_gguf

from benchmarks.measurement import Completion, Side, SideResult
from benchmarks.peers import PeersOptions, add_arguments, assisted_note, run
from benchmarks.peers_report import PEERS, PeersReport, PeersSetup, render, summarise
from benchmarks.prompts import BenchPrompt
from benchmarks.references import ReferenceDrafter, ReferenceModel
from benchmarks.speedup import Subject
from outrider.engine.sources import resolve_model
from outrider.errors import ConfigError, InvariantError, SettingError
from outrider.speculation.sampling import Rule

PROMPTS = tuple(BenchPrompt(f"p{i}", category) for i, category in enumerate("aab"))
NOTES = {side: f"note on {side.value}" for side in PEERS}


def parse(*words: str) -> PeersOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return PeersOptions.from_arguments(parser.parse_args(words), num_draft_tokens=3)


def test_flags_reach_the_options() -> None:
    assert parse() == PeersOptions(num_draft_tokens=3)
    words = "--prompts x.jsonl --num-prompts 6 --max-tokens 9 --temperature 1 --rule block --raw"
    found = parse(*words.split(), "--json", "--llama-cpp-python", sys.executable)
    assert found == PeersOptions(
        prompts=Path("x.jsonl"),
        num_prompts=6,
        max_tokens=9,
        temperature=1.0,
        rule=Rule.BLOCK,
        raw=True,
        num_draft_tokens=3,
        llama_cpp_python=Path(sys.executable),
    )


def test_limits_of_decoding_hold_and_an_interpreter_must_be_a_program(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="max_tokens: 0 is wrong"):
        PeersOptions(max_tokens=0)
    text = tmp_path / "python"
    text.write_text("")
    for wrong in (tmp_path / "none", tmp_path, text):
        with pytest.raises(SettingError, match=r"llama_cpp_python: .* interpreter's path"):
            PeersOptions(llama_cpp_python=wrong)


def test_an_interpreter_without_the_binding_is_refused_before_anything_starts() -> None:
    with pytest.raises(SettingError, match="can import llama_cpp"):
        PeersOptions(llama_cpp_python=Path(sys.executable)).check_llama_cpp()


def result(*pairs: tuple[int, float]) -> SideResult:
    """Completions of so many tokens in so many seconds, with a token a round."""
    completions = tuple(
        Completion(tuple(range(num_tokens)), 0.0, seconds, num_tokens, 2 * num_tokens, num_tokens)
        for num_tokens, seconds in pairs
    )
    return SideResult(completions, sum(seconds for _, seconds in pairs))


def report(temperature: float = 0.0, rule: str = "greedy") -> PeersReport:
    """Ours writes 20 tokens a second on every prompt. The ratios to the assisted peer are 2, 4 and
    10; to plain llama.cpp, which ends the first text sooner, 0.5, 0.5 and 1."""
    results = {
        Side.SPECULATIVE: result((20, 1.0), (40, 2.0), (20, 1.0)),
        Side.ASSISTED: result((20, 2.0), (40, 8.0), (20, 10.0)),
        Side.LLAMA_CPP: result((10, 0.25), (40, 1.0), (20, 1.0)),
    }
    setup = PeersSetup(
        model="demo", draft_model="mine", dtype="bfloat16", num_draft_tokens=5, max_tokens=40,
        temperature=temperature, rule=rule, threads=2,
    )  # fmt: skip
    return summarise(setup, PROMPTS, results, NOTES)


def test_a_ratio_is_the_median_of_ours_over_theirs_and_rates_are_totals() -> None:
    found = report()
    assert found.overall.ours.tokens_per_second == pytest.approx(20.0)
    assisted = found.overall.peers[Side.ASSISTED]
    assert assisted.ratio == pytest.approx(4.0)
    assert assisted.tokens_per_second == pytest.approx(80 / 20)
    assert assisted.ratio_of_totals == pytest.approx(20 / (80 / 20))
    plain = found.overall.peers[Side.LLAMA_CPP]
    assert plain.ratio == pytest.approx(0.5)
    assert plain.ratio_of_totals == pytest.approx(20 / (70 / 2.25))
    assert found.categories["a"].peers[Side.ASSISTED].ratio == pytest.approx(3.0)
    assert found.categories["b"].peers[Side.ASSISTED].ratio == pytest.approx(10.0)
    assert found.categories["b"].peers[Side.LLAMA_CPP].ratio == pytest.approx(1.0)


def test_same_tokens_are_counted_where_all_must_write_the_same() -> None:
    assert report().overall.peers[Side.ASSISTED].same_tokens == 3
    assert report().overall.peers[Side.LLAMA_CPP].same_tokens == 2
    assert report(1e-6).overall.peers[Side.LLAMA_CPP].same_tokens == 2  # as good as 0
    assert report(1.0, "token").overall.peers[Side.LLAMA_CPP].same_tokens is None


def test_json_holds_every_peer_also_those_that_were_not_measured() -> None:
    value = json.loads(report().to_json())
    assert value["threads"] == 2
    assert value["num_prompts"] == 3
    assert value["ours"]["num_draft_tokens"] == 5
    assert value["ours"]["acceptance_rate"] == 0.5
    assert value["transformers_assisted"]["ratio"] == 4.0
    assert value["transformers_prompt_lookup"] == {
        "tokens_per_second": None, "num_tokens": None, "ratio": None, "ratio_of_totals": None,
        "same_tokens": None, "note": "note on transformers prompt lookup",
    }  # fmt: skip
    assert list(value["categories"]) == ["a", "b"]
    assert value["categories"]["b"]["num_prompts"] == 1
    assert value["categories"]["b"]["ours"]["tokens_per_second"] == 20.0
    assert value["categories"]["b"]["transformers_assisted"]["ratio"] == 10.0
    assert set(PEERS.values()) < set(value["categories"]["a"])


def test_the_table_shows_rates_ratios_and_notes() -> None:
    """Whole figures and headings on a terminal of 80 columns, too."""
    narrow, output = io.StringIO(), io.StringIO()
    Console(file=narrow, width=80).print(render(report()))
    assert "…" not in narrow.getvalue()
    assert "31.1 0.50x" in narrow.getvalue()
    Console(file=output, width=150).print(render(report()))
    shown = output.getvalue()
    row = next(line for line in shown.splitlines() if " all " in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "all", "3", "20.0", "4.0 4.00x", "-", "31.1 0.50x", "-",
    ]  # fmt: skip
    assert "K <= 5" in shown
    assert "llama.cpp plain: note on llama.cpp plain; our tokens on 2 of 3 prompts" in shown
    assert "llama.cpp prompt lookup: note on llama.cpp prompt lookup\n" in shown


def test_sides_that_decoded_other_prompts_are_refused() -> None:
    with pytest.raises(InvariantError, match="every prompt"):
        summarise(report().setup, PROMPTS[:2], {Side.SPECULATIVE: result((1, 1.0))}, NOTES)


def subject(
    side: ScriptedSide, reference: ReferenceModel | None, model: str, draft_model: str
) -> Subject:
    return Subject(
        client=side, model=model, draft_model=draft_model, dtype="bfloat16", num_draft_tokens=8,
        reference=reference, keeps_answers=draft_model.startswith("hybrid:suffix"), asked=None,
    )  # fmt: skip


async def test_a_deployment_whose_files_are_elsewhere_has_no_peers() -> None:
    side = ScriptedSide(lambda prompt, decoding: (3, 1.0))
    with pytest.raises(ConfigError, match="server: the target's files"):
        await run(PeersOptions(), subject(side, None, "far", "ngram"), lambda line: None)
    with pytest.raises(ConfigError, match="num_draft_tokens: 0"):
        plain = Subject(
            client=side, model="far", draft_model="ngram", dtype="bfloat16", num_draft_tokens=0,
            reference=None, keeps_answers=False, asked=None,
        )  # fmt: skip
        await run(PeersOptions(), plain, lambda line: None)
    assert not side.calls


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.Q8_0.gguf")


@pytest.fixture
def target(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return resolve_model(str(tiny))


def test_the_assistants_note_says_what_the_library_was_given() -> None:
    """Of a hybrid less than the services have."""
    assert assisted_note("mine").startswith("the drafter mine as assistant_model, ")
    found = assisted_note("hybrid:suffix,mine")
    assert found.startswith("of hybrid:suffix,mine the model mine alone, without the look-up, as ")


@pytest.mark.long
async def test_every_peer_decodes_every_prompt(tiny: Path, target: Path, tmp_path: Path) -> None:
    """The library's two in processes of their own, and llama.cpp's two with a stand-in for the
    binding, which is given a file with the target's weights. All of ours write `0, 1, 2`."""
    drafter = save_tiny_drafter(tmp_path / "drafter", target, range(0, 320, 2))
    reference = ReferenceModel(
        directory=str(target), dtype="auto", device="cpu", num_threads=1,
        drafter=ReferenceDrafter(directory=str(drafter), name="drafter", dtype="auto"),
    )  # fmt: skip
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The fox"}\n{"prompt": "The cat", "category": "cat"}\n')
    options = PeersOptions(
        prompts=prompts, max_tokens=3, llama_cpp_python=environment(tmp_path / "llama")
    )
    lines: list[str] = []
    ours = subject(
        ScriptedSide(lambda prompt, decoding: (3, 1.0)), reference, str(tiny),
        f"hybrid:suffix,{drafter}",
    )  # fmt: skip
    found = json.loads((await run(options, ours, lines.append)).to_json())
    for key in PEERS.values():
        assert found[key]["tokens_per_second"] > 0
        assert found[key]["num_tokens"] <= 6
    assert found["llama_cpp_plain"]["num_tokens"] == 6
    assert "9.8.7" in found["llama_cpp_prompt_lookup"]["note"]
    assert sum(line.startswith("warning: drafts may copy") for line in lines) == 1
    assert f"the model {drafter} alone" in found["transformers_assisted"]["note"]
    assert set(found["categories"]) == {"other", "cat"}
    assert list((tmp_path / "cache" / "models").glob("tiny.Q8_0-*.gguf"))
    assert found["threads"] == 1


@pytest.mark.parametrize(
    ("draft_model", "reason"),
    [("ngram", "the drafter ngram is no model"), ("quantized:4", "nothing like the drafter")],
)
async def test_peers_that_are_not_there_say_why(
    target: Path, tmp_path: Path, draft_model: str, reason: str
) -> None:
    """No assistant without a model, and no llama.cpp without its interpreter or a GGUF file."""
    reference = ReferenceModel(directory=str(target), dtype="auto", device="cpu", num_threads=1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The fox"}\n')
    side = ScriptedSide(lambda prompt, decoding: (3, 1.0))
    python = Path(sys.executable) if draft_model == "ngram" else None
    options = PeersOptions(prompts=prompts, max_tokens=2, llama_cpp_python=python)
    found = await run(options, subject(side, reference, str(target), draft_model), lambda _: None)
    assert found.overall.peers[Side.ASSISTED].ratio is None
    assert reason in found.notes[Side.ASSISTED]
    assert found.overall.peers[Side.PROMPT_LOOKUP].tokens_per_second
    expected = "not come from a GGUF file" if python else "--llama-cpp-python is not given"
    assert expected in found.notes[Side.LLAMA_CPP_LOOKUP]
