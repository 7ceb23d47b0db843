"""`bench serve`: arrival times, figures, and whole runs by gRPC and HTTP."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.bench.measurement import Completion
from outrider.bench.serve import Load, ServeOptions, arrival_times, measure, report
from outrider.cli.main import main
from outrider.errors import Unavailable
from outrider.interfaces.request import GenerateRequest
from tests.support.bench_sides import ScriptedSide
from tests.support.command_lines import refusal, reported
from tests.support.openai_server import OpenAiServer, Reply, serving
from tests.support.stack import VOCAB, running_stack, toy_text
from tests.support.toy_engine import ToyEngine

NUMBER = 20_000


@pytest.mark.parametrize(("burstiness", "tail"), [(0.25, 24.0), (4.0, 1.5)])
def test_gaps_have_the_mean_and_the_variance_of_their_law(burstiness: float, tail: float) -> None:
    """A Gamma distribution of shape k and mean 1/R has variance 1 / (k R^2) and excess kurtosis 6 /
    k. The bounds are 5 standard errors: a correct function fails with probability 6e-7."""
    rate = 8.0
    times = [0.0, *islice(arrival_times(rate, burstiness), NUMBER)]
    found = np.array([after - before for before, after in pairwise(times)])
    variance = 1 / (burstiness * rate**2)
    assert abs(found.mean() - 1 / rate) < 5 * math.sqrt(variance / NUMBER)
    assert abs(found.var() - variance) < 5 * variance * math.sqrt((tail + 2) / NUMBER)


def server_of(fails: Callable[[GenerateRequest], bool] = lambda _: False) -> ScriptedSide:
    """A server that answers with four tokens after 4 s, or refuses a request."""

    def script(request: GenerateRequest) -> tuple[int, float]:
        if fails(request):
            raise Unavailable("no room")
        return 4, 4.0

    return ScriptedSide(script)


@pytest.mark.virtual
async def test_without_a_rate_all_come_at_once_and_a_failure_ends_nothing(tmp_path: Path) -> None:
    """A prompt's own `max_tokens` replaces the option's."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 7}\n{"prompt": "b"}\n', "utf-8")
    server = server_of(lambda _: len(server.calls) == 2)
    load = await measure(ServeOptions(prompts=file, max_tokens=9, num_prompts=100), server, print)
    assert set(server.starts) == {server.starts[0]}
    assert server.most_running == load.most_running == 99
    assert load.duration_s == pytest.approx(4.0)
    assert (len(load.completed), load.errors) == (99, {"no room": 1})
    assert {one.prompt: one.max_tokens for one in server.calls} == {"a": 7, "b": 9}


@pytest.mark.virtual
async def test_a_fixed_concurrency_is_kept_full_and_never_passed() -> None:
    server = server_of()
    lines: list[str] = []
    load = await measure(ServeOptions(num_prompts=10, max_concurrency=3), server, lines.append)
    assert server.most_running == 3
    assert lines[0] == "1 of 10 requests done, 2 running"
    assert lines[-1] == "10 of 10 requests done, 0 running"
    assert load.duration_s == pytest.approx(16.0)


@pytest.mark.virtual
async def test_what_a_rate_holds_back_waits_outside_of_its_latency() -> None:
    """A request arrives each second and takes 4 s, so later requests wait in the client."""
    options = ServeOptions(num_prompts=5, request_rate=1.0, burstiness=math.inf, max_concurrency=1)
    server = server_of()
    began_s = asyncio.get_running_loop().time()
    load = await measure(options, server, print)
    assert server.starts == pytest.approx([began_s + at for at in (1.0, 5.0, 9.0, 13.0, 17.0)])
    found = report(options, options.settings("b", "s", "m"), load).values
    assert (found["mean_e2el_ms"], found["duration"]) == pytest.approx((4e3, 21.0))


