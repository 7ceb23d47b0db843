"""Conversion of GGUF files: complete or not at all, and once."""

from __future__ import annotations

from pathlib import Path

import pytest

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
