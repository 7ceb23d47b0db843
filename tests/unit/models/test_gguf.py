"""Conversion of GGUF files: complete or not at all, and once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny_gguf import save_tiny_gguf
from transformers.utils import logging as transformers_logging

from outrider.errors import ConfigError
from outrider.models import sources
from outrider.models.sources import converted, resolve_model


def test_a_file_that_is_no_gguf_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"bad.gguf: this GGUF file cannot be read"):
        resolve_model(str(bad))
    left = [p.name for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_a_conversion_shows_no_bar_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would stand between the lines of a command."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    source = save_tiny_gguf(tmp_path / "tiny.Q8_0.gguf")
    transformers_logging.enable_progress_bar()
    capfd.readouterr()
    assert (resolve_model(str(source)) / "model.safetensors").is_file()
    assert "%|" not in capfd.readouterr().err


def _fake_write(gguf: Path, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(gguf.read_bytes())


def test_changed_files_are_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory's name holds the content's fingerprint."""
    monkeypatch.setattr(sources, "_write", _fake_write)
    gguf = tmp_path / "model.Q4_1.gguf"
    gguf.write_bytes(b"one")
    first = converted(gguf, tmp_path)
    gguf.write_bytes(b"two")
    second = converted(gguf, tmp_path)
    assert first != second
    assert first.name.startswith("model.Q4_1-")
    assert [(d / "model.safetensors").read_bytes() for d in (first, second)] == [b"one", b"two"]


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first: it begins while the first is inside the conversion."""
    entered, others = threading.Event(), threading.Event()
    conversions: list[Path] = []

    def write(gguf: Path, directory: Path) -> None:
        conversions.append(directory)
        entered.set()
        others.wait(20)
        _fake_write(gguf, directory)

    monkeypatch.setattr(sources, "_write", write)
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"data")
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(converted(gguf, tmp_path)))
               for _ in range(2)]  # fmt: skip
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    others.set()
    for thread in threads:
        thread.join(20)
    assert len(conversions) == 1
    assert results[0] == results[1]
    assert (results[0] / "model.safetensors").read_bytes() == b"data"
