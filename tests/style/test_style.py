"""The style that can be measured (docs/ARCHITECTURE.md, style), held over every file of ours."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("outrider", "draft_service", "target_service", "coordinator", "deploy", "benchmarks")
GENERATED = ROOT / "outrider" / "v1"

FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100
# A note to a tool says nothing to a reader and may stand beyond the last column.
PRAGMA = re.compile(r"  # (type: ignore|noqa|fmt: skip).*$")
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}

# The paths, or path::function, that may break a limit, each with its reason.
EXCEPTIONS: dict[str, str] = {
    "outrider/engine/cuda/triton_kernels.py::attend_blocks": (
        "a third of it is what a kernel is given, and its registers are not to be handed around"
    ),
}


def _python_files(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if GENERATED not in path.parents
    )


PRODUCT_FILES = _python_files(*PRODUCT)
ALL_FILES = [*PRODUCT_FILES, *_python_files("tests")]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _unless_excepted(found: dict[str, str]) -> None:
    wrong = {place: what for place, what in found.items() if place not in EXCEPTIONS}
    assert not wrong, "\n".join(f"{place}: {what}" for place, what in wrong.items())


def test_functions_fit_a_screen() -> None:
    """No function is longer than `FUNCTION_LINES_MAX` lines."""
    found = {}
    for path in ALL_FILES:
        for function in _functions(_tree(path)):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found[f"{_name(path)}::{function.name}"] = f"{lines} lines"
    _unless_excepted(found)


def test_lines_fit_a_screen() -> None:
    """No line is longer than `LINE_COLUMNS_MAX`."""
    found = {}
    for path in ALL_FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            line = PRAGMA.sub("", line)
            if len(line) > LINE_COLUMNS_MAX:
                found[f"{_name(path)}:{number}"] = f"{len(line)} columns"
    _unless_excepted(found)


def test_files_and_folders_are_named_after_an_idea() -> None:
    """No file or folder has a name that says nothing."""
    found = {}
    for path in ALL_FILES:
        for part in path.relative_to(ROOT).with_suffix("").parts:
            if set(part.lower().split("_")) & FORBIDDEN_NAMES:
                found[_name(path)] = f"{part!r} says nothing"
    _unless_excepted(found)


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports the modules of folders without `__init__.py` by their file names alone."""
    found: dict[str, str] = {}
    first: dict[str, Path] = {}
    for path in _python_files("tests"):
        if path.name == "conftest.py" or (path.parent / "__init__.py").exists():
            continue
        other = first.setdefault(path.name, path)
        if other is not path:
            found[_name(path)] = f"has the name of {_name(other)}"
    _unless_excepted(found)


def _parts(path: Path) -> tuple[str, ...]:
    """The module's dotted name, in parts."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _shared_names() -> set[tuple[str, str]]:
    """(module, name) of all that product code imports from a folder other than its own."""
    shared = set()
    for path in PRODUCT_FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                module = tuple(node.module.split("."))
                if module[:-1] != _parts(path)[:-1] and module != _parts(path)[:-1]:
                    shared |= {(node.module, alias.name) for alias in node.names}
    return shared


def test_what_folders_share_is_documented() -> None:
    """What another folder imports has a docstring, and so have its public methods.

    A property, a dunder method and a method that a base class declares need none.
    """
    shared = _shared_names()
    found = {}
    for path in PRODUCT_FILES:
        module = ".".join(_parts(path))
        for node in _tree(path).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (module, node.name) not in shared:
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


def test_product_checks_stay_on_without_asserts() -> None:
    """Product code has no `assert`, which `python -O` removes: `outrider.errors.check` stays."""
    found = {}
    for path in PRODUCT_FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Assert):
                found[f"{_name(path)}:{node.lineno}"] = "bare assert"
    _unless_excepted(found)


def test_product_loads_nothing_that_runs_code() -> None:
    """No pickle, eval, exec or torch.load in product code."""
    found = {}
    for path in PRODUCT_FILES:
        for node in ast.walk(_tree(path)):
            place = f"{_name(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                if names & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}:
                    found[place] = "imports a module that unpickles"
            elif isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Name) and called.id in ("eval", "exec"):
                    found[place] = f"calls {called.id}"
                is_load = isinstance(called, ast.Attribute) and called.attr == "load"
                if is_load and ast.unparse(called) == "torch.load":
                    found[place] = "calls torch.load"
    _unless_excepted(found)


def test_values_are_frozen() -> None:
    """Every dataclass of the product is frozen: state lives in classes with methods."""
    found = {}
    for path in PRODUCT_FILES:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                words = ast.unparse(decorator)
                if words.startswith("dataclass") and "frozen=True" not in words:
                    found[f"{_name(path)}::{node.name}"] = "a dataclass that is not frozen"
    _unless_excepted(found)


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("num_speculative_tokens", "num_draft_tokens"),
        ("draft_len", "num_draft_tokens"),
        ("n_tokens", "num_tokens"),
        ("rejected_token", "correction"),
        ("recovered_token", "correction"),
    ],
)
def test_one_word_per_thing(word: str, instead: str) -> None:
    """Identifiers of the product use the glossary's words."""
    found = {}
    for path in PRODUCT_FILES:
        for node in ast.walk(_tree(path)):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            name = name or getattr(node, "arg", None) or getattr(node, "name", None)
            if isinstance(name, str) and name.startswith(word):
                found[f"{_name(path)}:{getattr(node, 'lineno', 0)}"] = f"{name}: say {instead}"
    _unless_excepted(found)


def test_exceptions_are_needed() -> None:
    """Every exception names a file that exists, and says why."""
    for place, reason in EXCEPTIONS.items():
        assert (ROOT / place.split(":")[0]).exists(), f"{place} is gone"
        assert len(reason) > 20, f"{place} has no reason"
