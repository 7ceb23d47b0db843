"""A headless Chromium, spoken to in WebDriver's protocol (https://www.w3.org/TR/webdriver2/). As a
script it fails where that is not installed, and says how it is."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOW_TO_INSTALL = """install Chromium, or Chrome, and the driver of the same version:
  Debian   apt-get install chromium chromium-driver
  Ubuntu   apt-get install chromium-browser chromium-chromedriver
  Fedora   dnf install chromium chromedriver
  macOS    brew install --cask chromium chromedriver"""
BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CALL_S = 60.0
WAIT_S = 90.0
KEYS = {"Enter": "\ue007", "Control": "\ue009", "Escape": "\ue00c", "Tab": "\ue004",
        "Right": "\ue014", "Left": "\ue012", "End": "\ue010", "Space": " "}  # fmt: skip
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # Containers have no namespaces of their own to give.
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)


class BrowserError(Exception):
    """What the driver says went wrong."""


def missing() -> str:
    """What is not installed; empty where nothing is missing."""
    found = {"chromium": chromium(), "chromedriver": shutil.which("chromedriver")}
    lacking = [name for name, path in found.items() if path is None]
    return f"there is no {' and no '.join(lacking)} on the PATH" if lacking else ""


def chromium() -> str | None:
    """The browser's path, by whatever name it goes; None where there is none."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


class Browser:
    """One window."""

    def __init__(self, driver: str, width: int, height: int) -> None:
        options = {
            "args": [*_ARGUMENTS, f"--window-size={width},{height}"],
            "binary": chromium(),
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._driver = driver
        started = _call(driver, "POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{started['sessionId']}"

    def open(self, url: str) -> None:
        """Loads a page."""
        self._post("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns in the page."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def press(self, *keys: str, held: Sequence[str] = ()) -> None:
        """Presses keys, one after the other, while others are held: names in `KEYS`, or texts."""
        downs = [{"type": "keyDown", "value": KEYS[key]} for key in held]
        ups = [{"type": "keyUp", "value": KEYS[key]} for key in held]
        pressed = [
            {"type": kind, "value": character}
            for key in keys
            for character in KEYS.get(key, key)
            for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": [*downs, *pressed, *ups]}
        self._post("/actions", {"actions": [keyboard]})

    def until(self, script: str, *arguments: Any) -> Any:
        """Waits until a script returns what is true, and returns it."""
        end = time.monotonic() + WAIT_S
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > end:
                raise BrowserError(f"it did not come true within {WAIT_S} s: {script}")
            time.sleep(0.05)
        return found

    def wear(self, **features: str) -> None:
        """Sets what the person prefers, as `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": is_} for name, is_ in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=named)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self) -> list[str]:
        """What the console was told since it was last read."""
        entries = self._post("/se/log", {"type": "browser"})
        return [f"{one['level']}: {one['message']}" for one in entries]

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows, as PNG."""
        path.write_bytes(
            base64.b64decode(_call(self._driver, "GET", f"{self._session}/screenshot"))
        )

    def close(self) -> None:
        """Ends the browser."""
        _call(self._driver, "DELETE", self._session)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call(self._driver, "POST", self._session + path, body)


@contextmanager
def browser(width: int = 1360, height: int = 1000) -> Iterator[Browser]:
    """A browser, and its driver, for as long as they are needed."""
    if lacking := missing():
        raise BrowserError(lacking)
    command = ["chromedriver", "--port=0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            opened = Browser(f"http://127.0.0.1:{_port(process)}", width, height)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    """That the driver listens on, which it says."""
    assert process.stdout is not None
    for line in process.stdout:
        if "successfully on port " in line:
            return int(line.rpartition("on port ")[2].strip(" .\n"))
    raise BrowserError("the driver has not started")


def _call(driver: str, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 (the driver listens on loopback)
        driver + path, data, {"content-type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as response:  # noqa: S310
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        told = json.load(error)["value"]
        raise BrowserError(f"{told['error']}: {told['message'].splitlines()[0]}") from None


if __name__ == "__main__":
    lacking = missing()
    sys.exit(f"{lacking}; {HOW_TO_INSTALL}" if lacking else 0)