ANSWER = Completion(
    (),
    0.0,
    2.5,
    num_rounds=9,
    num_draft_tokens=8,
    num_accepted_draft_tokens=6,
    num_drafts=4,
    chunk_s=(0.5, 1.0, 2.5),
    prompt_tokens=10,
    counted_tokens=7,
)
ONE = Completion((), 0.0, 0.6, chunk_s=(0.5,), counted_tokens=1)
"""An answer of one token has no TPOT and no ITL."""


def test_the_figures_of_a_load() -> None:
    options = ServeOptions(goodput=("tpot:334", "e2el:2499"))
    load = Load(5.0, 2, [ANSWER, ONE, "no room"])
    found = report(options, options.settings("openai", "h:1", "m"), load)
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 10,
        "total_output_tokens": 8,
        "request_throughput": 0.4,
        "request_goodput": 0.2,
        "output_throughput": 1.6,
        "total_token_throughput": 3.6,
        "mean_ttft_ms": 500.0,
        "mean_tpot_ms": 2000 / 6,
        "mean_itl_ms": 1000.0,
        "std_itl_ms": 500.0,
        "median_e2el_ms": 1550.0,
        "p99_e2el_ms": 2481.0,
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 4,
    }
    assert {name: found.values[name] for name in expected} == pytest.approx(expected)
    assert (found.values["backend"], found.values["request_rate"]) == ("openai", "inf")
    assert found.warnings == ["warning: 1 of 3 requests failed: 1x no room"]
    [shown] = found.shown
    units = {name: unit for name, _, unit in shown.rows}
    some = ("duration", "mean ttft", "p99 itl", "output throughput", "request goodput", "failed")
    assert [units[name] for name in some] == ["s", "ms", "ms", "tokens/s", "requests/s", ""]


def test_rounds_without_drafts_count_in_no_acceptance_figure() -> None:
    """In nine rounds, nothing was drafted."""
    plain = replace(ANSWER, num_draft_tokens=0, num_accepted_draft_tokens=0, num_drafts=0)
    options = ServeOptions()
    found = report(options, options.settings("openai", "h:1", "m"), Load(5.0, 1, [plain]))
    assert found.values["spec_decode_num_drafts"] == 0
    assert found.values["spec_decode_acceptance_length"] is None
    assert found.values["spec_decode_acceptance_rate"] is None


def measured(
    capsys: pytest.CaptureFixture[str], server: OpenAiServer, *flags: str, code: int = 0
) -> tuple[dict[str, Any], str]:
    return reported(capsys, "bench", "serve", "--base-url", server.base_url, *flags, code=code)


