"""Settings of telemetry, trace context, log lines, and a request's spans and metrics."""

import json
import logging
import sys
from typing import Any
from urllib.request import Request, urlopen

import pytest
from opentelemetry.trace import get_current_span

from outrider.config.deployment import CoordinatorConfig
from outrider.config.telemetry_destination import Destination
from outrider.errors import ConfigError, Unavailable
from outrider.foundation.logs import JsonLines, about, identify
from outrider.interfaces.request import ChatMessage, GenerateRequest
from outrider.registry.registry import ROLES
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from outrider.telemetry import setup
from outrider.telemetry.observer import RequestObserver
from outrider.telemetry.request_spans import ObservedRequests
from tests.support.scraping import Memory, Page

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
REQUEST = GenerateRequest((1, 2, 3))


def test_one_setting_says_where_telemetry_goes() -> None:
    assert Destination.parse("") == Destination()
    assert setup.start_exports("", "target", "127.0.0.1") is None
    both = Destination.parse("otlp=http://collector:4317, prometheus=9464")
    assert both == Destination("http://collector:4317", 9464)
    assert Destination.parse("prometheus=0").port("draft", 2) == 0
    ports = [both.port(role, index) for index in range(3) for role in ROLES]
    assert ports == list(range(9464, 9473)), "those of an index stand together"


@pytest.mark.parametrize(
    "text",
    [
        "otlp=collector:4317",
        "otlp=http://[::1:4317",
        "prometheus=65534",
        "prometheus=²",
        "prometheus=1,prometheus=2",
        "zipkin=http://host:9411",
    ],
)
def test_a_wrong_destination_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^telemetry: .* it must be otlp=http"):
        CoordinatorConfig(telemetry=text)


def test_trace_context_survives_the_wire() -> None:
    span = get_current_span(setup.read_traceparent(SAMPLED))
    assert span.get_span_context().is_remote
    assert setup.write_traceparent(span) == SAMPLED
    quiet = setup.write_traceparent(span, sampled=False)
    assert quiet == SAMPLED[:-1] + "0"
    assert setup.read_sampled(quiet) is None
    assert setup.read_sampled(SAMPLED[:-1] + "3") is not None
    assert setup.read_traceparent(f"01{SAMPLED[2:]}-what-a-later-version-adds") is not None
    for text in ("", "x", SAMPLED[:-1], SAMPLED.replace(SPAN_ID, "0" * 16), "\ud800-1"):
        assert setup.read_traceparent(text) is setup.read_sampled(text) is None


def test_rounds_are_sampled_at_the_beginning_and_then_now_and_then() -> None:
    for every, found in ((3, [0, 1, 2, 5, 8, 11]), (0, [])):
        requests = Recorded(trace_every_rounds=every).requests
        assert [index for index in range(12) if requests.samples(index)] == found


async def test_log_lines_carry_session_and_trace() -> None:
    identify("s1", TRACE_ID)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        record = logging.LogRecord("there", 30, "", 1, 'a "%s"\n', ("b",), sys.exc_info())
    record.__dict__ |= about(round=7)
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["session_id"], line["trace_id"], line["round"]) == ("s1", TRACE_ID, 7)
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "there", 'a "b"\n')
    assert line["exception"].endswith("ValueError: first\nsecond")


class Recorded(Memory):
    """One observed request, and its spans and metrics."""

    def __init__(self, request: GenerateRequest = REQUEST, **traced: Any) -> None:
        super().__init__("coordinator")
        exports, config = self.exports["coordinator"], CoordinatorConfig(**traced)
        self.requests = ObservedRequests(exports.tracer, exports.meter, config)
        self.observer = self.requests.begin(request, "m", SAMPLED)

    def total(self, name: str) -> float:
        return sum(point.value for point in self.points("coordinator")[f"outrider.{name}"])


def _round(observer: RequestObserver, index: int, *, by_replica: bool = True) -> None:
    observer.round_began(index)
    observer.asked("draft")
    if not by_replica:
        observer.count("fallback_rounds")
    observer.answered("draft", 0.004, 1.0, 2.0)
    observer.asked("target")
    observer.answered("target", 0.010, 1.0, 6.0)
    observer.decided(EncodedProposal((1, 2)), 1, 2, 5)


def test_unsampled_rounds_count_and_have_no_spans() -> None:
    recorded = Recorded(trace_every_rounds=64)
    observer = recorded.observer
    assert observer.context("draft").startswith(f"00-{TRACE_ID}-")
    assert setup.read_sampled(observer.context("draft"))
    for index in (1, 3, 4):
        _round(observer, index, by_replica=index < 4)
        observer.shown({index: 0.001}, 2)
        assert bool(setup.read_sampled(observer.context("target"))) == (index == 1)
        assert observer.context("target")[3:35] == TRACE_ID
    observer.failed(Unavailable("x"))
    assert len(recorded.named("outrider.round")) == 1
    assert len(recorded.named("outrider.wire")) == 2
    (root,) = recorded.named("text_completion m")
    found = root.attributes or {}
    for phase, ms in (("draft", 12), ("wire", 9), ("queue", 3), ("verify", 18), ("commit", 3)):
        assert found[f"outrider.{phase}_ms"] == pytest.approx(ms), phase
    assert recorded.total("fallback_rounds") == 1
    assert recorded.total("spec_decode_num_accepted_tokens") == 3
    assert recorded.total("generation_tokens") == 6


