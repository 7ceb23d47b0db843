"""Takes screenshots of the window for the documentation. Given the URL of a coordinator of the demo
model, this script writes `docs/window-light.png`, `window-dark.png` and `window-narrow.png`."""

import argparse
import asyncio
from pathlib import Path

from tests.page.browser import Browser, browser

ROOT = Path(__file__).resolve().parents[2]
WIDTH, NARROW_WIDTH = 1360, 400
THEMES = ("light", "dark")
PROMPT = (
    'Repeat the following text exactly, but write "captain" instead of "skipper". The skipper of '
    "the small ferry knows every stone in the river. In the morning he carries the bread across, "
    "and in the evening he brings the children home. Nobody has ever seen the skipper read a "
    "clock, and yet the ferry is never late."
)
OPTIONS = {"temperature": "0", "seed": "7", "max_tokens": "110", "num_draft_tokens": "4"}


async def draw(url: str, folder: Path, prompt: str) -> None:
    """Generates once, and takes a screenshot under each theme."""
    with browser(WIDTH) as window:
        await window.open(url)
        await _generate(window, prompt)
        for theme in THEMES:
            await window.wear(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
            await _draw_whole(window, WIDTH, folder / f"window-{theme}.png")
        await _draw_whole(window, NARROW_WIDTH, folder / "window-narrow.png")


async def _draw_whole(window: Browser, width: int, path: Path) -> None:
    """Takes a screenshot of the whole page, however high it is."""
    size = {"width": width, "deviceScaleFactor": 1, "mobile": False}
    await window.devtools("Emulation.setDeviceMetricsOverride", height=800, **size)
    height = await window.run("return document.documentElement.scrollHeight")
    await window.devtools("Emulation.setDeviceMetricsOverride", height=height, **size)
    window.screenshot(path)


async def _generate(window: Browser, prompt: str) -> None:
    for name, value in OPTIONS.items():
        await window.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)
    await window.run("document.getElementById('keep').click()")
    await window.run("document.getElementById('prompt').focus()")
    await window.press(prompt)
    await window.press("Enter", held=("Control",))
    await window.until("return document.getElementById('ratio').textContent.endsWith('×')")
    await window.run(
        "[...document.querySelectorAll('.token.correction')].at(-1).dispatchEvent("
        "new MouseEvent('mouseover', {bubbles: true}))"
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("url")
    options.add_argument("--prompt", default=PROMPT)
    options.add_argument("--folder", type=Path, default=ROOT / "docs")
    given = options.parse_args()
    asyncio.run(draw(given.url, given.folder, given.prompt))
