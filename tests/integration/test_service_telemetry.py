"""Traces and metrics of the three services and of HTTP: in memory, by OTLP, and scraped."""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from coordinator.auth.access_control import OPEN
from coordinator.host import CoordinatorHost
from outrider.config.deployment import CoordinatorConfig
from outrider.interfaces.request import GenerateRequest
from outrider.registry.registry import ROLES, Role
from outrider.speculation.sampling_params import SamplingParams
from outrider.telemetry.observer import UNOBSERVED
from outrider.telemetry.setup import Exports
from outrider.transport.channel import open_channel
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.support.scraping import Memory, Page, observers, started_exports, watched_stack
from tests.support.stack import Stack, emulated_stack, toy_stack

DETAIL = CoordinatorConfig(trace_every_rounds=4)
PROMPT = "a secret that must not be recorded"
REQUEST = GenerateRequest(
    PROMPT, sampling=SamplingParams(temperature=0.0), max_tokens=24, num_draft_tokens=3
)
GENAI_ATTRIBUTES = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}


def observed_stack(
    exports: Mapping[Role, Exports], directory: Path
) -> AbstractAsyncContextManager[Stack]:
    # Without look-ahead, every proposal is requested and has its spans.
    return toy_stack(directory, look_ahead=0, **observers(exports, DETAIL))


