"""`outrider autoscale`: between which bounds the load decides how many replicas a role has."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from deploy.fleet.reconciler import DeploymentLocation, connect_reconciler
from outrider.config import AutoscalePolicy, Bounds, parse_bounds
from outrider.errors import ConfigError
from outrider.registry.registry import ROLES, Role

from .deployment import add_place_flags, find_deployment
from .scale import role_and_value

OFF = "off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bounds, and which deployment."""
    parser.add_argument(
        "bounds", nargs="*", metavar="ROLE=LEAST:MOST",
        help="target=1:4, draft=0:8 or coordinator=1:2; ROLE=off leaves a role's number to "
        "`outrider scale`; nothing shows what holds",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_place_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tells the deployment, and prints what holds."""
    changes = parsed_bounds(arguments.bounds)
    policy = asyncio.run(_tell(find_deployment(arguments), changes))
    if arguments.json:
        print(policy.to_json())
        return 0
    for role in ROLES:
        least, most = policy.bounds.get(role, (None, None))
        print(f"{role}: {OFF if least is None else f'{least} to {most}'}")
    return 0


def parsed_bounds(words: Sequence[str]) -> dict[Role, Bounds | None]:
    """Of `ROLE=LEAST:MOST` and `ROLE=off`. Raises `ConfigError`."""
    found: dict[Role, Bounds | None] = {}
    for word in words:
        role, text = role_and_value(word, "LEAST:MOST", found)
        try:
            found[role] = None if text == OFF else parse_bounds(text, role)
        except ValueError as error:
            raise ConfigError(f"{word}: {error}, or {OFF}") from None
    return found


async def _tell(where: DeploymentLocation, changes: dict[Role, Bounds | None]) -> AutoscalePolicy:
    async with connect_reconciler(where) as reconciler:
        policy: AutoscalePolicy = await reconciler.call("bound", changes)
        return policy