def test_chats_and_texts_by_http(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tokens come in three chunks, 20 ms apart. TPOT is per token, ITL per chunk."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    counts = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 6}
    reply = Reply(gap_s=0.02, metrics={"speculative_decoding": counts})
    with serving(lambda body: reply) as server:
        found, err = measured(capsys, server, "--num-prompts", "4", "--max-tokens", "9")
    assert (found["completed"], found["failed"]) == (4, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 24)
    assert (found["backend"], found["model_id"]) == ("openai-chat", "served")
    assert found["mean_ttft_ms"] >= 20
    decoding_ms = found["mean_e2el_ms"] - found["mean_ttft_ms"]
    assert found["mean_tpot_ms"] == pytest.approx(decoding_ms / 5, abs=1e-2)
    assert 0 < found["mean_itl_ms"] <= decoding_ms / 2 + 1e-2
    assert found["spec_decode_acceptance_length"] == 2.5
    body = server.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": body["messages"][0]["content"]}]
    assert (body["max_completion_tokens"], body["model"]) == (9, "served")
    assert "ignore_eos" not in body
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in json.dumps(found) + err
    with serving(lambda body: Reply()) as server:
        flags = ("--raw", "--ignore-eos", "--temperature", "0.5", "--model", "mine")
        found, _ = measured(capsys, server, *flags, "--num-prompts", "1")
    assert (server.paths, found["backend"]) == (["/v1/completions"], "openai")
    [body] = server.bodies
    assert isinstance(body["prompt"], str)
    assert (body["max_tokens"], body["model"], body["temperature"]) == (128, "mine", 0.5)
    assert body["ignore_eos"] is True


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(status=429, error="try\n later \x1b[2J"), '1x HTTP 429: {"error": {"message": "try'),
        (Reply(breaks=True), "1x the stream: peer closed connection"),
        (Reply(error="out of\x07 memory"), "the stream ended with an error: {'message': 'out of"),
        (Reply(num_tokens=0), "or without `usage`"),
        (Reply(metrics={"speculative_decoding": 3}), "the stream is not in OpenAI's format"),
    ],
)
def test_a_request_that_fails_is_counted_and_told(
    reply: Reply, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: reply) as server:
        found, err = measured(capsys, server, "--num-prompts", "1", code=1)
    assert (found["completed"], found["failed"]) == (0, 1)
    [line] = [one for one in err.splitlines() if "warning: 1 of 1 requests failed: 1x " in one]
    assert said in line
    assert line.isprintable()


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """If the client has to ask for a model, the command fails; otherwise every request fails."""
    url = ["--base-url", "http://127.0.0.1:9", "--num-prompts", "2"]
    assert main(["bench", "serve", *url]) == 1
    said = "nothing answers at http://127.0.0.1:9 (All connection attempts failed); start a server"
    err = capsys.readouterr().err
    assert f"error: {said} there, or give another address with --base-url\n" in err
    found, err = reported(capsys, "bench", "serve", "--model", "m", *url, code=1)
    assert (found["failed"], found["mean_ttft_ms"]) == (2, None)
    assert f"2 of 2 requests failed: 2x {said}" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", "fast"), "--request-rate: 'fast' is wrong; it must be a number, at "),
        (("--goodput", "itl:5"), "--goodput: 'itl:5' is wrong; it must be NAME:MS"),
        (("--goodput", "ttft:inf"), "--goodput: 'ttft:inf' is wrong; it must be NAME:MS"),
        (
            ("--base-url", "h:80"),
            "--base-url: 'h:80' is wrong; it must begin with http:// or https",
        ),
        (
            ("--base-url", "http://h:65536"),
            "--base-url: 'http://h:65536' is wrong: the largest port is 65535",
        ),
        (("--base-url", "http://[::1"), "--base-url: 'http://[::1' is wrong"),
        (("--base-url", "http://h", "--dtype", "auto"), "--dtype: is for an Outrider deployment"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "bench", "serve", *flags).startswith(f"outrider: error: {message}")


@pytest.mark.xdist_group("redis")
async def test_a_load_by_grpc_is_counted_as_the_coordinator_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Draft and target are the same model. The coordinator refuses one of the two prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 5000}\n', "utf-8")
    target, draft = (ToyEngine(VOCAB, salt=1, max_model_len=4096) for _ in range(2))
    async with running_stack(target, draft, tmp_path / "redis", text=toy_text()) as stack:
        words = [
            "bench",
            "serve",
            "--server",
            stack.server.address,
            "--num-prompts",
            "7",
            "--max-tokens",
            "16",
            "--ignore-eos",
            "--num-draft-tokens",
            "3",
            "--max-concurrency",
            "1",
            "--prompts",
            str(file),
        ]
        found, err = await asyncio.to_thread(reported, capsys, *words, code=1)
    assert (found["backend"], found["model_id"]) == ("outrider-grpc", "model")
    assert found["server"] == stack.server.address
    done = found["completed"]
    assert done + found["failed"] == 7
    assert done in (3, 4)
    assert found["total_output_tokens"] == 16 * done
    # Each round commits one token more than it accepts. The first round of an answer has no draft.
    drafts, accepted = found["spec_decode_num_drafts"], found["spec_decode_accepted_tokens"]
    assert 0 < drafts <= 16 * done - accepted - done
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts, abs=1e-3)
    assert found["max_concurrent_requests"] == 1
    assert f"warning: {7 - done} of 7 requests failed: {7 - done}x max_tokens: " in err
