"""`outrider keys`: makes API keys, and keeps the file of what is known of them.

A key is shown once, on standard output alone; the file has its hash. Coordinators that run read the
file again by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Final

from outrider.api_keys import Caller, add_key, check_key_name, read_key_file, remove_key
from outrider.errors import ConfigError, SettingError
from outrider.limits import KEY_CONCURRENCY_MAX, REQUESTS_PER_MINUTE_MAX
from outrider.settings import check_range

from .tables import show

FILE_VARIABLE: Final = "OUTRIDER_API_KEY_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """new, list and revoke."""
    parser.add_argument(
        "--api-key-file", metavar="FILE", default=os.environ.get(FILE_VARIABLE),
        help=f"the file of keys [${FILE_VARIABLE}]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    actions = parser.add_subparsers(dest="action", required=True, metavar="new|list|revoke")
    new = actions.add_parser("new", help="make a key, print it, and add its hash to the file")
    new.add_argument("name", metavar="NAME", help="of the key")
    new.add_argument("--tenant", help="whose sessions and cached prefixes it reaches [NAME]")
    new.add_argument(
        "--requests-per-minute", type=int, metavar="N", help="that it may begin [any number]"
    )
    new.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="generations that may run at a time [any number]",
    )
    new.add_argument(
        "--admin", action="store_true", help="may read and cancel sessions of every tenant"
    )
    actions.add_parser("list", help="say which keys there are")
    revoke = actions.add_parser("revoke", help="take a key out of the file")
    revoke.add_argument("name", metavar="NAME", help="of the key")


def run(arguments: argparse.Namespace) -> int:
    """Changes the file, or reads it."""
    if not arguments.api_key_file:
        raise ConfigError("--api-key-file: name the file of keys")
    path = Path(arguments.api_key_file).expanduser()
    if arguments.action == "new":
        return _new(path, arguments)
    if arguments.action == "revoke":
        remove_key(path, arguments.name)
        print(f"outrider: {path} has no key {arguments.name!r} any more", file=sys.stderr)
        return 0
    return _list(path, as_json=arguments.json)


def _new(path: Path, arguments: argparse.Namespace) -> int:
    for key, most in (
        ("requests_per_minute", REQUESTS_PER_MINUTE_MAX),
        ("concurrency", KEY_CONCURRENCY_MAX),
    ):
        check_range(key, getattr(arguments, key), 1, most)
    caller = Caller(
        name=_checked("name", arguments.name),
        tenant=_checked("tenant", arguments.tenant or arguments.name),
        requests_per_minute=arguments.requests_per_minute or 0,
        concurrency=arguments.concurrency or 0,
        admin=arguments.admin,
    )
    try:
        key = add_key(path, caller)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"outrider: {path} has the hash of the key, which is shown only now:", file=sys.stderr)
    print(json.dumps({"name": caller.name, "key": key}) if arguments.json else key, flush=True)
    return 0


def _checked(option: str, text: str) -> str:
    try:
        return check_key_name(text)
    except ValueError as error:
        if option == "name":
            raise ConfigError(f"NAME: {error}") from None
        raise SettingError(option, str(error)) from None


def _list(path: Path, *, as_json: bool) -> int:
    """All but hashes."""
    callers = [entry.caller for entry in read_key_file(path)]
    if as_json:
        facts = [{name: getattr(one, name) for name in Caller.__slots__} for one in callers]
        print(json.dumps({"keys": facts}))
        return 0
    from rich.table import Table

    table = Table("key", "tenant", "requests a minute", "at a time", "admin", box=None)
    for one in callers:
        table.add_row(
            one.name, one.tenant, str(one.requests_per_minute or "any"),
            str(one.concurrency or "any"), "yes" if one.admin else "",
        )  # fmt: skip
    show(table, highlight=False)
    return 0
