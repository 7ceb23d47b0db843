"""Where a drafter goes: what is refused before the work begins, and what a failure leaves."""

from pathlib import Path

import pytest

from draft_service.training.storage import check_out, filled
from outrider.errors import SettingError


def drafter(directory: Path, text: str = "old") -> Path:
    directory.mkdir(parents=True)
    (directory / "drafter.json").write_text(text)
    return directory


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def fill(out: Path) -> None:
    with filled(check_out(out)) as directory:
        (directory / "drafter.json").write_text("new")


def test_an_earlier_drafter_an_empty_directory_and_nothing_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a link, which stays, and from within; nothing is left beside it."""
    place = tmp_path / "place"
    drafter(place / "earlier")
    (place / "empty").mkdir()
    (place / "here").mkdir()
    for out in (place / "earlier", place / "empty", place / "sub" / "none"):
        fill(out)
        assert content(out) == {"drafter.json": "new"}
    (tmp_path / "aim").mkdir()
    (place / "link").symlink_to(tmp_path / "aim")
    fill(place / "link")
    assert (place / "link").is_symlink()
    assert content(tmp_path / "aim") == {"drafter.json": "new"}
    monkeypatch.chdir(place / "here")
    fill(Path())
    assert content(place / "here") == {"drafter.json": "new"}
    names = sorted(path.name for path in place.iterdir())
    assert names == ["earlier", "empty", "here", "link", "sub"]


def test_what_cannot_be_filled_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (drafter(tmp_path / "shared") / "thesis.tex").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    (tmp_path / "theirs" / "README.md").write_text("# A head by others")
    for out, message in {
        "theirs": "exists and contains no drafter made by",
        "other": "exists and contains no drafter made by",
        "shared": "holds thesis.tex beside a drafter",
        "file/out": "no drafter can be written there",
        "loop": "no drafter can be written there",
    }.items():
        with pytest.raises(SettingError, match=message) as bad:
            check_out(tmp_path / out)
        assert bad.value.key == "out"
    assert (tmp_path / "shared" / "thesis.tex").exists()


@pytest.mark.parametrize("failing", ["out", "new"])
def test_a_failure_at_the_end_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """At each rename, and while the new one is written."""
    out = drafter(tmp_path / "out")
    rename = Path.rename

    def fail(path: Path, aim: Path) -> Path:
        if path.name == failing:
            raise OSError("no")
        return rename(path, aim)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(SettingError, match="could be written there: no") as bad:
        fill(out)
    assert bad.value.key == "out"
    assert content(out) == {"drafter.json": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(KeyboardInterrupt), filled(out):
        raise KeyboardInterrupt
    assert content(out) == {"drafter.json": "old"}
