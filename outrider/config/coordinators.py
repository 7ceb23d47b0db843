"""What a coordinator can be told."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Final, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from outrider.config.models import DraftConfig, NgramMax, NgramMin, check_ngrams
from outrider.config.servers import THREADS_MAX, FrontConfig, Port
from outrider.errors import SettingError
from outrider.limits import (
    DEADLINE_MS_DEFAULT,
    DEADLINE_MS_MAX,
    LOOK_AHEAD_BYTES_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
    REDIS_WAIT_REPLICAS_MAX,
    RUN_AHEAD_ROUNDS_MAX,
    SEED_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    SIBLINGS_MAX,
)
from outrider.sessions.redis_address import RedisAddress
from outrider.settings import CHECKED, Internal

TRACE_ROUNDS_MAX: Final = 2**20
WAIT_MS_MAX: Final = 600_000

WaitMs = Annotated[int, Field(ge=1, le=WAIT_MS_MAX)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class CoordinatorConfig(FrontConfig):
    """One coordinator."""

    served_model_name: str = ""
    """Name that requests call the model by; empty = the target's own."""
    grpc_port: Port = 50_051
    """The coordinator's gRPC port; 0 = any."""
    http: bool = True
    """Answer OpenAI's clients by HTTP, too."""
    port: Port = 8_000
    """The coordinator's HTTP port; 0 = any."""
    redis_url: str = Field(default="", repr=False)
    """`redis://`, `rediss://` (TLS), `unix://` or, with Sentinel,
    `redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]` URL of the session store; empty = an
    embedded server."""
    redis_username: str = ""
    """User of the session store; one in the URL wins."""
    redis_password: str = Field(default="", repr=False)
    """Its password; one in the URL wins. Best given as a variable."""
    redis_password_file: str = ""
    """File that holds the password instead, on each machine; read when a process connects."""
    redis_ca_file: str = ""
    """Certificate authority of servers reached by TLS (`rediss://`, `rediss+sentinel://`); empty =
    the system's."""
    redis_sentinel_password: str = Field(default="", repr=False)
    """Password of the Sentinels, where they ask for one. Best given as a variable."""
    redis_wait_replicas: Annotated[int, Field(ge=0, le=REDIS_WAIT_REPLICAS_MAX)] = 0
    """Replicas of Redis that must have tokens before they are shown; 0 = the primary alone. No
    failover loses what all replicas have."""
    redis_key_prefix: str = "outrider:"
    """Begins every key in Redis."""
    num_draft_tokens: Annotated[int, Field(ge=0, le=NUM_DRAFT_TOKENS_MAX)] = 8
    """Draft tokens a round where a request does not say, or the most of them with `length_control`;
    0 = plain decoding."""
    length_control: bool = True
    """Choose the draft tokens of each round by what they are expected to bring and cost, none
    included; a request's number is then the most of them."""
    look_ahead: Annotated[int | None, Field(ge=0, le=LOOK_AHEAD_MAX)] = None
    """Outcomes of a round that the draft works out while the target verifies; 0 = none, unset =
    some where draft and target share neither cores nor a device."""
    look_ahead_bytes_max: Annotated[int, Field(ge=0)] = LOOK_AHEAD_BYTES_MAX
    """Bytes of proposals that are kept for the outcomes of one round of a session."""
    draft_siblings: Annotated[int, Field(ge=0, le=SIBLINGS_MAX)] = 0
    """Candidates that a model's proposal may have beside each of its tokens, in a tree; without
    `length_control` just so many, as far as a tree may be large. 0 = chains. None with
    `look_ahead`, asked for or chosen, `deterministic`, penalties or the rule block."""
    run_ahead_rounds: Annotated[int, Field(ge=0, le=RUN_AHEAD_ROUNDS_MAX)] = 8
    """Rounds of plain decoding that the target may run before it hears back."""
    max_sessions: Annotated[int, Field(ge=1, le=SESSIONS_PER_COORDINATOR_MAX)] = (
        SESSIONS_PER_COORDINATOR_MAX
    )
    """Sessions that may run at once; more are refused."""
    deadline_ms: Annotated[int, Field(ge=1, le=DEADLINE_MS_MAX)] = DEADLINE_MS_DEFAULT
    """Deadline of a request that names none, ms."""
    resume_grace_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = 10_000
    """Wait for a client whose stream broke to resume its session, which then counts as cancelled,
    ms. Nothing is decoded meanwhile."""
    draft_timeout_ms: WaitMs = 1_000
    """Time that a round gives its draft, which answers with the tokens that it has by then, ms;
    length control gives less where they are not worth it."""
    draft_retry_ms: WaitMs = 1_000
    """Rest after a failure before the draft is asked again, ms."""
    target_timeout_ms: WaitMs = 30_000
    """Wait for a verdict before it is asked for again, ms."""
    target_retry_ms: WaitMs = 100
    """First rest after a failure before the target is asked again, ms; it doubles."""
    target_gone_ms: WaitMs = 60_000
    """A target that cannot be reached for so long ends the request, ms."""
    ngram_min: NgramMin = 1
    ngram_max: NgramMax = 16
    seed: Annotated[int | None, Field(ge=0, le=SEED_MAX)] = None
    """Seeds the stream that requests without a seed take theirs from; unset = the operating
    system's randomness."""
    num_cpus: Annotated[float, Field(alias="coordinator_num_cpus", ge=0, le=THREADS_MAX)] = 0.25
    """CPUs that Ray reserves for the coordinator."""
    audit_share: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of the sessions whose tokens the target scores once more when they are over, one at a
    time, to be held against its law in metrics; 0 = none. None without `telemetry`."""
    trace_first_rounds: Annotated[int, Field(ge=0, le=TRACE_ROUNDS_MAX)] = 2
    """Rounds at a request's beginning that have spans of their own."""
    trace_every_rounds: Annotated[int, Field(ge=0, le=TRACE_ROUNDS_MAX)] = 64
    """After those, each so manieth round has; 0 = none. All count in the request's totals."""
    trace_prompts: bool = False
    """Record the text of prompts in traces."""
    redis_asks_for_password: Internal[bool] = False
    """See `RedisAddress.asks_for_password` ..."""
    redis_sentinel_password_file: Internal[str] = ""
    redis_asks_for_sentinel_password: Internal[bool] = False
    """... and of the Sentinels."""
    tokenizer_directory: Internal[str] = ""
    """Where the tokenizer's files are; empty = requests give token ids and get no text."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model's files."""
    drafting_delays: Internal[bool] = False
    """Whether a draft's work delays the target's: they share cores or a device."""
    shares_ports: Internal[bool] = False
    """Whether another coordinator, which comes in the place of this one, may listen on its ports
    before this one has ended."""
    takes_over_ports: Internal[bool] = False
    """Whether this one comes in the place of a coordinator of its deployment that may still listen
    on its ports. Else ports that are in use are refused."""
    target_address: Internal[str] = ""
    """HOST:PORT of the target, where it is not announced ..."""
    draft_address: Internal[str] = ""
    """... and of the draft; empty = none."""
    lookup: Internal[DraftConfig | None] = None
    """The look-up that drafts in the coordinator, alone or before a model, heads or an exit."""

    @property
    def redis(self) -> RedisAddress:
        """The session store: its fields are `redis_NAME` here."""
        return RedisAddress(
            **{one.name: getattr(self, f"redis_{one.name}") for one in fields(RedisAddress)}
        )

    def reaching(self, redis: RedisAddress) -> Self:
        """The same coordinator with another way to its session store."""
        changes: dict[str, Any] = {
            f"redis_{one.name}": getattr(redis, one.name) for one in fields(redis)
        }
        if self.membership is not None:
            changes["membership"] = replace(self.membership, redis=redis)
        return replace(self, **changes)

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.redis_key_prefix) & set("{}"):
            raise SettingError("redis_key_prefix", "braces are not allowed in it")
        if self.redis_password and self.redis_password_file:
            raise SettingError("redis_password_file", "cannot go with redis_password")
        check_ngrams(self.ngram_min, self.ngram_max)
