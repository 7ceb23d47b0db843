"""`bench core`: which logits it takes, and that it times what a target really does."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from verdict_laws import score

from benchmarks.core import (
    HIGH_NATS,
    NUM_DRAFT_TOKENS,
    make_cases,
    measure,
    record_rows,
    render,
)
from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.errors import ConfigError
from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.sampling_params import Rule
from outrider.speculation.verification import Question, verdicts_from_logits

VOCAB_SIZE = 512


class RowsEngine:
    """Logits of the token before: of an even token nearly flat (over 4 nats), of an odd one
    nearly certain."""

    info = ModelInfo("rows", VOCAB_SIZE, 64, "float32", (), "w", "t")

    def __init__(self) -> None:
        self.released = 0

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        found = []
        for step in steps:
            rows = []
            for token_id in step.token_ids[-step.num_logits :]:
                row = np.random.default_rng(token_id).normal(
                    0, 0.5 + 5 * (token_id % 2), VOCAB_SIZE
                )
                rows.append(torch.from_numpy(row).float())
            found.append(torch.stack(rows))
        return found

    def length(self, sequence_id: str) -> int:
        return 0

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        raise NotImplementedError

    def release(self, sequence_id: str) -> None:
        self.released += 1

    def take_step_seconds(self) -> float:
        return 0.0


def nats(rows: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=rows.double()).entropy()


def cases(rule: Rule) -> list[Question]:
    return make_cases(record_rows(RowsEngine(), [tuple(range(64))], 21), rule)


def test_every_second_row_has_more_than_four_nats() -> None:
    rows = record_rows(RowsEngine(), [tuple(range(30)), tuple(range(30, 60))], 40)
    assert rows.shape == (40, VOCAB_SIZE)
    assert bool((nats(rows[::2]) > HIGH_NATS).all())
    assert bool((nats(rows[1::2]) <= HIGH_NATS).all())


def test_no_text_is_read_when_there_are_rows_enough() -> None:
    engine = RowsEngine()
    record_rows(engine, [tuple(range(30))] * 5, 10)
    assert engine.released == 1


def test_texts_without_uncertain_rows_are_refused() -> None:
    odd = tuple(range(1, 60, 2))
    with pytest.raises(ConfigError, match="gave 0 rows over 4 nats and 30 others; 5 of each"):
        record_rows(RowsEngine(), [odd], 10)


def test_a_text_longer_than_the_model_takes_is_cut() -> None:
    assert len(record_rows(RowsEngine(), [tuple(range(200))], 60)) == 60


@pytest.mark.parametrize("rule", list(Rule))
def test_what_is_timed_is_the_verdict(rule: Rule) -> None:
    found = cases(rule)
    assert len(found) == 4  # one row of 21 is left over
    for case in found:
        assert case.logits.shape == (NUM_DRAFT_TOKENS + 1, VOCAB_SIZE)
        assert len(case.proposal.q) == (NUM_DRAFT_TOKENS if rule.needs_q else 0)
        expected = score(target_probabilities(case.logits, case.params), case.proposal, case.noise)
        (verdict,) = verdicts_from_logits([case])
        assert verdict.correction == expected.correction
        assert verdict.accept_probability == pytest.approx(expected.accept_probability, abs=1e-6)


def test_drafts_are_neither_all_accepted_nor_all_refused() -> None:
    """Else half of a verdict's work would be left out."""
    verdicts = verdicts_from_logits(cases(Rule.TOKEN))
    shares = [share for verdict in verdicts for share in verdict.accept_probability]
    assert 0.2 < np.mean(shares) < 0.999


def test_a_report_has_every_rule_and_the_draft() -> None:
    lines: list[str] = []
    report = measure(RowsEngine(), [tuple(range(64))], lines.append, repetitions=3, num_cases=4)
    value = json.loads(report.to_json())
    for times in (value["verdict_ms"], value["verdict_of_several_ms"]):
        assert set(times) == {"token", "block", "coupled", "greedy"}
        assert all(ms > 0 for ms in times.values())
    assert value["draft_sampling_ms"] > 0
    assert value["draft_entries"] == value["vocab_size"] == VOCAB_SIZE
    assert value["repetitions"] == 3
    assert lines
    assert render(report).row_count == 9
