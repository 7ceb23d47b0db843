"""What the chart makes of any values is valid, and what is not valid is noticed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from outrider.config import load_config
from tests.manifests.rendering import (
    EVERY_OPTION,
    OWN_REDIS,
    VARIANTS,
    of_kind,
    pods,
    ray_cluster,
    refusal,
    render,
    render_variant,
    settings_file,
)
from tests.manifests.settings_schema import CHART, SCHEMA, with_settings
from tests.manifests.validating import Refused, check_native, check_pod, check_ray_cluster


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_of_kubernetes_are_valid(variant: str) -> None:
    """Every object but the RayCluster, and every pod of that, by the schemas of Kubernetes."""
    manifests = render_variant(variant)
    for manifest in manifests:
        if manifest["kind"] != "RayCluster":
            check_native(manifest)
    for template in pods(manifests).values():
        check_pod(template)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_ray_cluster_is_valid(variant: str, test_data: Path) -> None:
    """By KubeRay's own definition, without a field that it does not know."""
    check_ray_cluster(ray_cluster(render_variant(variant)), test_data)


def test_every_option_is_given() -> None:
    """The values file that claims to have every option has all of the defaults' keys."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    every = yaml.safe_load(EVERY_OPTION.read_text("utf-8"))

    def missing(left: object, right: object, place: str) -> list[str]:
        if not isinstance(left, dict) or not left:
            return []
        assert isinstance(right, dict), place
        found = [f"{place}.{key}" for key in left.keys() - right.keys()]
        for key in left.keys() & right.keys():
            found += missing(left[key], right[key], f"{place}.{key}")
        return found

    assert not missing(defaults, every, "values")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("target.replica=2", "target: Additional property replica is not allowed"),
        ("redis.external.ulr=x", "redis.external: Additional property ulr is not allowed"),
        ("ray.autoscaling.enable=true", "Additional property enable is not allowed"),
        ("settings.num_draft_token=4", "settings: Additional property num_draft_token is not"),
        ("settings.grpc_port=1", "settings: Additional property grpc_port is not allowed"),
        ("settings.num_draft_tokens=99", "Must be less than or equal to 16"),
        ("cache.kind=nfs", "cache.kind must be one of the following"),
        ("target.gpus=-1", "Must be greater than or equal to 0"),
        ("redis.enabled=false", "redis.external.url must say where sessions are kept"),
        ("redis.external.url=redis://r:1/0", "set one of them"),
        ("redis.external.url=redis://:secret@r:1/0", "Does not match pattern"),
        ("target.replicas=9", "target: its replicas need 9 pods, but minPods is 1"),
        ("cache.kind=hostPath", "cache.hostPath must name a directory"),
        ("telemetry.otlp=collector:4317", "telemetry.otlp: Does not match pattern"),
    ],
)
def test_a_slip_in_the_values_is_told(value: str, words: str) -> None:
    """Helm refuses it, and says where it is."""
    assert words in refusal(value)


def test_replicas_that_share_a_pod_share_no_port_for_metrics() -> None:
    """Each draft of a pod would serve metrics on the same port."""
    words = refusal("telemetry.prometheusPort=9464", "draft.slots=2")
    assert "draft.slots: replicas that share a pod" in words


@pytest.mark.parametrize(
    ("path", "old", "new", "place"),
    [
        ("headGroupSpec", "rayStartParams", "rayStartParam", "spec.headGroupSpec: Additional"),
        ("workerGroupSpecs.1", "maxReplicas", "maxReplica", "workerGroupSpecs.1: Additional"),
        (
            "workerGroupSpecs.0.template.spec.containers.0.readinessProbe", "grpc", "grcp",
            "containers.0.readinessProbe: Additional properties",
        ),
    ],
)  # fmt: skip
def test_a_slip_in_the_ray_cluster_is_noticed(
    path: str, old: str, new: str, place: str, test_data: Path
) -> None:
    """A field that KubeRay does not know, at any depth, fails the validation and is named."""
    manifest = copy.deepcopy(ray_cluster(render()))
    found = manifest["spec"]
    for word in path.split("."):
        found = found[int(word) if word.isdecimal() else word]
    found[new] = found[old]
    with pytest.raises(Refused, match=place):
        check_ray_cluster(manifest, test_data)


def test_a_slip_in_an_object_of_kubernetes_is_noticed() -> None:
    """Likewise in a network policy, and in a pod."""
    manifests = render()
    policy = copy.deepcopy(of_kind(manifests, "NetworkPolicy")["rel-outrider-ray"])
    policy["spec"]["ingres"] = policy["spec"].pop("ingress")
    with pytest.raises(Refused, match="spec: Additional properties"):
        check_native(policy)
    template = copy.deepcopy(pods(manifests)["headgroup"])
    template["spec"]["enableServiceLink"] = template["spec"].pop("enableServiceLinks")
    with pytest.raises(Refused, match="spec: Additional properties"):
        check_pod(template)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_configuration_loads(variant: str, tmp_path: Path) -> None:
    """What the release's ConfigMap holds is a configuration that `outrider serve` takes."""
    file = tmp_path / "config.yaml"
    file.write_text(settings_file(render_variant(variant)), "utf-8")
    config = load_config({}, {}, file)
    assert (config.coordinator.grpc_port, config.coordinator.port) == (50051, 8000)
    assert config.coordinator.redis_url
    for service in (config.target, config.draft, config.coordinator):
        assert (service.host, service.insecure) == ("0.0.0.0", True)  # noqa: S104 (in its pod)


