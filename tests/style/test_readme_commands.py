"""The commands in the documents have flags that exist, and can run in the documents' order."""

import re
import shlex
from pathlib import Path

import pytest

from outrider.bench import speedup
from outrider.cli import generate, plan
from outrider.cli.command import Arguments
from outrider.cli.main import parse
from outrider.cli.options import deployment_config
from tests.support.documents import DOCUMENTS, README, ROOT, lines_of

GUIDES = [
    README,
    *(ROOT / "docs" / f"{name}.md" for name in ("get-started", "serve", "scale", "drafters")),
]
NEEDS_DEPLOYMENT = ("status", "scale", "upgrade", "stop")
MADE_BY_READER = {"more.jsonl", "mine.jsonl"}


def words_of(line: str) -> list[str] | None:
    """The words after `outrider`; None if the line runs another program. Variables may come before
    `outrider`, or another program and `--` that run it elsewhere."""
    words = shlex.split(line, comments=True) if "outrider " in line else []
    for place, word in enumerate(words):
        before = words[:place]
        is_first = all("=" in one for one in before) or before[-1] == "--"
        if Path(word).name == "outrider" and is_first:
            return words[place + 1 :]
    return None


def commands_of(document: Path) -> list[tuple[str, Arguments]]:
    """Each `outrider` command line is parsed by the real parser."""
    found = []
    for line in lines_of(document):
        words = words_of(line)
        if words is not None:
            found.append((line, parse(words)))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_have_flags_that_exist(document: Path) -> None:
    """The values are accepted too: a wrong one would raise an error here."""
    for line, arguments in commands_of(document):
        name = arguments.run.__name__
        if name == "serve" and arguments.config is None:
            if arguments.target is not None:
                arguments.settings["model"] = arguments.target
            if "--ssl-certfile" not in line and "--api-key-file" not in line:
                deployment_config(arguments)
        elif name == "generate":
            generate._request(arguments)
        elif "bench speedup" in line:
            speedup.SpeedupOptions.from_arguments(arguments).load_prompts()
        elif name == "plan" and not arguments.simulate:
            plan.PlanOptions.from_arguments(arguments).load_prompts()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_the_commands_of_a_guide_work_in_their_order(guide: Path) -> None:
    """A deployment runs when a command needs one, and none runs when one is started. Files that a
    command uses were made by an earlier command, or exist."""
    runs, made = False, {path.name for path in ROOT.iterdir()} | MADE_BY_READER
    for line, arguments in commands_of(guide):
        if "ray job submit" in line:  # The line runs on another machine.
            continue
        assert line.startswith("outrider "), line
        name = arguments.run.__name__
        if name == "serve":
            assert not runs, line
            assert arguments.detach, line
            runs = True
        elif name in NEEDS_DEPLOYMENT:
            assert runs, line
            runs = name != "stop"
        for option in ("prompts", "measure", "start_from", "corpus"):
            path = getattr(arguments, option, None)
            assert path is None or callable(path) or Path(path).parts[0] in made, line
        for word in re.findall(r"my-\w+", str(arguments.settings.get("draft_model", ""))):
            assert word in made, line
        if name == "distill":
            made.add(str(arguments.out))
    assert not runs or guide == README, "a deployment that nothing stops"
    assert made or guide != GUIDES[-1]
