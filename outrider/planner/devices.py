"""`outrider plan --devices` computes from bytes and bandwidth whether a draft is worth its device.

A step reads the weights once, and the keys and values of each session once. If a step has more than
`compute_rows` rows (tokens), computing takes longer than reading the weights. A step also takes
`layer_ms` for each layer, and `session_ms` for each session after the first.

In each round, a head on a draft device waits for the hidden states of the committed tokens. A
hidden state has `head_width` numbers of 2 bytes, and passes two links of `link_gb` GB/s each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat

from outrider.bench.report import Report, table
from outrider.config.emulated_spec import Parts, Share, parse_numbers
from outrider.errors import SettingError
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import LOOK_AHEAD_DEFAULT
from outrider.speculation.sampling_params import Rule

from .choosing import SWEEP
from .rounds import Attempt, Line, Option, ServiceTimes, replay

SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""The compared numbers of drafts for each target; 0 = the draft runs on the target's devices."""
PRESETS = {"h200-8b": "", "h200-70b-fp8": "target=70.6/80/327.7/4,head=2.81/1/20.5/4,"}
DRAFT, HEAD, HEAD_APART = "a draft", "a head", "a head on a draft device"
RATE, SPEED = "device_tokens_per_second", "session_tokens_per_second"
_BYTES_OF_A_NUMBER = 2
_Count = Annotated[int, Field(ge=1, le=10**9)]


class _Model(NamedTuple):
    gb: PositiveFloat
    layers: _Count
    kv_kb: PositiveFloat
    """Size of a token's keys and values, KB."""
    devices: _Count = 1


class _Devices(BaseModel, extra="forbid", allow_inf_nan=False):
    """The defaults are for H200s, Llama 3.1 8B, Llama 3.2 1B and an EAGLE-3 head.
    docs/performance.md has the sources of these numbers."""

    sessions: _Count = 1
    """Number of sessions of a target. Fewer run if the memory has no room for all (`seats`)."""
    context: _Count = 1024
    target: Annotated[_Model, Parts] = _Model(16.06, 32, 131.1)
    draft: Annotated[_Model, Parts] = _Model(2.47, 16, 32.8)
    head: Annotated[_Model, Parts] = _Model(0.85, 1, 12.3)
    head_width: _Count = 4096
    link_gb: PositiveFloat = 3.0
    """Speed of each link (target to coordinator, coordinator to draft), GB/s: about 25 Gbit/s."""
    acceptance: Share = 0.65
    head_acceptance: Share = 0.71
    hit_rate: Share = 0.84
    memory_gb: PositiveFloat = 127.0
    """Memory of a device for weights, keys and values: 0.9 of 141 GB."""
    bandwidth_tb: PositiveFloat = 3.6
    """Memory bandwidth of a device: 0.75 of 4.8 TB/s."""
    compute_rows: _Count = 206
    """Number of rows whose computation takes as long as reading the weights. In BF16, a row takes
    one operation for each byte of the weights: 990 TFLOP/s / 4.8 TB/s = 206. In FP8, computing and
    reading are both twice as fast, so the number is the same."""
    layer_ms: NonNegativeFloat = 0.07
    session_ms: NonNegativeFloat = 0.05
    verdict_ms: NonNegativeFloat = 0.07
    round_ms: NonNegativeFloat = 1.3
    """Time of a round with a draft, apart from the steps and verdicts of the round."""
    plain_ms: NonNegativeFloat = 0.5
    """Time of a round without a draft, apart from the step of the round."""

    def costs(self, model: _Model) -> StepCosts:
        gb_s = 1 / (self.bandwidth_tb * 1e3 * model.devices)
        read_s, rest_s = model.gb * gb_s, model.layers * self.layer_ms / 1e3
        rows = self.compute_rows
        return StepCosts(
            (1, rows + 1, 2 * rows + 1),
            (rest_s + read_s, rest_s + read_s, rest_s + 2 * read_s),
            self.session_ms / 1e3,
            model.kv_kb * gb_s / 1e6,
        )

    def seats(self, model: _Model) -> float:
        room_gb = self.memory_gb * model.devices - model.gb
        return room_gb * 1e6 / (model.kv_kb * self.context)

    def row(
        self, way: str, model: _Model, acceptance: float, share: float, round_trip_s: float
    ) -> dict[str, Any] | None:
        """Figures of a `way` to decode, with its fastest K and look-ahead, and with `share` drafts
        for each target. None if no session fits into the memory, or if a drafter on the target's
        devices needs more devices than the target has."""
        seats = self.seats(self.target), self.seats(model) * (share or 1)
        sessions = int(min(self.sessions, *seats))
        if sessions < 1 or (not share and model.devices > self.target.devices):
            return None
        times = ServiceTimes(
            target=self.costs(self.target),
            draft=self.costs(model),
            plain=Line(self.plain_ms / 1e3),
            round_trip_s=round_trip_s * (share > 0),
            rest_s=(self.round_ms + sessions * self.verdict_ms) / 1e3,
            max_num_seqs=2**20,
            shares_device=not share,
        )
        tried = []
        for k in SWEEP if acceptance else (0,):
            attempt = Attempt(k, k, [acceptance**depth for depth in range(1, k + 1)])
            one_round = replay(2, {1: attempt}.__getitem__, self.context - 1)
            tokens = sessions * (1 + sum(attempt.survival))
            link_s = times.round_trip_s
            if way == HEAD_APART:
                link_s += 2 * tokens * self.head_width * _BYTES_OF_A_NUMBER / (self.link_gb * 1e9)
            for ahead in (0, LOOK_AHEAD_DEFAULT * (way == DRAFT and share > 0)):
                option = Option(
                    rule=Rule.TOKEN,
                    num_draft_tokens=k,
                    look_ahead=ahead,
                    draft_replicas=share,
                    hit_rate=self.hit_rate if ahead else None,
                )
                linked = replace(times, round_trip_s=link_s)
                rate = tokens / linked.seconds(one_round, option, sessions)
                tried.append((rate, k, ahead, link_s * 1e3))
        rate, k, ahead, link_ms = max(tried)
        draft_devices = share * model.devices
        return {
            "way": way,
            "draft_devices": draft_devices,
            "sessions": sessions,
            "num_draft_tokens": k,
            "look_ahead": ahead,
            "link_ms": link_ms,
            SPEED: rate / sessions,
            RATE: rate / (self.target.devices + draft_devices),
        }


