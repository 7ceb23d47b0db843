"""Processes do not import packages that they do not need: these cost seconds and memory."""

import subprocess
import sys

import pytest

OTHER = {"torch", "transformers", "ray", "redis", "grpc", "numpy"}
HELP = """
from outrider.cli.main import main
try:
    main({})
except SystemExit:
    pass"""
COORDINATOR = """
import coordinator.actor, coordinator.routing.discovery, coordinator.service
import coordinator.grpc_api, coordinator.http_api.server
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule
assert 0 < next(RoundNoise(7, Rule.TOKEN, 5).accept_uniforms(1)) < 1"""
SERVICES = """
import coordinator.actor, target_service.actor, draft_service.actor
import coordinator.decoding.sessions, outrider.replica.service"""


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        (COORDINATOR, {"torch"}),
        (SERVICES, {"opentelemetry"}),
        ("import outrider.bench.device", {"ray", "grpc", "redis", "rich", "gguf", "google"}),
        (HELP.format(["--help"]), OTHER | {"pydantic", "rich"}),
        (HELP.format(["serve", "--help"]), OTHER),
        (HELP.format(["bench", "serve", "--help"]), OTHER),
    ],
    ids=[
        "coordinator draws",
        "telemetry is off",
        "bench device",
        "help",
        "help of a command",
        "help of a benchmark",
    ],
)
def test_it_does_without(program: str, unwanted: set[str]) -> None:
    program += f"\nimport sys\nsys.exit(', '.join({unwanted} & set(sys.modules)) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "help" not in program or "--help" in done.stdout
