"""What a process that hosts a service does before and beside it."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer, save_tiny_model

from outrider.config import DraftConfig, TargetConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.interface import SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.engine.tensor_parallel.rank_process import (
    engine_of_a_replica,
)
from outrider.engine.threads import on_threads
from outrider.errors import BadRequest, SettingError
from outrider.grammar.constraint import Constraint
from outrider.models import linear_layers
from outrider.replica.process_setup import (
    LOADING_NICENESS,
    STANDARD_ERROR,
    advertised,
    available_cores,
    build_engine,
    build_grammars,
    build_lookup,
    log_at,
    log_to,
    on_passing_thread,
    use_threads,
)


def test_threads_are_set_for_libraries_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the environment when they are imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(variable, "before")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    use_threads(3)
    assert os.environ["GOMP_SPINCOUNT"] == "7"  # Who states it knows better.
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


async def test_a_passing_thread_ends_with_its_work() -> None:
    """Also where the work fails; it is not the event loop's own thread."""
    threads: list[threading.Thread] = []

    def work(answer: int) -> int:
        threads.append(threading.current_thread())
        return 1 // answer

    assert await on_passing_thread(work, 1) == 1
    with pytest.raises(ZeroDivisionError):
        await on_passing_thread(work, 0)
    for thread in threads:
        assert thread is not threading.current_thread()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_a_thread_that_loads_a_model_gives_way_and_no_later_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas that serve on the same cores go first; the new one's own steps do not give way."""
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())

    def priority(*_: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr("outrider.engine.tensor_parallel.rank_process.build_engine", priority)
    loading: Any = await on_passing_thread(
        engine_of_a_replica, TargetConfig(), "target", 1, None
    )  # fmt: skip
    assert loading == own + LOADING_NICENESS
    assert await on_passing_thread(priority) == own == priority()


def test_an_address_for_all_is_not_advertised() -> None:
    """Nobody can call 0.0.0.0."""
    assert advertised("127.0.0.1", "127.0.0.1:5") == "127.0.0.1:5"
    everywhere = "0.0.0.0"  # noqa: S104
    host, port = advertised(everywhere, f"{everywhere}:5").split(":")
    assert port == "5"
    assert host != everywhere


def test_logs_go_where_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To a file of the role's name, or to standard error; without a directory nowhere."""
    before = logging.root.handlers[:]
    level = logging.root.level
    try:
        log_to(str(tmp_path), "target")
        logging.getLogger("x").info("hello")
        log_to("", "draft")
        logging.getLogger("x").info("lost")
        log_to(STANDARD_ERROR, "draft")
        logging.getLogger("x").info("elsewhere")
    finally:
        logging.basicConfig(handlers=before, level=level, force=True)
    assert json.loads(capsys.readouterr().err)["message"] == "elsewhere"
    (line,) = (tmp_path / "target.log").read_text("utf-8").splitlines()
    assert {"level": "INFO", "logger": "x", "message": "hello"}.items() <= json.loads(line).items()
    assert [path.name for path in tmp_path.iterdir()] == ["target.log"]


def test_our_own_lines_have_a_level_of_their_own(tmp_path: Path) -> None:
    """`debug` brings no library's."""
    before, level = logging.root.handlers[:], logging.root.level
    try:
        log_to(str(tmp_path), "target")
        for chosen in ("info", "debug", "warning"):
            log_at(chosen)
            logging.getLogger("coordinator.decoding.sessions").debug("own at %s", chosen)
            logging.getLogger("asyncio").debug("library's at %s", chosen)
            logging.getLogger("outrider.tokenizer").info("news at %s", chosen)
    finally:
        log_at("notset")
        logging.basicConfig(handlers=before, level=level, force=True)
    lines = (tmp_path / "target.log").read_text("utf-8").splitlines()
    assert [json.loads(line)["message"] for line in lines] == [
        "news at info", "own at debug", "news at debug",
    ]  # fmt: skip


def test_a_rounded_draft_is_near_its_target_and_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files: logits differ, by little. Where no layer can be rounded, the setting is
    named."""
    directory = str(save_tiny_model(tmp_path))
    step = SequenceStep("s", (1, 2, 3), 3)
    logits = {}
    for name in ("tiny", "quantized:8"):
        engine = build_engine(DraftConfig(model=name, directory=directory), "draft", 1)
        [logits[name]] = engine.forward([step])
    exact, rounded = logits.values()
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()
    monkeypatch.setattr(linear_layers, "_has_kernel", lambda *_: False)
    with pytest.raises(SettingError, match="rounded to 4 bits") as bad:
        build_engine(DraftConfig(model="quantized:4", directory=directory), "draft", 1)
    assert bad.value.key == "draft_model"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_target_of_one_core_and_more_runs_short_steps(tmp_path: Path, num_threads: int) -> None:
    """Also where steps take long for a while: only of several cores one can be left free."""
    engine = build_engine(
        TargetConfig(directory=str(save_tiny_model(tmp_path))), "target", num_threads
    )
    with on_threads(num_threads):
        for token_id in range(32):
            engine.forward([SequenceStep("s", (token_id,), 1)])
    assert isinstance(engine, PagedEngine)
    assert (engine._contended is not None) == (num_threads > 1)


def test_too_little_memory_names_the_setting_of_its_role(tmp_path: Path) -> None:
    directory = str(save_tiny_model(tmp_path))
    target = TargetConfig(directory=directory, kv_cache_memory_bytes=5)
    draft = DraftConfig(model="tiny", directory=directory, kv_cache_memory_bytes=5)
    for config, role in ((target, "target"), (draft, "draft")):
        with pytest.raises(SettingError, match="5 bytes hold no page") as bad:
            build_engine(config, role, 1)
        prefix = {"target": "", "draft": "draft_"}[role]
        assert bad.value.key == f"{prefix}kv_cache_memory_bytes"
        long = replace(config, kv_cache_memory_bytes=20_000, max_model_len=128)
        with pytest.raises(SettingError, match=r"128 tokens are more than .* holds") as bad:
            build_engine(long, role, 1)
        assert bad.value.key == f"{prefix}max_model_len"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ngram", NgramDrafter),
        ("suffix", SuffixDrafter),
        ("hybrid:suffix,small", SuffixDrafter),
        ("small", type(None)),
        ("quantized:8", type(None)),
    ],
)
def test_a_name_leads_to_its_look_up(name: str, kind: type) -> None:
    """With its settings."""
    lookup = build_lookup(DraftConfig(model=name, suffix_tokens_total=7))
    assert type(lookup) is kind
    if isinstance(lookup, SuffixDrafter):
        assert lookup._config.tokens_total == 7


def test_grammars_are_those_of_the_targets_tokenizer(tmp_path: Path) -> None:
    """Its ends of text are the files' own where nobody names others."""
    spoken = save_tiny_model(
        tmp_path / "spoken", vocab_size=320, eos_token_id=5, tokenizer=byte_level_tokenizer()
    )
    constraint = Constraint.of_regex("a")
    for given, ends in (((), {0, 5}), ((7,), {7})):
        made = build_grammars(DraftConfig(tokenizer_directory=str(spoken)), given)
        assert made is not None
        assert made.get(constraint).eos_token_ids == ends
    assert build_grammars(DraftConfig()) is None
    made = build_grammars(TargetConfig(tokenizer_directory=str(tmp_path)))
    assert made is not None
    with pytest.raises(BadRequest, match="regex: the model has no tokenizer"):
        made.get(constraint)
