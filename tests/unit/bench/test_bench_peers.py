"""`bench peers`: its arithmetic, and a run with a scripted deployment and scripted libraries."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest.mock import Mock

import pytest

from outrider.bench import libraries, peers
from outrider.bench.libraries import Library
from outrider.bench.measurement import Completion, SideResult
from outrider.bench.peers import PeersOptions, level_of, report, run
from outrider.bench.rates import Work
from outrider.bench.speedup import Subject
from outrider.cli import bench
from outrider.config.deployment import TargetConfig
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.models.sources import resolve_model
from tests.support.bench_sides import ScriptedSide, subject_of
from tests.support.command_lines import printed, reported
from tests.support.tiny_gguf import save_tiny_gguf

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
        "tokens_per_second": pytest.approx(25.0),
        "num_tokens": 70,
        "same_tokens": 2,
        "time_to_first_token_ms": pytest.approx(80.0),
    }
    assert (second["speculative_ratio"], second["plain_ratio"]) == (None, None)
    figures = second["sides"]["outrider plain"]
    assert (figures["time_to_first_token_ms"], figures["same_tokens"]) == (None, None)
    setup = dict.fromkeys(
        (
            "model",
            "draft_model",
            "dtype",
            "num_draft_tokens",
            "rule",
            "num_prompts",
            "max_tokens",
            "threads",
            "precision",
        )
    )
    found = report(setup, [first, second], {"openvino": "not installed"})
    shown = " ".join(printed(*found.shown).split())
    for text in ("vllm n-gram 32.000", "plain_ratio: 0.80", "openvino: not installed"):
        assert text in shown


class ScriptedLibrary(ScriptedSide):
    """Replaces a `LibraryProcess`. A library in `fails` does not start. Loading takes as many
    seconds as `loading_s` says for the side, and each answer as many as `seconds` says."""

    fails: ClassVar[dict[str, str]] = {"openvino": "No module named 'openvino_genai'"}
    loading_s: ClassVar[dict[str, float]] = {}
    seconds: ClassVar[float] = 1.0
    killed: ClassVar[list[str]] = []

    def __init__(self, library: Library, setting: Any, inputs: Any) -> None:
        super().__init__(lambda request: (request.max_tokens, self.seconds))
        self._name, self._setting = library.name, setting

    async def __aenter__(self) -> Self:
        mode = "drafts" if "speculative_config" in self._setting else "plain"
        for name in (self._name, f"{self._name} {mode}"):
            if why := self.fails.get(name):
                raise ConfigError(why)
        await asyncio.sleep(self.loading_s.get(f"{self._name} {mode}", 0.0))
        return self

    def kill(self) -> None:
        self.killed.append(self._name)

    async def __aexit__(self, *error: object) -> None:
        """Nothing is open."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a GGUF file, two prompts and installed peers, in which nothing is slow."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "REST_S", 0.0)
    monkeypatch.setattr(ScriptedLibrary, "killed", [])
    for module in (peers, libraries):
        monkeypatch.setattr(module, "LibraryProcess", ScriptedLibrary)
    save_tiny_gguf(tmp_path / "tiny.Q8_0.gguf")
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "The fox"}\n{"prompt": "The cat", "category": "cat"}\n'
    )
    for name in ("vllm", "openvino"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "installed").touch()
    return tmp_path


def subjects(world: Path, *, known: bool = True, seconds: float = 1.0) -> Any:
    """Starts the same scripted deployment for both sides."""
    tiny = world / "tiny.Q8_0.gguf"
    directory = str(resolve_model(str(tiny)))
    target = TargetConfig(directory=directory, dtype="auto", device="cpu", num_threads=1)
    side = ScriptedSide(lambda request: (3, seconds))
    subject = subject_of(side, model=str(tiny), target=target if known else None)

    @asynccontextmanager
    async def start(*_: object) -> AsyncIterator[tuple[Subject, Subject]]:
        yield subject, subject

    return start


async def measured(
    world: Path, lines: list[str] | None = None, *, known: bool = True, **changes: Any
) -> dict[str, Any]:
    options = PeersOptions(
        prompts=world / "prompts.jsonl",
        num_prompts=None,
        max_tokens=3,
        temperature=(0.0,),
        concurrency=(1, 2),
        environments=world,
    )
    tell = (lines if lines is not None else []).append
    report = await run(replace(options, **changes), subjects(world, known=known), tell)
    return dict(report.values)


async def test_each_side_decodes_each_prompt(world: Path) -> None:
    """Transformers gets one request at a time. Peers that are not installed or fail are missing."""
    found = await measured(world)
    one, two = (level["sides"] for level in found["levels"])
    assert two.keys() == {"outrider plain", "outrider speculative", "vllm plain", "vllm n-gram"}
    assert one.keys() == two.keys() | {"transformers plain", "transformers prompt lookup"}
    assert {side["num_tokens"] for side in (*one.values(), *two.values())} == {6}
    assert found["missing"] == {
        "vllm-pace": "not installed; `make peers` installs it",
        "llama-cpp": "not installed; `make peers` installs it",
        "openvino": "No module named 'openvino_genai'",
    }
    assert found["settings"]["vllm n-gram"]["speculative_config"]["num_speculative_tokens"] == 3
    assert found["settings"].keys() == one.keys() - {"outrider plain", "outrider speculative"}


