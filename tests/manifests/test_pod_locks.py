"""Keys of callers, and certificates of services, in the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from outrider.config import load_config
from outrider.transport.certificates import RoleFiles
from tests.manifests.rendering import EVERY_OPTION, ray_pods, render, settings_file


def _mounted(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The secrets of a pod's first container, by where they are."""
    volumes = {each["name"]: each.get("secret") for each in pod["spec"]["volumes"]}
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    return {one["mountPath"]: volumes[one["name"]] for one in mounts if volumes[one["name"]]}


def test_each_role_has_its_own_certificate_alone(tmp_path: Path) -> None:
    """Where the configuration says that it is, under the names that services look for, and with
    the key for nobody else to read; only coordinators have keys of callers."""
    manifests = render([EVERY_OPTION])
    file = tmp_path / "config.yaml"
    file.write_text(settings_file(manifests), "utf-8")
    config = load_config({}, {}, file)
    pods = ray_pods(manifests)
    for role, one in (
        ("coordinator", config.coordinator), ("target", config.target), ("draft", config.draft)
    ):  # fmt: skip
        mounted = _mounted(pods[role])
        secret = mounted[one.internal_tls_dir]
        files = RoleFiles.of(Path(one.internal_tls_dir), role)  # type: ignore[arg-type]
        names = {path.name for path in (files.authority, files.certificate, files.key)}
        assert {item["path"] for item in secret["items"]} == names
        assert (secret["secretName"], secret["defaultMode"]) == ("services", 0o440)
        assert ("/etc/outrider/keys" in mounted) == (role == "coordinator")
    keys = _mounted(pods["coordinator"])["/etc/outrider/keys"]
    assert keys["secretName"] == "callers"
    assert config.coordinator.api_key_file == f"/etc/outrider/keys/{keys['items'][0]['path']}"
    assert not [path for path in _mounted(pods["headgroup"]) if path != "/etc/outrider/redis"]


def test_without_secrets_there_are_no_locks() -> None:
    """As before: the network policies alone say who may call."""
    manifests = render()
    settings = yaml.safe_load(settings_file(manifests))
    assert not {"api_key_file", "internal_tls_dir"} & settings.keys()
    for pod in ray_pods(manifests).values():
        assert not _mounted(pod)
