"""Certificates that tests make, for any host."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)


class Made:
    """A certificate and its key, either self-signed or signed by another certificate."""

    def __init__(self, directory: Path, name: str, *hosts: str, by: Made | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [
            x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
            for host in hosts
        ]
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.subject)
            .issuer_name((by or self).subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(hours=1))
            .not_valid_after(NOW + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign((by or self).key, hashes.SHA256())
        self.file, self.key_file = directory / f"{name}.pem", directory / f"{name}-key.pem"
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self.key_file.write_bytes(self.key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
