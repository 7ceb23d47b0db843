"""Options, requests and the whole of `bench speedup` over a side that decodes nothing."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_sides import ScriptedSide

from benchmarks.measurement import Decoding
from benchmarks.prompts import BenchPrompt
from benchmarks.speedup import (
    AskedPrompts,
    ServiceClient,
    SpeedupOptions,
    Subject,
    add_arguments,
    run,
)
from outrider.errors import ConfigError, Unavailable
from outrider.request import ChatMessage, GenerateRequest, Metrics
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule


def parse(*words: str) -> SpeedupOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return SpeedupOptions.from_arguments(parser.parse_args(words))


def subject(
    side: ScriptedSide,
    num_draft_tokens: int = 8,
    keeps_answers: bool = False,
    asked: AskedPrompts | None = None,
) -> Subject:
    return Subject(
        client=side,
        model="demo",
        draft_model="ngram",
        dtype="bfloat16",
        num_draft_tokens=num_draft_tokens,
        reference=None,
        keeps_answers=keeps_answers,
        asked=asked,
    )


def test_flags_default_to_the_options() -> None:
    assert parse() == SpeedupOptions()


def test_flags_reach_the_options() -> None:
    words = "--prompts x.jsonl --num-prompts 6 --max-tokens 9 --temperature 0.5 --rule block"
    found = parse(*words.split(), "--concurrency", "3,1,16", "--raw", "--no-reference", "--json")
    assert found == SpeedupOptions(
        prompts=Path("x.jsonl"),
        num_prompts=6,
        max_tokens=9,
        temperature=0.5,
        rule=Rule.BLOCK,
        concurrency=(3, 1, 16),
        raw=True,
        reference=False,
    )


@pytest.mark.parametrize(
    ("option", "fine", "wrong"),
    [
        ("num_prompts", (1, 100_000), (0, 100_001)),
        ("max_tokens", (1, 16_384), (0, 16_385)),
        ("temperature", (0, 2.0), (-0.01, 2.01, float("nan"), float("inf"))),
        ("num_draft_tokens", (1, 16), (0, 17)),
        ("concurrency", ((1,), (4096, 1)), ((0,), (4, 4097), (), (4, 4))),
        ("seed", (0, 2**64 - 1), (-1, 2**64)),
        ("rule", (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED), (Rule.GREEDY,)),
    ],
)
def test_every_limit_holds_on_both_sides_and_names_its_option(
    option: str, fine: tuple[object, ...], wrong: tuple[object, ...]
) -> None:
    for value in fine:
        assert getattr(SpeedupOptions(**{option: value}), option) == value  # type: ignore[arg-type]
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^{option}: .* must be "):
            SpeedupOptions(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["four", "1,", "1.5", ""])
def test_a_concurrency_that_is_no_number_is_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--concurrency", words)
    assert ended.value.code == 2
    assert "--concurrency" in capsys.readouterr().err


async def test_each_concurrency_is_measured_alone_and_references_once() -> None:
    levels = SpeedupOptions(concurrency=(1, 4), num_prompts=12).levels()
    assert [(level.concurrency, level.reference) for level in levels] == [
        ((1,), True),
        ((4,), False),
    ]
    for level, most in zip(levels, (1, 4), strict=True):
        side = ScriptedSide(lambda prompt, decoding: (12, 2.0))
        report = await run(level, subject(side), lambda line: None)
        assert side.most_running == most
        assert report.setup.concurrency == most


def decoding(num_draft_tokens: int = 8) -> Decoding:
    return Decoding(
        max_tokens=33, temperature=0.5, rule=Rule.BLOCK, seed=4, num_draft_tokens=num_draft_tokens
    )


class RecordingClient:
    """Stands where `outrider.client.Client` does."""

    def __init__(self, finish_reason: FinishReason) -> None:
        self.finish_reason = finish_reason
        self.requests: list[GenerateRequest] = []

    async def complete(self, request: GenerateRequest) -> SimpleNamespace:
        self.requests.append(request)
        return SimpleNamespace(
            token_ids=(5, 6, 7),
            finish_reason=self.finish_reason,
            metrics=Metrics(2, 9, 1, 1.5, 3.0, 100.0),
        )


@pytest.mark.parametrize("raw", [False, True])
async def test_a_request_says_all_that_is_measured(raw: bool) -> None:
    client = RecordingClient(FinishReason.LENGTH)
    side = ServiceClient(client, raw=raw)  # type: ignore[arg-type]
    done = await side.generate(BenchPrompt("Hello.", "chat"), decoding())
    [request] = client.requests
    assert request.prompt == ("Hello." if raw else (ChatMessage("user", "Hello."),))
    assert request.sampling.temperature == 0.5
    assert (request.rule, request.seed) == (Rule.BLOCK, 4)
    assert (request.max_tokens, request.num_draft_tokens) == (33, 8)
    assert not request.ignore_eos
    assert done.token_ids == (5, 6, 7)
    assert (done.num_rounds, done.num_draft_tokens, done.num_accepted_draft_tokens) == (2, 9, 1)
    assert done.seconds > 0


async def test_plain_decoding_is_asked_for_as_no_draft_tokens() -> None:
    client = RecordingClient(FinishReason.STOP)
    await ServiceClient(client, raw=True).generate(BenchPrompt("a", "b"), decoding(0))  # type: ignore[arg-type]
    assert client.requests[0].num_draft_tokens == 0


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
async def test_a_request_that_was_cut_short_is_no_measurement(reason: FinishReason) -> None:
    side = ServiceClient(RecordingClient(reason), raw=True)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=reason.value):
        await side.generate(BenchPrompt("a", "b"), decoding())


async def test_the_whole_of_it_over_the_built_in_prompts() -> None:
    """Speculation takes a third of the time in `rewrite` and as long elsewhere."""

    def script(prompt: BenchPrompt, decoding: Decoding) -> tuple[int, float]:
        helped = decoding.num_draft_tokens > 0 and prompt.category == "rewrite"
        return 12, 1.0 if helped else 3.0

    lines: list[str] = []
    options = SpeedupOptions(num_prompts=12)
    report = await run(options, subject(ScriptedSide(script)), lines.append)
    assert report.overall.num_prompts == 12
    assert report.overall.speedup == pytest.approx(1.0)
    assert {name: found.speedup for name, found in report.categories.items()} == pytest.approx(
        {"chat": 1, "code": 1, "math": 1, "rewrite": 3, "summary": 1, "extract": 1}
    )
    assert all(found.num_prompts == 2 for found in report.categories.values())
    assert report.engine_tokens_per_second is None
    assert lines[-1] == "prompt 12 of 12: extract"


async def test_temperature_zero_is_greedy_and_the_deployment_says_how_much_is_drafted() -> None:
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    report = await run(SpeedupOptions(num_prompts=6), subject(side, 5), lambda line: None)
    assert {found.rule for _, found in side.calls} == {Rule.GREEDY}
    assert {found.num_draft_tokens for _, found in side.calls} == {0, 5}
    assert report.setup.rule == "greedy"
    assert report.setup.num_draft_tokens == 5


async def test_sampling_uses_the_rule_asked_for_and_the_bound_asked_for() -> None:
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    options = SpeedupOptions(num_prompts=6, temperature=1.0, rule=Rule.BLOCK, num_draft_tokens=3)
    await run(options, subject(side), lambda line: None)
    assert {found.rule for _, found in side.calls} == {Rule.BLOCK}
    assert {found.num_draft_tokens for _, found in side.calls} == {0, 3}


async def test_a_deployment_that_drafts_nothing_has_nothing_to_compare() -> None:
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    with pytest.raises(ConfigError, match="num_draft_tokens: 0"):
        await run(SpeedupOptions(), subject(side, 0), lambda line: None)
    assert not side.calls


@pytest.mark.parametrize(
    ("keeps_answers", "asked", "texts", "warned"),
    [
        (False, None, "aab", []),
        (True, "", "abc", []),
        (True, "xyz", "abc", []),
        (True, "bcd", "abc", ["2 of the prompts were measured on this deployment before"]),
        (True, None, "abc", ["it is not known what this server was asked before"]),
        (True, "", "aaba", ["2 of the prompts are there already"]),
        (True, "a", "aa", ["2 of the prompts were measured", "1 of the prompts are there already"]),
    ],
)
async def test_what_may_be_copied_from_earlier_answers_is_warned_of(
    tmp_path: Path, keeps_answers: bool, asked: str | None, texts: str, warned: list[str]
) -> None:
    """Those of an earlier measurement, and those of a prompt that is listed twice. One that
    has answered other prompts is not warned of."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    lines: list[str] = []
    before = None if asked is None else AskedPrompts(None, "")
    if before is not None:
        before.add([BenchPrompt(text, "other") for text in asked or ""])
    found = subject(side, keeps_answers=keeps_answers, asked=before)
    await run(SpeedupOptions(prompts=path), found, lines.append)
    warnings = [line for line in lines if line.startswith("warning: drafts may copy")]
    assert len(warnings) == len(warned)
    assert all(words in line for words, line in zip(warned, warnings, strict=True))


def test_what_was_asked_is_kept_for_one_deployment(tmp_path: Path) -> None:
    """In a file; one that cannot be read, or is of another deployment, says nothing."""
    path, prompts = tmp_path / "asked.json", [BenchPrompt(text, "other") for text in "abc"]
    assert AskedPrompts(path, "one").count(prompts) == 0
    AskedPrompts(path, "one").add(prompts[:2])
    assert AskedPrompts(path, "one").count(prompts) == 2
    assert AskedPrompts(path, "two").count(prompts) == 0
    AskedPrompts(path, "two").add(prompts[2:])
    assert [AskedPrompts(path, name).count(prompts) for name in ("one", "two")] == [0, 1]
    for text in ("", "[]", '{"deployment": "two", "prompts": 5}'):
        path.write_text(text)
        assert AskedPrompts(path, "two").count(prompts) == 0


async def test_a_wrong_prompt_file_stops_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2"):
        await run(SpeedupOptions(prompts=path), subject(side), lambda line: None)
    assert not side.calls


async def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    await run(SpeedupOptions(num_prompts=6), subject(side))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "prompt 6 of 6: extract" in captured.err
