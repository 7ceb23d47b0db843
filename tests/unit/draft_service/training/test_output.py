"""The directory of a new drafter: what is refused, and what a failure leaves."""

from pathlib import Path

import pytest

from draft_service.training.storage import check_out, filled
from outrider.errors import SettingError


def fill(out: Path) -> None:
    with filled(check_out(out)) as directory:
        (directory / "drafter.json").write_text("new")


def test_new_and_empty_directories_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    for name in ("empty", "here", "aim"):
        (place / name).mkdir(parents=True)
    (place / "link").symlink_to(place / "aim")
    monkeypatch.chdir(place / "here")
    for out in (place / "empty", place / "sub" / "none", place / "link", Path()):
        fill(out)
    for name in ("empty", "sub/none", "aim", "here"):
        assert [path.name for path in (place / name).iterdir()] == ["drafter.json"]
    assert (place / "link").is_symlink()
    names = sorted(path.name for path in place.iterdir())
    assert names == ["aim", "empty", "here", "link", "sub"]


def test_what_cannot_be_filled_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    fill(tmp_path / "made")
    for out, message in {
        "made": "must be a new or an empty directory",
        "file": "must be a new or an empty directory",
        "file/out": "no drafter can be written there",
        "loop": "no drafter can be written there",
    }.items():
        with pytest.raises(SettingError, match=message) as bad:
            check_out(tmp_path / out)
        assert bad.value.key == "out"


def test_a_failure_at_the_end_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SettingError, match="could be written there"), filled(out):
        out.write_text("x")
    out.unlink()
    with pytest.raises(KeyboardInterrupt), filled(out):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
