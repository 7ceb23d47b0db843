"""`bench acceptance` is compared with sums over the whole vocabulary and with hand calculations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.bench import acceptance
from outrider.bench.options import AcceptanceOptions
from outrider.bench.prompts import BenchPrompt
from outrider.config.deployment import load_config
from outrider.drafters.lookup import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import SettingError
from outrider.speculation.proposal import COUNT_TOTAL
from outrider.speculation.sampling_params import SamplingParams
from tests.support.bench_sides import tiny_pair
from tests.support.command_lines import reported
from tests.support.toy_engine import ToyEngine, toy_logits

VOCAB_SIZE = 16
SALT = 11
ROUNDING = VOCAB_SIZE / COUNT_TOTAL


def engine(salt: int) -> ToyEngine:
    return ToyEngine(vocab_size=VOCAB_SIZE, salt=salt, max_model_len=64)


def law(salt: int, prefix: tuple[int, ...]) -> np.ndarray:
    return torch.softmax(toy_logits(salt, prefix, VOCAB_SIZE).double(), 0).numpy()


def measured(reader: Any, num_prompts: int = 4, **options: Any) -> dict[str, Any]:
    prompts = [BenchPrompt(f"{i}", "ab"[i % 2]) for i in range(num_prompts)]
    reading = acceptance.Reading(
        engine(1), reader, "toy", prompts, lambda text: (1, 2, int(text) % VOCAB_SIZE), 20
    )
    return dict(acceptance.measure(AcceptanceOptions(**options), reading, lambda line: None).values)


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    found = measured(acceptance.ModelReader(engine(1)), hits=True)
    assert found["greedy"] == 1.0
    assert found["sampled"] == pytest.approx(1.0, abs=1e-3)
    assert found["by_position"] == pytest.approx([1.0] * 8, abs=2e-3)
    assert found["num_positions"] == 80
    assert found["hits"]["coupled"]["4"] > 0.99
    other = measured(acceptance.ModelReader(engine(SALT)), hits=True)["hits"]
    for rule in ("greedy", "token", "coupled"):
        shares = list(other[rule].values())
        assert shares == sorted(shares)
        assert 0 < shares[0] < 0.99


def test_one_prefill_gives_what_sums_over_tokens_give(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(acceptance.ModelReader(engine(SALT)), num_prompts=1)
    ids = (1, 2, 0)
    asked = [acceptance.Answer("", 0, ids, 20)]
    [(greedy_text, _)] = acceptance.write(engine(1), asked, SamplingParams(temperature=0.0))
    [(text, _)] = acceptance.write(engine(1), asked, acceptance.SAMPLED)
    hits, overlaps = [], []
    for i in range(20):
        prefix = (*ids, *greedy_text[:i])
        hits.append(int(law(SALT, prefix).argmax()) == greedy_text[i])
        prefix = (*ids, *text[:i])
        overlaps.append(np.minimum(law(1, prefix), law(SALT, prefix)).sum())
    assert found["greedy"] == pytest.approx(np.mean(hits), abs=1e-4)
    assert 0 < found["greedy"] < 1
    assert found["sampled"] == pytest.approx(np.mean(overlaps), abs=ROUNDING)
    monkeypatch.setattr(acceptance, "DRAFT_SUPPORT_ENTRIES", 2)
    cut = measured(acceptance.ModelReader(engine(1)))
    assert cut["greedy"] == 1.0
    assert cut["sampled"] < 0.95


def test_lookup_proposes_what_followed_before_or_nothing() -> None:
    q = acceptance.LookupReader(NgramDrafter()).distributions((5, 6, 7, 5, 6, 7, 5, 9), 2)
    assert [entry and entry.token_ids for entry in q] == [None, None, (6,), (7,), (5,), (6,)]
    with pytest.raises(SettingError, match="toy predicts no outcomes"):
        measured(acceptance.LookupReader(NgramDrafter()), hits=True)


def test_suffix_decoding_has_what_was_read_at_that_temperature_as_its_history() -> None:
    """Nothing has followed the last token, so it has no proposal."""
    reader = acceptance.LookupReader(SuffixDrafter())
    for expected in ([None] * 3, [(7,), (8,), None]):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature)
            q = reader.distributions((5, 6, 7, 8, 9), 2, params)
            assert [entry and entry.token_ids for entry in q] == expected


def test_answers_side_by_side_are_those_alone() -> None:
    texts = ((5, (1, 2, 3), 20), (6, (3, 1), 4), (7, (2, 2, 2, 1), 12))
    asked = [acceptance.Answer("", *one) for one in texts]
    together = acceptance.write(engine(1), asked, acceptance.SAMPLED)
    for each, (tokens, rows) in zip(asked, together, strict=True):
        [(alone, rows_alone)] = acceptance.write(engine(1), [each], acceptance.SAMPLED)
        assert tokens == alone
        assert torch.allclose(torch.stack(rows), torch.stack(rows_alone), atol=1e-5)
    assert len({len(tokens) for tokens, _ in together}) == 3


def test_a_draft_that_reads_the_target_is_refused() -> None:
    config = load_config({"draft_model": "eagle3:DIR"}, {})
    with pytest.raises(SettingError, match="eagle3:DIR is wrong; it must not read"):
        acceptance.load_reading(config, AcceptanceOptions(), lambda line: None)


def test_a_wrong_file_of_prompts_is_refused_before_models_are_loaded(tmp_path: Path) -> None:
    lines: list[str] = []
    options = AcceptanceOptions(prompts=tmp_path / "no.jsonl")
    with pytest.raises(SettingError, match=r"cannot read .*no\.jsonl"):
        acceptance.load_reading(load_config({}, {}), options, lines.append)
    assert lines == []


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    prompts = [BenchPrompt("x", "a")]
    reader = acceptance.ModelReader(engine(1))
    with pytest.raises(SettingError, match="prompt 1 has 64 tokens; it must have 1 to 63"):
        acceptance.Reading(engine(1), reader, "toy", prompts, lambda text: (1,) * 64, 20)


def test_the_command_loads_both_models_and_prints_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*tiny_pair(tmp_path), "--max-tokens", "5", "--hits")
    value, _ = reported(capsys, "bench", "acceptance", *flags)
    assert value["num_positions"] == 5
    assert 0 < value["sampled"] < 0.9
    assert value["by_category"] == {"chat": {k: value[k] for k in ("greedy", "sampled")}}
    assert set(value["hits"]) == {"greedy", "token", "coupled"}


P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.2, 0.6])
NUM_PLACES = 60_000


def test_matched_is_how_often_two_races_with_one_noise_agree() -> None:
    """The standard error is at most 0.005: a correct function fails with p < 1e-8."""
    noise = np.random.default_rng(3).gumbel(size=(NUM_PLACES, 3))
    ours, theirs = (np.log(P) + noise).argmax(axis=1), (np.log(Q) + noise).argmax(axis=1)
    for token_id in range(3):
        share = (theirs[ours == token_id] == token_id).mean()
        assert abs(acceptance.matched(P, Q, token_id) - share) < 0.03
    assert acceptance.matched(P, np.array([0.5, 0.5, 0.0]), 2) == 0.0


def test_race_ranks_are_those_of_two_races_with_one_noise() -> None:
    """Ranks are drawn given the winner. The standard error is 0.004, the bound 0.03."""
    generator = np.random.default_rng(11)
    noise = generator.exponential(size=(NUM_PLACES, 3))
    winners = (noise / P).argmin(axis=1)
    order = (noise / Q).argsort(axis=1).argsort(axis=1)
    mine = order[winners == 0, 0]
    told = np.array([acceptance.race_rank(P, Q, 0, generator) for _ in range(15_000)])
    for rank in range(3):
        assert abs((mine == rank).mean() - (told == rank).mean()) < 0.03
    assert acceptance.race_rank(P, np.array([0.0, 0.5, 0.5]), 0, generator) is None
    assert {acceptance.race_rank(P, Q, 0, generator, refused=2) for _ in range(200)} == {0, 1}


def test_hit_rates_add_up_the_likeliest_outcomes() -> None:
    """For K = 1 and acceptance 0.8, the chances by hand are 0.8 * (0.6, 0.4) for a bonus and 0.2 *
    0.5 for a correction."""
    guessing = acceptance.Guessing()
    for rank in (0, None):
        acceptance.note_guess(guessing.recovery, rank)
    acceptance.note_guess(guessing.bonus, 0, 6.0)
    acceptance.note_guess(guessing.bonus, 1, 4.0)
    assert guessing.hit_rates([0.8])[:3] == pytest.approx((0.48, 0.80, 0.90))
