"""What the Dockerfile says about the image, which is not built here."""

import re
import shlex
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from outrider.kernels import cpu, openvino
from tests.manifests.rendering import pods, render

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IGNORED = ROOT / "deploy" / "Dockerfile.dockerignore"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, in order."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def test_what_the_wheel_needs_is_copied() -> None:
    """The packages and the files that describe them exist, and are sent to the builder. The extra
    for a cluster is installed, and Outrider's command is the entrypoint. pip's own setting says
    where packages come from."""
    copied = [
        source
        for name, words in instructions()
        if name == "COPY" and not words.startswith("--from")
        for source in shlex.split(words)[:-1]
    ]
    sent = [line[1:] for line in IGNORED.read_text("utf-8").splitlines() if line.startswith("!")]
    assert sorted(sent) == sorted(copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = [pattern.rstrip("*") for pattern in include]
    described = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {*packages, *described, "pyproject.toml", "constraints.txt"} == set(copied)
    assert all((ROOT / source).exists() for source in copied)
    text = DOCKERFILE.read_text("utf-8")
    assert set(re.findall(r"(?:\.|outrider)\[(\w+)\]", text)) == {"cluster"}
    extra = project["project"]["optional-dependencies"]["cluster"]
    assert any(each.startswith("ray[default]") for each in extra)  # The operator's probes call it.
    assert [words for name, words in instructions() if name == "ENTRYPOINT"] == ['["outrider"]']
    assert "://" not in text
    assert "index-url" not in text


def test_the_image_does_not_run_as_root() -> None:
    """The image's last user is the one as which the chart's pods run."""
    users = [words for name, words in instructions() if name == "USER"]
    assert users
    security = pods(render())["target"]["spec"]["securityContext"]
    assert users[-1] == f"{security['runAsUser']}:{security['runAsGroup']}"
    made = " ".join(words for name, words in instructions() if name == "RUN")
    assert f"--uid {security['runAsUser']}" in made
    assert f"--gid {security['runAsGroup']}" in made


def test_the_chart_and_the_image_are_of_one_version() -> None:
    """They have the same version of Outrider, and the version of Ray with which the tests were
    run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    chart = (ROOT / "deploy/helm/outrider/Chart.yaml").read_text("utf-8")
    assert f"appVersion: {project['version']}\n" in chart
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    versions = dict(re.findall(r"^(ray|torch)==(\S+)$", pinned, re.M))
    values = (ROOT / "deploy/helm/outrider/values.yaml").read_text("utf-8")
    assert f"version: {versions['ray']}\n" in values
    assert f"torch=={versions['torch']}+cpu" in DOCKERFILE.read_text("utf-8")


def test_kernels_for_cpus_are_installed_in_releases_that_can_be_used() -> None:
    """In the image, which installs the same in both stages, by `make install`, and by the extra.
    Without their dependencies, which Outrider does not need."""
    packages = {cpu.PACKAGE, openvino.PACKAGE}
    arguments = [words for name, words in instructions() if name == "ARG"]
    stages = [shlex.split(words) for words in arguments if words.startswith("CPU_KERNELS")]
    assert len(stages) == 2
    for [words] in stages:
        assert {*words.removeprefix("CPU_KERNELS=").split()} == packages
    makefile = (ROOT / "Makefile").read_text("utf-8")
    installed = re.findall(r"Linux.*--no-deps (.*) ;;", makefile)
    assert [{*line.split()} for line in installed] == [packages, {openvino.PACKAGE}]
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    versions = dict(re.findall(r"^([\w-]+)==(\S+)$", pinned, re.M))
    assert versions[cpu.PACKAGE] == cpu.VERSION
    assert versions[openvino.PACKAGE].rpartition(".")[0] in openvino.VERSIONS
    assert not [name for name in versions if name.startswith("openvino-")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [extra] = map(Requirement, project["optional-dependencies"]["openvino"])
    assert extra.name == openvino.PACKAGE
    releases = [f"{year}.{number}.0" for year in range(2024, 2029) for number in range(8)]
    usable = {f"{version}.0" for version in openvino.VERSIONS}
    assert {*extra.specifier.filter(releases)} == usable
