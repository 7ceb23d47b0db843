"""Who reaches what of a release, by its network policies as Kubernetes reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest

from tests.manifests.rendering import (
    EVERY_OPTION,
    OWN_GCS,
    OWN_REDIS,
    RELEASE,
    Manifest,
    of_kind,
    pods,
    render,
)

GROUPS: Final = ("headgroup", "coordinator", "target", "draft")
RAY_PORTS: Final = (6379, 8265, 10001)
GRPC: Final = 50051
HTTP: Final = 8000
METRICS: Final = {"coordinator": 9464, "target": 9465, "draft": 9466}
ANY_PORT: Final = 40000
"""Where a target or a draft may listen: any port."""


@dataclass(frozen=True)
class Source:
    """A pod that opens a connection."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] | None = None
    """The labels of its namespace; None = the release's own."""


STRANGER: Final = Source()
FAR_STRANGER: Final = Source(namespace={"kubernetes.io/metadata.name": "elsewhere"})


def _matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def _is_peer(peer: Manifest, source: Source) -> bool:
    if "ipBlock" in peer:
        return False  # Of no pod here.
    if "namespaceSelector" not in peer:
        inside = source.namespace is None
    else:
        inside = _matches(peer["namespaceSelector"], source.namespace or {})
    return inside and _matches(peer.get("podSelector", {}), source.labels)


def admits(policies: Sequence[Manifest], to: Mapping[str, str], source: Source, port: int) -> bool:
    """Whether a pod with the labels `to` may be reached: by any policy that selects it, or by
    everybody if none does."""
    selecting = [each["spec"] for each in policies if _matches(each["spec"]["podSelector"], to)]
    for spec in selecting:
        assert spec["policyTypes"] == ["Ingress"]
        for rule in spec["ingress"]:
            ports = rule.get("ports")
            if ports is not None and port not in [each["port"] for each in ports]:
                continue
            if "from" not in rule or any(_is_peer(peer, source) for peer in rule["from"]):
                return True
    return not selecting


def _labels(manifests: Sequence[Manifest], cluster: str) -> dict[str, dict[str, str]]:
    """Of each kind of pod, with those that KubeRay adds."""
    found = {}
    for group, template in pods(manifests).items():
        found[group] = dict(template["metadata"]["labels"])
        if group not in ("redis", "gcs"):
            found[group] |= {"ray.io/cluster": cluster, "ray.io/group": group}
    return found


def _policies(manifests: Sequence[Manifest]) -> list[Manifest]:
    return list(of_kind(manifests, "NetworkPolicy").values())


@pytest.mark.parametrize("stranger", [STRANGER, FAR_STRANGER], ids=["near", "far"])
def test_only_the_coordinators_ports_face_users(stranger: Source) -> None:
    """Of all ports of all pods, a stranger reaches two."""
    manifests = render()
    labels = _labels(manifests, f"{RELEASE}-outrider")
    reached = {
        (group, port)
        for group in labels
        for port in (*RAY_PORTS, GRPC, HTTP, ANY_PORT, *METRICS.values())
        if admits(_policies(manifests), labels[group], stranger, port)
    }
    assert reached == {("coordinator", GRPC), ("coordinator", HTTP)}


def test_the_pods_of_a_release_reach_each_other_and_its_redis() -> None:
    """Ray's processes, and coordinators their targets and drafts, at any port; Redis at one. Those
    of another release, whose labels differ in the cluster's name alone, reach nothing."""
    manifests = render()
    labels = _labels(manifests, f"{RELEASE}-outrider")
    others = _labels(manifests, "another-outrider")
    to = labels["redis"]
    for group in GROUPS:
        for port in (*RAY_PORTS, GRPC, HTTP, ANY_PORT):
            for other in GROUPS:
                assert admits(_policies(manifests), labels[group], Source(labels[other]), port)
        assert admits(_policies(manifests), to, Source(labels[group]), 6379)
        assert not admits(_policies(manifests), to, Source(labels[group]), 26379)
        for other in labels:
            assert not admits(_policies(manifests), labels[other], Source(others[group]), 6379)


def test_what_the_head_knows_is_for_the_head() -> None:
    """What stands there runs as code on every node: neither the pods of coordinators, targets and
    drafts reach it, nor clients of the sessions' Redis."""
    for files, values in (((), ()), ([EVERY_OPTION], (*OWN_REDIS, *OWN_GCS))):
        manifests = render(files, values)
        name = "speculation" if files else f"{RELEASE}-outrider"
        labels, policies = _labels(manifests, name), _policies(manifests)
        sources = {group: Source(one) for group, one in labels.items()}
        sources |= {"heir": Source({"ray.io/cluster": "speculation-next"}), "stranger": STRANGER}
        admitted = {
            group for group, one in sources.items() if admits(policies, labels["gcs"], one, 6379)
        }
        assert admitted == {"headgroup"}


def test_who_is_named_is_admitted_and_nobody_else() -> None:
    """Users, scrapers and clients of Redis, each to their ports."""
    manifests = render([EVERY_OPTION], OWN_REDIS)
    labels, policies = _labels(manifests, "speculation"), _policies(manifests)
    user = Source({"uses": "outrider"}, {"kubernetes.io/metadata.name": "applications"})
    scraper = Source({}, {"kubernetes.io/metadata.name": "monitoring"})
    heir = Source({"ray.io/cluster": "speculation-next"})
    reached = {
        (name, group, port)
        for name, source in (("user", user), ("scraper", scraper), ("heir", heir))
        for group in labels
        for port in (*RAY_PORTS, GRPC, HTTP, ANY_PORT, *METRICS.values())
        if admits(policies, labels[group], source, port)
    }
    assert reached == {
        ("user", "coordinator", GRPC),
        ("user", "coordinator", HTTP),
        *(("scraper", role, port) for role, port in METRICS.items()),
        ("heir", "redis", 6379),
    }
    for stranger in (STRANGER, FAR_STRANGER, Source({"uses": "outrider"})):
        for group in labels:
            for port in (*RAY_PORTS, GRPC, HTTP, ANY_PORT):
                assert not admits(policies, labels[group], stranger, port)


def test_services_lead_to_coordinators_and_to_redis() -> None:
    """No service of the chart has a port of a target, of a draft or of Ray."""
    manifests = render()
    labels = _labels(manifests, f"{RELEASE}-outrider")
    led = {
        name.removeprefix(f"{RELEASE}-outrider"): group
        for name, each in of_kind(manifests, "Service").items()
        for group in labels if _matches({"matchLabels": each["spec"]["selector"]}, labels[group])
    }  # fmt: skip
    assert led == {
        "": "coordinator", "-coordinators": "coordinator", "-redis": "redis", "-gcs": "gcs"
    }  # fmt: skip
