"""Finds the packages of the three services, which are installed beside `outrider`.

Their names are not unusual. A folder `coordinator` in the working directory, or in that of a Ray
job, would be found first. So the command line and the fleet, also in Ray's processes, call `secure`
before they import a service."""

import importlib.util
import sys
from pathlib import Path

from outrider.errors import ConfigError

SERVICES = ("coordinator", "draft_service", "target_service")
ROOT = Path(__file__).parents[1]


def secure() -> None:
    """Makes the services importable, whatever else has their names. Raises `ConfigError` if another
    package of such a name has already been imported."""
    if all(_folder_of(name) == ROOT / name for name in SERVICES):
        return
    sys.path.insert(0, str(ROOT))
    importlib.invalidate_caches()
    for name in SERVICES:
        if (folder := _folder_of(name)) != ROOT / name:
            raise ConfigError(
                f"Outrider's package {name!r} is {ROOT / name}, but {folder} was imported in its "
                "place; rename that folder, or start from a directory without it"
            )


def _folder_of(name: str) -> Path | None:
    """The folder from which `import name` takes, or has taken, the package."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    return Path(next(iter(folders))) if folders else Path(spec.origin or "")
