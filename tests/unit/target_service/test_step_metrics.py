"""Metrics of a replica's steps: pages, prefixes, parts of prompts."""

from outrider.interfaces.messages import VerifyItem
from outrider.replica.step_spans import ObservedSteps
from tests.support.rounds import Replica, make_head, session_name
from tests.support.scraping import Memory
from tests.support.toy_engine import ToyEngine


def values(memory: Memory) -> dict[str, float]:
    """Sums by name without the prefix; `step_answers` by kind."""
    found: dict[str, float] = {}
    for metric, points in memory.points("target").items():
        for point in points:
            kind = (point.attributes or {}).get("kind", "")
            name = metric.removeprefix("outrider.") + (f"/{kind}" if kind else "")
            found[name] = found.get(name, 0) + getattr(point, "value", 0)
    return found


async def test_pages_prefixes_parts_and_preemptions_are_told() -> None:
    """Of 40 pages session 1 takes 38 in parts; session 2 shares 2 of its 3 and takes one more. Then
    session 1 needs 3 more than are free, and session 2 is preempted."""
    memory = Memory("target")
    exports = memory.exports["target"]
    engine = ToyEngine(max_model_len=160, num_pages=40)
    at = Replica("target", engine, 0.0, max_num_seqs=8, max_num_batched_tokens=64)
    at.service.observe(ObservedSteps(exports.tracer, exports.meter, "target"))
    prompt = [(3 * i) % 8 for i in range(152)]
    first = await at.ask(VerifyItem(make_head(prompt)))
    second = await at.ask(VerifyItem(make_head(prompt[:9], session=2)))
    assert (first.cached_length, second.cached_length) == (152, 9)
    told = values(memory)
    assert told["num_prefill_chunks"] == told["step_answers/continues"] == 2
    assert told["prefix_cache_queries"] == 161
    assert told["prefix_cache_hits"] == 8
    assert told["kv_cache_pages"] == 40
    assert told["kv_cache_pages_free"] == 1
    assert told["kv_cache_usage_perc"] == 39 / 40
    await at.ask(VerifyItem(make_head([*prompt, *[1] * 8], 152, round_index=1)))
    told = values(memory)
    assert told["num_preemptions"] == 1
    assert told["kv_cache_pages_free"] + told["kv_cache_pages_evictable"] == 0
    at.link.release(session_name(1), 1)
    await at.ask(VerifyItem(make_head([5], session=3)))
    assert values(memory)["kv_cache_pages_evictable"] > 30
    await at.service.close()
