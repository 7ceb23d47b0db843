"""The files of the window, and which refused tokens its script finds in a round."""

import json
import re
import shutil
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from test_http_app import Front
from told_coordinator import ToldCoordinator

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


TREE = [-1, 0, -1, 2, 3]
"""A round with a tree: A and C are siblings, B follows A, D follows C, and E follows D. The text of
each token is its letter."""
CHAIN: list[int] = []


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on the PATH")
@pytest.mark.parametrize(
    ("parents", "came", "num_accepted", "struck"),
    [
        (TREE, "X", 0, [(0, "AB")]),
        (TREE, "AX", 1, [(1, "B")]),
        (TREE, "ABX", 2, []),
        (TREE, "CX", 1, [(0, "AB"), (1, "DE")]),
        (TREE, "CDEX", 3, [(0, "AB")]),
        (CHAIN, "X", 0, [(0, "ABCDE")]),
        (CHAIN, "ABCX", 3, [(3, "DE")]),
        (CHAIN, "ABCDEX", 5, []),
    ],
)
def test_what_was_drafted_in_vain_is_struck_through(
    parents: list[int], came: str, num_accepted: int, struck: Any
) -> None:
    """The refused tokens that would have followed the last accepted one. If the accepted path left
    the path of first siblings, also the rest of that path. Each has the number of accepted tokens
    before it."""
    told = {
        "proposed_token_ids": [*range(5)], "proposed_parents": parents,
        "num_accepted": num_accepted,
    }  # fmt: skip
    script = f"""
        const round = {json.dumps(told)};
        round.accepted = acceptedOf(round, {["ABCDEX".index(letter) for letter in came]});
        console.log(JSON.stringify(refusedOf(round)));"""
    source = FOLDER.joinpath("writing.js").read_text("utf-8") + script
    ran = subprocess.run(
        ["node", "--input-type=module"], input=source, capture_output=True, check=True,
        encoding="utf-8",
    )  # fmt: skip
    found = [
        (one["at"], "".join("ABCDE"[i] for i in one["path"])) for one in json.loads(ran.stdout)
    ]
    assert found == struck
