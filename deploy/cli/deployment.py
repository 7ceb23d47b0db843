"""The deployment that a command changes: the one that runs on this machine, or one on a Ray cluster
elsewhere."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from deploy.fleet.local_state import running_deployment, state_directory
from deploy.fleet.reconciler import DeploymentLocation
from outrider.config import deployment_settings
from outrider.errors import Unavailable
from outrider.settings import merge

from .settings import add_setting_flags, given_flags

PLACE_KEYS: Final = ("address", "deployment_name")


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """Where a deployment is that runs on another cluster; see `find_deployment`."""
    others = [key for key in deployment_settings() if key not in PLACE_KEYS]
    add_setting_flags(parser, "a deployment on a Ray cluster elsewhere", without=others)


def find_deployment(arguments: argparse.Namespace) -> DeploymentLocation:
    """The deployment of this machine, unless settings name another one and its cluster. Raises
    `Unavailable` where there is none."""
    values = merge(deployment_settings(), arguments.config, os.environ, given_flags(arguments))
    address, name = (str(values.get(key) or "") for key in PLACE_KEYS)
    record = running_deployment(state_directory(os.environ))
    if record is not None and name in ("", record.deployment):
        token = Path(record.ray_token) if record.ray_token else None
        return DeploymentLocation(record.ray_address, record.deployment, token=token)
    if not (address and name):
        raise Unavailable(
            "nothing runs here; `outrider serve` starts a deployment, --address and "
            "--deployment-name name one on a Ray cluster elsewhere"
        )
    return DeploymentLocation(address, name, elsewhere=True)
