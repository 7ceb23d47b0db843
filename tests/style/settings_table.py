"""Makes the table in `docs/settings.md`. Run as a module, it writes the table."""

from pathlib import Path

from outrider.config.deployment import deployment_settings

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = ROOT / "docs" / "settings.md"
BEGIN = "<!-- settings: made by `python -m tests.style.settings_table` -->\n"
END = "<!-- end of settings -->\n"


def table() -> str:
    """A row for each setting: flag, default, description and allowed values. If a setting of the
    draft has the same description as the target's, both share a row."""
    rows: dict[str, list[str]] = {}
    for setting in deployment_settings().values():
        default = "" if setting.default in (None, "") else f"`{str(setting.default).lower()}`"
        if isinstance(setting.default, str) and setting.default:
            default = f"`{setting.default}`"
        words = setting.doc.replace("|", "\\|")
        if setting.choices or "minimum" in setting.schema:
            words += f" ({setting.allowed})"
        name = setting.flag.removeprefix("--draft-")
        for other in (f"--{name}", f"--target-{name}"):
            if rows.get(other, [])[1:] == [default, words]:
                rows[other][0] += f", `{setting.flag}`"
                break
        else:
            rows[setting.flag] = [f"`{setting.flag}`", default, words]
    lines = ["| flag | default | what it is |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows.values()]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page with an up-to-date table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no place for the table of settings")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    SETTINGS.write_text(with_table(SETTINGS.read_text("utf-8")), "utf-8")
