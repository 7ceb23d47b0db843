import asyncio
import time

import pytest

from outrider.clock import run_virtually
from outrider.errors import InvariantError


def test_waiting_moves_the_clock_and_costs_nothing() -> None:
    """Timers fire in order at their exact times; an hour passes in well under a second."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()

        async def wait(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return loop.time()

        return list(await asyncio.gather(*(wait(3600 * k / 7) for k in range(8))))

    start = time.perf_counter()
    assert run_virtually(main()) == pytest.approx([3600 * k / 7 for k in range(8)])
    assert time.perf_counter() - start < 5


def test_a_program_that_hangs_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(InvariantError, match="hangs"):
        run_virtually(main())
