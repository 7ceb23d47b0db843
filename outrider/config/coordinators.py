"""What a coordinator can be told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from outrider.config.drafts import DraftConfig, check_ngrams, ngram_max_setting, ngram_min_setting
from outrider.config.models import PORT_MAX, THREADS_MAX
from outrider.config.security import FrontConfig
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
from outrider.settings import setting

TRACE_ROUNDS_MAX: Final = 2**20
WAIT_MS_MAX: Final = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(FrontConfig):
    """One coordinator."""

    served_model_name: str = setting(
        "", "Name that requests call the model by; empty = the target's own."
    )
    grpc_port: int = setting(
        50_051, "The coordinator's gRPC port; 0 = any.", minimum=0, maximum=PORT_MAX
    )
    http: bool = setting(True, "Answer OpenAI's clients by HTTP, too.")
    port: int = setting(8_000, "The coordinator's HTTP port; 0 = any.", minimum=0, maximum=PORT_MAX)
    redis_url: str = setting(
        "", "`redis://`, `rediss://` (TLS), `unix://` or, with Sentinel, "
        "`redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]` URL of the session store; empty "
        "= an embedded server.",
        secret=True,
    )  # fmt: skip
    redis_username: str = setting("", "User of the session store; one in the URL wins.")
    redis_password: str = setting(
        "", "Its password; one in the URL wins. Best given as a variable.", secret=True
    )
    redis_password_file: str = setting(
        "", "File that holds the password instead, on each machine; read when a process connects."
    )
    redis_ca_file: str = setting(
        "", "Certificate authority of servers reached by TLS (`rediss://`, `rediss+sentinel://`); "
        "empty = the system's.",
    )  # fmt: skip
    redis_sentinel_password: str = setting(
        "", "Password of the Sentinels, where they ask for one. Best given as a variable.",
        secret=True,
    )  # fmt: skip
    redis_wait_replicas: int = setting(
        0, "Replicas of Redis that must have tokens before they are shown; 0 = the primary alone. "
        "No failover loses what all replicas have.",
        minimum=0, maximum=REDIS_WAIT_REPLICAS_MAX,
    )  # fmt: skip
    redis_key_prefix: str = setting("outrider:", "Begins every key in Redis.")
    num_draft_tokens: int = setting(
        8, "Draft tokens a round where a request does not say, or the most of them with "
        "`length_control`; 0 = plain decoding.", minimum=0, maximum=NUM_DRAFT_TOKENS_MAX,
    )  # fmt: skip
    length_control: bool = setting(
        True, "Choose the draft tokens of each round by what they are expected to bring and cost, "
        "none included; a request's number is then the most of them.",
    )  # fmt: skip
    look_ahead: int | None = setting(
        None, "Outcomes of a round that the draft works out while the target verifies; 0 = none, "
        "unset = some where draft and target share neither cores nor a device.",
        minimum=0, maximum=LOOK_AHEAD_MAX,
    )  # fmt: skip
    look_ahead_bytes_max: int = setting(
        LOOK_AHEAD_BYTES_MAX,
        "Bytes of proposals that are kept for the outcomes of one round of a session.",
        minimum=0,
    )
    draft_siblings: int = setting(
        0, "Candidates that a model's proposal may have beside each of its tokens, in a tree; "
        "without `length_control` just so many, as far as a tree may be large. 0 = chains. None "
        "with `look_ahead`, asked for or chosen, `deterministic`, penalties or the rule block.",
        minimum=0, maximum=SIBLINGS_MAX,
    )  # fmt: skip
    run_ahead_rounds: int = setting(
        8, "Rounds of plain decoding that the target may run before it hears back.",
        minimum=0, maximum=RUN_AHEAD_ROUNDS_MAX,
    )  # fmt: skip
    max_sessions: int = setting(
        SESSIONS_PER_COORDINATOR_MAX, "Sessions that may run at once; more are refused.",
        minimum=1, maximum=SESSIONS_PER_COORDINATOR_MAX,
    )  # fmt: skip
    deadline_ms: int = setting(
        DEADLINE_MS_DEFAULT,
        "Deadline of a request that names none, ms.",
        minimum=1,
        maximum=DEADLINE_MS_MAX,
    )
    resume_grace_ms: int = setting(
        10_000, "Wait for a client whose stream broke to resume its session, which then counts as "
        "cancelled, ms. Nothing is decoded meanwhile.", minimum=0, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    draft_timeout_ms: int = setting(
        1_000, "Time that a round gives its draft, which answers with the tokens that it has by "
        "then, ms; length control gives less where they are not worth it.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    draft_retry_ms: int = setting(
        1_000, "Rest after a failure before the draft is asked again, ms.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    target_timeout_ms: int = setting(
        30_000, "Wait for a verdict before it is asked for again, ms.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    target_retry_ms: int = setting(
        100, "First rest after a failure before the target is asked again, ms; it doubles.",
        minimum=1, maximum=WAIT_MS_MAX,
    )  # fmt: skip
    target_gone_ms: int = setting(
        60_000,
        "A target that cannot be reached for so long ends the request, ms.",
        minimum=1,
        maximum=WAIT_MS_MAX,
    )
    ngram_min: int = ngram_min_setting()
    ngram_max: int = ngram_max_setting()
    """Of the prompt lookup that drafts while no draft replica answers."""
    seed: int | None = setting(
        None, "Seeds the stream that requests without a seed take theirs from; unset = the "
        "operating system's randomness.", minimum=0, maximum=SEED_MAX,
    )  # fmt: skip
    num_cpus: float = setting(
        0.25, "CPUs that Ray reserves for the coordinator.", key="coordinator_num_cpus",
        minimum=0, maximum=THREADS_MAX,
    )  # fmt: skip
    audit_share: float = setting(
        0.001, "Share of the sessions whose tokens the target scores once more when they are "
        "over, one at a time, to be held against its law in metrics; 0 = none. None without "
        "`telemetry`.", minimum=0, maximum=1,
    )  # fmt: skip
    trace_first_rounds: int = setting(
        2, "Rounds at a request's beginning that have spans of their own.", minimum=0,
        maximum=TRACE_ROUNDS_MAX,
    )  # fmt: skip
    trace_every_rounds: int = setting(
        64, "After those, each so manieth round has; 0 = none. All count in the request's totals.",
        minimum=0, maximum=TRACE_ROUNDS_MAX,
    )  # fmt: skip
    trace_prompts: bool = setting(False, "Record the text of prompts in traces.")
    redis_asks_for_password: bool = False
    """See `RedisAddress.asks_for_password` ..."""
    redis_sentinel_password_file: str = ""
    redis_asks_for_sentinel_password: bool = False
    """... and of the Sentinels."""
    tokenizer_directory: str = ""
    """Where the tokenizer's files are; empty = requests give token ids and get no text."""
    trust_remote_code: bool = setting(False, "Run Python code that comes with a model's files.")
    drafting_delays: bool = False
    """Whether a draft's work delays the target's: they share cores or a device."""
    shares_ports: bool = False
    """Whether another coordinator, which comes in the place of this one, may listen on its ports
    before this one has ended."""
    takes_over_ports: bool = False
    """Whether this one comes in the place of a coordinator of its deployment that may still listen
    on its ports. Else ports that are in use are refused."""
    target_address: str = ""
    """HOST:PORT of the target, where it is not announced ..."""
    draft_address: str = ""
    """... and of the draft; empty = none."""
    lookup: DraftConfig | None = None
    """The look-up that drafts in the coordinator, alone or before a model, heads or an exit."""

    @property
    def redis(self) -> RedisAddress:
        """The session store."""
        return RedisAddress(
            url=self.redis_url,
            username=self.redis_username,
            password=self.redis_password,
            ca_file=self.redis_ca_file,
            sentinel_password=self.redis_sentinel_password,
            key_prefix=self.redis_key_prefix,
            password_file=self.redis_password_file,
            asks_for_password=self.redis_asks_for_password,
            sentinel_password_file=self.redis_sentinel_password_file,
            asks_for_sentinel_password=self.redis_asks_for_sentinel_password,
        )

    def reaching(self, redis: RedisAddress) -> Self:
        """The same coordinator with another way to its session store."""
        member = self.membership
        return replace(
            self,
            redis_url=redis.url,
            redis_username=redis.username,
            redis_password=redis.password,
            redis_password_file=redis.password_file,
            redis_asks_for_password=redis.asks_for_password,
            redis_sentinel_password=redis.sentinel_password,
            redis_sentinel_password_file=redis.sentinel_password_file,
            redis_asks_for_sentinel_password=redis.asks_for_sentinel_password,
            membership=None if member is None else replace(member, redis=redis),
        )

    def __post_init__(self) -> None:
        FrontConfig.__post_init__(self)
        if set(self.redis_key_prefix) & set("{}"):
            raise SettingError("redis_key_prefix", "braces are not allowed in it")
        if self.redis_password and self.redis_password_file:
            raise SettingError("redis_password_file", "cannot go with redis_password")
        check_ngrams(self.ngram_min, self.ngram_max)
