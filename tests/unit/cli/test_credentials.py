"""API keys and certificates of commands and deployments. No key is ever shown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outrider.cli.command import Arguments
from outrider.cli.main import main, parse
from outrider.cli.options import caller_key, caller_trust_of
from outrider.cli.output import masked_settings
from outrider.client import Trust
from outrider.config.deployment import CoordinatorConfig, DeploymentConfig, load_config
from outrider.errors import ConfigError, SettingError
from outrider.fleet.preflight import warnings, without_secrets
from outrider.foundation.api_keys import given_keys, key_hash, new_key
from tests.support.command_lines import refusal

EVERYWHERE = "0.0.0.0"  # noqa: S104
KEY = "a-secret-of-sixteen-or-more"


def parsed(*words: str) -> Arguments:
    return parse(["chat", *words])


def test_with_keys_users_may_come_from_elsewhere() -> None:
    """Targets and drafts have no keys. They stay on loopback without certificates or `insecure`."""
    keys = {"host": EVERYWHERE, "api_key": KEY}
    config = load_config(keys, {})
    hosts = [one.host for one in (config.coordinator, config.target, config.draft)]
    assert hosts == [EVERYWHERE, "127.0.0.1", "127.0.0.1"]
    assert config.values()["host"] == EVERYWHERE
    assert config.coordinator.metrics_host == "127.0.0.1"
    for more in ({"internal_tls_dir": "/tls"}, {"insecure": True}):
        config = load_config(keys | more, {})
        assert config.target.host == config.draft.host == EVERYWHERE
    for refused, remedy in (
        (keys | {"address": "ray://x"}, "certificates with --internal-tls-dir"),
        ({"host": EVERYWHERE, "internal_tls_dir": "/t"}, "keys with --api-key-file"),
    ):
        with pytest.raises(SettingError, match=f"does not authenticate callers; .*{remedy}"):
            load_config(refused, {})
    for more, is_warned in (({}, True), ({"ssl_certfile": "c", "ssl_keyfile": "k"}, False)):
        told = warnings(load_config(keys | more, {}))
        assert any("plain text" in line for line in told) is is_warned


def test_settings_of_keys_and_certificates_go_together() -> None:
    for key, value in (
        ("ssl_certfile", "c"),
        ("ssl_keyfile", "k"),
        ("ssl_ca_certs", "a"),
        ("api_key", "short"),
    ):
        with pytest.raises(SettingError) as caught:
            CoordinatorConfig(**{key: value})
        assert caught.value.key == key
    assert CoordinatorConfig().serves_reflection
    assert not CoordinatorConfig(api_key=KEY).serves_reflection


def test_a_deployment_is_told_hashes_and_a_key_of_its_own() -> None:
    """Ray and Redis get neither the given keys nor the new one. Paths are absolute."""
    given = DeploymentConfig(coordinator=CoordinatorConfig(api_key=f"{KEY},{new_key()}"))
    config, own, _ = without_secrets(given)
    found = given_keys(config.coordinator.api_key)
    assert len(found) == 3
    assert found.keys() > {key_hash(KEY), key_hash(own)}
    shown = str(config.values())
    assert KEY not in shown
    assert own not in shown
    assert without_secrets(DeploymentConfig())[1] == ""
    files = {
        "internal_tls_dir": "tls",
        "api_key_file": "keys",
        "redis_ca_file": "ca.pem",
        "redis_password_file": "~/redis",
    }
    config, _, _ = without_secrets(load_config(files, {}))
    assert config.draft.internal_tls_dir == str(Path.cwd() / "tls")
    assert config.coordinator.redis.ca_file == str(Path.cwd() / "ca.pem")
    assert config.coordinator.redis.password_file == str(Path.home() / "redis")
    assert config.coordinator.ssl_certfile == ""


SHOWS = """
import json, os
from pathlib import Path
from outrider.cli import generate, main

def run(arguments):
    print(json.dumps({
        "words": Path("/proc/self/cmdline").read_text(), "flags": arguments.settings,
        "variables": dict(os.environ), "prompt": arguments.prompt,
    }))
    return 0

