"""What Kubernetes would say of a manifest, by its schemas and by KubeRay's; unknown fields, which a
cluster drops in silence, are refused."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml

from tests.manifests.rendering import Manifest

KUBERNETES: Final = "1.31"
CRD: Final = Path("kuberay") / "ray.io_rayclusters.yaml.gz"
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Refused(Exception):
    """A manifest that is not valid: where, and why."""


def check_native(manifest: Manifest) -> None:
    """Raises `Refused` for an object of Kubernetes' own that is not valid."""
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refused(f"{_path(error)}: {error.message}") from error


def check_pod(template: Manifest) -> None:
    """Raises `Refused` for a template that makes no valid pod."""
    metadata = {**template["metadata"], "name": "pod"}
    check_native(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    )


def check_ray_cluster(manifest: Manifest, test_data: Path) -> None:
    """Raises `Refused` for a RayCluster that is not valid by KubeRay's definition."""
    errors = _ray_cluster(test_data / CRD).iter_errors(manifest)
    for error in sorted(errors, key=lambda error: [str(part) for part in error.absolute_path]):
        raise Refused(f"{_path(error)}: {error.message}")


@cache
def _ray_cluster(path: Path) -> jsonschema.Draft202012Validator:
    with gzip.open(path) as file:
        definition = yaml.load(file.read(), _LOADER)  # noqa: S506 (a SafeLoader)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema that takes no field it does not name; metadata, of which structural
    schemas say nothing, stays open."""
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = closed(schema[key])
    return found


def _path(error: jsonschema.ValidationError) -> str:
    return ".".join(str(part) for part in error.absolute_path)