def test_times_of_rounds_that_ran_unasked_are_only_in_the_spans() -> None:
    """Two such rounds go to the client as one event, which has one commit and one latency."""
    recorded = Recorded()
    observer = recorded.observer
    observer.shown({0: 0.001}, 1)
    for index in (1, 2):
        observer.round_began(index)
        observer.answered("target", 0.0, 1.0, 6.0, asked=index == 1)
    observer.shown({1: 0.002, 2: 0.001}, 2)
    observer.failed(Unavailable("x"))
    points = recorded.points("coordinator")
    for name, num in (("round_verify", 1), ("round_commit", 2), ("inter_token_latency", 1)):
        (point,) = points[f"outrider.{name}_seconds"]
        assert point.count == num, name
    (root,) = recorded.named("text_completion m")
    assert (root.attributes or {})["outrider.verify_ms"] == pytest.approx(12)


def test_acceptance_is_counted_by_position_and_context_length() -> None:
    exports = setup.start_exports("prometheus=0", "coordinator", "127.0.0.1", vllm_model="m")
    requests = ObservedRequests(exports.tracer, exports.meter, CoordinatorConfig())
    observer = requests.begin(REQUEST, "m", "")
    two, three = EncodedProposal((1, 2)), EncodedProposal((1, 2, 3))
    for proposal, num_accepted, length in (
        (two, 2, 1023),
        (two, 0, 1024),
        (three, 1, 70_000),
        (EMPTY_ENCODED_PROPOSAL, 0, 70_000),
    ):
        observer.decided(proposal, num_accepted, num_accepted + 1, length)
    accept = "application/openmetrics-text;version=1.0.0"
    url = f"http://{exports.scrape.address}/metrics"
    with urlopen(Request(url, headers={"Accept": accept}), timeout=5) as served:
        text = served.read()
    assert text == exports.scrape.render()
    page = Page.parse(text.decode())
    exports.shut_down()
    for context, drafted, accepted in (
        ("0-1k", [1, 1], [1, 1]),
        ("1k-4k", [1, 1], [0, 0]),
        ("64k+", [1, 1, 1], [1, 0, 0]),
    ):
        for kind, expected in (("draft", drafted), ("accepted", accepted)):
            name = f"outrider_spec_decode_num_{kind}_tokens_per_pos_total"
            places = map(str, range(len(expected)))
            found = [page.value(name, context=context, position=place) for place in places]
            assert found == expected, (context, kind)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert page.value(name, model_name="m", position="0") == 2
    assert page.labels(name) == {"model_name", "position"}
    for name, value in (
        ("drafts", 3),
        ("draft_tokens", 7),
        ("accepted_tokens", 3),
        ("accepted_tokens_per_pos", 3),
    ):
        for prefix in ("outrider_", "vllm:"):
            assert page.value(f"{prefix}spec_decode_num_{name}_total") == value, name


def test_a_request_that_breaks_off_ends_all_its_spans_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = Recorded()
    _round(recorded.observer, 0)
    recorded.observer.round_began(1)
    recorded.observer.asked("target")
    recorded.observer.failed(Unavailable("gone"))
    recorded.observer.answered("target", 0.01, 0.0, 1.0)
    recorded.observer.decided(EMPTY_ENCODED_PROPOSAL, 0, 1, 4)
    recorded.observer.shown({1: 0.0}, 1)
    _round(recorded.observer, 2)
    recorded.observer.failed(Unavailable("again"))
    assert len(recorded.named("outrider.round")) == 2
    assert len(recorded.named("outrider.wire")) == 3
    assert len(recorded.named("text_completion m")) == 1
    assert recorded.total("request_failure") == 1
    assert caplog.records == []


def test_a_trace_contains_no_prompt() -> None:
    recorded = Recorded(GenerateRequest((ChatMessage("user", "hush"),)))
    recorded.observer.failed(Unavailable("x"))
    (root,) = recorded.named("chat m")
    assert "hush" not in str(root.attributes)


def test_a_port_that_is_taken_or_beyond_the_last_is_a_configuration_error() -> None:
    """Each further replica on a machine adds 3 to the port."""
    first = setup.start_exports("prometheus=0", "draft", "127.0.0.1")
    port = int(first.scrape.address.rpartition(":")[2])
    try:
        for given, index, said in ((port, 0, "in use"), (65533, 1, "port must be 0-65535")):
            with pytest.raises(ConfigError, match=f"cannot serve Prometheus .*{said}"):
                setup.start_exports(f"prometheus={given}", "coordinator", "127.0.0.1", index)
    finally:
        first.shut_down()
