"""What telemetry costs: `python tests/telemetry_bench.py`. Not a test.

Two whole stacks in one process, equal but for telemetry: emulated engines, real gRPC, real Redis.
The one with telemetry sends every span and metric by OTLP to a collector in another process.
Requests alternate between them, and each pair gives a ratio of tokens per second. Coordinator,
target and draft share this process and its lock, so what they pay adds up: an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from stack import Stack, running_stack

from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.request import GenerateRequest
from outrider.telemetry.request_spans import Detail, ObservedRequests
from outrider.telemetry.setup import Exports, start_exports
from outrider.telemetry.step_spans import ObservedSteps

COLLECTOR = """
import grpc, sys
from concurrent.futures import ThreadPoolExecutor
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as m
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as mg
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as t
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as tg

class Taker(tg.TraceServiceServicer, mg.MetricsServiceServicer):
    def Export(self, request, context):
        traces = isinstance(request, t.ExportTraceServiceRequest)
        return t.ExportTraceServiceResponse() if traces else m.ExportMetricsServiceResponse()

server = grpc.server(ThreadPoolExecutor(2))
tg.add_TraceServiceServicer_to_server(Taker(), server)
mg.add_MetricsServiceServicer_to_server(Taker(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


def _exports(port: str) -> dict[str, Exports]:
    started = {
        role: start_exports(f"otlp=http://127.0.0.1:{port}", role, "127.0.0.1")
        for role in ("coordinator", "target", "draft")
    }
    return {role: made for role, made in started.items() if made is not None}


async def _one(stack: Stack, request: GenerateRequest) -> tuple[float, float, float]:
    """Tokens per second; seconds of CPU per round, of this process and of its event loop."""
    cpu, loop_cpu, begin = time.process_time(), time.thread_time(), time.perf_counter()
    answer = await stack.client.complete(request)
    seconds = time.perf_counter() - begin
    rounds = answer.metrics.num_rounds
    return (
        len(answer.token_ids) / seconds,
        (time.process_time() - cpu) / rounds,
        (time.thread_time() - loop_cpu) / rounds,
    )


async def measure(arguments: argparse.Namespace, port: str) -> dict[str, float]:
    spec = EmulatedSpec.parse(arguments.emulated)
    exports = _exports(port)
    observed = {
        r: ObservedSteps(e.tracer, e.meter, r) for r, e in exports.items() if r in "target draft"
    }
    coordinator = exports["coordinator"]
    detail = Detail(arguments.first_rounds, arguments.every_rounds)
    request = GenerateRequest(
        tuple(range(32)), max_tokens=arguments.max_tokens, num_draft_tokens=4, seed=1
    )
    pairs = []
    async with AsyncExitStack() as stack:
        sides = []
        for telemetry in (False, True):
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            found = running_stack(
                EmulatedEngine(spec, "target", 64),
                EmulatedEngine(spec, "draft", 64),
                Path(directory),
                **(
                    {
                        "observation": ObservedRequests(
                            coordinator.tracer, coordinator.meter, detail
                        ),
                        "target_observer": observed["target"],
                        "draft_observer": observed["draft"],
                    }
                    if telemetry
                    else {}
                ),
            )
            sides.append(await stack.enter_async_context(found))
        for side in sides:
            await _one(side, request)
        for pair in range(arguments.pairs):
            first = pair % 2
            results = {i: await _one(sides[i], request) for i in (first, 1 - first)}
            pairs.append((results[0], results[1]))
    for made in exports.values():
        await made.close()
    ratios = sorted(on[0] / off[0] for off, on in pairs)
    return {
        "pairs": len(pairs),
        "off_tokens_per_second": statistics.median(off[0] for off, _ in pairs),
        "on_over_off": statistics.median(ratios),
        "on_over_off_quartile_1": ratios[len(ratios) // 4],
        "on_over_off_quartile_3": ratios[3 * len(ratios) // 4],
        "off_cpu_us_per_round": 1e6 * statistics.median(off[1] for off, _ in pairs),
        "more_cpu_us_per_round": 1e6 * statistics.median(on[1] - off[1] for off, on in pairs),
        "more_loop_cpu_us_per_round": 1e6 * statistics.median(on[2] - off[2] for off, on in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", default="", help="engine specification")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--first-rounds", type=int, default=2)
    parser.add_argument("--every-rounds", type=int, default=64)
    arguments = parser.parse_args()
    collector = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert collector.stdout is not None
        port = collector.stdout.readline().strip()
        print(json.dumps(asyncio.run(measure(arguments, port)), indent=2))
    finally:
        collector.terminate()
        collector.wait()


if __name__ == "__main__":
    main()
