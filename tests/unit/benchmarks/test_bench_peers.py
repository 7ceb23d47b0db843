"""`bench peers`: its arithmetic, and a run with a scripted deployment and scripted libraries."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from bench_sides import ScriptedSide, subject_of
from command_lines import printed
from tiny_gguf import save_tiny_gguf

from benchmarks import libraries, peers
from benchmarks.libraries import Library
from benchmarks.measurement import Completion, SideResult
from benchmarks.peers import PeersOptions, level_of, report, run
from benchmarks.rates import Work
from benchmarks.speedup import Subject
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.models.sources import resolve_model

pytestmark = pytest.mark.virtual


def result(*pairs: tuple[int, float]) -> SideResult:
    """Completions of (tokens, seconds). The first token comes after a tenth of the time."""
    completions = tuple(
        Completion(tuple(range(number)), 0.0, seconds, number, chunk_s=(seconds / 10,))
        for number, seconds in pairs
    )
    return SideResult(completions, tuple(Work(*pair) for pair in pairs))


OURS = {
    "outrider plain": result((20, 1.0), (40, 2.0), (20, 1.0)),
    "outrider speculative": result((20, 0.5), (40, 1.0), (20, 0.5)),
}
THEIRS = {
    "vllm plain": result((10, 0.4), (40, 1.6), (20, 0.8)),
    "vllm n-gram": result((20, 0.625), (40, 1.25), (20, 0.625)),
    "openvino plain": result((20, 2.0), (40, 4.0), (20, 2.0)),
}


def test_ratios_are_to_the_fastest_peer_of_all_tokens_over_all_time() -> None:
    """Outrider decodes 20 tokens/s plainly and 40 with drafts, vllm 25 and 32, openvino 10."""
    first, second = level_of(0.0, 1, OURS | THEIRS), level_of(1.0, 8, OURS)
    assert first["plain_ratio"] == pytest.approx(20 / 25)
    assert first["speculative_ratio"] == pytest.approx(40 / 32)
    assert first["first_token_ratio"] == pytest.approx(100 / 62.5)
    assert first["sides"]["vllm plain"] == {
        "tokens_per_second": pytest.approx(25.0), "num_tokens": 70, "same_tokens": 2,
        "time_to_first_token_ms": pytest.approx(80.0),
    }  # fmt: skip
    assert (second["speculative_ratio"], second["plain_ratio"]) == (None, None)
    figures = second["sides"]["outrider plain"]
    assert (figures["time_to_first_token_ms"], figures["same_tokens"]) == (None, None)
    setup = dict.fromkeys(
        ("model", "draft_model", "dtype", "num_draft_tokens", "rule", "num_prompts", "max_tokens",
         "threads")
    )  # fmt: skip
    found = report(setup, [first, second], {"openvino": "not installed"})
    shown = " ".join(printed(*found.shown).split())
    for text in ("│ vllm n-gram │ 32.000", "plain_ratio: 0.80", "openvino: not installed"):
        assert text in shown


class ScriptedLibrary(ScriptedSide):
    """Replaces a `LibraryProcess`. OpenVINO does not start."""

    def __init__(self, library: Library, *_: object) -> None:
        super().__init__(lambda request: (request.max_tokens, 1.0))
        self._name = library.name

    async def __aenter__(self) -> Self:
        if self._name == "openvino":
            raise ConfigError("No module named 'openvino_genai'")
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing is open."""


async def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, known: bool = True
) -> dict[str, Any]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "REST_S", 0.0)
    for module in (peers, libraries):
        monkeypatch.setattr(module, "LibraryProcess", ScriptedLibrary)
    tiny = save_tiny_gguf(tmp_path / "tiny.Q8_0.gguf")
    directory = str(resolve_model(str(tiny)))
    target = TargetConfig(directory=directory, dtype="auto", device="cpu", num_threads=1)
    side = ScriptedSide(lambda request: (3, 1.0))
    subject = subject_of(side, model=str(tiny), target=target if known else None)

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[Subject, Subject]]:
        yield subject, subject

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The fox"}\n{"prompt": "The cat", "category": "cat"}\n')
    options = PeersOptions(
        prompts=prompts, num_prompts=None, max_tokens=3, temperature=(0.0,), concurrency=(1, 2),
        environments=tmp_path,
    )  # fmt: skip
    return dict((await run(options, start, lambda line: None)).values)


async def test_each_side_decodes_each_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers gets one request at a time. Peers that are not installed or fail are missing."""
    for name in ("vllm", "openvino"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "installed").touch()
    found = await measured(tmp_path, monkeypatch)
    one, two = (level["sides"] for level in found["levels"])
    assert two.keys() == {"outrider plain", "outrider speculative", "vllm plain", "vllm n-gram"}
    assert one.keys() == two.keys() | {"transformers plain", "transformers prompt lookup"}
    assert {side["num_tokens"] for side in (*one.values(), *two.values())} == {6}
    assert found["missing"] == {
        "vllm-pace": "not installed; `make peers` installs it",
        "openvino": "plain does not work: No module named 'openvino_genai'",
        "llama-cpp": "not installed; `make peers` installs it",
    }


async def test_a_deployment_whose_files_are_elsewhere_has_no_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="server: has a target whose files"):
        await measured(tmp_path, monkeypatch, known=False)
