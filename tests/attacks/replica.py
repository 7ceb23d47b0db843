"""A target or a draft with an emulated engine. Takes JSON options and a folder. Prints its address
as a line of JSON, and runs until its standard input is closed."""

import asyncio
import json
import sys
from typing import Any, Final

from draft_service.actor import DraftActor
from outrider.config.deployment import DraftConfig, ReplicaConfig, TargetConfig
from outrider.replica.host import ReplicaHost
from outrider.replica.logs import STANDARD_ERROR
from target_service.actor import TargetActor

ROLES: Final[dict[str, tuple[type[ReplicaHost[Any, Any]], type[ReplicaConfig]]]] = {
    "target": (TargetActor, TargetConfig),
    "draft": (DraftActor, DraftConfig),
}


async def main(role: str, settings: dict[str, Any]) -> None:
    actor, config = ROLES[role]
    replica = actor()
    address = await replica.start(config(log_level="warning", **settings), STANDARD_ERROR)
    print(json.dumps({"address": address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await replica.stop(0.0)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