def service(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.name"])


@pytest.fixture
def memory() -> Memory:
    return Memory(*ROLES)


async def test_a_request_is_one_trace_over_three_services(memory: Memory, tmp_path: Path) -> None:
    async with observed_stack(memory.exports, tmp_path) as stack:
        answer = await stack.client.complete(REQUEST)
    assert not any(PROMPT in span.to_json() for span in memory.spans)
    assert len({span.context.trace_id for span in memory.spans}) == 1
    assert {service(span) for span in memory.spans} == {f"outrider-{role}" for role in ROLES}

    (root,) = memory.named("text_completion model")
    by_id = {span.context.span_id: span for span in memory.spans}
    rounds = memory.named("outrider.round")
    # The first two rounds have spans, and then every fourth round.
    indices = [span.attributes["outrider.round.index"] for span in rounds]
    assert indices == [i for i in range(answer.metrics.num_rounds) if i < 2 or (i - 2) % 4 == 0]
    assert all(span.parent.span_id == root.context.span_id for span in rounds)
    for name, parent, services in (
        ("outrider.open", root.name, {"outrider-coordinator"}),
        ("outrider.wire", "outrider.round", {"outrider-coordinator"}),
        ("outrider.commit", "outrider.round", {"outrider-coordinator"}),
        ("outrider.verify", "outrider.wire", {"outrider-target"}),
    ):
        found = memory.named(name)
        assert {service(span) for span in found} == services
        assert {by_id[span.parent.span_id].name for span in found} == {parent}
        assert all(span.start_time >= by_id[span.parent.span_id].start_time for span in found)
    queued = {service(span) for span in memory.named("outrider.queue")}
    assert queued == {"outrider-draft", "outrider-target"}
    # The draft's prefill belongs to no round.
    drafts = memory.named("outrider.draft")
    assert {service(span) for span in drafts} == {"outrider-draft"}
    parents = [by_id[span.parent.span_id].name for span in drafts]
    assert sorted(parents) == sorted([root.name] + ["outrider.wire"] * (len(rounds) - 1))
    assert len(memory.named("outrider.commit")) == len(rounds)


async def test_the_request_span_says_what_the_conventions_and_we_promise(
    memory: Memory, tmp_path: Path
) -> None:
    request = replace(REQUEST, seed=2**63, stop=("never said",))
    async with observed_stack(memory.exports, tmp_path) as stack:
        answer = await stack.client.complete(request)
    (root,) = memory.named("text_completion model")
    found = root.attributes
    assert root.kind is SpanKind.SERVER
    metrics = answer.metrics
    for name, value in {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "model",
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.seed": str(2**63),
        "gen_ai.request.stop_sequences": ("never said",),
        "gen_ai.response.id": answer.session_id,
        "gen_ai.server.time_to_first_token": metrics.time_to_first_token_ms / 1e3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 24,
        "outrider.num_rounds": metrics.num_rounds,
        "outrider.num_accepted_draft_tokens": metrics.num_accepted_draft_tokens,
    }.items():
        assert found[name] == value, name
    durations = memory.points("coordinator")
    for name in ("time_to_first_token", "time_per_output_token", "request.duration"):
        (point,) = durations[f"gen_ai.server.{name}"]
        assert point.count == 1
        assert dict(point.attributes) == {key: found[key] for key in GENAI_ATTRIBUTES}
    # The sum is over all rounds, also those without spans.
    wires = memory.named("outrider.wire")
    at_target = [span for span in wires if span.attributes["outrider.peer"] == "target"]
    verify_ms = sum(span.attributes["outrider.compute_ms"] for span in at_target)
    assert found["outrider.verify_ms"] > verify_ms > 0
    for phase in ("draft", "wire", "queue", "verify", "commit"):
        assert found[f"outrider.{phase}_ms"] > 0


async def _raw_generate(stack: Stack, traceparent: str) -> None:
    request = pb.GenerateRequest(text=PROMPT, max_tokens=4)
    async with open_channel(stack.client.address) as channel:
        call = CoordinatorStub(channel).Generate(request, metadata=(("traceparent", traceparent),))
        assert [event async for event in call]


async def test_a_caller_s_trace_goes_on_here(memory: Memory, tmp_path: Path) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with observed_stack(memory.exports, tmp_path) as stack:
        await _raw_generate(stack, f"00-{trace_id}-{span_id}-01")
        recorded = memory.spans
        await _raw_generate(stack, f"00-{trace_id}-{span_id}-00")
    (root,) = memory.named("text_completion model")
    assert f"{root.parent.span_id:016x}" == span_id
    assert {f"{span.context.trace_id:032x}" for span in recorded} == {trace_id}
    assert len(memory.spans) == len(recorded) > 5


async def test_a_client_that_goes_is_a_cancel(memory: Memory, tmp_path: Path) -> None:
    async with observed_stack(memory.exports, tmp_path) as stack:
        events = stack.coordinator.streams.generate(REQUEST)
        async for _ in events:
            break
        await events.aclose()
        (root,) = memory.named("text_completion model")
    assert root.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert "error.type" not in root.attributes
    points = memory.points("coordinator")["outrider.request_success"]
    (point,) = [point for point in points if point.value]
    assert dict(point.attributes) == {"finished_reason": "cancelled"}


class Collector(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.metrics: set[tuple[str, str]] = set()

    def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, metrics_pb.ExportMetricsServiceRequest):
            for resource in request.resource_metrics:
                found = [one for scope in resource.scope_metrics for one in scope.metrics]
                self.metrics |= {(_service_of(resource), metric.name) for metric in found}
            return metrics_pb.ExportMetricsServiceResponse()
        for resource in request.resource_spans:
            spans = [one for scope in resource.scope_spans for one in scope.spans]
            self.spans += [(_service_of(resource), span) for span in spans]
        return trace_pb.ExportTraceServiceResponse()


def _service_of(found: Any) -> str:
    attributes = found.resource.attributes
    return next(a.value.string_value for a in attributes if a.key == "service.name")


async def test_one_trace_over_real_otlp(tmp_path: Path) -> None:
    collector, server = Collector(), grpc.aio.server()
    trace_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(collector, server)
    way = f"otlp=http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    exports = started_exports(way)
    async with observed_stack(exports, tmp_path) as stack:
        await stack.client.complete(REQUEST)
    for made in exports.values():
        await made.close()
    await server.stop(None)
    assert len({span.trace_id for _, span in collector.spans}) == 1
    assert {role for role, _ in collector.spans} == {f"outrider-{role}" for role in ROLES}
    names = {span.name for _, span in collector.spans}
    assert names >= {f"outrider.{n}" for n in ("queue", "draft", "wire", "verify", "commit")}
    assert ("outrider-coordinator", "outrider.generation_tokens") in collector.metrics
    assert ("outrider-target", "outrider.step_time_seconds") in collector.metrics


BODY: dict[str, Any] = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
TIMES = "http_server_request_duration_seconds_count"


async def test_requests_are_timed_by_route_and_status(tmp_path: Path) -> None:
    async with watched_stack(tmp_path) as watched:
        host = CoordinatorHost(CoordinatorConfig(port=0))
        host.exports = watched.exports["coordinator"]
        address = await host.serve_http(watched.stack.coordinator, OPEN)
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            await http.post("/v1/completions", json=BODY)
            async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as one:
                async for _ in one.aiter_raw():
                    pass
            await http.post("/v1/completions", json={**BODY, "max_tokens": -1})
            await http.get("/v1/models/of/another")
            await http.get("/v1/completions")
            await http.get("/nowhere/secret")
            twice = [("authorization", "Bearer a"), ("authorization", "Bearer b")]
            await http.post("/v1/completions", json=BODY, headers=twice)
            await http.request("SECRET", "/health")
            await http.get("/health")
            page = Page.parse((await http.get("/metrics")).text)
        own = await watched.page("coordinator")
        await host.http.stop()
    for method, route, status, num in (
        ("POST", "/v1/completions", 200, 2),
        ("POST", "/v1/completions", 400, 1),
        ("GET", "/v1/models/{name:path}", 404, 1),
        ("GET", "/health", 200, 1),
    ):
        labels = {"http_request_method": method, "http_response_status_code": f"{status}"}
        assert page.value(TIMES, http_route=route, url_scheme="http", **labels) == num, route
    assert page.value(TIMES, http_response_status_code="405") == 2
    assert page.value(TIMES, http_request_method="_OTHER") == 1
    refused = page.value(TIMES, http_response_status_code="401")
    assert refused == 1, "it was refused before its route was known"
    assert page.value(TIMES) == 9
    assert "secret" not in json.dumps(sorted(map(str, page.samples))).lower()
    assert page.names == own.names
    assert not [name for name in page.names if name.startswith("vllm:")]
    assert "outrider_generation_tokens_total" in page.names


async def test_metrics_are_there_without_being_asked_for(tmp_path: Path) -> None:
    """Metrics are served at the port of the models, no other is opened. vLLM's names appear if they
    are configured."""
    config = CoordinatorConfig(port=0, served_model_name="model", vllm_metric_names=True)
    host = CoordinatorHost(config)
    async with emulated_stack(tmp_path, observation=host.observe()) as stack:
        address = await host.serve_http(stack.coordinator, OPEN)
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            assert (await http.get("/v1/models")).status_code == 200
            for _ in range(2):
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
            found = await http.get("/metrics")
        await host.http.stop()
    assert found.status_code == 200
    page = Page.parse(found.text)
    assert page.value(TIMES, http_route="/v1/completions", http_response_status_code="200") == 2
    assert page.value("outrider_generation_tokens_total") == 2 * BODY["max_tokens"]
    assert page.value("vllm:spec_decode_num_drafts_total", model_name="model") >= 0
    assert host.exports.scrape.address == ""
    await host.exports.close()
    assert CoordinatorHost(CoordinatorConfig(http=False)).observe() is UNOBSERVED