async def test_peers_of_which_none_is_installed_are_refused_before_a_deployment_starts(
    world: Path,
) -> None:
    with pytest.raises(ConfigError, match=rf"peers: nothing .* in {world}: vllm-pace, llama-cpp\."):
        await run(
            PeersOptions(peers=("llama-cpp", "vllm-pace"), environments=world),
            Mock(side_effect=AssertionError),
            lambda line: None,
        )


async def test_peers_of_which_none_is_loaded_end_the_benchmark(world: Path) -> None:
    lines: list[str] = []
    with pytest.raises(Unavailable, match="no peer was loaded"):
        await measured(world, lines, peers=("openvino",))
    assert lines[-1] == "warning: openvino is left out: No module named 'openvino_genai'"


@pytest.mark.parametrize(("peer", "needs_gguf"), [("vllm", False), ("openvino", True)])
async def test_a_gguf_file_is_written_only_for_a_peer_that_needs_one(
    peer: Any, needs_gguf: bool, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the folder is told."""
    monkeypatch.setattr(ScriptedLibrary, "fails", {})
    lines: list[str] = []
    await measured(world, lines, peers=(peer,))
    assert bool(glob(f"{world}/cache/**/*.f16.gguf", recursive=True)) == needs_gguf
    told = f"finding or writing a GGUF file for {peer} in {world / 'cache'}"
    assert (told in lines) == needs_gguf


async def test_a_peer_that_fails_is_named_before_anything_else_is_done(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A speculative side may fail alone. A side may also fail while it decodes."""
    monkeypatch.setattr(ScriptedLibrary, "fails", {"vllm drafts": "no drafts here"})
    decode, broken = ScriptedLibrary.generate, OutriderError("it broke")

    async def generate(self: ScriptedLibrary, request: Any) -> Completion:
        if self._name == "openvino" and len(self.calls) == 3:
            raise broken
        return await decode(self, request)

    monkeypatch.setattr(ScriptedLibrary, "generate", generate)
    lines: list[str] = []
    found = await measured(world, lines, concurrency=(1,))
    reasons = {
        "vllm-pace": "not installed; `make peers` installs it",
        "llama-cpp": "not installed; `make peers` installs it",
        "vllm n-gram": "no drafts here",
        "openvino plain": "it failed: it broke",
        "openvino prompt lookup": "it failed: it broke",
    }
    assert found["missing"] == reasons
    told = {
        name: lines.index(f"warning: {name} is left out: {why}") for name, why in reasons.items()
    }
    assert told["llama-cpp"] < lines.index("loading the model: vllm plain")
    next_one = lines.index("loading the model: openvino plain")
    assert told["vllm n-gram"] == lines.index("loading the model: vllm n-gram") + 1 < next_one
    assert told["openvino plain"] < lines.index(
        "temperature 0, 1 at a time: vllm plain 3.0 tokens/s, first token after 1000 ms"
    )
    assert {"vllm plain", "transformers plain"} < found["levels"][0]["sides"].keys()
    assert ScriptedLibrary.killed == ["openvino"] * 2


@pytest.mark.parametrize(("minutes", "prompts"), [(1.0, [1]), (3.0, [3, 4]), (4.0, [4, 4])])
async def test_levels_have_fewer_prompts_if_the_time_is_short(
    world: Path, minutes: float, prompts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sides of peers take 4 s for a prompt, and Outrider's two take 1 s. So the first level
    takes 36 s for warm-ups and 18 s for each prompt. In the second one, only Outrider's sides are
    warmed up, two prompts run at a time, and there are two turns of two prompts. After a minute, no
    turn of it has ended, and only the side that runs may go on."""
    lines = [f'{{"prompt": "{word}"}}' for word in ("fox", "cat", "dog", "hen")]
    (world / "prompts.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(ScriptedLibrary, "seconds", 4.0)
    began_s = asyncio.get_running_loop().time()
    found = await measured(world, minutes=minutes)
    seconds = asyncio.get_running_loop().time() - began_s
    assert [level["num_prompts"] for level in found["levels"]] == prompts
    for level in found["levels"]:
        assert {side["num_tokens"] for side in level["sides"].values()} == {
            3 * level["num_prompts"]
        }
    assert seconds < 60 * minutes + 4.0


async def test_a_level_is_left_out_if_the_time_is_up(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first level takes 54 s at least, and the second one 14 s. The others do not begin."""
    monkeypatch.setattr(ScriptedLibrary, "seconds", 4.0)
    options = PeersOptions(
        prompts=world / "prompts.jsonl",
        num_prompts=None,
        max_tokens=3,
        temperature=(0.0, 1.0),
        concurrency=(1, 2),
        environments=world,
        minutes=1.0,
    )
    found = await run(options, subjects(world), lambda line: None)
    done = [(level["temperature"], level["concurrency"]) for level in found.values["levels"]]
    assert done == [(0.0, 1)]
    left_out = [
        (level["temperature"], level["concurrency"]) for level in found.values["left_out_levels"]
    ]
    assert left_out == [(0.0, 2), (1.0, 1), (1.0, 2)]
    assert found.warnings == [
        "warning: not measured, because the time was up: temperature "
        f"{temperature:g}, {number} at a time"
        for temperature, number in left_out
    ]


async def test_a_peer_that_is_loaded_too_slowly_is_left_out(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of four minutes is for loading. No side is loaded after it. A sweep adds its time."""
    loading = {"vllm plain": 70.0, "vllm drafts": 1e5}
    monkeypatch.setattr(ScriptedLibrary, "loading_s", loading)
    lines: list[str] = []
    clock = asyncio.get_running_loop().time
    began_s = clock()
    found = await measured(world, lines, minutes=4.0, peers=("vllm", "transformers"))
    why = "not loaded before 50% of the time (--minutes) was up"
    assert found["missing"] == {"vllm n-gram": why, "transformers": why}
    assert "loading the model: transformers plain" not in lines
    assert [level["num_prompts"] for level in found["levels"]] == [2, 2]
    assert found["left_out_levels"] == []
    assert clock() - began_s < 240.0

    async def sweep(*_: object) -> Any:
        await asyncio.sleep(100.0)
        return {"plain": {}}

    monkeypatch.setattr(libraries, "fastest_settings", sweep)
    found = await measured(world, minutes=4.0, peers=("vllm", "openvino"), sweep=True)
    assert "vllm" not in found["missing"]


async def test_a_peer_that_hangs_is_ended_and_the_time_is_kept(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two sides that hang ends 2 minutes after the level's 5 minutes, and the other
    one after 2 minutes more. The level then has one repetition."""
    decode = ScriptedLibrary.generate

    async def generate(self: ScriptedLibrary, request: Any) -> Completion:
        if self._name == "vllm":
            await asyncio.sleep(1e5)
        return await decode(self, request)

    monkeypatch.setattr(ScriptedLibrary, "generate", generate)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    found = await measured(world, minutes=10.0)
    assert clock() - began_s < 600 + 120
    assert ScriptedLibrary.killed == ["vllm"] * 2
    for side in ("vllm plain", "vllm n-gram"):
        assert found["missing"][side] == (
            f"it failed: {side} did not end its turn in the time of the benchmark"
        )
    assert [level["num_prompts"] for level in found["levels"]] == [1, 2]


async def test_a_sweep_is_not_part_of_the_time(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `sweep`, no setting is searched for."""
    swept: list[str] = []

    async def sweep(library: Library, *_: object) -> Any:
        swept.append(library.name)
        await asyncio.sleep(1e4)
        return {"plain": {}}

    monkeypatch.setattr(libraries, "fastest_settings", sweep)
    found = await measured(world)
    assert swept == []
    again = await measured(world, sweep=True)
    assert swept == ["vllm", "openvino"]
    for one, other in zip(found["levels"], again["levels"], strict=True):
        assert one["num_prompts"] == other["num_prompts"] == 2
    assert "vllm n-gram" not in again["levels"][0]["sides"]


async def test_a_deployment_whose_files_are_elsewhere_has_no_peers(world: Path) -> None:
    with pytest.raises(ConfigError, match="server: has a target whose files"):
        await measured(world, known=False)


@pytest.mark.parametrize(("flag", "is_told"), [("--json", True), ("--quiet", False)])
def test_progress_goes_to_standard_error_beside_the_json(
    flag: str,
    is_told: bool,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --quiet, only warnings do. The figures of a level come before the next level begins."""
    monkeypatch.setattr(bench, "_two_tenants", subjects(world, seconds=0.001))
    monkeypatch.setattr(ScriptedLibrary, "seconds", 0.001)
    words = [
        "bench",
        "peers",
        "--prompts",
        str(world / "prompts.jsonl"),
        "--environments",
        str(world),
        "--temperature",
        "0",
        "--concurrency",
        "1,2",
        "--max-tokens",
        "3",
    ]
    found, err = reported(capsys, *words, *{flag} - {"--json"})
    assert [level["concurrency"] for level in found["levels"]] == [1, 2]
    assert "warning: openvino is left out: No module named 'openvino_genai'" in err
    told = [
        err.find(f"outrider: {line}")
        for line in (
            "loading the model: vllm plain",
            "temperature 0, 1 at a time: vllm plain ",
            "temperature 0, 2 at a time\n",
            "temperature 0, 2 at a time: vllm n-gram ",
        )
    ]
    assert told == sorted(told)
    assert (min(told) >= 0) == is_told
    assert max(told) >= 0 or not is_told
