"""`bench peers`: its arithmetic, and the whole of it over a side that decodes nothing, a tiny
model's library sides and fakes of other libraries and their servers."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bench_sides import ScriptedSide
from openai_server import Reply, serving
from peer_stand_ins import make_environment
from rich.console import Console
from tiny_gguf import save_tiny_gguf

from benchmarks import libraries, peers
from benchmarks.clients import HttpClient
from benchmarks.libraries import PEERS, Library, Setting, TargetInputs, library_server
from benchmarks.measurement import Completion, Decoding, SideResult
from benchmarks.peers import PeersOptions, StartSubjects, level_of, report, run
from benchmarks.prompts import BenchPrompt
from benchmarks.report import Report, to_json
from benchmarks.speedup import Subject
from outrider.config import TargetConfig
from outrider.errors import ConfigError, Unavailable
from outrider.models.sources import resolve_model
from outrider.speculation.sampling_params import Rule


def measured() -> Report:
    """Ours writes 20 tokens a second plain and 40 speculatively, vllm 25 and 32, openvino 10."""
    ours = {
        "outrider plain": result((20, 1.0), (40, 2.0), (20, 1.0)),
        "outrider speculative": result((20, 0.5), (40, 1.0), (20, 0.5)),
    }
    theirs = {
        "vllm plain": result((10, 0.4), (40, 1.6), (20, 0.8)),
        "vllm n-gram": result((20, 0.625), (40, 1.25), (20, 0.625)),
        "openvino plain": result((20, 2.0), (40, 4.0), (20, 2.0)),
    }
    setup = {
        "model": "demo", "draft_model": "mine", "dtype": "bfloat16", "num_draft_tokens": 5,
        "num_prompts": 3, "max_tokens": 40, "rule": "token", "threads": 2,
    }  # fmt: skip
    levels = [level_of(0.0, 1, ours | theirs), level_of(1.0, 8, ours)]
    return report(setup, levels, {"pace": "not installed"})


GREEDY = Decoding(max_tokens=40, temperature=0.0, rule=Rule.GREEDY, seed=0, num_draft_tokens=5)


def result(*pairs: tuple[int, float]) -> SideResult:
    """Completions of so many tokens in so many seconds, with the first after a tenth of them."""
    completions = tuple(
        Completion(tuple(range(number)), 0.0, seconds, number, chunk_s=(seconds / 10,))
        for number, seconds in pairs
    )
    return SideResult(completions, sum(seconds for _, seconds in pairs))


def test_ratios_are_to_the_fastest_peer_of_all_tokens_over_all_time() -> None:
    """Plain to plain, and speculative to whatever is fastest."""
    first, second = json.loads(to_json(measured().values))["levels"]
    assert first["plain_ratio"] == pytest.approx(20 / 25)
    assert first["speculative_ratio"] == pytest.approx(40 / 32)
    assert first["first_token_ratio"] == pytest.approx(100 / 62.5)
    assert first["sides"]["vllm plain"] == {
        "tokens_per_second": 25.0, "num_tokens": 70, "time_to_first_token_ms": 80.0,
        "same_tokens": 2,
    }  # fmt: skip
    assert first["sides"]["vllm n-gram"]["same_tokens"] == 3
    assert (second["speculative_ratio"], second["plain_ratio"]) == (None, None)
    figures = second["sides"]["outrider plain"]
    assert (figures["time_to_first_token_ms"], figures["same_tokens"]) == (None, None)


def test_tokens_whose_ids_are_not_known_are_counted_and_not_compared() -> None:
    counted = SideResult((Completion((), 0.0, 2.0, 10, counted_tokens=10),), 2.0)
    level = level_of(
        0.0, 1, dict.fromkeys(("outrider plain", "outrider speculative", "vllm plain"), counted)
    )
    found = level["sides"]["vllm plain"]
    assert (found["tokens_per_second"], found["same_tokens"]) == (5.0, None)


def test_the_tables_have_a_row_for_each_side_and_ratios_below() -> None:
    """And a line says why a peer is missing."""
    output = io.StringIO()
    Console(file=output, width=150).print(*measured().shown, sep="\n")
    shown = " ".join(output.getvalue().split())
    for text in (
        "│ vllm n-gram │ 32.000",
        "plain_ratio: 0.80",
        "speculative_ratio: 1.25",
        "pace: not",
    ):
        assert text in shown


def subjects(
    side: ScriptedSide, target: TargetConfig | None, model: str, **changes: object
) -> StartSubjects:
    """A deployment where plain and speculative decoding are one side."""
    subject = Subject(
        client=side, model=model, draft_model="mine", dtype="bfloat16", num_draft_tokens=8,
        target=target,
    )  # fmt: skip

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[Subject, Subject]]:
        found = replace(subject, **changes)  # type: ignore[arg-type]
        yield found, found

    return start


def files(directory: Path) -> TargetConfig:
    return TargetConfig(directory=str(directory), dtype="auto", device="cpu", num_threads=1)


def side() -> ScriptedSide:
    return ScriptedSide(lambda prompt, decoding: (3, 1.0))


async def test_a_deployment_whose_files_are_elsewhere_has_no_peers() -> None:
    ours = side()
    with pytest.raises(ConfigError, match="server: the target's files"):
        await run(PeersOptions(), subjects(ours, None, "far"), lambda line: None)
    with pytest.raises(ConfigError, match="num_draft_tokens: 0"):
        start = subjects(ours, None, "far", num_draft_tokens=0)
        await run(PeersOptions(), start, lambda line: None)
    assert not ours.calls


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.Q8_0.gguf")


@pytest.fixture
def target(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    alone = [replace(one, bindings=one.bindings[:1], drafting=one.drafting[-1:]) for one in PEERS]
    monkeypatch.setattr(peers, "REST_S", 0.0)
    monkeypatch.setattr(libraries, "SWEEP_TOKENS", 2)
    monkeypatch.setattr(peers, "PEERS", alone)  # A sweep of one setting is short.
    return resolve_model(str(tiny))


def options(tmp_path: Path, **changes: object) -> PeersOptions:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The fox"}\n{"prompt": "The cat", "category": "cat"}\n')
    values = {
        "prompts": prompts, "num_prompts": None, "max_tokens": 3, "concurrency": (1, 2),
        "temperature": (0.0,), "environments": tmp_path / "peers",
    }  # fmt: skip
    return PeersOptions(**values | changes)  # type: ignore[arg-type]


async def test_every_side_decodes_every_prompt(
    tiny: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library one request at a time; stand-ins for vLLM and llama.cpp at both numbers of
    requests; what is not installed, or fails, is missing."""
    for name in ("vllm", "llama-cpp", "openvino"):
        make_environment(tmp_path / "peers", name)
    make_environment(tmp_path / "peers", "pace", installed=False)
    start = subjects(side(), files(target), str(tiny))
    found = json.loads(to_json((await run(options(tmp_path), start, lambda line: None)).values))
    one, two = (set(level["sides"]) for level in found["levels"])
    ours = {"outrider plain", "outrider speculative"}
    theirs = {"vllm plain", "vllm n-gram", "llama-cpp plain", "llama-cpp n-gram"}
    library = {"transformers plain", "transformers prompt lookup"}
    assert one == ours | theirs | library
    assert two == ours | theirs
    sides = [entry for level in found["levels"] for entry in level["sides"].values()]
    assert all(0 < entry["num_tokens"] <= 6 for entry in sides)
    assert found["levels"][0]["sides"]["vllm plain"]["num_tokens"] == 6
    missing = found["missing"]
    assert set(missing) == {"vllm-pace", "openvino", "pace"}
    assert missing["pace"] == missing["vllm-pace"] == "not installed; `make peers` installs it"
    assert "No module named 'openvino_genai'" in missing["openvino"]


