"""What the target writes by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_engine import ToyEngine

from draft_service.training import writing
from draft_service.training.documents import BEGINNING, Template
from draft_service.training.writing import TEMPERATURES, Wanted, WrittenCorpus, draw

TEMPLATE = Template(before=(0, 1), after=(2, 3, 4))
VOCAB = 12


def corpus(directory: Path, **changes: object) -> WrittenCorpus:
    values = {"template": TEMPLATE, "prompts": (), "seed": 5, "tokens_max": 40} | changes
    return WrittenCorpus(directory, **values)  # type: ignore[arg-type]


def write(found: WrittenCorpus, tokens: int, together: int = 4) -> WrittenCorpus:
    engine = ToyEngine(vocab_size=VOCAB, salt=7)
    found.write(engine, together, Wanted(tokens, 0.0), lambda part: None)
    return found


def lines(directory: Path) -> dict[int, dict[str, Any]]:
    text = (directory / "conversations.jsonl").read_text()
    return {record["index"]: record for record in map(json.loads, text.splitlines())}


def test_a_conversation_has_the_templates_form(tmp_path: Path) -> None:
    """A turn between what the template puts around it, drawn by the target, then the answer; what
    is learned begins with the turn."""
    found = write(corpus(tmp_path), 200)
    for index, record in lines(tmp_path).items():
        prompt = record["prompt"]
        assert prompt[:2] == [0, 1]
        assert prompt[-3:] == [2, 3, 4]
        assert 2 not in prompt[2:-3]  # The token that ends a turn.
        assert record["temperature"] == TEMPERATURES[index % 3]
        assert len(prompt) + len(record["answer"]) <= 40
    documents = found.documents(200)
    assert all(document.first == 2 for document in documents)
    assert all(
        2 < d.answer_first == len(lines(tmp_path)[i]["prompt"]) for i, d in enumerate(documents)
    )
    assert sum(len(d.token_ids) for d in documents) >= 200


def test_text_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    """Not on how many are written side by side."""
    write(corpus(tmp_path / "few"), 120, together=2)
    write(corpus(tmp_path / "many"), 120, together=7)
    write(corpus(tmp_path / "other", seed=6), 120)
    few, many, other = (lines(tmp_path / name) for name in ("few", "many", "other"))
    shared = few.keys() & many.keys()
    assert len(shared) >= 4
    assert all(few[index] == many[index] for index in shared)
    assert any(few[index] != other[index] for index in few.keys() & other.keys())


def test_the_first_conversations_are_told_by_their_tokens(tmp_path: Path) -> None:
    """As many of them, without a gap, as have so many answered tokens; or all of those."""
    found = write(corpus(tmp_path), 150, together=5)
    records = lines(tmp_path)
    firsts = [len(records[i]["answer"]) for i in range(len(found.documents(10**9)))]
    assert len(firsts) not in records
    for tokens in (0, 1, firsts[0], firsts[0] + 1, sum(firsts[:3]), 150, sum(firsts), 10**9):
        enough = (n for n in range(len(firsts)) if sum(firsts[:n]) >= tokens)
        assert len(found.documents(tokens)) == next(enough, len(firsts))
        assert len(corpus(tmp_path).documents(tokens)) == len(found.documents(tokens))
        assert found.is_enough(Wanted(tokens, 0.0)) == (sum(firsts) >= tokens)


def test_conversations_are_cut_off_where_the_time_is_over_before_enough_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run writes them whole, and so does one that is told by tokens. What has hardly begun
    is not used."""
    num_steps = 0
    next_tokens = writing._next_tokens

    def counted(*arguments: Any) -> list[int]:
        nonlocal num_steps
        num_steps += 1
        return next_tokens(*arguments)

    monkeypatch.setattr(writing, "_next_tokens", counted)
    monkeypatch.setattr(WrittenCorpus, "is_enough", lambda *_: num_steps >= 24)
    short = corpus(tmp_path)
    short.write(ToyEngine(vocab_size=VOCAB, salt=7), 8, Wanted(None, 1.0), lambda part: None)
    monkeypatch.undo()
    whole = write(corpus(tmp_path / "whole"), 300, together=8)
    records = lines(tmp_path)
    cut = {index for index, record in records.items() if record.get("cut")}
    used = {index for index in cut if len(records[index]["answer"]) >= BEGINNING}
    assert cut > used > set()
    for index in cut:
        answer = lines(tmp_path / "whole")[index]["answer"]
        assert records[index]["answer"] == answer[: len(records[index]["answer"])]
    for again in (short, corpus(tmp_path)):
        assert len(again.documents()) == len(records.keys() - cut | used)
        assert len(again.documents(10**9)) == len(records.keys() - cut)
    monkeypatch.setattr(writing, "_FEW", len(records) - len(cut))
    assert len(short.documents()) == len(records) - len(cut)
    monkeypatch.undo()
    longer = write(corpus(tmp_path), 300, together=8)
    texts = {tuple(document.token_ids) for document in longer.documents(300)}
    assert texts == {tuple(document.token_ids) for document in whole.documents(300)}
    assert len(longer.documents()) == len(lines(tmp_path))


