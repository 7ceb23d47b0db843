"""What `outrider plan --simulate` knows of a target and a draft: from a plan, or from numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Final

from outrider.engine.step_costs import StepCosts
from outrider.errors import OutriderError, SettingError
from outrider.fleet_simulator.scenario import Drafting
from outrider.limits import ENGINE_SEQUENCES_MAX, LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.planning.fitting import Line
from outrider.planning.round_times import ServiceTimes

REPORT_BYTES_MAX: Final = 2**24
STEP_MS_MAX: Final = 60_000.0
TABLE_ROWS_MAX: Final = 2**20
STAIRS_MAX: Final = 4_096
"""Steps of a table that grows for each begun so many rows; beyond, it goes on as a line."""
NUMBERS: Final = {
    "verify_ms": "18.3", "verify_tokens": "16", "draft_ms": "1.3", "draft_branches": "64",
    "acceptance": "0.8", "num_draft_tokens": "6", "look_ahead": "0", "hit_rate": "0",
    "rest_ms": "0",
}  # fmt: skip
"""Keys of `--from-numbers`, and what they are where they are not named: those of `bench emulate
--scenario 70b-1b`."""


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """A target and a draft as a simulation needs them."""

    name: str
    drafting: Drafting
    times: ServiceTimes
    round_trip_ms: float = 0.0
    """Of the link that the plan was made for."""
    target_max_num_seqs: int | None = None
    """Sessions that share a step of a target; None = as many as of a draft, by `times`."""


def of_report(report: Mapping[str, Any], source: str) -> SimulatedPair:
    """From what `outrider plan --json` says, by its first temperature's choice. Raises
    `SettingError` where that is not what `source` has."""
    try:
        plan = next(iter(report["temperatures"].values()))
        chosen, found = plan["chosen"], plan["times"]
        times = ServiceTimes(
            target=_costs(report["target_costs"]),
            verify=_costs(found["verify"]),
            draft=None if report["draft_costs"] is None else _costs(report["draft_costs"]),
            plain=Line(**found["plain"]),
            wait=Line(**found["wait"]),
            rest_s=float(found["rest_s"]),
            first=Line(**found["first"]),
            max_num_seqs=int(found["max_num_seqs"]),
        )
        k = int(chosen["num_draft_tokens"])
        chances = plan["acceptance"]["all"]["by_position"][chosen["rule"]][:k] if k else ()
        drafting = Drafting(
            survival=tuple(accumulate((chance or 0.0 for chance in chances), mul)),
            num_proposed=float(chosen["proposed_per_round"]),
            num_steps=float(chosen["steps_per_round"]),
            look_ahead=int(chosen["look_ahead"]),
            hit_rate=float(chosen["hit_rate"] or 0.0),
        )
        name = f"{report['draft_model']} for {report['model']}"
        return SimulatedPair(name, drafting, times, float(report["round_trip_ms"]))
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError, OutriderError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise SettingError(
            "from_report",
            f"{source} is not what this version's `outrider plan --json` prints: {why}",
        ) from error


def read_report(path: Path) -> SimulatedPair:
    """From a file. Raises `SettingError`."""
    try:
        with path.open("rb") as file:
            text = file.read(REPORT_BYTES_MAX + 1)
        if len(text) > REPORT_BYTES_MAX:
            raise SettingError("from_report", f"{path} is larger than {REPORT_BYTES_MAX} bytes")
        report = json.loads(text)
    except OSError as error:
        raise SettingError("from_report", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SettingError("from_report", f"{path} is not JSON: {error}") from error
    return of_report(report, str(path))


def of_numbers(
    text: str,
    max_num_seqs: int = ENGINE_SEQUENCES_MAX,
    draft_max_num_seqs: int = ENGINE_SEQUENCES_MAX,
) -> SimulatedPair:
    """From `key=value,...`; see `NUMBERS`. So many sessions share a step of a target, or a draft.
    Raises `SettingError` naming what is wrong."""
    values = dict(NUMBERS)
    given: set[str] = set()
    for item in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in NUMBERS:
            _refuse(f"unknown key {key!r}; known: {', '.join(NUMBERS)}")
        if key in given:
            _refuse(f"{key} is given twice")
        given.add(key)
        values[key] = value
    num = _whole("num_draft_tokens", values, 0, NUM_DRAFT_TOKENS_MAX)
    look_ahead = _whole("look_ahead", values, 0, LOOK_AHEAD_MAX)
    if look_ahead > 0 and num == 0:
        _refuse(f"look_ahead {look_ahead} is wrong; with num_draft_tokens 0 it must be 0")
    verify = _table("verify_ms", "verify_tokens", values)
    rest_s = _number("rest_ms", values["rest_ms"], STEP_MS_MAX) / 1e3
    times = ServiceTimes(
        target=verify,
        verify=verify,
        draft=_table("draft_ms", "draft_branches", values),
        plain=Line(rest_s),
        rest_s=rest_s,
        max_num_seqs=draft_max_num_seqs,
    )
    drafting = Drafting(
        survival=tuple(accumulate(_chances(values["acceptance"], num), mul)),
        num_proposed=num,
        num_steps=num,
        look_ahead=look_ahead,
        hit_rate=_number("hit_rate", values["hit_rate"], 1.0) if look_ahead else 0.0,
    )
    return SimulatedPair(text or "70b-1b", drafting, times, target_max_num_seqs=max_num_seqs)


def _costs(found: Mapping[str, Any]) -> StepCosts:
    known = {field.name: found[field.name] for field in fields(StepCosts)}
    return StepCosts(**known | {name: tuple(known[name]) for name in ("rows", "seconds")})


def _chances(text: str, num: int) -> Sequence[float]:
    """By position, given those before; the last one is that of all further ones."""
    chances = [_number("acceptance", part, 1.0) for part in text.split("/")]
    return [chances[min(depth, len(chances) - 1)] for depth in range(num)]


def _table(key: str, each_key: str, values: Mapping[str, str]) -> StepCosts:
    """A step's time: for each begun so many rows, or `ROWS:MS/ROWS:MS/...` with lines between."""
    text = values[key]
    if ":" not in text:
        each = _whole(each_key, values, 1, TABLE_ROWS_MAX)
        return _stairs(_number(key, text, STEP_MS_MAX) / 1e3, each)
    pairs = [part.partition(":") for part in text.split("/")]
    rows = [_number(key, first, TABLE_ROWS_MAX) for first, _, _ in pairs]
    seconds = [_number(key, last, STEP_MS_MAX) / 1e3 for _, _, last in pairs]
    if any(row < 1 or row != int(row) for row in rows) or sorted(set(rows)) != rows:
        _refuse(f"{key}={text!r} is wrong; its rows must be whole numbers from 1 that ascend")
    return StepCosts(tuple(map(int, rows)), tuple(seconds))


def _stairs(seconds: float, each: int) -> StepCosts:
    """A table of so many seconds for each begun `each` rows."""
    if each == 1:
        return StepCosts((1, 2), (seconds, 2 * seconds))
    points: dict[int, float] = {}
    for number in range(1, STAIRS_MAX // each + 2):
        points[(number - 1) * each + 1] = points[number * each] = number * seconds
    last = max(points)
    points[last + each] = points[last] + seconds
    return StepCosts(tuple(points), tuple(points.values()))


def _whole(key: str, values: Mapping[str, str], lowest: int, highest: int) -> int:
    try:
        value = int(values[key])
    except ValueError:
        value = lowest - 1
    if not lowest <= value <= highest:
        _refuse(
            f"{key}={values[key]!r} is wrong; it must be a whole number from {lowest} to {highest}"
        )
    return value


def _number(key: str, text: str, highest: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= highest:
        _refuse(f"{key}={text!r} is wrong; it must be a number from 0 to {highest:g}")
    return value


def _refuse(reason: str) -> None:
    raise SettingError("from_numbers", reason)
