"""Renders the chart by Helm into Kubernetes objects, and finds parts of these objects."""

import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from outrider.config.deployment import DeploymentConfig, load_config
from tests.manifests.settings_schema import CHART

EVERY_OPTION: Final = CHART.parent / "values-every-option.yaml"
OWN_REDIS: Final = ("redis.enabled=true", "redis.external.url=")
"""Values, on top of every option, that choose the release's own Redis instead of an external
one."""
OWN_GCS: Final = ("ray.gcsFaultTolerance.external.address=",)
"""The same for the Redis of Ray's head."""
RELEASE: Final = "rel"
Manifest = dict[str, Any]

VARIANTS: Final[dict[str, tuple[tuple[Path, ...], tuple[str, ...]]]] = {
    "default": ((), ()),
    "every-option": ((EVERY_OPTION,), ()),
    "every-option-own-redis": ((EVERY_OPTION,), (*OWN_REDIS, *OWN_GCS)),
    "redis-password-kept-elsewhere": ((), ("redis.auth.existingSecret=mine",)),
    "redis-without-persistence": ((), ("redis.persistence.enabled=false",)),
    "models-on-every-node": ((), ("cache.kind=hostPath", "cache.hostPath=/srv/models")),
    "a-claim-that-exists": ((), ("cache.kind=claim", "cache.claim.existing=models")),
    "nothing-optional": (
        (),
        tuple(
            f"{name}.enabled=false"
            for name in (
                "ray.auth",
                "ray.gcsFaultTolerance",
                "ray.autoscaling",
                "networkPolicy",
                "podDisruptionBudget",
            )
        ),
    ),
    "what-the-head-knows-kept-elsewhere": (
        (),
        ("ray.gcsFaultTolerance.external.address=redis://r:6379",),
    ),
    "no-drafts": ((), ("draft.replicas=0", "draft.minPods=0", "draft.maxPods=0")),
}
"""By variant: the values files and further values from which the chart must render valid
manifests."""


@cache
def helm(files: tuple[Path, ...], values: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The result of `helm template` with these values files and NAME=VALUE pairs. Each is run
    once."""
    command = [str(Path(sysconfig.get_path("scripts")) / "helm"), "template", RELEASE, str(CHART)]
    for file in files:
        command += ["--values", str(file)]
    for value in values:
        command += ["--set", value]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def render(files: Sequence[Path] = (), values: Sequence[str] = ()) -> list[Manifest]:
    """The manifests that the chart renders from these values."""
    done = helm(tuple(files), tuple(values))
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def render_variant(name: str) -> list[Manifest]:
    return render(*VARIANTS[name])


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    return {found["metadata"]["name"]: found for found in manifests if found["kind"] == kind}


def ray_cluster(manifests: Sequence[Manifest]) -> Manifest:
    (found,) = of_kind(manifests, "RayCluster").values()
    return found


def ray_pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """The pod templates of a RayCluster, by the value of their label `ray.io/group`."""
    spec = ray_cluster(manifests)["spec"]
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"headgroup": spec["headGroupSpec"]["template"], **groups}


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """All pod templates: those of Ray, of the release's own Redis servers `redis` (for sessions)
    and `gcs` (for Ray's head), and of the `gateway`."""
    found = ray_pods(manifests)
    kinds = of_kind(manifests, "StatefulSet") | of_kind(manifests, "Deployment")
    for one in kinds.values():
        template = one["spec"]["template"]
        found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


def container(template: Manifest, name: str) -> Manifest:
    (found,) = (each for each in template["spec"]["containers"] if each["name"] == name)
    return found


def variables(of: Manifest) -> dict[str, Any]:
    """A container's environment by name: the value, or the source of the value."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in of.get("env", [])}


def settings_file(manifests: Sequence[Manifest]) -> str:
    """The text of the file that `outrider serve --config` gets."""
    maps = of_kind(manifests, "ConfigMap").values()
    (text,) = (found["data"]["config.yaml"] for found in maps if "config.yaml" in found["data"])
    return str(text)


def settings(manifests: Sequence[Manifest]) -> dict[str, Any]:
    return yaml.safe_load(settings_file(manifests))


def configuration(manifests: Sequence[Manifest], directory: Path) -> DeploymentConfig:
    """The configuration that `outrider serve` makes of the file, which is written into
    `directory`."""
    file = directory / "config.yaml"
    file.write_text(settings_file(manifests), "utf-8")
    return load_config({}, {}, file)
