"""The chart renders valid objects from any values, and refuses wrong values."""

import gzip
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.manifests import rendering
from tests.manifests.settings_schema import CHART, SCHEMA, with_settings

KUBERNETES: Final = "1.31"
CRD: Final = Path("kuberay") / "ray.io_rayclusters.yaml.gz"
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check(manifest: rendering.Manifest) -> None:
    """Raises an error if an object of Kubernetes' own kinds is not valid."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@cache
def ray_clusters(path: Path) -> jsonschema.Draft202012Validator:
    """A validator from KubeRay's definition of a RayCluster."""
    definition = yaml.load(gzip.decompress(path.read_bytes()), _LOADER)  # noqa: S506 (a SafeLoader)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema that refuses fields that it does not name. Metadata stays open, as
    structural schemas do not describe it."""
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = closed(schema[key])
    return found


@pytest.mark.parametrize("variant", rendering.VARIANTS)
def test_objects_and_configuration_are_valid(variant: str, test_data: Path, tmp_path: Path) -> None:
    """Objects are valid by the schemas of Kubernetes and KubeRay, and have no unknown field. The
    ConfigMap has a configuration that `outrider serve` accepts."""
    manifests = rendering.render_variant(variant)
    for manifest in manifests:
        if manifest["kind"] != "RayCluster":
            check(manifest)
    ray_clusters(test_data / CRD).validate(rendering.ray_cluster(manifests))
    for template in rendering.pods(manifests).values():
        metadata = {**template["metadata"], "name": "pod"}
        check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    config = rendering.configuration(manifests, tmp_path)
    assert (config.coordinator.grpc_port, config.coordinator.port) == (50051, 8000)
    assert config.coordinator.redis.url
    for service in (config.target, config.draft, config.coordinator):
        assert (service.host, service.insecure) == ("0.0.0.0", True)  # noqa: S104 (in its pod)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("target.replica=2", "target: Additional property replica is not allowed"),
        ("settings.num_draft_token=4", "settings: Additional property num_draft_token is not"),
        ("redis.enabled=false", "redis.external.url must say where sessions are kept"),
        ("redis.external.url=redis://r:1/0", "set one of them"),
        ("redis.external.url=redis://:secret@r:1/0", "Does not match pattern"),
        ("target.replicas=9", "target: its replicas need 9 pods, but minPods is 1"),
        ("cache.kind=hostPath", "cache.hostPath must name a directory"),
        ("telemetry.prometheusPort=9464 draft.slots=2", "draft.slots: replicas that share a pod"),
    ],
)
def test_a_slip_in_the_values_is_told(value: str, words: str) -> None:
    done = rendering.helm((), tuple(value.split()))
    assert (done.returncode != 0, words in done.stderr) == (True, True), done.stderr


def test_values_reach_the_configuration(tmp_path: Path) -> None:
    config = rendering.configuration(rendering.render([rendering.EVERY_OPTION]), tmp_path)
    assert (config.num_targets, config.num_drafts, config.num_coordinators) == (2, 4, 3)
    assert config.target.model == "meta-models/large"
    assert (config.target.tensor_parallel_size, config.target.num_gpus) == (2, 1)
    assert config.draft.num_gpus == 1
    assert config.target.kv_cache_memory_bytes == 32 * 2**30
    url = "rediss+sentinel://watch-0.example:26380,watch-1.example:26380/sessions/1"
    assert config.coordinator.redis.url == url
    assert config.coordinator.redis.ca_file == "/etc/outrider/redis/ca.pem"
    assert config.coordinator.telemetry == "otlp=http://collector.monitoring:4317,prometheus=9464"
    assert config.stop_timeout_s == 60
    manifests = rendering.render([rendering.EVERY_OPTION], rendering.OWN_REDIS)
    values = rendering.settings(manifests)
    assert values["redis_url"] == "redis://speculation-redis:6379/0"
    assert "speculation-redis" in rendering.of_kind(manifests, "Service")
    assert not {"redis_ca_file", "redis_username"} & values.keys()


def test_no_secret_is_in_a_config_map() -> None:
    manifests = rendering.render((), ["redis.auth.password=ahoy-captain"])
    for manifest in manifests:
        if manifest["kind"] != "Secret":
            assert "ahoy-captain" not in yaml.safe_dump(manifest)
    secret = rendering.of_kind(manifests, "Secret")["rel-outrider-redis"]
    assert secret["stringData"] == {"redis-password": "ahoy-captain"}


def test_the_schema_of_settings_is_what_the_configuration_says() -> None:
    """If this fails, run `python -m tests.manifests.settings_schema`."""
    text = SCHEMA.read_text("utf-8")
    assert text == with_settings(text)


def test_values_that_docs_name_are_real() -> None:
    """Each `a.b` in docs/operations.md whose first part is a value of the chart is a value."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    text = (CHART.parents[2] / "docs" / "operations.md").read_text("utf-8")
    named = [name.split(".") for name in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)`", text)]
    named = [parts for parts in named if parts[0] in values]
    assert len(named) > 15
    for parts in named:
        found: Any = values
        for part in parts:
            assert part in found, parts
            found = found[part]
