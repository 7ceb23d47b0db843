"""The installed wheel, in a folder whose own packages have the names of ours."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.xdist_group("deployment")]

ROOT = Path(__file__).parents[2]
OURS = {"coordinator", "draft_service", "outrider", "target_service"}
EMULATED = "emulated:vocab_size=64,verify_ms=1,draft_ms=1"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, without the packages that it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    # Built elsewhere, because setuptools leaves files of earlier builds in a folder `build`.
    for name in OURS:
        shutil.copytree(ROOT / name, folder / "source" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    make = ("wheel", folder / "source", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    subprocess.run([*PIP, *make], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.partition("/")[0] for name in packed.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == OURS
    subprocess.run([*PIP, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


@pytest.fixture(params=[True, False], ids=["packages", "plain folders"])
def decoys(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name in (*OURS - {"outrider"}, "deploy", "benchmarks", "tests", "fleet"):
        folder = tmp_path / "decoys" / name
        folder.mkdir(parents=True)
        if request.param:
            (folder / "__init__.py").touch()
    return tmp_path / "decoys"


@pytest.mark.parametrize("is_first", [False, True], ids=["working directory", "path"])
def test_other_packages_do_not_hide_ours(
    installed: Path, decoys: Path, tmp_path: Path, is_first: bool
) -> None:
    """Ray's processes look in the working directory first, and for a job with a working directory
    the command does, too."""
    path = [decoys, installed] if is_first else [installed]
    done = subprocess.run(
        [
            installed / "bin" / "outrider",
            "generate",
            "--token-ids",
            "1,2",
            "--json",
            "--max-tokens",
            "4",
        ],
        cwd=decoys,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OUTRIDER_ENGINE": EMULATED,
            "OUTRIDER_STATE_DIR": str(tmp_path / "state"),
        },
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4
