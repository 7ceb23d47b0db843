"""Telemetry of HTTP requests: times by route and status, traces, and the page for Prometheus."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.trace import SpanKind
from scraping import Memory, Page, watched_stack
from stack import emulated_stack, http_front
from test_service_telemetry import REQUEST, observed_stack

from coordinator.auth.access_control import OPEN
from coordinator.host import CoordinatorHost
from outrider.config import CoordinatorConfig
from outrider.registry.registry import ROLES
from outrider.telemetry.observer import UNOBSERVED

BODY: dict[str, Any] = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
TIMES = "http_server_request_duration_seconds_count"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


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
        assert host.http is not None
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
    """Metrics are served by HTTP, at the same port as the models. Without HTTP there are no
    metrics. No other port is opened, and nothing is audited. vLLM's names appear only if they are
    configured."""
    config = CoordinatorConfig(port=0, served_model_name="model", vllm_metric_names=True)
    host = CoordinatorHost(config)
    async with emulated_stack(tmp_path, observation=host.observe()) as stack:
        address = await host.serve_http(stack.coordinator, OPEN)
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            assert (await http.get("/v1/models")).status_code == 200
            for _ in range(2):
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
            found = await http.get("/metrics")
        assert host.http is not None
        assert host.exports is not None
        await host.http.stop()
    assert found.status_code == 200
    page = Page.parse(found.text)
    assert page.value(TIMES, http_route="/v1/completions", http_response_status_code="200") == 2
    assert page.value("outrider_generation_tokens_total") == 2 * BODY["max_tokens"]
    assert page.value("vllm:spec_decode_num_drafts_total", model_name="model") >= 0
    assert host.exports.scrape is not None
    assert host.exports.scrape.address == ""
    await host.exports.close()
    assert CoordinatorHost(CoordinatorConfig(http=False)).observe() is UNOBSERVED


async def test_a_call_is_a_span_with_what_grpc_s_has(tmp_path: Path) -> None:
    memory = Memory(*ROLES)
    fields = {"model": "model", "max_tokens": 24, "temperature": 0, "seed": 3, "stop": "never said"}
    request = replace(REQUEST, seed=3, stop=("never said",), num_draft_tokens=None)
    async with observed_stack(memory.exports, tmp_path) as stack, http_front(stack) as url:
        await stack.client.complete(request)
        async with httpx.AsyncClient(base_url=url) as http:
            headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
            body = {**fields, "prompt": REQUEST.prompt}
            assert (await http.post("/v1/completions", json=body, headers=headers)).is_success
            body = {**fields, "messages": [{"role": "user", "content": "hello"}]}
            assert (await http.post("/v1/chat/completions", json=body)).is_success
    by_grpc, by_http = memory.named("text_completion model")
    assert by_http.parent is not None
    assert f"{by_http.parent.span_id:016x}" == SPAN_ID
    assert f"{by_http.context.trace_id:032x}" == TRACE_ID
    (chat,) = memory.named("chat model")
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    for span in (by_http, chat):
        assert span.kind is SpanKind.SERVER
        assert span.attributes.keys() == by_grpc.attributes.keys()
    for name in ("request.max_tokens", "request.temperature", "request.seed", "usage.input_tokens"):
        assert by_http.attributes[f"gen_ai.{name}"] == by_grpc.attributes[f"gen_ai.{name}"], name
