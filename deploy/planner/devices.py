"""`outrider plan --devices`: whether a draft earns its device, from bytes and bandwidth.

A step reads the weights once, and each session's keys and values once; from `compute_rows` rows on
it computes for longer than it reads the weights. Beside that it takes `layer_ms` for each layer and
`session_ms` for each further session.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, NonNegativeFloat, PositiveFloat, PositiveInt

from benchmarks.report import Report, table
from outrider.engine.emulated_spec import Parts, Share, parse_numbers
from outrider.engine.step_costs import StepCosts
from outrider.errors import SettingError
from outrider.limits import LOOK_AHEAD_DEFAULT
from outrider.speculation.sampling_params import Rule

from .choosing import SWEEP
from .rounds import Attempt, Line, Option, ServiceTimes, replay

SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Drafts for each target that are looked at; 0 = the draft runs on the target's devices."""
PRESETS = {"h200-8b": "", "h200-70b-fp8": "target=70.6/80/327.7/4,head=2.81/1/20.5/4,"}


class _Model(NamedTuple):
    gb: PositiveFloat
    """Weights that a step reads."""
    layers: PositiveInt
    kv_kb: PositiveFloat
    """Keys and values of a token."""
    devices: PositiveInt = 1


_Spec = Annotated[_Model, Parts]


class _Devices(BaseModel, extra="forbid", validate_default=True, allow_inf_nan=False):
    """H200s, Llama 3.1 8B, Llama 3.2 1B and an EAGLE-3 head; docs/performance.md has sources."""

    sessions: PositiveInt = 1
    """Of each target, or as many as fit ..."""
    context: PositiveInt = 1024
    """... behind so many tokens."""
    target: _Spec = "16.06/32/131.1"  # type: ignore[assignment]
    draft: _Spec = "2.47/16/32.8"  # type: ignore[assignment]
    head: _Spec = "0.85/1/12.3"  # type: ignore[assignment]
    acceptance: Share = 0.65
    head_acceptance: Share = 0.71
    hit_rate: Share = 0.84
    memory_gb: PositiveFloat = 127.0
    """0.9 of 141, for weights, keys and values."""
    bandwidth_tb: PositiveFloat = 3.6
    """0.75 of 4.8 TB/s."""
    compute_rows: PositiveInt = 206
    """990 TFLOP/s over 4.8 TB/s. In 8 bits twice as many are computed of weights half as long."""
    layer_ms: NonNegativeFloat = 0.07
    session_ms: NonNegativeFloat = 0.05
    verdict_ms: NonNegativeFloat = 0.07
    """Of a session's verdict."""
    round_ms: NonNegativeFloat = 1.3
    """Of a round with a draft, beside steps and verdicts ..."""
    plain_ms: NonNegativeFloat = 0.5
    """... and of one without."""

    def costs(self, model: _Model) -> StepCosts:
        """Of its steps."""
        gb_s = 1 / (self.bandwidth_tb * 1e3 * model.devices)
        read_s, rest_s = model.gb * gb_s, model.layers * self.layer_ms / 1e3
        rows = self.compute_rows
        return StepCosts(
            (1, rows + 1, 2 * rows + 1), (rest_s + read_s, rest_s + read_s, rest_s + 2 * read_s),
            self.session_ms / 1e3, model.kv_kb * gb_s / 1e6,
        )  # fmt: skip

    def seats(self, model: _Model) -> float:
        """Sessions that its devices have memory for."""
        room_gb = self.memory_gb * model.devices - model.gb
        return room_gb * 1e6 / (model.kv_kb * self.context)


def compare(text: str, round_trip_s: float) -> Report:
    """What is fastest with a draft, with a head and without both. `text` is PRESET,KEY=VALUE,..
    Raises `ConfigError` naming what is wrong."""
    name, _, numbers = text.partition(",")
    if name not in PRESETS:
        raise SettingError("devices", f"{name!r} is wrong; it begins with {' or '.join(PRESETS)}")
    found = parse_numbers(_Devices, PRESETS[name] + numbers, "--devices")
    ways = [
        ("decoding without drafts", found.target, 0.0, 0.0),
        ("a head", found.head, found.head_acceptance, 0.0),
        *(("a draft", found.draft, found.acceptance, share) for share in SHARES),
    ]
    if found.seats(found.target) < 1:
        raise SettingError("devices", f"memory_gb: {found.context} tokens do not fit")
    rows: list[dict[str, Any]] = []
    for way, model, acceptance, share in ways:
        seats = found.seats(found.target), found.seats(model) * (share or 1)
        sessions = int(min(found.sessions, *seats))
        if sessions < 1 or (not share and model.devices > found.target.devices):
            continue
        draft_devices = share * model.devices
        times = ServiceTimes(
            target=found.costs(found.target), draft=found.costs(model),
            plain=Line(found.plain_ms / 1e3), round_trip_s=round_trip_s * (share > 0),
            rest_s=(found.round_ms + sessions * found.verdict_ms) / 1e3,
            max_num_seqs=2**20, shares_device=not share,
        )  # fmt: skip
        tried = []
        for k in SWEEP if acceptance else (0,):
            attempt = Attempt(k, k, [acceptance**depth for depth in range(1, k + 1)])
            one_round = replay(2, {1: attempt}.__getitem__, found.context - 1)
            tokens = sessions * (1 + sum(attempt.survival))
            for ahead in (0, LOOK_AHEAD_DEFAULT * (share > 0)):
                option = Option(
                    rule=Rule.TOKEN, num_draft_tokens=k, look_ahead=ahead, draft_replicas=share,
                    hit_rate=found.hit_rate if ahead else None,
                )  # fmt: skip
                rate = tokens / times.seconds(one_round, option, sessions)
                tried.append((rate, k, ahead))
        rate, k, ahead = max(tried)
        rows.append(
            {
                "way": way, "draft_devices": draft_devices, "sessions": sessions,
                "num_draft_tokens": k, "look_ahead": ahead,
                "session_tokens_per_second": rate / sessions,
                "device_tokens_per_second": rate / (found.target.devices + draft_devices),
            }
        )  # fmt: skip
    most = max(rows, key=lambda row: row["device_tokens_per_second"])
    use = "Use" if most["draft_devices"] else "Do not use"
    devices = f" ({most['draft_devices']:g} draft devices for each target)"
    advice = (
        f"{use} a separate draft here: {most['way']} brings the most, "
        f"{most['device_tokens_per_second']:.0f} tokens/s a device"
        f"{devices * (most['way'] == 'a draft')}."
    )
    return Report({"devices": rows, "advice": advice}, [table(text, rows), advice])
