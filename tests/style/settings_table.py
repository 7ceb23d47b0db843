"""Makes the tables in `docs/settings.md` and `docs/serve.md`. Run as a module, it writes them."""

from pathlib import Path

from outrider.cli.vllm_flags import SAME, SERVE
from outrider.config.deployment import deployment_settings
from tests.support.documents import ROOT

SETTINGS = ROOT / "docs" / "settings.md"


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


def flag_table() -> str:
    """A row for the flags of vLLM with the same meaning, and one for each other hint."""
    rows = {"the same; some defaults differ ([settings.md](settings.md))": [*SAME]}
    for flag, words in SERVE.items():
        rows.setdefault(words, []).append(flag)
    lines = ["| `vllm serve` | `outrider serve` |", "| --- | --- |"]
    lines += [
        f"| {' '.join(f'`{one}`' for one in flags)} | {text} |" for text, flags in rows.items()
    ]
    return "\n".join(lines) + "\n"


PAGES = {SETTINGS: ("settings", table), ROOT / "docs" / "serve.md": ("flags", flag_table)}
"""Page -> the name and the maker of its table."""


def with_table(page: Path) -> str:
    """The page with an up-to-date table."""
    name, make = PAGES[page]
    first = f"<!-- {name}: made by `python -m tests.style.settings_table` -->\n"
    last = f"<!-- end of {name} -->\n"
    before, begin, rest = page.read_text("utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table of {name}")
    return f"{before}{first}\n{make()}\n{last}{after}"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_table(path), "utf-8")
