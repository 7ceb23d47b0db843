"""`bench serve` as a whole against a server with OpenAI's streams, well-behaved and otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer, Reply, serving

from deploy.cli.main import main


def measured(
    capsys: pytest.CaptureFixture[str], server: OpenAiServer, *flags: str, code: int = 0
) -> tuple[dict[str, Any], str]:
    """The one JSON object, and what was said beside it."""
    assert main(["bench", "serve", "--json", "--base-url", server.base_url, *flags]) == code
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found, err


def test_the_figures_of_a_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's names. Three chunks of six tokens, 20 ms apart: TPOT is by token, ITL by chunk.
    What a busy machine adds to a time is in both sides of what is compared."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    told = {
        "speculative_decoding": {
            "num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 6,
        }
    }  # fmt: skip
    with serving(lambda body: Reply(gap_s=0.02, metrics=told)) as server:
        found, err = measured(
            capsys, server, "--num-prompts", "4", "--max-tokens", "9", "--goodput", "ttft:10000",
            "tpot:0.001",
        )  # fmt: skip
    assert (found["completed"], found["failed"]) == (4, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 24)
    assert found["model_id"] == "served"
    assert found["backend"] == "openai-chat"
    assert found["request_throughput"] == pytest.approx(4 / found["duration"], rel=1e-3)
    assert found["output_throughput"] == pytest.approx(24 / found["duration"], rel=1e-3)
    assert found["total_token_throughput"] == pytest.approx(44 / found["duration"], rel=1e-3)
    assert found["request_goodput"] == 0.0
    assert found["mean_ttft_ms"] >= 20
    decoding_ms = found["mean_e2el_ms"] - found["mean_ttft_ms"]
    assert found["mean_tpot_ms"] == pytest.approx(decoding_ms / 5, abs=1e-3)
    assert 0 < found["mean_itl_ms"] <= decoding_ms / 2 + 1e-3
    assert found["p99_e2el_ms"] >= found["median_e2el_ms"] >= 60
    assert found["max_concurrent_requests"] == 4
    assert 0 < found["max_output_tokens_per_s"] <= 24
    assert found["spec_decode_acceptance_rate"] == 75.0
    assert found["spec_decode_acceptance_length"] == 2.5
    assert len(server.bodies) == 4
    body = server.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": body["messages"][0]["content"]}]
    assert (body["max_completion_tokens"], body["model"]) == (9, "served")
    assert body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in json.dumps(found) + err


def test_texts_and_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body: Reply()) as server:
        found, _ = measured(
            capsys, server, "--raw", "--ignore-eos", "--temperature", "0.5", "--model", "mine",
            "--num-prompts", "2",
        )  # fmt: skip
    assert set(server.paths) == {"/v1/completions"}
    body = server.bodies[0]
    assert isinstance(body["prompt"], str)
    assert (body["max_tokens"], body["model"], body["temperature"]) == (128, "mine", 0.5)
    assert body["ignore_eos"] is True
    assert found["backend"] == "openai"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(status=429, error="try\n later \x1b[2J"), '1x HTTP 429: {"error": {"message": "try'),
        (Reply(breaks=True), "1x RemoteProtocolError"),
        (Reply(stops=True), "or before its usage"),
        (Reply(error="out of\x07 memory"), "the stream ended with an error: {'message': 'out of"),
        (Reply(num_tokens=0), "or before its usage"),
        (Reply(metrics={"speculative_decoding": 3}), "the stream is not as OpenAI's"),
    ],
)
def test_a_request_that_fails_is_counted_and_told(
    reply: Reply, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: reply) as server:
        found, err = measured(capsys, server, "--num-prompts", "1", code=1)
    assert (found["completed"], found["failed"]) == (0, 1)
    assert "warning: 1 of 1 requests failed: 1x " in err
    assert said in err
    assert err.isprintable() or err.count("\n") == 1


def test_a_hundred_streams_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The server answers nobody before all of them are there: nothing here holds one back."""
    with serving(lambda body: Reply(waits_for=100)) as server:
        found, _ = measured(capsys, server, "--num-prompts", "100")
    assert (found["completed"], found["max_concurrent_requests"]) == (100, 100)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model's name nothing can begin; with one, every request fails."""
    url = ["--base-url", "http://127.0.0.1:9", "--num-prompts", "2"]
    assert main(["bench", "serve", *url]) == 1
    assert "error: http://127.0.0.1:9/v1/models: ConnectError(" in capsys.readouterr().err
    assert main(["bench", "serve", "--json", "--model", "m", *url]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == 2
    assert json.loads(out)["mean_ttft_ms"] is None
    assert "2 of 2 requests failed: 2x ConnectError" in err


def test_the_report_is_one_page_with_the_same_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It loads nothing, and shows what the JSON object says. What a model is called cannot leave
    its text. One of nothing but failures is a page as well."""
    name = '</script><script src="x">&'
    path = tmp_path / "report.html"
    flags = ("--num-prompts", "3", "--report", str(path), "--model", name)
    with serving(lambda body: Reply(gap_s=0.01)) as server:
        found, _ = measured(capsys, server, *flags)
    text = path.read_text("utf-8")
    assert not re.search(r"""(src|href|action)=["'](?!#)|url\((?!#)|@import|<script""", text)
    shown = " ".join(re.sub("<[^>]*>", "", text).split())
    for key in ("completed", "mean_ttft_ms", "p99_e2el_ms"):
        value = found[key]
        cell = f"{value:.3f}" if isinstance(value, float) else str(value)
        assert f"{key.replace('_', ' ')} │ {cell}" in shown
    with serving(lambda body: Reply(status=503, error="away")) as server:
        measured(capsys, server, *flags, code=1)
    assert "<svg" in path.read_text("utf-8")


def test_the_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body: Reply()) as server:
        words = ["--base-url", f"{server.base_url}/v1/", "--num-prompts", "2"]
        assert main(["bench", "serve", *words]) == 0
    out = capsys.readouterr().out
    for text in ("served by openai-chat", "completed", "p99 ttft ms", "mean e2el ms"):
        assert text in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", "nan"), "--request-rate: nan is wrong"),
        (("--request-rate", "fast"), "--request-rate: 'fast' is wrong; it must be from 0.001"),
        (("--num-prompts", "0"), "--num-prompts: 0 is wrong"),
        (("--goodput", "ttft"), "--goodput: 'ttft' is wrong; it must be NAME:MS"),
        (("--goodput", "itl:5"), "--goodput: 'itl:5' is wrong; it must be NAME:MS"),
        (("--goodput", "ttft:-1"), "--goodput: 'ttft:-1' is wrong"),
        (("--prompts", "/nowhere.jsonl"), "--prompts: cannot read /nowhere.jsonl"),
        (("--report", "/nowhere/x.html"), "--report: /nowhere is no folder"),
        (("--base-url", "http://[::1"), "--base-url: 'http://[::1' is wrong"),
        (("--base-url", "http://h", "--dtype", "auto"), "--dtype: is for a deployment of ours"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line, nothing on standard output, nothing started."""
    try:
        code: object = main(["bench", "serve", *flags])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"outrider: error: {message}")
    assert err.count("\n") == 1
