import asyncio

import pytest

from outrider.errors import InvariantError
from outrider.foundation.clock import run_virtually


def test_a_program_that_hangs_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(InvariantError, match="hangs"):
        run_virtually(main())
