"""A headless Chromium. As a script, it says how to install Chromium if that is missing."""

import asyncio
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys

HOW_TO_INSTALL = """install Chromium, or Chrome, and the driver of the same version:
  Debian   apt-get install chromium chromium-driver
  Ubuntu   apt-get install chromium-browser chromium-chromedriver
  Fedora   dnf install chromium chromedriver
  macOS    brew install --cask chromium chromedriver"""
BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_S = 90.0
KEYS = {
    "Enter": Keys.ENTER,
    "Control": Keys.CONTROL,
    "Escape": Keys.ESCAPE,
    "Tab": Keys.TAB,
    "Right": Keys.RIGHT,
    "Left": Keys.LEFT,
    "End": Keys.END,
    "Space": " ",
}
_ARGUMENTS = (
    "--no-sandbox",  # Containers cannot create namespaces for the sandbox.
    "--headless=new",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
)


def missing() -> str:
    found = {"chromium": _chromium(), "chromedriver": shutil.which("chromedriver")}
    lacking = [name for name, path in found.items() if path is None]
    return f"there is no {' and no '.join(lacking)} on the PATH" if lacking else ""


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, BINARIES)), None)


class Browser:
    """One window, whose driver is called on a separate thread."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self._driver.get, url)

    async def run(self, script: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self._driver.execute_script, script, *arguments)

    async def text(self, selector: str) -> str:
        found = "return document.querySelector(arguments[0]).textContent"
        return str(await self.run(found, selector))

    async def press(self, *keys: str, held: Sequence[str] = ()) -> None:
        """Presses keys of `KEYS`, or types texts, while `held` keys are down."""
        actions = ActionChains(self._driver, duration=0)
        for key in held:
            actions.key_down(KEYS[key])
        actions.send_keys(*(KEYS.get(key, key) for key in keys))
        for key in held:
            actions.key_up(KEYS[key])
        await asyncio.to_thread(actions.perform)

    async def until(self, script: str, *arguments: Any) -> Any:
        """Waits until a script returns a true value, and returns this value."""
        async with asyncio.timeout(WAIT_S):
            while not (found := await self.run(script, *arguments)):
                await asyncio.sleep(0.05)
        return found

    async def wear(self, **features: str) -> None:
        named = [{"name": name.replace("_", "-"), "value": is_} for name, is_ in features.items()]
        await self.devtools("Emulation.setEmulatedMedia", features=named)

    async def devtools(self, command: str, **parameters: Any) -> Any:
        return await asyncio.to_thread(self._driver.execute_cdp_cmd, command, parameters)

    def screenshot(self, path: Path) -> None:
        self._driver.save_screenshot(str(path))

    async def log(self) -> list[str]:
        entries = await asyncio.to_thread(self._driver.get_log, "browser")
        return [f"{one['level']}: {one['message']}" for one in entries]


@contextmanager
def browser(width: int = 1360) -> Iterator[Browser]:
    options = ChromeOptions()
    options.binary_location = _chromium() or ""
    for argument in (*_ARGUMENTS, f"--window-size={width},1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options, ChromeService(shutil.which("chromedriver"))) as driver:
        yield Browser(driver)


if __name__ == "__main__":
    lacking = missing()
    sys.exit(f"{lacking}; {HOW_TO_INSTALL}" if lacking else 0)
