"""`outrider certs`: certificates by which a deployment's services know each other.

One authority, and a certificate for each role. Put `ca.pem` and a role's two files where that role
runs; `ca-key.pem` is needed to make others only, and is best kept elsewhere.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError
from outrider.settings import check_range
from outrider.transport.certificates import (
    AUTHORITY,
    INTERNAL_ROLES,
    ROLE_DAYS,
    RoleFiles,
    days_left,
    make_authority,
    make_role,
)

DAYS_MAX: Final = 3650


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and whether others are replaced."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where they are, or are made")
    parser.add_argument(
        "--days", type=int, default=ROLE_DAYS, metavar="N",
        help=f"how long those of roles last [{ROLE_DAYS}]",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--renew", action="store_true",
        help="make those of roles anew, by the authority that is there",
    )  # fmt: skip
    what.add_argument(
        "--force", action="store_true",
        help="make all anew, also the authority: nobody then trusts those from before",
    )  # fmt: skip
    what.add_argument("--check", action="store_true", help="only say how long they last")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Makes them, or looks at them."""
    check_range("days", arguments.days, 1, DAYS_MAX)
    directory: Path = arguments.directory.expanduser()
    if not arguments.check:
        try:
            _make(directory, arguments)
        except OSError as error:
            raise ConfigError(f"cannot write {directory}: {error.strerror}") from error
    now = datetime.datetime.now(datetime.UTC)
    left = {AUTHORITY: days_left(directory / f"{AUTHORITY}.pem", now)}
    for role in INTERNAL_ROLES:
        files = RoleFiles.of(directory, role)
        files.check()
        left[role] = days_left(files.certificate, now)
    if arguments.json:
        print(json.dumps({"directory": str(directory), "days_left": left}))
    else:
        for name, days in left.items():
            print(f"{directory / f'{name}.pem'}: {days} days")
    return 0


def _make(directory: Path, arguments: argparse.Namespace) -> None:
    names = [f"{name}{end}.pem" for name in (AUTHORITY, *INTERNAL_ROLES) for end in ("", "-key")]
    found = [name for name in names if (directory / name).exists()]
    if found and not (arguments.renew or arguments.force):
        raise ConfigError(
            f"{directory / found[0]}: is there already; --renew makes the certificates of roles "
            "anew, --force all"
        )
    now = datetime.datetime.now(datetime.UTC)
    if not arguments.renew:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_authority(directory, now)
    for role in INTERNAL_ROLES:
        make_role(directory, role, now, arguments.days)
    print(
        f"outrider: keep {directory / f'{AUTHORITY}-key.pem'} where nobody reads it: whoever has "
        "it can make certificates of any role",
        file=sys.stderr,
    )
