"""The files of the window, and which rejected tokens its script finds in a round."""

import json
import re
import shutil
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.http_front import Front
from tests.support.told_coordinator import ToldCoordinator

ROOT = Path(__file__).resolve().parents[4]
FOLDER = files("coordinator.http_api").joinpath("page")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
INLINE = r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle="


async def test_every_file_is_packaged_and_served() -> None:
    """And no other. The files load nothing from other hosts, and each is used by another."""
    lying = {one.name: one.read_bytes() for one in FOLDER.iterdir()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["coordinator"]
    packaged = {path.name for one in patterns for path in (ROOT / "coordinator").glob(one)}
    assert packaged == lying.keys() | {"hermes.jinja"}
    front = Front(ToldCoordinator())
    named: set[tuple[str, str]] = set()
    for path in ("/", "/docs", *(f"/page/{name}" for name in lying)):
        name = {"/": "index.html", "/docs": "docs.html"}.get(path, path.rpartition("/")[2])
        found = await front.send("GET", path)
        assert (found.status_code, found.content) == (200, lying[name])
        assert found.headers["content-type"].startswith(TYPES[name.rpartition(".")[2]])
        policy = found.headers["content-security-policy"].split(";")
        allowed = {word for rule in policy for word in rule.split()[1:]}
        assert allowed == {"'none'", "'self'", "'script'"}
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "://" not in found.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(INLINE, found.text)
        named |= set(re.findall(r'(?:src|href)="page/([^"]+)"|from "\./([^"]+)"', found.text))
        again = await front.send("GET", path, {"if-none-match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await front.send("HEAD", path)).status_code == 200
    for path in ("/page", "/page/", "/page/x.js", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert (await front.send("GET", path)).json()["error"]["code"] == "not_found", path
    error = (await front.send("POST", "/v1/embeddings", json={})).json()["error"]
    assert error["message"] == "there is no POST /v1/embeddings; see GET /openapi.json"
    assert {"".join(one) for one in named} | {"index.html", "docs.html"} == lying.keys()


NODE = """
class Node {
    children = []; dataset = {}; textContent = "";
    classList = { add() {}, toggle() {} };
    constructor(kind) { this.kind = kind; }
    addEventListener() {}
    setAttribute() {}
    append(...nodes) { this.children.push(...nodes); }
    replaceChildren(...nodes) { this.children = nodes; }
    get text() { return this.textContent + this.children.map(one => one.text).join(""); }
}
globalThis.document = { createElement: (kind) => new Node(kind) };
"""
"""As much of an element as the text of an answer needs."""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on the PATH")
@pytest.mark.parametrize(
    ("came", "num_accepted", "kept", "behind"),
    [
        ("X", 0, ["-ABCDE", "X"], ["X", "-ABCDE"]),
        ("ABCX", 3, ["A", "B", "C", "-DE", "X"], ["A", "B", "C", "X", "-DE"]),
        ("ABCDEX", 5, [*"ABCDEX"], [*"ABCDEX"]),
    ],
)
def test_what_was_drafted_in_vain_is_struck_through(
    came: str, num_accepted: int, kept: list[str], behind: list[str]
) -> None:
    """A to E were proposed. The rejected tokens (here after a minus sign) follow the last accepted
    one, or stand behind the text. The text of each token is its letter."""
    begun = {"proposed_token_ids": [*range(5)], "proposed_texts": [*"ABCDE"]}
    written = {
        "token_ids": ["ABCDEX".index(letter) for letter in came],
        "texts": [*came],
        "text_delta": came,
        "origins": ["accepted"] * num_accepted + ["correction"],
    }
    script = f"""{NODE}
        const told = [true, false].map((keeps) => {{
            const paper = new Node("p");
            const writing = Object.assign(new Writing(paper, () => {{}}), {{ keeps }});
            writing.begin({json.dumps({**begun, "num_accepted": num_accepted})});
            writing.write({json.dumps(written)});
            return paper.children.map((one) => (one.kind === "del" ? "-" : "") + one.text);
        }});
        console.log(JSON.stringify(told));"""
    source = FOLDER.joinpath("writing.js").read_text("utf-8") + script
    ran = subprocess.run(
        ["node", "--input-type=module"],
        input=source,
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    assert json.loads(ran.stdout) == [kept, behind]
