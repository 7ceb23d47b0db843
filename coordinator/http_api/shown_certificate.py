"""The certificate that HTTP shows: the newest one in its files, to whoever connects."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.files import FileWatch
from outrider.limits import KEY_FILE_LOOK_MS


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """In PEM."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """By which callers must have a certificate, too; None = they need none."""

    @property
    def asks_callers(self) -> ssl.VerifyMode:
        return ssl.CERT_NONE if self.authority is None else ssl.CERT_REQUIRED


class ShownCertificate:
    """Reads files again when they have changed, as a connection begins. What cannot be read changes
    nothing."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        paths = [one for one in (files.certificate, files.key, files.authority) if one is not None]
        self._files = files
        self._watch = FileWatch(paths, clock, KEY_FILE_LOOK_MS / 1e3)
        self._newest: ssl.SSLContext | None = None

    def follow(self, context: ssl.SSLContext) -> None:
        context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Asked in each handshake, whether the client names a host or not."""
        self._newest = self._watch.news(lambda: _read(self._files)) or self._newest
        if self._newest is not None:
            connection.context = self._newest


def _read(files: TlsFiles) -> ssl.SSLContext:
    """Raises `OSError` or `ValueError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key, password="")  # It asks no terminal.
    context.verify_mode = files.asks_callers
    if files.authority is not None:
        context.load_verify_locations(files.authority)
    return context