def test_values_reach_the_configuration(tmp_path: Path) -> None:
    """Models, GPUs of a rank, settings of any kind, Redis and its authority are what was given."""
    file = tmp_path / "config.yaml"
    file.write_text(settings_file(render([EVERY_OPTION])), "utf-8")
    config = load_config({}, {}, file)
    assert (config.num_targets, config.num_drafts, config.num_coordinators) == (2, 4, 3)
    assert config.target_resources == "outrider_target=1"
    assert config.draft_resources == "outrider_draft=1"
    assert config.coordinator_resources == "outrider_coordinator=1"
    assert config.target.model == "meta-models/large"
    assert (config.target.tensor_parallel_size, config.target.num_gpus) == (2, 1)
    assert config.draft.num_gpus == 1
    assert config.target.kv_cache_memory_bytes == 32 * 2**30
    url = "rediss+sentinel://watch-0.example:26380,watch-1.example:26380/sessions/1"
    assert config.coordinator.redis_url == url
    assert config.coordinator.redis_ca_file == "/etc/outrider/redis/ca.pem"
    assert config.coordinator.telemetry == "otlp=http://collector.monitoring:4317,prometheus=9464"
    assert config.stop_timeout_s == 60


def test_own_redis_is_what_the_configuration_names() -> None:
    """By the name of the release's service."""
    manifests = render([EVERY_OPTION], OWN_REDIS)
    values = yaml.safe_load(settings_file(manifests))
    assert values["redis_url"] == "redis://speculation-redis:6379/0"
    assert "speculation-redis" in of_kind(manifests, "Service")
    assert "redis_ca_file" not in values
    assert "redis_username" not in values


def test_no_secret_is_in_a_config_map() -> None:
    """A password in the values is in a Secret and nowhere else."""
    manifests = render((), ["redis.auth.password=ahoy-captain"])
    for manifest in manifests:
        if manifest["kind"] != "Secret":
            assert "ahoy-captain" not in yaml.safe_dump(manifest)
    secret = of_kind(manifests, "Secret")["rel-outrider-redis"]
    assert secret["stringData"] == {"redis-password": "ahoy-captain"}


def test_the_schema_of_settings_is_what_the_configuration_says() -> None:
    """Run `python -m tests.manifests.settings_schema` after a change."""
    text = SCHEMA.read_text("utf-8")
    assert text == with_settings(text)
