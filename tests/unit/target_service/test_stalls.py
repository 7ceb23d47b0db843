"""How much a long prompt slows other sessions, and how long it takes, on a virtual clock. The
engine states its times, and costs are measured on it."""

import asyncio
import statistics

from outrider.config.emulated_spec import EmulatedSpec
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.step_costs import measure_step_costs
from outrider.foundation.clock import run_virtually
from outrider.interfaces.messages import VerifyItem
from tests.support.rounds import Replica, ask, make_head

SPEC = EmulatedSpec(vocab_size=64, support=4, verify_ms=10.0, verify_tokens=16)
"""A step of 8 rows takes 10 ms, a prompt of 4,000 tokens 2,500 ms."""
PROMPT = [(7 * i) % 64 for i in range(4000)]


def measured(knows_costs: bool) -> tuple[float, float, float]:
    """The median gap between a session's answers before a long prompt comes, the 99th percentile
    while the prompt runs, and how long the prompt takes, in seconds."""

    async def main() -> tuple[float, float, float]:
        engine = EmulatedEngine(SPEC, "target")
        costs = measure_step_costs(engine, 512, 64, lambda: 0.0) if knows_costs else None
        target = Replica("target", engine, costs=costs)
        now = asyncio.get_running_loop().time
        gaps: list[tuple[float, float]] = []

        async def play(session: int) -> None:
            """Plain rounds. Any token will do, so none is checked."""
            at, tokens, last = target.connect(), [session, 1, 2], 0.0
            for index in range(500):
                held = len(tokens) - 1 if index else 0
                head = make_head(tokens, held, session=session, round_index=index)
                await ask(*at, VerifyItem(head))
                gaps.append((last, now()))
                last = now()
                tokens.append(5)

        players = [asyncio.create_task(play(session)) for session in range(1, 9)]
        await asyncio.sleep(1.0)
        came = now()
        await target.ask(VerifyItem(make_head(PROMPT, session=99)))
        answered = now()
        for player in players:
            player.cancel()
        await asyncio.gather(*players, return_exceptions=True)
        await target.service.drain()
        await target.service.close()
        before = [end - start for start, end in gaps if start >= 0.1 and end <= came]
        during = [end - start for start, end in gaps if came - 0.02 <= start and end <= answered]
        percentile = statistics.quantiles(during, n=100)[98]
        return statistics.median(before), percentile, answered - came

    return run_virtually(main())


def test_a_long_prompt_does_not_stall_other_sessions() -> None:
    """Gaps of other sessions at most triple in 99 of 100 cases. The prompt takes longer than alone,
    but no longer than shared steps require. Without costs the sessions would stall."""
    before, during, took = measured(knows_costs=True)
    assert 0.010 <= before < 0.012
    assert during <= 3 * before + 1e-6
    assert 2.5 < took < 5.5
    assert measured(knows_costs=False)[1] > 10 * before
