"""`bench identity` compares answers with drafts with plain answers."""

from pathlib import Path

import pytest
from bench_sides import subject_of

from benchmarks.identity import IdentityOptions, run
from benchmarks.measurement import BenchClient, Completion, Decoding
from benchmarks.prompts import BenchPrompt
from outrider.speculation.sampling_params import Rule


class Side(BenchClient):
    """The first token of an answer is the length of the prompt. The second is 0, or with drafts 1
    for the prompt `differs`."""

    def __init__(self, differs: str = "", accepts: int = 1) -> None:
        self.differs, self.accepts = differs, accepts
        self.calls: list[Decoding] = []

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        self.calls.append(decoding)
        drafted = bool(decoding.num_draft_tokens)
        tokens = (len(prompt.text), int(drafted and prompt.text == self.differs))
        return Completion(tokens, 0.0, 1.0, num_accepted_draft_tokens=drafted * self.accepts)


@pytest.mark.parametrize("side", [Side(), Side(differs="b"), Side(accepts=0)])
async def test_all_ways_are_held_against_plain_decoding(side: Side, tmp_path: Path) -> None:
    """The check fails if an answer differs, and if no draft token was accepted."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', "utf-8")
    options = IdentityOptions(prompts=prompts, num_draft_tokens=(1, 8))
    found = (await run(options, subject_of(side), lambda line: None)).values
    assert (found["failed"] > 0) == (side.differs != "" or side.accepts == 0)
    assert [(row["way"], row["num_draft_tokens"]) for row in found["ways"][:4]] == [
        ("alone", 1), ("alone", 8), ("beside", 1), ("beside", 8),
    ]  # fmt: skip
    assert found["ways"][0]["different"] == ([1] if side.differs else [])
    coupled = [call for call in side.calls if call.rule is Rule.COUPLED]
    assert {(call.seed, call.temperature) for call in coupled} == {(0, 1.0), (1, 1.0)}
    # Plain answers without a context and with one.
    assert sum(call.num_draft_tokens == 0 for call in coupled) == 4
