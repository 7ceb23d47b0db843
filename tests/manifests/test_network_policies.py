"""Which pods reach which ports of a release, according to its network policies."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pytest

from tests.manifests import rendering

GROUPS: Final = ("headgroup", "coordinator", "target", "draft")
RAY_PORTS: Final = (6379, 8265, 10001)
GRPC: Final = 50051
HTTP: Final = 8000
HEALTH: Final = 50052
GATEWAY: Final = 8080
METRICS: Final = {"coordinator": 9464, "target": 9465, "draft": 9466}
ANY_PORT: Final = 40000
"""A port on which a target or draft may listen: any."""


class Source(NamedTuple):
    """A pod that opens a connection, with the labels of its namespace. None = the release's own
    namespace."""

    labels: Mapping[str, str] = {}
    namespace: Mapping[str, str] | None = None


STRANGER: Final = Source()
FAR_STRANGER: Final = Source(namespace={"kubernetes.io/metadata.name": "elsewhere"})


def _matches(selector: rendering.Manifest, labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def _is_peer(peer: rendering.Manifest, source: Source) -> bool:
    if "ipBlock" in peer:
        return False  # Matches no pod here.
    if "namespaceSelector" not in peer:
        inside = source.namespace is None
    else:
        inside = _matches(peer["namespaceSelector"], source.namespace or {})
    return inside and _matches(peer.get("podSelector", {}), source.labels)


def _labels(manifests: Sequence[rendering.Manifest], cluster: str) -> dict[str, dict[str, str]]:
    """The labels of each kind of pod, including those that KubeRay adds."""
    found = {}
    for group, template in rendering.pods(manifests).items():
        found[group] = dict(template["metadata"]["labels"])
        if group not in ("redis", "gcs", "gateway"):
            found[group] |= {"ray.io/cluster": cluster, "ray.io/group": group}
    return found


class Release:
    """Answers which pods reach which ports of which pods."""

    def __init__(self, cluster: str = f"{rendering.RELEASE}-outrider", *rendered: Any) -> None:
        self.manifests = rendering.render(*rendered)
        self.labels = _labels(self.manifests, cluster)
        self._policies = list(rendering.of_kind(self.manifests, "NetworkPolicy").values())

    def admits(self, to: str, source: Source, port: int) -> bool:
        """Whether `source` reaches this port of the pods `to`. It does if any policy that selects
        these pods admits it, or if no policy selects them."""
        specs = [each["spec"] for each in self._policies]
        selecting = [spec for spec in specs if _matches(spec["podSelector"], self.labels[to])]
        assert all(spec["policyTypes"] == ["Ingress"] for spec in selecting)
        return not selecting or any(
            ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
            and ("from" not in rule or any(_is_peer(peer, source) for peer in rule["from"]))
            for spec in selecting
            for rule in spec["ingress"]
        )

    def reached(self, source: Source) -> set[tuple[str, int]]:
        ports = (*RAY_PORTS, GRPC, HTTP, HEALTH, GATEWAY, ANY_PORT, *METRICS.values())
        return {(to, one) for to in self.labels for one in ports if self.admits(to, source, one)}


@pytest.mark.parametrize("stranger", [STRANGER, FAR_STRANGER], ids=["near", "far"])
def test_only_the_coordinators_ports_face_users(stranger: Source) -> None:
    assert Release().reached(stranger) == {("coordinator", GRPC), ("coordinator", HTTP)}


def test_the_pods_of_a_release_reach_each_other_and_its_redis() -> None:
    """Ray's processes reach each other, and coordinators reach targets and drafts, at any port. All
    reach Redis at one port. Pods of another release, whose labels differ only in the name of the
    cluster, reach nothing."""
    release = Release()
    others = _labels(release.manifests, "another-outrider")
    for group in GROUPS:
        ours = Source(release.labels[group])
        for port in (*RAY_PORTS, GRPC, HTTP, ANY_PORT):
            assert all(release.admits(other, ours, port) for other in GROUPS)
        assert release.admits("redis", ours, 6379)
        assert not release.admits("redis", ours, 26379)
        assert not any(release.admits(to, Source(others[group]), 6379) for to in release.labels)


def test_what_the_head_knows_is_for_the_head() -> None:
    """Data in this Redis runs as code on every node. Neither the pods of coordinators, targets and
    drafts nor clients of the sessions' Redis reach it."""
    every = Release("speculation", *rendering.VARIANTS["every-option-own-redis"])
    for release in (Release(), every):
        sources = {group: Source(one) for group, one in release.labels.items()}
        sources |= {"heir": Source({"ray.io/cluster": "speculation-next"}), "stranger": STRANGER}
        admitted = {group for group, one in sources.items() if release.admits("gcs", one, 6379)}
        assert admitted == {"headgroup"}


def test_only_what_is_named_is_admitted() -> None:
    release = Release("speculation", [rendering.EVERY_OPTION], rendering.OWN_REDIS)
    user = Source({"uses": "outrider"}, {"kubernetes.io/metadata.name": "applications"})
    scraper = Source({}, {"kubernetes.io/metadata.name": "monitoring"})
    heir = Source({"ray.io/cluster": "speculation-next"})
    public = {("coordinator", GRPC), ("coordinator", HTTP)}
    assert release.reached(user) == {*public, ("gateway", GATEWAY)}
    assert release.reached(Source(release.labels["gateway"])) == public
    assert release.reached(scraper) == {*METRICS.items()}
    assert release.reached(heir) == {("redis", 6379)}
    for stranger in (STRANGER, FAR_STRANGER, Source({"uses": "outrider"})):
        assert release.reached(stranger) == set()


@pytest.mark.parametrize("has_gateway", [False, True])
def test_services_lead_to_coordinators_and_to_redis(has_gateway: bool) -> None:
    """One more leads to the gateway, if there is one. No service of the chart has a port of a
    target, of a draft or of Ray."""
    release = Release(
        f"{rendering.RELEASE}-outrider", (), [f"gateway.enabled={str(has_gateway).lower()}"]
    )
    led = {
        name.removeprefix(f"{rendering.RELEASE}-outrider"): group
        for name, each in rendering.of_kind(release.manifests, "Service").items()
        for group, labels in release.labels.items()
        if _matches({"matchLabels": each["spec"]["selector"]}, labels)
    }
    assert led == {
        "": "coordinator",
        "-coordinators": "coordinator",
        "-redis": "redis",
        "-gcs": "gcs",
    } | ({"-gateway": "gateway"} if has_gateway else {})
