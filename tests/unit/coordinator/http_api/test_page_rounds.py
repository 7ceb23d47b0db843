"""What the page makes of a round, asked of its own script where there is something to run it."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

NODE = shutil.which("node")
A, B, C, D, E = range(5)
TREE = [-1, A, -1, C, D]
"""A with B behind it; beside A C, with D and then E behind that. Its texts are its letters."""
CHAIN: list[int] = []

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node on the PATH")


def refused(parents: list[int], letters: str, num_accepted: int) -> list[tuple[int, str]]:
    """What is struck through of A to E, with how many accepted tokens stand before it, where these
    letters came of a round."""
    assert NODE is not None
    ids = ["ABCDEX".index(letter) for letter in letters]
    told: dict[str, Any] = {
        "proposed_token_ids": [A, B, C, D, E], "proposed_parents": parents,
        "num_accepted": num_accepted,
    }  # fmt: skip
    script = f"""
        const round = {json.dumps(told)};
        round.accepted = acceptedOf(round, {ids});
        console.log(JSON.stringify(refusedOf(round)));"""
    writing = files("coordinator.http_api").joinpath("page", "writing.js").read_text("utf-8")
    ran = subprocess.run(
        [NODE, "--input-type=module"], input=writing + script, capture_output=True, check=True,
        encoding="utf-8",
    )  # fmt: skip
    return [(one["at"], "".join("ABCDE"[i] for i in one["path"])) for one in json.loads(ran.stdout)]


@pytest.mark.parametrize(
    ("came", "num_accepted", "struck"),
    [
        ("X", 0, [(0, "AB")]),
        ("AX", 1, [(1, "B")]),
        ("ABX", 2, []),
        ("CX", 1, [(0, "AB"), (1, "DE")]),
        ("CDEX", 3, [(0, "AB")]),
    ],
)
def test_what_a_tree_drew_in_vain(came: str, num_accepted: int, struck: Any) -> None:
    """What would have followed the last token that was accepted, and where that was another branch
    than the one in pencil, this one, where they part."""
    assert refused(TREE, came, num_accepted) == struck


def test_what_a_chain_drew_in_vain() -> None:
    assert refused(CHAIN, "X", 0) == [(0, "ABCDE")]
    assert refused(CHAIN, "ABCX", 3) == [(3, "DE")]
    assert refused(CHAIN, "ABCDEX", 5) == []
