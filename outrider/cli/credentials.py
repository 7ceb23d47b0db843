"""`outrider keys` manages the API keys of callers. `outrider certs` creates the TLS certificates of
the services."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from outrider.bench.report import Report, table
from outrider.errors import ConfigError
from outrider.foundation.api_keys import Caller, add_key, check_key_name, read_key_file, remove_key
from outrider.limits import KEY_CONCURRENCY_MAX, REQUESTS_PER_MINUTE_MAX
from outrider.registry.registry import ROLES
from outrider.transport import tls
from outrider.transport.tls import AUTHORITY

from .command import Arguments, Group, Option, argument, command, exclusive, json_option
from .output import note, tell

FILE_VARIABLE = "OUTRIDER_API_KEY_FILE"
DAYS_MAX = 3650


@command(
    "new",
    argument("name", "name of the key"),
    Option("--tenant", help="tenant whose sessions and cached prefixes the key can reach [NAME]"),
    Option(
        "--requests-per-minute",
        type=click.IntRange(1, REQUESTS_PER_MINUTE_MAX),
        metavar="N",
        help="limit on requests a minute [no limit]",
    ),
    Option(
        "--concurrency",
        type=click.IntRange(1, KEY_CONCURRENCY_MAX),
        metavar="N",
        help="limit on generations that run at the same time [no limit]",
    ),
    Option("--admin", is_flag=True, help="the key can read and cancel every tenant's sessions"),
)
def new(arguments: Arguments) -> int:
    path = _key_file(arguments)
    tenant = arguments.tenant or arguments.name
    for label, text in (("NAME", arguments.name), ("--tenant", tenant)):
        try:
            check_key_name(text)
        except ValueError as error:
            raise ConfigError(f"{label}: {error}") from None
    caller = Caller(
        arguments.name,
        tenant,
        requests_per_minute=arguments.requests_per_minute or 0,
        concurrency=arguments.concurrency or 0,
        admin=arguments.admin,
    )
    with _writing(path):
        key = add_key(path, caller)
    note(f"{path} now holds the hash of this key. The key is shown only this once:")
    return tell(Report({"name": caller.name, "key": key}, [key]), arguments.json)


@command("list")
def list_keys(arguments: Arguments) -> int:
    callers = [asdict(caller) for caller in read_key_file(_key_file(arguments)).values()]
    rows = [{name: value or "-" for name, value in caller.items()} for caller in callers]
    return tell(Report({"keys": callers}, [table("keys", rows)] if rows else []), arguments.json)


@command("revoke", argument("name", "name of the key"))
def revoke(arguments: Arguments) -> int:
    path = _key_file(arguments)
    with _writing(path):
        remove_key(path, arguments.name)
    note(f"removed key {arguments.name!r} from {path}")
    return 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _key_file(arguments: Arguments) -> Path:
    if not arguments.api_key_file:
        raise ConfigError(f"--api-key-file: is missing; give this option, or set {FILE_VARIABLE}")
    path = Path(arguments.api_key_file).expanduser()
    if path.exists() and not path.is_file():  # A write would replace e.g. /dev/null.
        raise ConfigError(f"--api-key-file: {path} is not a regular file")
    return path


keys = Group(
    "keys",
    {
        "new": "create a key, print it, and add its hash to the file",
        "list": "list the keys in the file",
        "revoke": "remove a key from the file",
    },
    {"new": new, "list": list_keys, "revoke": revoke}.__getitem__,
    params=[
        Option(
            "--api-key-file",
            metavar="FILE",
            envvar=FILE_VARIABLE,
            help=f"file of key hashes [${FILE_VARIABLE}]",
        ),
        json_option(),
    ],
    subcommand_metavar="new|list|revoke",
)


@command(
    "certs",
    argument("directory", "directory of the certificates", metavar="DIR", type=Path),
    Option(
        "--days",
        type=click.IntRange(1, DAYS_MAX),
        default=tls.ROLE_DAYS,
        help="validity of the roles' certificates, days",
    ),
    Option(
        "--renew",
        is_flag=True,
        help="replace the roles' certificates by new ones that the existing authority signs",
    ),
    Option(
        "--force",
        is_flag=True,
        help="replace the authority and all certificates; the old ones are no longer trusted",
    ),
    Option("--check", is_flag=True, help="only show how many days each certificate is still valid"),
    json_option(),
)
def certs(arguments: Arguments) -> int:
    exclusive(arguments, "renew", "force", "check")
    directory: Path = arguments.directory.expanduser()
    if not arguments.check:
        with _writing(directory):
            _make_certificates(directory, arguments)
    now = datetime.datetime.now(datetime.UTC)
    left = {AUTHORITY: tls.days_left(directory / f"{AUTHORITY}.pem", now)}
    for role in ROLES:
        left[role] = tls.days_left(tls.RoleFiles.of(directory, role).checked().certificate, now)
    rows = [f"{directory / f'{name}.pem'}: {days} days" for name, days in left.items()]
    return tell(Report({"directory": str(directory), "days_left": left}, rows), arguments.json)


def _make_certificates(directory: Path, arguments: Arguments) -> None:
    names = [f"{name}{end}.pem" for name in (AUTHORITY, *ROLES) for end in ("", "-key")]
    existing = [name for name in names if (directory / name).exists()]
    if existing and not (arguments.renew or arguments.force):
        raise ConfigError(
            f"{directory / existing[0]}: exists already; --renew replaces the certificates of the "
            "roles, --force also replaces the authority"
        )
    now = datetime.datetime.now(datetime.UTC)
    if not arguments.renew:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tls.make_authority(directory, now)
    for role in ROLES:
        tls.make_role(directory, role, now, arguments.days)
    note(f"keep {directory / f'{AUTHORITY}-key.pem'} secret: it can sign a certificate of any role")
