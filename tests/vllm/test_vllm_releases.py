"""What `outrider/engine/vllm_engine.py` imports from vLLM exists in the installed release and in
the next one, whose wheel `make test-vllm` unpacks into NEXT_VLLM."""

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from outrider.replica.vllm_release import VLLM_VERSION, vllm_version

ENGINE = Path(__file__).parents[2] / "outrider/engine/vllm_engine.py"
CHANGES: dict[str, str] = {}
"""By imported name: what must change in the engine for the next release."""
METHODS = (
    ("vllm.model_executor.models.interfaces", "SupportsEagle3.set_aux_hidden_state_layers"),
    ("vllm.model_executor.models.interfaces", "EagleModelMixin._maybe_add_hidden_state"),
)
"""Methods and fields that the engine uses without importing them."""


def imported() -> list[tuple[str, str]]:
    """(module, name) of every import from vLLM, and of `METHODS`."""
    return [*METHODS] + [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(ENGINE.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm.")
        for alias in node.names
    ]


def installed() -> Path:
    spec: Any = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent


def given_to(name: str) -> set[str | None]:
    """Keywords that the engine passes when it calls a class."""
    return {
        keyword.arg
        for node in ast.walk(ast.parse(ENGINE.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for keyword in node.keywords
    }


def signature(root: Path, module: str, name: str) -> str | None:
    """The parameters of a function, or the fields of a class that the engine passes, in the source
    at `root`. None if the source does not define the name."""
    path = root.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.is_file():
        return None
    name, _, method = name.partition(".")
    for node in ast.parse(source.read_text("utf-8")).body:
        match node:
            case ast.ClassDef() if node.name == name and method:
                found = (one for one in node.body if getattr(one, "name", "") == method)
                return next((ast.unparse(one) for one in found), None)
            case ast.FunctionDef() if node.name == name:
                return ast.unparse(node.args)
            case ast.ClassDef() if node.name == name:
                used = given_to(name)
                return "; ".join(
                    ast.unparse(part.target) + ": " + ast.unparse(part.annotation)
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) in used
                )
            case ast.ImportFrom() if any(alias.name == name for alias in node.names):
                base = module.split(".")
                base = base[: len(base) - node.level + path.is_dir()] if node.level else []
                target = ".".join([*base, *filter(None, [node.module])])
                return signature(root, target, name)
    return None


def test_the_engine_is_written_for_the_release_that_is_installed() -> None:
    assert (vllm_version() or "").startswith(f"{VLLM_VERSION}.")
    for module, name in imported():
        assert signature(installed(), module, name) is not None, (module, name)


def test_what_the_next_release_changes_is_listed() -> None:
    root = os.environ.get("NEXT_VLLM")
    if not root:
        pytest.skip("NEXT_VLLM names no unpacked wheel: make test-vllm")
    found = {}
    for module, name in imported():
        now, later = (signature(place, module, name) for place in (installed(), Path(root)))
        if later is None:
            found[name] = "gone from its module"
        elif later != now:
            found[name] = "another signature"
    assert found == CHANGES
