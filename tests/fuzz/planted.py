"""`tests.fuzz.system` with a bug in it: its target breaks down at one input."""

from __future__ import annotations

import asyncio
import logging
import sys

from outrider.messages import VerifyItem
from outrider.speculation.sampling_params import SamplingParams
from target_service.verifier import Verifier

from . import seeds, system

_validate = Verifier._validate


def _broken(scorer: Verifier, item: VerifyItem) -> SamplingParams:
    if item.head.seed == seeds.SEED_MAX:
        raise RuntimeError("the planted fault")
    return _validate(scorer, item)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    Verifier._validate = _broken  # type: ignore[method-assign]
    asyncio.run(system.main())