generate.generate.callback = run
main.main()
"""


def test_a_command_with_a_secret_runs_without_options_among_its_words() -> None:
    """Ray's head would store them, because `ray.init` reads the command line of its process."""
    flags = ("--redis-password", "hidden-1", "--api-key=hidden-2", "--api-key", "hidden-3")
    words = ("generate", *flags, "--max-num-seqs", "3", "--", "--api-key")
    command = [sys.executable, "-c", SHOWS, *words]
    found = json.loads(subprocess.check_output(command, text=True, timeout=60))
    assert found["words"].rstrip("\0").endswith(" generate")
    assert found["flags"] == {
        "redis_password": "hidden-1",
        "api_key": "hidden-2,hidden-3",
        "max_num_seqs": "3",
    }
    assert "hidden" not in found["words"] + json.dumps(found["variables"])
    assert found["prompt"] == "--api-key"


def test_a_command_shows_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert caller_key(parsed()) == ""
    monkeypatch.setenv("OUTRIDER_API_KEY", f"{KEY}, other-key-12345678")
    assert caller_key(parsed()) == KEY
    assert caller_key(parsed("--api-key", "flag-key-12345678")) == "flag-key-12345678"
    monkeypatch.setenv("OUTRIDER_API_KEY", "sha256:" + "0" * 64)
    with pytest.raises(SettingError, match="is the hash of a key"):
        caller_key(parsed())


def test_how_a_server_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = tmp_path / "tls"
    assert main(["certs", str(tls)]) == 0
    authority = str(tls / "ca.pem")
    runs = {"ssl_certfile": str(tls / "target.pem")}
    assert caller_trust_of(parsed(), {}) is None
    for words, deployment, name in (
        (("--ca-cert", authority), {}, ""),
        (("--tls",), {}, ""),
        ((), runs, "target.outrider.internal"),
        (("--ca-cert", authority), runs, ""),
    ):
        found = caller_trust_of(parsed(*words), deployment)
        assert isinstance(found, Trust)
        assert (found.credentials is not None, found.server_name) == (True, name)
    monkeypatch.setenv("OUTRIDER_CA_CERT", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"cannot read .*none\.pem"):
        caller_trust_of(parsed(), {})


def test_no_key_is_shown(tmp_path: Path) -> None:
    made = new_key()
    config = load_config({"api_key": f"{KEY},{made}", "served_model_name": f"is {made}"}, {})
    masked = masked_settings(config.values(secrets=False))
    shown = [str(masked), repr(CoordinatorConfig(api_key=KEY))]
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"api_key": [KEY, made]}))
    for settings, place in (({}, file), ({"api_key": f"{KEY} {made}"}, None)):
        with pytest.raises(ConfigError) as caught:
            load_config(settings, {}, place)
        shown.append(str(caught.value))
    for text in shown:
        assert KEY not in text
        assert made not in text


def test_keys_are_made_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    (link := tmp_path / "link").symlink_to(file)
    words = ["keys", "--api-key-file", str(link)]
    assert main([*words, "new", "alice", "--tenant", "team", "--concurrency", "4"]) == 0
    key = capsys.readouterr().out.strip()
    assert key not in file.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"keys", "keys.lock", "link"}
    assert main([*words, "--json", "new", "bob", "--requests-per-minute", "60", "--admin"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "bob"
    monkeypatch.setenv("OUTRIDER_API_KEY_FILE", str(file))
    assert main(["keys", "--json", "list"]) == 0
    listed = capsys.readouterr().out
    assert [one["name"] for one in json.loads(listed)["keys"]] == ["alice", "bob"]
    assert "sha256" not in listed
    assert main(["keys", "revoke", "alice"]) == 0
    capsys.readouterr()
    assert "NAME: 'a/b' is not a valid name" in refusal(capsys, "keys", "new", "a/b")
    assert "there is no key 'alice'" in refusal(capsys, "keys", "revoke", "alice")
    (device := tmp_path / "device").symlink_to("/dev/null")
    monkeypatch.setenv("OUTRIDER_API_KEY_FILE", str(device))
    assert "is not a regular file" in refusal(capsys, "keys", "new", "carol")
    (loop := tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("OUTRIDER_API_KEY_FILE", str(loop))
    assert "cannot read" in refusal(capsys, "keys", "revoke", "bob")
    monkeypatch.setenv("OUTRIDER_API_KEY_FILE", str(tmp_path / "missing" / "keys"))
    for action in (("new", "carol"), ("revoke", "bob")):
        assert "cannot write" in refusal(capsys, "keys", *action)
    monkeypatch.delenv("OUTRIDER_API_KEY_FILE")
    assert "--api-key-file" in refusal(capsys, "keys", "list")
