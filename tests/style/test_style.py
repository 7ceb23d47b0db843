"""Checks the measurable rules of style (docs/contributing.md, "Rules") in all files."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("outrider", "draft_service", "target_service", "coordinator")
GENERATED = ROOT / "outrider" / "v1"

FUNCTION_LINES_MAX = 70
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
GLOSSARY = {
    "num_speculative_tokens": "num_draft_tokens",
    "draft_len": "num_draft_tokens",
    "n_tokens": "num_tokens",
    "rejected_token": "correction",
    "recovered_token": "correction",
}
"""Prefixes of identifiers that are not allowed, and what to use instead."""

# Paths, or path::function, that may break a limit, each with the reason.
EXCEPTIONS: dict[str, str] = {
    "outrider/engine/cuda/triton_kernels.py::attend_blocks": (
        "a third of it is what a kernel is given, and its registers are not to be handed around"
    ),
    "outrider/speculation/triton_kernels.py::settle_rows": "as above",
}


_TEST_MODULE = re.compile(r"(^|\.)(test_\w+|conftest)(\.|$)")


def _python_files(*folders: str) -> list[Path]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if GENERATED not in path.parents)


PRODUCT_FILES = _python_files(*PRODUCT)
ALL_FILES = [*PRODUCT_FILES, *_python_files("tests")]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _nodes(files: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in files:
        for node in ast.walk(_tree(path)):
            yield path, node


def _place(path: Path, node: ast.AST) -> str:
    return f"{_name(path)}::{getattr(node, 'name', getattr(node, 'lineno', 0))}"


def _unless_excepted(found: dict[str, str]) -> None:
    wrong = {place: what for place, what in found.items() if place not in EXCEPTIONS}
    assert not wrong, "\n".join(f"{place}: {what}" for place, what in wrong.items())


def test_the_formatter_decides_how_code_looks() -> None:
    """Where a table of numbers reads better by hand, it is data in a file."""
    marks = ("# fmt: " + "skip", "# fmt: " + "off")
    found = [_name(path) for path in ALL_FILES for mark in marks if mark in path.read_text("utf-8")]
    assert found == []


def test_functions_fit_a_screen() -> None:
    found = {}
    for path, node in _nodes(ALL_FILES):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found[_place(path, node)] = f"{lines} lines"
    _unless_excepted(found)


def test_files_and_folders_are_named_after_an_idea() -> None:
    """No file or folder has a meaningless name. Test modules have distinct names, because pytest
    imports them by file name only."""
    found = {}
    first: dict[str, Path] = {}
    for path in ALL_FILES:
        for part in path.relative_to(ROOT).with_suffix("").parts:
            if set(part.lower().split("_")) & FORBIDDEN_NAMES:
                found[_name(path)] = f"{part!r} says nothing"
        if path.name.startswith("test_") and first.setdefault(path.name, path) is not path:
            found[_name(path)] = f"has the name of {_name(first[path.name])}"
    _unless_excepted(found)


def test_no_test_imports_from_a_test_module() -> None:
    """What tests share is in `tests/support`, and its README names each module."""
    found = {}
    for path, node in _nodes(ALL_FILES):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        for module in modules:
            if _TEST_MODULE.search(module) and module.split(".")[0] not in PRODUCT:
                found[_place(path, node)] = f"imports from {module}"
    _unless_excepted(found)
    support = ROOT / "tests" / "support"
    listed = (support / "README.md").read_text("utf-8")
    assert [one.name for one in support.glob("*.py") if f"`{one.name}`" not in listed] == []


def _parts(path: Path) -> tuple[str, ...]:
    """The parts of the module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _shared_names() -> set[tuple[str, str]]:
    """(module, name) of everything that product code imports from another folder."""
    shared = set()
    for path in PRODUCT_FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                module = tuple(node.module.split("."))
                if module[:-1] != _parts(path)[:-1] and module != _parts(path)[:-1]:
                    shared |= {(node.module, alias.name) for alias in node.names}
    return shared


def test_what_folders_share_is_documented() -> None:
    """What another folder imports has a docstring, and so have its public methods, except for
    properties, dunder methods and methods that a base class declares."""
    shared = _shared_names()
    found = {}
    for path in PRODUCT_FILES:
        for node in _tree(path).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (".".join(_parts(path)), node.name) not in shared:
                continue
            if not ast.get_docstring(node):
                found[f"{_name(path)}::{node.name}"] = "no docstring"
            if isinstance(node, ast.ClassDef) and not node.bases:
                for method in node.body:
                    if (
                        isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                        and not method.name.startswith("_")
                        and not any("property" in ast.unparse(d) for d in method.decorator_list)
                        and not ast.get_docstring(method)
                    ):
                        found[f"{_name(path)}::{node.name}.{method.name}"] = "no docstring"
    _unless_excepted(found)


def test_values_are_frozen_and_things_have_one_name() -> None:
    """Every dataclass of the product is frozen, because state belongs into classes with methods.
    Identifiers use the words of the glossary."""
    found = {}
    for path, node in _nodes(PRODUCT_FILES):
        if isinstance(node, ast.ClassDef):
            for decorator in map(ast.unparse, node.decorator_list):
                if decorator.startswith("dataclass") and "frozen=True" not in decorator:
                    found[_place(path, node)] = "a dataclass that is not frozen"
        for attribute in ("id", "attr", "arg", "name"):
            name = getattr(node, attribute, None)
            if isinstance(name, str) and name.startswith(tuple(GLOSSARY)):
                instead = next(says for word, says in GLOSSARY.items() if name.startswith(word))
                found[_place(path, node)] = f"{name}: say {instead}"
    _unless_excepted(found)