def compare(text: str, round_trip_s: float) -> Report:
    """Compares plain decoding, heads and drafts. `text` is PRESET,KEY=VALUE,.."""
    name, _, numbers = text.partition(",")
    if name not in PRESETS:
        presets = " or ".join(PRESETS)
        raise SettingError("devices", f"must begin with {presets}, not {name!r}")
    devices = parse_numbers(_Devices, PRESETS[name] + numbers, "--devices")
    if devices.seats(devices.target) < 1:
        raise SettingError(
            "devices", f"memory_gb is too small for the target and {devices.context} tokens"
        )
    ways = [
        ("decoding without drafts", devices.target, 0.0, 0.0),
        (HEAD, devices.head, devices.head_acceptance, 0.0),
        *((DRAFT, devices.draft, devices.acceptance, share) for share in SHARES),
    ]
    if devices.target.devices == 1:  # A target on several ranks sends no hidden states.
        head = devices.head, devices.head_acceptance
        ways += [(HEAD_APART, *head, share) for share in SHARES[1:]]
    rows = [row for way in ways if (row := devices.row(*way, round_trip_s)) is not None]
    advice = f"{_most(rows)} {_where_heads_pay(rows)}".strip()
    return Report({"devices": rows, "advice": advice}, [table(text, rows), advice])


def _most(rows: Sequence[dict[str, Any]]) -> str:
    most = max(rows, key=lambda row: row[RATE])
    use = "Use" if most["draft_devices"] else "Do not use"
    figures = f"{most[RATE]:.0f} tokens/s a device"
    if most["way"] in (DRAFT, HEAD_APART):
        figures += f" ({most['draft_devices']:g} draft devices for each target)"
    return f"{use} a separate draft here: {most['way']} is the fastest, {figures}."


def _where_heads_pay(rows: Sequence[dict[str, Any]]) -> str:
    on_target, apart = (
        [row for row in rows if row["way"] == way and row["num_draft_tokens"]]
        for way in (HEAD, HEAD_APART)
    )
    if not (on_target and apart):
        return ""
    [beside] = on_target
    fastest = max(apart, key=lambda row: row[SPEED])
    most = max(row[RATE] for row in apart)
    by_device = "draft" if most > beside[RATE] else "target"
    by_speed = "draft" if fastest[SPEED] > beside[SPEED] else "target"
    place = by_device
    if by_speed != by_device:
        place += f" for throughput, {by_speed} for the speed of each session"
    return (
        f"For a head, use --eagle3-on {place}. On the target a head yields {beside[RATE]:.0f} "
        f"tokens/s a device and {beside[SPEED]:.0f} a session. On draft devices it yields at most "
        f"{most:.0f} a device and {fastest[SPEED]:.0f} a session, and each round waits "
        f"{fastest['link_ms']:.2f} ms for hidden states."
    )
