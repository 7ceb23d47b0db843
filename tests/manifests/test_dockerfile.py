"""What can be told of the image without building it."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from tests.manifests.rendering import pods, render

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IGNORED = ROOT / "deploy" / "Dockerfile.dockerignore"


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile and what it is given, in order."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def _copied() -> list[str]:
    return [
        source
        for name, words in instructions()
        if name == "COPY" and not words.startswith("--from")
        for source in shlex.split(words)[:-1]
    ]


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    """Every source is in the tree, and is not left out of the context."""
    sent = [line[1:] for line in IGNORED.read_text("utf-8").splitlines() if line.startswith("!")]
    assert _copied()
    for source in _copied():
        assert (ROOT / source).exists(), source
        assert source.removeprefix("./") in sent, source
    assert sorted(sent) == sorted(_copied())


def test_every_package_is_copied() -> None:
    """Those that the wheel is made of, and what describes it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = [
        pattern.rstrip("*")
        for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    described = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {*packages, *described, "pyproject.toml", "constraints.txt"} == set(_copied())


def test_the_image_does_not_run_as_root() -> None:
    """Its last user is the one that the chart's pods run as."""
    users = [words for name, words in instructions() if name == "USER"]
    assert users
    security = pods(render())["target"]["spec"]["securityContext"]
    assert users[-1] == f"{security['runAsUser']}:{security['runAsGroup']}"
    made = " ".join(words for name, words in instructions() if name == "RUN")
    assert f"--uid {security['runAsUser']}" in made
    assert f"--gid {security['runAsGroup']}" in made


def test_extras_that_are_installed_exist() -> None:
    """Where the Dockerfile says `[NAME]`, the project has such an extra, with Ray's dashboard,
    which the operator's probes ask."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = set(re.findall(r"(?:\.|outrider)\[(\w+)\]", DOCKERFILE.read_text("utf-8")))
    assert named == {"cluster"}
    assert any(
        each.startswith("ray[default]") for each in project["optional-dependencies"]["cluster"]
    )


def test_the_entrypoint_is_the_command() -> None:
    """That the project installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (entrypoint,) = (words for name, words in instructions() if name == "ENTRYPOINT")
    assert entrypoint == '["outrider"]'
    assert "outrider" in project["scripts"]


def test_the_chart_and_the_image_are_of_one_version() -> None:
    """Of Outrider, and of the Ray that the tests were run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    chart = (ROOT / "deploy/helm/outrider/Chart.yaml").read_text("utf-8")
    assert f"appVersion: {project['version']}\n" in chart
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    values = (ROOT / "deploy/helm/outrider/values.yaml").read_text("utf-8")
    ray = re.search(r"^ray==(\S+)$", pinned, re.M)
    torch = re.search(r"^torch==(\S+)$", pinned, re.M)
    assert ray is not None
    assert torch is not None
    assert f"version: {ray[1]}\n" in values
    assert f"torch=={torch[1]}+cpu" in DOCKERFILE.read_text("utf-8")


def test_no_package_index_is_named() -> None:
    """pip's own settings say where packages come from."""
    text = DOCKERFILE.read_text("utf-8")
    assert "://" not in text
    assert "index-url" not in text
