"""The PromQL of alerts and dashboard is valid, its metrics are on the pages of a running
deployment, and each alert is documented."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from coordinator.http_api.server import HttpOptions
from outrider import limits
from outrider.errors import BadRequest
from outrider.interfaces.request import GenerateRequest
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import SamplingParams
from outrider.telemetry.metrics import HttpTimes
from tests.support.scraping import ROLES, VOCAB, Page, watched_stack
from tests.support.stack import http_front

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
CASES = Path(__file__).with_name("alert_cases.yaml")
[GROUP] = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
ALERTS: list[dict[str, Any]] = GROUP["rules"]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
DOCUMENTED = {
    name
    for text in (OPERATIONS, (ROOT / "docs" / "exactness.md").read_text("utf-8"))
    for name in re.findall(r"`(outrider_\w+|http_server_\w+)`", text)
} - {"outrider_coordinator", "outrider_draft", "outrider_target"}  # Names of Ray's resources.
"""Metrics that the documents name. A histogram has its base name."""
BY_SCRAPES = {"namespace", "job", "instance", "le"}
"""Labels that the scraper adds, or that histograms have."""
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on the PATH (apt-get install prometheus)"
)


_KEYWORDS = {"and", "or", "unless", "bool", "offset"}
_TEXT_OR_TIME = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\[\]]*\]')
_LABELS = re.compile(r"\{[^{}]*\}|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_NAME = re.compile(r"(?<![\w.$])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")


def metric_names(expression: str) -> set[str]:
    """Every identifier that is no function, keyword, label, string or duration."""
    text = _LABELS.sub(" ", _TEXT_OR_TIME.sub("", expression))
    return {*_NAME.findall(text)} - _KEYWORDS


def label_names(expression: str) -> set[str]:
    """Labels by which the expression groups or filters."""
    listed = _LABELS.findall(_TEXT_OR_TIME.sub("", expression))
    return {*_NAME.findall(" ".join(listed))}


def expressions() -> dict[str, str]:
    found = {alert["alert"]: alert["expr"] for alert in ALERTS}
    for panel in PANELS:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(FOLDER / "alerts.yaml"))
    promtool("test", "rules", str(CASES))


@needs_promtool
def test_promtool_parses_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """The expressions are checked as rules, with values in place of Grafana's variables."""
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [
        {"record": f"dashboard:x{'x' * index}", "expr": expr.replace("$__rate_interval", "5m")}
        for index, expr in enumerate(found)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), "utf-8")
    promtool("check", "rules", str(file))


def test_alerts_say_what_they_mean_and_lead_to_their_paragraph() -> None:
    behind = OPERATIONS.split("\n## Alerts\n")[1]
    headings = re.findall(r"^### (\w+)$", behind.split("\n## ")[0], re.M)
    assert sorted(headings) == sorted(alert["alert"] for alert in ALERTS)
    for alert in ALERTS:
        name, told = alert["alert"], alert["annotations"]
        assert all(told[key].endswith(".") for key in ("summary", "description")), name
        assert told["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert alert["labels"]["severity"] in ("warning", "critical"), name


def test_the_dashboard_can_be_imported() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*ids}) == len(ids)
    for panel in PANELS:
        for uses in (panel, *panel["targets"]):
            assert uses["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


async def test_what_they_name_is_on_a_live_deployment_s_pages(tmp_path: Path) -> None:
    """Names and labels are checked. The coordinator's page is that of its own HTTP server."""
    request = GenerateRequest(
        (3, 4, 5), sampling=SamplingParams(temperature=1.0), max_tokens=40, seed=1
    )
    async with watched_stack(tmp_path, audit_share=1.0) as watched:
        await watched.registry.want({"target": 1})
        for _ in range(2):
            await watched.stack.client.complete(request)
        with pytest.raises(BadRequest):
            await watched.stack.client.complete(GenerateRequest((VOCAB,), max_tokens=1))
        await watched.until("outrider_replicas_wanted", 1, role="target")
        exports = watched.exports["coordinator"]
        options = HttpOptions(metrics=exports.scrape.render, times=HttpTimes(exports.meter))
        front = http_front(watched.stack, options)
        async with front as url, httpx.AsyncClient(base_url=url) as http:
            await http.get("/health")
            body = b"x" * (limits.HTTP_BODY_BYTES_MAX + 1)
            assert (await http.post("/v1/completions", content=body)).status_code == 413
            by_http = Page.parse((await http.get("/metrics")).text)
        pages = [by_http, *[await watched.page(role) for role in ROLES if role != "coordinator"]]
    names = set().union(*(page.names for page in pages))
    bases = {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}
    missing = DOCUMENTED - names - bases
    assert not missing, missing
    assert "outrider_audits_total" in DOCUMENTED
    for title, expression in expressions().items():
        used = metric_names(expression)
        assert used, title
        assert used <= names, (title, used - names)
        has = set().union(*(page.labels(name) for page in pages for name in used))
        assert label_names(expression) - BY_SCRAPES <= has, title
    reasons = {reason.value for reason in FinishReason}
    assert {
        one
        for one in reasons
        if pages[0].value("outrider_request_success_total", finished_reason=one) >= 0
    } == reasons