def test_a_token_step_looks_at_no_earlier_record(tmp_path: Path) -> None:
    """Or a long corpus takes longer for each token the longer it is."""

    class Watched(dict[int, object]):
        num_read = 0

        def __getitem__(self, key: int) -> object:
            Watched.num_read += 1
            return super().__getitem__(key)

    found = corpus(tmp_path)
    found._records = Watched()  # type: ignore[assignment]
    write(found, 600)
    assert Watched.num_read == len(found.documents(10**9))


def test_a_torn_line_is_written_anew(tmp_path: Path) -> None:
    whole = write(corpus(tmp_path / "whole"), 150).documents(150)
    path = tmp_path / "torn" / "conversations.jsonl"
    write(corpus(tmp_path / "torn"), 60)
    path.write_bytes(path.read_bytes()[:-9])
    again = write(corpus(tmp_path / "torn"), 150).documents(150)
    assert [d.token_ids.tolist() for d in again] == [d.token_ids.tolist() for d in whole]


def test_prompts_are_answered_first(tmp_path: Path) -> None:
    """And are not learned, for the target did not write them."""
    prompts = ((0, 1, 9, 2, 3, 4), (0, 1, 8, 8, 2, 3, 4))
    documents = write(corpus(tmp_path, prompts=prompts), 100).documents(100)
    assert [record["prompt"] for record in lines(tmp_path).values()].count(list(prompts[1])) == 1
    assert documents[1].first == len(prompts[1])


def test_without_a_template_any_token_begins_a_text(tmp_path: Path) -> None:
    write(corpus(tmp_path, template=Template((), ())), 200)
    firsts = {record["prompt"][0] for record in lines(tmp_path).values()}
    assert len(firsts) > 2
    assert all(len(record["prompt"]) == 1 for record in lines(tmp_path).values())


def test_tokens_are_drawn_from_the_distribution() -> None:
    """Evenly spread numbers hit each token as often as it is likely, to one of them; greedy rows
    take the likeliest, and a floor leaves out what is far below it."""
    num = 4000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -4.0])
    uniforms = ((np.arange(num) + 0.5) / num).tolist()
    for temperature in (0.7, 1.0):
        rows = logits.expand(num, -1)
        drawn = draw(rows, [temperature] * num, [0.0] * num, uniforms)
        expected = (logits.double() / temperature).softmax(0) * num
        counts = np.bincount(drawn, minlength=5)
        assert np.abs(counts - expected.numpy()).max() <= 1.5
    assert draw(logits.expand(2, -1), [0.0, 0.0], [0.0, 0.0], [0.1, 0.9]) == [3, 3]
    floored = draw(logits.expand(num, -1), [1.0] * num, [0.2] * num, uniforms)
    assert set(floored) == {1, 3}


def test_what_is_held_out_depends_on_the_prompt_and_not_on_its_place(tmp_path: Path) -> None:
    """Neither on the order in which conversations are finished, nor on how many there are."""
    found = write(corpus(tmp_path / "few"), 1200, together=3)
    few = {d.token_ids.tobytes(): d.is_held_out for d in found.documents(1200)}
    again = write(corpus(tmp_path / "many"), 2000, together=7)
    many = {d.token_ids.tobytes(): d.is_held_out for d in again.documents()}
    assert set(few.values()) == {False, True}
    assert few.keys() < many.keys()
    assert all(many[text] == is_held_out for text, is_held_out in few.items())


def test_without_a_turn_texts_are_held_out_by_what_they_say(tmp_path: Path) -> None:
    """All begin alike, and would else be all held out or none."""
    found = write(corpus(tmp_path, template=Template((0, 1), ())), 4000)
    prompts = {document.prompt for document in found.documents()}
    assert prompts == {(0, 1)}
    assert {document.is_held_out for document in found.documents()} == {False, True}
