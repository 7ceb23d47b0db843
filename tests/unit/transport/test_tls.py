"""Certificates of services: creation, refusal, renewal, validity."""

import datetime
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.registry.registry import ROLES
from outrider.transport import tls

NOW = datetime.datetime.now(datetime.UTC)
FILES = {f"{name}{end}.pem" for name in ("ca", *ROLES) for end in ("", "-key")}


def first_certificate(path: Path) -> x509.Certificate:
    return tls.read_certificates(path)[0]


def test_every_role_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    assert main(["certs", str(directory)]) == 0
    assert {path.name for path in directory.iterdir()} == FILES
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    authority = first_certificate(directory / "ca.pem")
    serials = {authority.serial_number}
    for role in ROLES:
        files = tls.RoleFiles.of(directory, role)
        files.checked()
        assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
        found = first_certificate(files.certificate)
        assert tls.pinned_trust(files.certificate).server_name == f"{role}.outrider.internal"
        assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
        usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        assert 395 <= tls.days_left(files.certificate, NOW) <= 397
        serials.add(found.serial_number)
    assert len(serials) == 4
    assert stat.S_IMODE((directory / "ca-key.pem").stat().st_mode) == 0o600
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_nothing_is_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "tls"
    main(["certs", str(directory)])
    before = {path.name: path.read_bytes() for path in directory.iterdir()}

    def changed() -> set[str]:
        return {name for name in FILES if (directory / name).read_bytes() != before[name]}

    assert main(["certs", str(directory)]) == 2
    assert "ca.pem: exists already; --renew" in capsys.readouterr().err
    assert changed() == set()
    assert main(["certs", str(directory), "--renew", "--days", "30", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["days_left"]["target"] in (29, 30)
    assert not caplog.records
    assert changed() == FILES - {"ca.pem", "ca-key.pem"}
    assert main(["certs", str(directory), "--force"]) == 0
    assert changed() == FILES
    assert main(["certs", str(directory), "--check"]) == 0
    assert main(["certs", str(tmp_path / "other"), "--renew"]) == 2


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
        tls.make_authority(directory, NOW)
        for role in ROLES:
            tls.make_role(directory, role, NOW)
    files = tls.RoleFiles.of(one, "target")
    with pytest.raises(ConfigError, match=r"draft-key\.pem: is not the key of .*target\.pem"):
        tls.check_pair(files.certificate, one / "draft-key.pem")
    with pytest.raises(ConfigError, match=r"target\.pem: is not signed by .*two/ca\.pem"):
        tls.check_authority(two / "ca.pem", files.certificate)
    with pytest.raises(ConfigError, match=r"ca\.pem: holds no unencrypted private key in PEM"):
        tls.check_pair(files.certificate, one / "ca.pem")
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.pem: No such file"):
        tls.read_certificates(one / "gone.pem")
    # Several authorities in one file, as during a change.
    both = tmp_path / "both.pem"
    both.write_bytes((two / "ca.pem").read_bytes() + (one / "ca.pem").read_bytes())
    tls.check_authority(both, files.certificate)


def test_a_certificate_has_an_end(tmp_path: Path) -> None:
    past = NOW - datetime.timedelta(days=3640)
    tls.make_authority(tmp_path, past)
    tls.make_role(tmp_path, "draft", past)
    with pytest.raises(ConfigError, match=r"draft\.pem: expired \d{4}-\d\d-\d\d"):
        tls.RoleFiles.of(tmp_path, "draft").checked()
    tls.make_role(tmp_path, "draft", NOW)
    end = first_certificate(tmp_path / "ca.pem").not_valid_after_utc
    assert first_certificate(tmp_path / "draft.pem").not_valid_after_utc <= end
    with pytest.raises(ConfigError, match=r"ca\.pem: expires .* --force"):
        tls.make_role(tmp_path, "draft", NOW + datetime.timedelta(days=10))


def test_a_certificate_that_ends_soon_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls.make_authority(tmp_path, NOW)
    tls.make_role(tmp_path, "coordinator", NOW)
    tls.make_role(tmp_path, "target", NOW, days=20)
    tls.internal_trust(tmp_path, "coordinator", "target")
    assert not caplog.records
    tls.internal_server_credentials(tmp_path, "target")
    tls.internal_trust(tmp_path, "target", "draft")
    assert ["expires in 19 days" in one.getMessage() for one in caplog.records] == [True, True]
