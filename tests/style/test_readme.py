"""What the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.style.settings_table import PAGES, with_table
from tests.support.documents import DOCUMENTS, README, ROOT

FOLDERS = ("outrider", "draft_service", "target_service", "coordinator", "tests", "protos")
FILES = [one.as_posix() for folder in FOLDERS for one in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_table_that_the_code_makes_is_up_to_date(page: Path) -> None:
    """If this fails, run `python -m tests.style.settings_table`."""
    assert page.read_text("utf-8") == with_table(page)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "api.md"], ids=lambda page: page.name)
def test_the_python_examples_compile(page: Path) -> None:
    """Everything that they import from the client exists."""
    import outrider.client

    source = re.search(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
    for node in ast.walk(ast.parse(source[1])):
        if isinstance(node, ast.ImportFrom) and node.module == "outrider.client":
            for alias in node.names:
                assert hasattr(outrider.client, alias.name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    """Relative links exist, and so do paths of this project in backticks, or ends of them."""
    text = document.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`([\w/.-]+\.py)`", text):
        assert any(f"/{one}".endswith(f"/{path}") for one in FILES), path


def test_tests_that_documents_name_are_there() -> None:
    """This includes tests in commands."""
    files = [*(ROOT / "tests").rglob("*.py")]
    there = set(re.findall(r"def (test_\w+)", "".join(path.read_text("utf-8") for path in files)))
    there |= {path.stem for path in files}
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        assert set(re.findall(r"\btest_\w+", text)) <= there, document
        paths = re.findall(r"\btests/[\w/.]*\w", text)
        assert [path for path in paths if not (ROOT / path).exists()] == [], document


def test_every_make_target_is_real() -> None:
    """`make X` in a document names a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text("utf-8"), re.M))
        assert named <= targets, document
