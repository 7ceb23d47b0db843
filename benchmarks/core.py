"""`outrider bench core`: what verdicts and draft draws cost, on logits of a real model.

One thread, K = 4, top-p 0.95, temperature 1 (0 under greedy). A verdict is all that a target does
between its logits and its answer; a draft draw all that a draft does between logits and q.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Final

import torch
from rich.table import Table

from outrider.engine.interface import Engine, SequenceStep
from outrider.engine.threads import on_threads
from outrider.errors import SettingError
from outrider.speculation.draft_sampling import draw_from_logits
from outrider.speculation.logits_processing import NO_HISTORY
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import Question, verdicts_from_logits

from .figures import figures_table, to_json
from .measurement import Progress

NUM_DRAFT_TOKENS: Final = 4
DRAFT_ENTRIES: Final = 8_192
"""Width of the draft's logits: those of the target's first so many tokens."""
HIGH_NATS: Final = 4.0
"""Half of the rows have more entropy than this, half have at most as much."""
NUM_CASES: Final = 40
"""Verdicts' worth of rows: more than the processor's caches hold."""
REPETITIONS: Final = 200
WARM_UP: Final = 10
SAMPLED: Final = SamplingParams(temperature=1.0, top_p=0.95)
GREEDY: Final = SamplingParams(temperature=0.0)
DRAFTED: Final = SamplingParams(temperature=1.25, top_p=0.95)
"""Takes the draft's distribution from the target's logits, a little flatter."""
SESSIONS: Final = 8
_SEQUENCE: Final = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreReport:
    """The result of one `bench core`; times in ms, medians of `repetitions`."""

    model: str
    vocab_size: int
    num_draft_tokens: int
    repetitions: int
    verdict_ms: Mapping[str, float]
    """By rule: from logits [K+1, V] to the verdict."""
    verdict_of_several_ms: Mapping[str, float]
    """Likewise, of each of `SESSIONS` that are judged at once."""
    draft_sampling_ms: float
    """From logits [`draft_entries`] to a drawn token and its q."""
    draft_entries: int

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


def record_rows(engine: Engine, texts: Sequence[Sequence[int]], num_rows: int) -> torch.Tensor:
    """Logits [num_rows, V], float32, of the model reading `texts` (token ids): every second row has
    more than `HIGH_NATS` nats. Raises `SettingError` where the texts do not have so many."""
    high: list[torch.Tensor] = []
    low: list[torch.Tensor] = []
    wanted = -(-num_rows // 2)
    for ids in texts:
        if min(len(high), len(low)) >= wanted:
            break
        limit = engine.info.max_model_len
        step = SequenceStep(_SEQUENCE, tuple(ids[:limit]), num_logits=min(len(ids), limit))
        [logits] = engine.forward([step])
        engine.release(_SEQUENCE)
        logits = logits.cpu()
        logs = logits.double().log_softmax(dim=1)
        certain = torch.special.entr(logs.exp()).sum(dim=1) <= HIGH_NATS
        low += logits[certain].unbind()
        high += logits[~certain].unbind()
    if min(len(high), len(low)) < wanted:
        raise SettingError(
            "model",
            f"{engine.info.name} gave {len(high)} rows over {HIGH_NATS:g} nats and {len(low)} "
            f"others; {wanted} of each are needed",
        )
    pairs = zip(high[:wanted], low[:wanted], strict=True)
    return torch.stack([row for pair in pairs for row in pair])[:num_rows].contiguous()


def make_cases(rows: torch.Tensor, rule: Rule) -> list[Question]:
    """Verdicts to take over `rows` [N, V], K + 1 at a time; what is left over is not used."""
    params = GREEDY if rule is Rule.GREEDY else SAMPLED
    cases = []
    width = NUM_DRAFT_TOKENS + 1
    for index in range(len(rows) // width):
        logits = rows[index * width : (index + 1) * width]
        noise = RoundNoise(seed=index, rule=rule, committed_length=100 + index)
        draft_params = GREEDY if rule is Rule.GREEDY else DRAFTED
        drawn, _ = draw_from_logits(
            logits[:NUM_DRAFT_TOKENS],
            draft_params,
            [noise] * NUM_DRAFT_TOKENS,
            list(range(NUM_DRAFT_TOKENS)),
        )
        q = tuple(q for _, q in drawn) if rule.needs_q else ()
        proposal = Proposal(tuple(token_id for token_id, _ in drawn), q)
        cases.append(Question(logits.clone(), params, NO_HISTORY, proposal, noise))
    return cases


def measure(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    progress: Progress,
    *,
    repetitions: int = REPETITIONS,
    num_cases: int = NUM_CASES,
) -> CoreReport:
    """Records logits of `engine` reading `texts` (token ids), and times the rules in turn."""
    progress("recording logits")
    with torch.inference_mode():
        rows = record_rows(engine, texts, num_cases * (NUM_DRAFT_TOKENS + 1))
        progress("timing")
        with on_threads(1):
            cases = {rule: make_cases(rows, rule) for rule in Rule}
            alone, several = (_time_verdicts(cases, repetitions, num) for num in (1, SESSIONS))
            draws = _time_draws(rows[:, :DRAFT_ENTRIES].contiguous(), repetitions)
    return CoreReport(
        model=engine.info.name,
        vocab_size=rows.shape[1],
        num_draft_tokens=NUM_DRAFT_TOKENS,
        repetitions=repetitions,
        verdict_ms=alone,
        verdict_of_several_ms=several,
        draft_sampling_ms=median(draws),
        draft_entries=min(DRAFT_ENTRIES, rows.shape[1]),
    )


def _time_verdicts(
    cases: Mapping[Rule, Sequence[Question]], repetitions: int, num_sessions: int
) -> dict[str, float]:
    """ms of a verdict by rule, the median, where so many sessions are judged at once. The rules
    take turns, so that what the machine does beside this hits all of them."""
    times: dict[Rule, list[float]] = {rule: [] for rule in cases}
    for index in range(-WARM_UP, repetitions):
        for rule, own in cases.items():
            first = index * num_sessions
            asked = [own[(first + place) % len(own)] for place in range(num_sessions)]
            taken = _milliseconds(partial(verdicts_from_logits, asked)) / num_sessions
            if index >= 0:
                times[rule].append(taken)
    return {rule.value: median(values) for rule, values in times.items()}


def _time_draws(rows: torch.Tensor, repetitions: int) -> list[float]:
    """ms of each draft draw from a row of `rows` [N, entries], as a draft model makes it."""
    times = []
    for index in range(-WARM_UP, repetitions):
        row = rows[index % len(rows)][None]
        noise = RoundNoise(seed=7, rule=Rule.TOKEN, committed_length=100 + index)
        taken = _milliseconds(partial(_draw, row, noise))
        if index >= 0:
            times.append(taken)
    return times


def _draw(row: torch.Tensor, noise: RoundNoise) -> object:
    return draw_from_logits(row, SAMPLED, [noise], [0])


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def render(report: CoreReport) -> Table:
    """The report for people."""
    shape = f"K = {report.num_draft_tokens}, V = {report.vocab_size}"
    rows = [
        (f"verdict, {rule}, {num} at once ({shape})", f"{ms:.3f} ms")
        for num, times in ((1, report.verdict_ms), (SESSIONS, report.verdict_of_several_ms))
        for rule, ms in times.items()
    ]
    name = f"draft draw over {report.draft_entries} entries"
    rows.append((name, f"{report.draft_sampling_ms:.3f} ms"))
    return figures_table(f"{report.model}, one thread, median of {report.repetitions}", rows)
