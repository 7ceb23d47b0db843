"""The texts that the target writes for training."""

import json
from pathlib import Path
from typing import Any

from draft_service.training.documents import Template
from draft_service.training.writing import TEMPERATURES, WrittenCorpus
from tests.support.toy_engine import ToyEngine

TEMPLATE = Template(before=(0, 1), after=(2, 3, 4))
VOCAB = 12


def corpus(directory: Path, **changes: object) -> WrittenCorpus:
    values: Any = {"template": TEMPLATE, "prompts": (), "seed": 5, "tokens_max": 40} | changes
    return WrittenCorpus(directory, **values)


def write(directory: Path, tokens: int, together: int = 4, **changes: object) -> WrittenCorpus:
    found = corpus(directory, tokens=tokens, **changes)
    told: list[str] = []
    engine = ToyEngine(vocab_size=VOCAB, salt=7)
    found.write(engine, together, lambda part, detail: told.append(detail))
    counts = [int(detail.removesuffix(f" of {tokens} tokens")) for detail in told]
    assert counts == sorted(counts)
    assert counts[-1] >= tokens
    return found


def lines(directory: Path) -> dict[int, dict[str, Any]]:
    text = (directory / "conversations.jsonl").read_text()
    return {record["index"]: record for record in map(json.loads, text.splitlines())}


def test_a_conversation_has_the_templates_form(tmp_path: Path) -> None:
    found = write(tmp_path, 200)
    for index, record in lines(tmp_path).items():
        prompt = record["prompt"]
        assert prompt[:2] == [0, 1]
        assert prompt[-3:] == [2, 3, 4]
        assert 2 not in prompt[2:-3]  # The token that ends a turn.
        assert record["temperature"] == TEMPERATURES[index % 3]
        assert len(prompt) + len(record["answer"]) <= 40
    documents = found.documents()
    assert all(document.first == 2 for document in documents)
    assert all(
        2 < d.answer_first == len(lines(tmp_path)[i]["prompt"]) for i, d in enumerate(documents)
    )
    assert sum(len(d.token_ids) for d in documents) >= 200


def test_text_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    write(tmp_path / "few", 120, together=2)
    write(tmp_path / "many", 120, together=7)
    write(tmp_path / "other", 120, seed=6)
    few, many, other = (lines(tmp_path / name) for name in ("few", "many", "other"))
    shared = few.keys() & many.keys()
    assert len(shared) >= 4
    assert all(few[index] == many[index] for index in shared)
    assert any(few[index] != other[index] for index in few.keys() & other.keys())


def test_a_torn_line_is_written_anew(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 150).documents()
    path = tmp_path / "torn" / "conversations.jsonl"
    write(tmp_path / "torn", 60)
    path.write_bytes(path.read_bytes()[:-9])
    again = write(tmp_path / "torn", 150).documents()
    assert [d.token_ids.tolist() for d in again] == [d.token_ids.tolist() for d in whole]


def test_prompts_are_answered_first(tmp_path: Path) -> None:
    """They are not learned, because the target did not write them."""
    prompts = ((0, 1, 9, 2, 3, 4), (0, 1, 8, 8, 2, 3, 4))
    documents = write(tmp_path, 100, prompts=prompts).documents()
    assert [record["prompt"] for record in lines(tmp_path).values()].count(list(prompts[1])) == 1
    assert documents[1].first == len(prompts[1])


def test_answers_to_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    """One prompt in 32 is held out (of about 200, 6 are expected), whether it was given or written.
    If the prompt is no more than the template's beginning, the beginning of the answer decides."""
    prompts = [(0, 1, index % 200, 2, 3, 4) for index in range(400)]
    (tmp_path / "conversations.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "index": index,
                    "prompt": prompts[index],
                    "temperature": 1.0,
                    "answer": [index] * 3,
                }
            )
            + "\n"
            for index in range(400)
        )
    )
    for changes, are_equal in (
        ({}, True),
        ({"prompts": prompts}, True),
        ({"template": Template((0,) * 6, ())}, False),
    ):
        held = [one.is_held_out for one in corpus(tmp_path, **changes).documents()]
        assert (held[:200] == held[200:]) is are_equal
        assert 1 <= sum(held[:200]) <= 14


def test_without_a_template_any_token_begins_a_text(tmp_path: Path) -> None:
    write(tmp_path, 200, template=Template((), ()))
    firsts = {record["prompt"][0] for record in lines(tmp_path).values()}
    assert len(firsts) > 2
    assert all(len(record["prompt"]) == 1 for record in lines(tmp_path).values())
