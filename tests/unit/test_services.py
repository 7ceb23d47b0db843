"""Packages with the names of the services' packages."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from outrider.services import ROOT, SERVICES

DECOY = "coordinator"
PROGRAM = "import sys; sys.path[:0] = [{decoys!r}, {root!r}]; {first}"
OURS = f"import outrider.services as s; s.secure(); import {DECOY}.actor"


def test_the_wheel_has_no_common_names_at_its_root() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = find_packages(str(ROOT), **project["tool"]["setuptools"]["packages"]["find"])
    assert {name.partition(".")[0] for name in found} == {"outrider", *SERVICES}


def run(decoys: Path, first: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(decoys=str(decoys), root=str(ROOT), first=first)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(params=[True, False], ids=["package", "plain folder"])
def decoys(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / DECOY).mkdir()
    if request.param:
        (tmp_path / DECOY / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize("first", ["cli", "fleet", "bench"])
def test_a_folder_that_is_found_first_does_not_hide_ours(decoys: Path, first: str) -> None:
    done = run(decoys, f"import outrider.{first}, {DECOY}; print({DECOY}.__file__)")
    assert done.stdout.strip() == str(ROOT / DECOY / "__init__.py"), done.stderr


def test_an_imported_package_of_the_same_name_is_named(decoys: Path) -> None:
    done = run(decoys, f"import {DECOY}; {OURS}")
    if (decoys / DECOY / "__init__.py").exists():
        last = done.stderr.splitlines()[-1]
        assert f"but {decoys / DECOY} was imported in its place" in last
        assert str(ROOT / DECOY) in last
    else:  # Python prefers a package, wherever it is, to a plain folder.
        assert done.returncode == 0, done.stderr
