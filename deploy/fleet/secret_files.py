"""Files for their owner alone, which processes of this machine read: Ray opens its own directory to
all users, and a list of processes shows their words."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Secrets:
    """A directory of them, which is there as long as the deployment."""

    def __init__(self, directory: Path) -> None:
        """It is made when it is first needed, without what an earlier deployment has left."""
        self._directory = directory
        self._begun = False

    def hide(self, name: str, secret: str) -> Path:
        """A file with the secret, of mode 0600 in a directory of mode 0700."""
        if not self._begun:
            self.forget()
            self._directory.mkdir(mode=0o700, parents=True)
            self._begun = True
        path = self._directory / name
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secret)
        return path

    def forget(self) -> None:
        """Removes them."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._begun = False
