"""The window in a real browser, over emulated engines: what a user sees and does."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.http_api.server import HttpOptions
from outrider.foundation.api_keys import Caller, add_key
from outrider.interfaces.request import ChatMessage, GenerateRequest
from outrider.models.tokenizer import TokenizerText
from outrider.registry.registry import ReplicaRecord
from outrider.speculation.sampling_params import SamplingParams
from tests.page.browser import Browser, browser, missing
from tests.support.coordinator_bench import SlowText
from tests.support.stack import Stack, emulated_stack, http_front, toy_text, until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"{missing()}: see `make test-page`"),
    pytest.mark.xdist_group("page"),
]
ROWS_MAX = 400
"""The length of the list of rounds, as in `timeline.js`."""
IDS = "return [...document.querySelectorAll('#text .token')].map(one => Number(one.dataset.id))"
TEXT = "return [...document.querySelectorAll('#text .token')].map(one => one.textContent).join('')"
ROUNDS = "return [...document.querySelectorAll('#rounds li')].map(one => Number(one.dataset.index))"
IDLE = "return document.documentElement.dataset.state === 'idle'"
FOCUSED = "return document.activeElement.id || document.activeElement.name"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@contextlib.asynccontextmanager
async def opened(
    window: Browser, directory: Path, *, text: Any, options: HttpOptions | None = None
) -> AsyncIterator[Stack]:
    """A coordinator whose page is open. At the end, the console must have no messages."""
    async with emulated_stack(directory, text=text) as stack, http_front(stack, options) as url:
        await window.open(url)
        yield stack
        assert await window.log() == []
        await window.open("about:blank")


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerText:
    return toy_text()


@pytest.fixture
async def stack(window: Browser, tokenizer: TokenizerText, tmp_path: Path) -> AsyncIterator[Stack]:
    async with opened(window, tmp_path, text=tokenizer) as running:
        yield running


async def fill(window: Browser, **fields: object) -> None:
    """Sets fields by their ids. `kind` is that of the prompt; check boxes are true or false."""
    for name, value in fields.items():
        if name == "kind":
            choice = "document.querySelector(`[name=kind][value=${arguments[0]}]`)"
            await window.run(f"{choice}.click()", value)
        else:
            what = "checked" if isinstance(value, bool) else "value"
            script = f"document.getElementById(arguments[0]).{what} = arguments[1]"
            await window.run(script, name, value)


async def generate(window: Browser, **fields: object) -> None:
    await fill(window, **({"compare": False} | fields))
    await window.run("document.getElementById('form').requestSubmit()")
    told = "document.getElementById('status').textContent.includes('tokens')"
    await window.until(f"{IDLE} && {told}")


async def check_figures(window: Browser) -> None:
    """Checks the page after an answer of 60 tokens."""
    rounds = await window.until(ROUNDS)
    assert rounds == list(range(len(rounds)))
    assert await window.text("#num-rounds") == str(len(rounds))
    assert await window.text("#num-tokens") == "60"
    assert float(await window.text("#rate")) > 0
    classes = "return document.querySelectorAll('#text .token' + arguments[0]).length"
    kinds = ("accepted", "plain", "correction", "bonus")
    counts = [await window.run(classes, f".{kind}") for kind in kinds]
    assert sum(counts) == 60
    assert min(counts[:2]) > 0
    wide = "return [...document.querySelectorAll('#rounds .verify')].map(one => one.offsetWidth)"
    assert min(await window.run(wide)) > 0


@pytest.mark.parametrize(
    ("kind", "prompt"), [("raw", "the sky is"), ("chat", "snow ☃ falls"), ("ids", "1, 2 3")]
)
async def test_what_is_shown_is_what_grpc_answers(
    window: Browser, tokenizer: TokenizerText, tmp_path: Path, kind: str, prompt: str
) -> None:
    """Token ids without a tokenizer are shown, too."""
    text = None if kind == "ids" else tokenizer
    async with opened(window, tmp_path, text=text) as stack:
        await generate(window, kind=kind, prompt=prompt, seed=5, temperature=0.8, max_tokens=60)
        asked: Any = {"raw": prompt, "chat": (ChatMessage("user", prompt),), "ids": (1, 2, 3)}
        sampling = SamplingParams(temperature=0.8)
        answer = await stack.client.complete(
            GenerateRequest(asked[kind], sampling=sampling, seed=5, max_tokens=60)
        )
        assert await window.run(IDS) == list(answer.token_ids)
        shown_text = answer.text if text else "".join(map(str, answer.token_ids))
        assert await window.run(TEXT) == shown_text
        await check_figures(window)


async def test_keyboard_alone(window: Browser, stack: Stack) -> None:
    """The prompt has the focus. Tab, arrows, Ctrl-Enter and Escape do what users expect."""
    assert await window.run(FOCUSED) == "prompt"
    await window.press("the sea")
    order = []
    for keys in ("0.5", "11", "90", "", "4"):
        await window.press("Tab")
        order.append(await window.run(FOCUSED))
        if keys:
            await window.run("document.activeElement.select?.()")
            await window.press(keys)
    assert order == ["temperature", "seed", "max_tokens", "rule", "num_draft_tokens"]
    await window.press("Tab")
    await window.press("Space")  # The comparison is on by default.
    await window.press("Enter", held=("Control",))
    await window.until(IDLE + " && document.querySelectorAll('#text .token').length === 90")
    await window.press("Tab", "Tab")
    assert await window.run(FOCUSED) == "text"
    await window.press("End", "Left")
    assert (await window.text("#detail .words")).startswith("token 88, id ")
    assert await window.text("#text .chosen") is not None
    marked = "return document.querySelector('#rounds .marked').dataset.index"
    assert await window.text("#detail .head") == f"round {await window.run(marked)}"
    await fill(window, max_tokens=4000, compare=False)
    await window.run("document.getElementById('prompt').focus()")
    await window.press("Enter", held=("Control",))
    await window.until("return document.querySelectorAll('#text .token').length > 3")
    await window.press("Escape")
    await window.until(IDLE)
    assert await window.text("#status") == "stopped"
    await until(lambda: not stack.coordinator.num_running)


async def test_the_same_without_drafts(window: Browser, stack: Stack) -> None:
    """The window repeats the request with K = 0. Under coupled the tokens are the same."""
    await generate(window, prompt="a b c", seed=3, temperature=0.7, max_tokens=40, compare=True)
    await window.until("return document.getElementById('ratio').textContent.endsWith('×')")
    ratio = float((await window.text("#ratio")).removesuffix("×"))
    rates = [float(await window.text(f"#lane-{name}-rate")) for name in ("drafts", "plain")]
    assert ratio == pytest.approx(rates[0] / rates[1], abs=0.02)
    assert await window.text("#speed") == "as fast as without drafts"
    assert await window.text("#verdict") == "Both answers have the same tokens."
    assert len(await window.run(IDS)) == 40


@pytest.mark.parametrize(
    ("rule", "used"), [("", "block"), ("token", "token"), ("coupled", "coupled")]
)
async def test_what_the_coordinator_chose_is_shown_and_repeated(
    window: Browser, tokenizer: TokenizerText, tmp_path: Path, rule: str, used: str
) -> None:
    """Rule and seed are left empty. The seed is shown with all of its 64 bits."""
    async with opened(window, tmp_path, text=tokenizer):
        await window.run(
            """window.asked = []; const real = window.fetch;
            window.fetch = (url, options) => {
                if (options.body) window.asked.push(options.body);
                return real(url, options)}"""
        )
        more = {"temperature": 1, "max_tokens": 30, "rule": rule, "compare": True}
        await generate(window, prompt="a b", seed="", **more)
        await window.until("return document.getElementById('ratio').textContent.endsWith('×')")
        await window.until(IDLE)
        status = await window.text("#status")
        shown = re.search(r"\(rule (\w+), seed (\d+)\)", status)
        assert shown is not None, status
        first, again = map(json.loads, await window.run("return window.asked"))
        assert "seed" not in first
        assert first["speculation"].get("rule", "") == rule
        assert shown[1] == again["speculation"]["rule"] == used
        assert int(shown[2]) == again["seed"]
        if used == "coupled":
            assert await window.text("#verdict") == "Both answers have the same tokens."


async def test_speed_is_told_without_the_first_token(window: Browser, stack: Stack) -> None:
    """Of 30 tokens in 3 s the first took 1 s, so the others arrived at 14.5 tokens/s."""
    script = """import('/page/figures.js').then(({ Tally }) => {
        const tally = new Tally();
        tally.write({ token_ids: Array(30).fill(1) });
        tally.end({ metrics: { tokens_per_second: 10, time_to_first_token_ms: 1000 } });
        window.told = tally.rate})"""
    await window.run(script)
    assert await window.until("return window.told") == pytest.approx(14.5)


async def test_what_was_refused_can_be_kept_and_replayed(window: Browser, stack: Stack) -> None:
    await generate(window, prompt="x y", seed=9, temperature=1, max_tokens=100)
    ids, text = await window.run(IDS), await window.run(TEXT)
    await window.run("document.getElementById('keep').click()")
    refused = "return [...document.querySelectorAll('#text .refused')].map(one => one.textContent)"
    kept = await window.run(refused)
    assert len(kept) > 2
    assert all(kept)
    assert (await window.run(IDS), await window.run(TEXT)) == (ids, text)
    await window.run("document.getElementById('replay').click()")
    await window.until("return document.querySelectorAll('#text .pencil').length > 0")
    await window.press("Escape")
    await window.until(IDLE)
    assert (await window.run(IDS), await window.run(TEXT)) == (ids, text)


async def test_marks_do_not_need_colours(window: Browser, stack: Stack) -> None:
    """Origins differ in their lines, themes differ, and users may ask for no motion."""
    lines = """return ['accepted', 'correction', 'bonus', 'plain'].map(kind => {
        const style = getComputedStyle(document.querySelector(`.legend .${kind}`));
        return `${style.textDecorationLine} ${style.textDecorationStyle}`})"""
    assert len(set(await window.run(lines))) == 4
    paper = "return getComputedStyle(document.body).backgroundColor"
    papers = set()
    for theme in ("light", "dark"):
        await window.wear(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        papers.add(await window.run(paper))
    assert len(papers) == 2
    moving = """const one = document.createElement('i'); one.className = 'pencil';
        document.getElementById('text').append(one);
        return getComputedStyle(one).animationName"""
    assert await window.run(moving) == "none"
    await window.wear(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    assert await window.run(moving) == "sketch"


async def test_many_rounds(window: Browser, stack: Stack) -> None:
    await generate(window, prompt="z", seed=1, max_tokens=ROWS_MAX + 30, num_draft_tokens=0)
    last = "return document.querySelector('#rounds li:last-child')?.dataset.index === '429'"
    await window.until(last)
    assert await window.run(ROUNDS) == list(range(30, ROWS_MAX + 30))
    seen = """const list = document.getElementById('rounds').getBoundingClientRect();
        const row = document.querySelector('#rounds li:last-child').getBoundingClientRect();
        return row.bottom <= list.bottom + 1 && row.top >= list.top"""
    assert await window.run(seen)


async def test_the_fleet_is_followed(window: Browser, stack: Stack) -> None:
    rows = "return [...document.querySelectorAll('#fleet tr')].map(one => one.innerText).join('|')"
    seen = await window.until(rows)
    assert "coordinator-under-test (this one)" in seen
    assert seen.count("serving") == 3
    stack.coordinator.targets.retire("t")
    await window.until("return document.querySelector('#fleet .leaving') !== null")


async def test_a_fleet_of_several_coordinators(window: Browser, stack: Stack) -> None:
    note = "return document.getElementById('fleet-note').textContent"
    await window.until("return document.querySelectorAll('#fleet tr').length === 3")
    assert await window.run(note) == ""
    other = ReplicaRecord(
        role="coordinator", name="c2", address="h:1", host="node-two", pid=1, model="toy", load=7
    )
    stack.coordinator.fleet.update({"coordinator": [other]})
    await window.until(f"{note}.includes('the sessions of this coordinator')")
    row = "return document.querySelector('#fleet tr').innerText.split(/\\s+/).join(' ')"
    assert await window.run(row) == "coordinator c2 toy node-two 7 serving –"
    await window.until(f"{note}.startsWith('the registry has not answered for')")


async def test_a_wrong_field_is_shown(window: Browser, stack: Stack) -> None:
    await fill(window, prompt="a", temperature=9)
    await window.run("document.getElementById('form').requestSubmit()")
    await window.until(IDLE + " && !document.getElementById('trouble').hidden")
    assert "temperature" in await window.text("#trouble")
    assert await window.run(FOCUSED) == "temperature"
    [entry] = await window.log()  # The server has refused the request.
    assert "400" in entry


class Hostile(SlowText):
    """A tokenizer whose every token is markup with a script."""

    token_bytes_max = 64
    chat_template = ""
    MARKUP = "<img src=x onerror=\"document.title='run'\">"

    def encode_chat(self, messages: object, *_: object) -> list[int]:
        return [1, 2, 3]

    def spell(self, token_id: int) -> bytes:
        return self.MARKUP.encode()

    def push(self, token_id: int) -> str:
        return self.MARKUP


async def test_text_is_never_markup(window: Browser, tmp_path: Path) -> None:
    async with opened(window, tmp_path, text=Hostile()):
        await window.run("document.getElementById('keep').click()")
        await generate(window, prompt="a", seed=2, temperature=1, max_tokens=20)
        assert await window.run(TEXT) == Hostile.MARKUP * 20
        await window.press("End")
        images = "return document.querySelectorAll('#text img, #detail img, #rounds img').length"
        assert await window.run(images) == 0
        assert await window.run("return document.title") != "run"
        assert await window.log() == []
        forced = "try { document.body.innerHTML = arguments[0] } catch (e) { return e.name }"
        assert await window.run(forced, Hostile.MARKUP) == "TypeError"
        assert await window.log()  # The log has the violations of the page's policy.


async def test_the_reference_shows_every_operation(window: Browser, stack: Stack) -> None:
    await window.run("location.href = 'docs'")
    cards = await window.until(
        "return [...document.querySelectorAll('#docs section')].map(one => one.textContent)"
    )
    [chat] = [text for text in cards if text.startswith("POST /v1/chat/completions")]
    for words in ("messages [Message] (required)", "content string", "top_logprobs integer"):
        assert words in chat
    assert any(text.startswith("POST /tokenize") for text in cards)


async def test_an_example_can_be_tried(window: Browser, stack: Stack) -> None:
    await fill(window, max_tokens=12, compare=False)
    await window.run("document.querySelector('#examples button').click()")
    await window.until("return document.querySelectorAll('#text .token').length === 12")
    assert await window.run("return document.getElementById('prompt').value")
    assert await window.run("return document.getElementById('examples').hidden")


async def test_it_fits_a_telephone(window: Browser, stack: Stack) -> None:
    """Nothing is wider than the window. Wide parts, such as the table, scroll on their own."""
    await generate(window, prompt="w", seed=8, temperature=1, max_tokens=30)
    size = {"height": 800, "deviceScaleFactor": 1, "mobile": True}
    try:
        for width in (360, 700, 900):
            await window.devtools("Emulation.setDeviceMetricsOverride", width=width, **size)
            assert await window.run("return document.documentElement.scrollWidth") == width
            assert await window.run("return document.querySelector('.bar').offsetWidth") > 90
    finally:
        await window.devtools("Emulation.clearDeviceMetricsOverride")


async def test_a_key_is_asked_for_where_one_is_needed(
    window: Browser, tokenizer: TokenizerText, tmp_path: Path
) -> None:
    """The right key is kept for this tab only, and sent in a header, never in a URL. The request
    that was refused without a key then runs. The key can be forgotten."""
    key = add_key(tmp_path / "keys", Caller("alice", "alice"))
    options = HttpOptions(access=AccessControl(watch_keys(tmp_path / "keys")))
    asks = "return !document.getElementById('keys').hidden"
    words = "return document.getElementById('keys-words').textContent"
    kept = "return [Object.values(sessionStorage), localStorage.length, document.cookie]"
    async with opened(window, tmp_path / "redis", text=tokenizer, options=options):
        await window.until(asks)
        assert await window.run(words) == "This server requires an API key."
        assert await window.run(FOCUSED) == "key"
        await fill(window, prompt="a", seed=2, max_tokens=12, compare=False)
        await window.run("document.getElementById('form').requestSubmit()")
        await window.until(IDLE)
        for wrong in ("not a key", "some-other-key-1234"):
            await window.press(wrong, "Enter")
            await window.until(f"{asks} && document.getElementById('key').value === ''")
        await window.until(f"{words}.includes('does not know')")
        assert await window.run(IDS) == []
        assert await window.run(kept) == [[], 0, ""]
        await window.press(key, "Enter")
        await window.until("return document.querySelectorAll('#text .token').length === 12")
        await window.until(IDLE)
        assert not await window.run(asks)
        assert await window.run(kept) == [[key], 0, ""]
        urls = "return [location.href, ...performance.getEntries().map(one => one.name)].join()"
        assert "api/generate" in await window.run(urls)
        assert key not in await window.run(urls)
        await window.run("location.reload()")
        await window.until("return document.querySelectorAll('#fleet tr').length === 3")
        assert not await window.run(asks)
        await window.run("document.getElementById('forget').click()")
        assert await window.run(asks)
        assert await window.run(kept) == [[], 0, ""]
        told = await window.log()
        assert told
        assert all("401" in entry for entry in told)
