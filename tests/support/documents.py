"""The project's documents."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]


def lines_of(document: Path) -> list[str]:
    """The lines of the page's console blocks, with continued lines joined."""
    blocks = re.findall(r"^```console\n(.*?)^```", document.read_text("utf-8"), re.S | re.M)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