SERVER = r"""
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--broken" in sys.argv:
    sys.exit(3)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("application/json", json.dumps({"data": [{"id": " ".join(sys.argv[1:])}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chunks = [{"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]},
                  {"choices": [], "usage": {"completion_tokens": body["max_completion_tokens"]}}]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self.answer("text/event-stream", events + "data: [DONE]\n\n")

    def answer(self, kind, text):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(tmp_path: Path, *flags: str) -> library_server:
    make_environment(tmp_path, "p")
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    words = (str(program), "--port", "{port}", "--model", "{directory}", *flags)
    library = Library(name="p", decoder="vllm", server=words)
    inputs = TargetInputs(
        target=files(Path("/model")), context_tokens=9, eos_token_ids=(), token_ids={},
        environments=tmp_path,
    )  # fmt: skip
    return library_server(library, Setting(options={"an_option": {"k": 3}}), inputs)


async def test_a_server_starts_in_processes_of_its_own_and_ends_with_them(tmp_path: Path) -> None:
    """Options become flags. Its answers are counted by its usage."""
    async with server(tmp_path) as running:
        done = await running.generate(BenchPrompt("Hello", "chat"), GREEDY)
        assert done.num_tokens == 40
        assert done.token_ids == ()
        assert done.first_token_s is not None
        assert 0 < done.first_token_s <= done.seconds
        assert '--model /model --an-option {"k": 3}' in running.model
    with pytest.raises(Unavailable, match="Connect"):
        async with HttpClient(f"http://{running.address}", raw=False):
            pass
    with pytest.raises(Unavailable, match="its server ended with exit status 3"):
        async with server(tmp_path / "broken", "--broken"):
            pass


async def test_our_servers_are_asked_without_drafts_and_with_them(
    tiny: Path, target: Path, tmp_path: Path
) -> None:
    """By HTTP, each with its own key; a peer without a server, or one that fails, is missing."""
    for name in ("vllm", "llama-cpp"):
        make_environment(tmp_path / "peers", name)
    with serving(lambda body: Reply()) as ours:
        start = subjects(side(), files(target), str(tiny), http_url=ours.base_url, api_key="sk-1")
        found = await run(
            options(tmp_path, servers=True, peers=("vllm", "llama-cpp"), concurrency=(1,)),
            start,
            lambda line: None,
        )
    [level] = found.values["levels"]
    missing = found.values["missing"]
    assert set(level["sides"]) == {"outrider plain", "outrider speculative"}
    assert level["sides"]["outrider plain"]["num_tokens"] == 12
    assert missing["llama-cpp"] == "it has no server"
    assert set(missing) == {"llama-cpp", "vllm"}
    plain = [body for body in ours.bodies if body.get("speculation") == {"num_draft_tokens": 0}]
    assert 2 * len(plain) == len(ours.bodies)
    assert {head.get("authorization") for head in ours.headers} == {"Bearer sk-1"}
