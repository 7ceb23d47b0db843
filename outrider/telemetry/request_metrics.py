"""The numbers of a coordinator's requests, as OpenTelemetry instruments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

from opentelemetry.metrics import Meter

from outrider.sessions.store import FinishReason
from outrider.telemetry.instruments import PREFIX, Counts, times, watch
from outrider.telemetry.observer import Side

SIDES: Final[tuple[str, ...]] = get_args(Side)
PHASES: Final = ("draft", "wire", "queue", "verify", "commit")
"""Where a round's time goes: the whole wait for a proposal; of the wait for a verdict what is
neither the target's queue nor its step; those two; from the decision until it may be shown."""


class RequestTimes:
    """The histograms of a coordinator's requests."""

    def __init__(self, meter: Meter) -> None:
        seconds = "_seconds"
        self.phases = {
            phase: times(meter, f"{PREFIX}round_{phase}{seconds}", f"A round's time: {phase}.")
            for phase in PHASES
        }
        self.queue = times(
            meter, PREFIX + "request_queue_time_seconds",
            "From arrival until the target began the first step.",
        )  # fmt: skip
        self.first_token = times(
            meter, PREFIX + "time_to_first_token_seconds", "From arrival to the first token."
        )
        self.inter_token = times(
            meter, PREFIX + "inter_token_latency_seconds",
            "Between two rounds' tokens at the client, a token: one value a round.",
        )  # fmt: skip
        self.latency = times(
            meter,
            PREFIX + "e2e_request_latency_seconds",
            "From arrival to the last event, of completions that were sent whole.",
        )
        self.genai_first_token = times(
            meter, "gen_ai.server.time_to_first_token", "From arrival to the first token."
        )
        self.genai_per_token = times(
            meter, "gen_ai.server.time_per_output_token", "After the first token, a token."
        )
        self.genai_duration = times(
            meter, "gen_ai.server.request.duration", "From arrival to the last event or error."
        )


class RequestMeters(RequestTimes):
    """Instruments shared by all requests of a coordinator."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self._meter = meter
        self.prompt_tokens = Counts(meter, "prompt_tokens", "", "Prompt tokens of opened sessions.")
        self.generation_tokens = Counts(meter, "generation_tokens", "", "Committed tokens.")
        self.successes = Counts(
            meter, "request_success", "", "Requests that got a last event.", "finished_reason",
            [reason.value for reason in FinishReason],
        )  # fmt: skip
        self.failures = Counts(
            meter, "request_failure", "", "Requests that got an error instead.", "error_type"
        )
        self.rounds = Counts(meter, "num_rounds", "", "Rounds decided.")
        self.chosen_lengths = Counts(
            meter, "rounds_by_num_draft_tokens", "",
            "Rounds but the first of a request, by the draft tokens that were asked for.",
            "num_draft_tokens",
        )  # fmt: skip
        self.drafts = Counts(meter, "spec_decode_num_drafts", "", "Rounds with a proposal.")
        self.draft_tokens = Counts(
            meter, "spec_decode_num_draft_tokens", "", "Draft tokens proposed."
        )
        self.accepted_tokens = Counts(
            meter, "spec_decode_num_accepted_tokens", "", "Draft tokens accepted."
        )
        self.accepted_per_position = Counts(
            meter, "spec_decode_num_accepted_tokens_per_pos", "",
            "Draft tokens accepted, by their place in the proposal.", "position",
        )  # fmt: skip
        self.resyncs = Counts(
            meter, "resyncs", "", "Answers of a replica that lacked the stated prefix.", "side",
            SIDES,
        )  # fmt: skip
        self.moves = Counts(
            meter, "session_moves", "", "Sessions that went on to another replica.", "side", SIDES
        )
        self.unreadable_proposals = Counts(
            meter,
            "unreadable_proposals",
            "",
            "Proposals whose distributions the target could not read.",
        )
        self.look_ahead_hits = Counts(
            meter, "look_ahead_hits", "", "Rounds whose proposal was there before they began."
        )
        self.look_ahead_misses = Counts(
            meter, "look_ahead_misses", "",
            "Rounds that a draft had looked ahead of and whose proposal was not there.",
        )  # fmt: skip
        self.fallback_rounds = Counts(
            meter, "fallback_rounds", "", "Rounds drafted here because no draft answered."
        )

    def watch_load(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Shows how many requests run, and how many are being opened."""
        watch(self._meter, "num_requests_running", "Sessions that run.", running)
        watch(self._meter, "num_requests_waiting", "Requests being opened.", waiting)
