"""The part `steps` of `bench overhead`: its figures, its tables, and the text that it emulates."""

from collections.abc import Mapping
from itertools import takewhile
from operator import eq

import pytest

from outrider.bench.step_overhead import (
    ACCEPTANCE,
    DRAFTS,
    EMULATED_SPEC,
    PROMPT_TOKENS,
    PROPOSAL_SHARE,
    Configuration,
    Sample,
    figures,
    tables,
)
from outrider.config.emulated_spec import EmulatedSpec
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NgramDrafter
from outrider.engine.emulated import EmulatedEngine
from outrider.errors import Unavailable
from outrider.interfaces.engine import SequenceStep
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.command_lines import printed

CPU_S = {"coordinator": 0.2, "target": 0.1, "client": 0.05, "redis": 0.05}


def sample(
    num_tokens: int, num_rounds: int, seconds: float, cpu_s: Mapping[str, float] = CPU_S
) -> Sample:
    return Sample(num_tokens, num_rounds, seconds, cpu_s)


def test_plain_decoding_has_a_token_of_each_session_in_each_step_at_best() -> None:
    """In all, 1,200 tokens in 3 s, and 0.8 s of CPU time."""
    turns = [sample(400, 400, 1.0), sample(800, 800, 2.0)]
    found = figures(Configuration(5.0, 8, "plain", 0.0), turns)
    assert found["tokens_per_second"] == pytest.approx(400.0)
    assert found["ideal_tokens_per_second"] == pytest.approx(8 / 0.005)
    assert found["fraction_of_ideal"] == pytest.approx(0.25)
    assert found["core_ms_per_token"] == pytest.approx(800 / 1200)
    assert found["coordinator_core_ms_per_token"] == pytest.approx(400 / 1200)
    assert found["redis_core_ms_per_token"] == pytest.approx(100 / 1200)
    assert found["draft_core_ms_per_token"] is None
    assert (found["seconds"], found["num_draft_tokens"]) == (3.0, 0)


@pytest.mark.parametrize(
    ("drafting", "round_s"), [("lookup", 0.012), ("resident", 0.012), ("remote", 0.015)]
)
def test_drafts_allow_the_measured_tokens_a_round_in_the_time_of_its_steps(
    drafting: str, round_s: float
) -> None:
    """A remote draft takes three steps of 1 ms."""
    found = figures(Configuration(12.0, 4, drafting, 1.0), [sample(500, 200, 1.0)])
    assert found["tokens_per_round"] == 2.5
    assert found["ideal_tokens_per_second"] == pytest.approx(4 * 2.5 / round_s)
    assert found["fraction_of_ideal"] == pytest.approx(500 / (4 * 2.5 / round_s))


def test_a_window_without_rounds_is_an_error() -> None:
    with pytest.raises(Unavailable, match="36 ms, 1 sessions, plain, temperature 0: no round"):
        figures(Configuration(36.0, 1, "plain", 0.0), [sample(0, 0, 1.0)])


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    grid = [Configuration(36.0, 128, kind, 1.0) for kind in ("plain", "lookup", "remote")]
    cpu_s = CPU_S | {"draft": 0.1}
    rows = [figures(one, [sample(99_999, 45_000, 1.0, cpu_s)]) for one in grid]
    lines = printed(*tables(rows), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("remote T=1" in line for line in lines) == 2, "a table must not be continued"


def test_a_look_up_proposes_and_is_accepted_as_often_as_the_text_states() -> None:
    """800 rounds of greedy decoding. The bounds are five standard errors: false alarm < 1e-5."""
    spec = ",".join(f"{key}={value}" for key, value in EMULATED_SPEC.items())
    engine, drafter = EmulatedEngine(EmulatedSpec.parse(spec), "target"), NgramDrafter()
    tokens = list(range(PROMPT_TOKENS))
    new, num_proposals, num_accepted = tokens, 0, [0] * DRAFTS
    for _ in range(800):
        noise = RoundNoise(0, Rule.GREEDY, len(tokens))
        request = DraftRequest(
            "s", "", tokens, PROMPT_TOKENS, DRAFTS, SamplingParams(), Rule.GREEDY, noise
        )
        guess = drafter.guess(request).token_ids
        assert len(guess) in (0, DRAFTS)
        [logits] = engine.forward([SequenceStep("s", (*new, *guess), len(guess) + 1)])
        best = logits.argmax(-1).tolist()
        passed = [*takewhile(bool, map(eq, guess, best))]
        num_proposals += bool(guess)
        for depth in range(len(passed)):
            num_accepted[depth] += 1
        engine.keep("s", len(tokens) + len(passed))
        new = [best[len(passed)]]
        tokens += [*guess[: len(passed)], *new]
    assert num_proposals / 800 == pytest.approx(PROPOSAL_SHARE, abs=0.054)
    shares = [num / num_proposals for num in num_accepted]
    assert shares == pytest.approx([ACCEPTANCE, ACCEPTANCE**2, ACCEPTANCE**3], abs=0.095)
