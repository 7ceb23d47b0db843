"""Every limit by name. A request outside one is refused with the name of its field."""

from __future__ import annotations

from typing import Final

NUM_DRAFT_TOKENS_MAX: Final = 16
"""Of a chain, or of a path of a tree."""
TREE_TOKENS_MAX: Final = 32
"""Draft tokens of a tree."""
SIBLINGS_MAX: Final = 8
"""Candidates beside a draft token, for its place."""
TEMPERATURE_MAX: Final = 2.0
GREEDY_TEMPERATURE: Final = 1e-5
"""Below it a request is greedy: one-hot q, no noise."""
PENALTY_MAX: Final = 2.0
REPETITION_PENALTY_MAX: Final = 10.0
SEED_BITS: Final = 64
SEED_MAX: Final = 2**SEED_BITS - 1
STOP_STRINGS_MAX: Final = 16
STOP_STRING_BYTES_MAX: Final = 256
LOGPROBS_MAX: Final = 20
LOGIT_BIAS_ENTRIES_MAX: Final = 1024
LOGIT_BIAS_MAX: Final = 100.0
MAX_TOKENS_DEFAULT: Final = 16_384
DEADLINE_MS_DEFAULT: Final = 600_000
DEADLINE_MS_MAX: Final = 3_600_000
CHAT_MESSAGES_MAX: Final = 4096
ROLE_CHARS_MAX: Final = 64
DRAFT_DEADLINE_MS_MAX: Final = 600_000
"""Longest time that a round may give its draft."""
SILENT_DRAFT_S: Final = 5.0
"""A draft that has not answered so long after the time that a round gave it is lost or silent. This
assumes that a healthy one has answered by then with what it has drawn, whatever that is: that the
pass which runs when the time is over, the rest of its step and the way of the answer take less."""
UNTIMED_DRAFT_S: Final = 20
"""The same, beside `SILENT_DRAFT_S`, of a round that gives its draft no time: it bounds what a lost
answer costs."""

CONSTRAINT_BYTES_MAX: Final = 64 * 2**10
"""Of a JSON schema, or of all choices together."""
SCHEMA_DEPTH_MAX: Final = 32
REGEX_BYTES_MAX: Final = 16 * 2**10
CHOICES_MAX: Final = 1024
ALTERNATIVES_MAX: Final = 256
"""Alternatives of a JSON schema that are lists or objects. Where all of them begin alike, a step of
the parser takes the cube of their number, and there is no stopping it ..."""
LIST_ALTERNATIVE: Final = 4
"""... so that those which may be lists count as several: they take most."""
COMPILE_S_MAX: Final = 2.0
"""What takes longer to compile is refused."""
MASK_S_MAX: Final = 0.25
"""To say what may follow a token; where a constraint takes longer twice, a replica refuses it."""
FOLLOWED_AT_ONCE: Final = 64
"""Tokens that a constraint may follow in the same time."""
TOO_SLOW_S: Final = 60
"""How long a constraint that took too long is refused before it is tried again."""
COMPILE_BYTES_MAX: Final = 2**30
"""Memory that compiling a constraint may take in a coordinator, beside the tokenizer."""
COMPILE_THREADS: Final = 2
"""Constraints that are compiled at the same time in one process."""
COMPILE_WAIT_S_MAX: Final = 20
"""How long a request waits for its constraint to be compiled, behind others or by itself."""
COMPILATIONS_MAX: Final = 256
"""Constraints that may wait to be compiled in one process ..."""
COMPILATIONS_PER_TENANT_MAX: Final = 64
"""... of them, those of one tenant in a coordinator. Tenants take turns."""
CHECKED_CONSTRAINTS_MAX: Final = 4096
"""Constraints of which a coordinator remembers whether they can be compiled."""
GRAMMARS_MAX: Final = 64
"""Compiled constraints that a process keeps, beside those that somebody follows or waits with; the
longest unused makes room."""
LEXER_STATES_MAX: Final = 2**15
"""Of a compiled constraint, 1 to 2 KB each; they come as texts of its sessions are written. Where
they are used up, it is compiled anew."""
MATCHERS_MAX: Final = 1024
"""Sessions of which a replica keeps what their constraint makes of their tokens."""

GRPC_MESSAGE_BYTES_MAX: Final = 8 * 2**20
GRPC_METADATA_BYTES_MAX: Final = 16 * 2**10
GRPC_PENDING_CALLS_MAX: Final = 8192
"""Calls that a server has received and not yet begun: a burst of all the sessions of a coordinator,
and as many other calls. gRPC's own bounds are lower, and drop calls as CANCELLED."""
GRPC_PENDING_S_MAX: Final = 60
"""How long such a call may wait for its turn before gRPC drops it."""
GRPC_HANDSHAKE_MS: Final = 10_000
"""How long a connection to a gRPC server may take for TLS and the first frame of HTTP/2 ..."""
GRPC_IDLE_MS: Final = 300_000
"""... and may stay without a call. A client connects again with its next one."""
BULK_ITEM_BYTES: Final = 32 * 2**10
"""An item larger than this travels on the bulk stream, so that it does not delay small ones."""

SESSIONS_PER_COORDINATOR_MAX: Final = 4096
STREAM_QUEUE_ITEMS_MAX: Final = SESSIONS_PER_COORDINATOR_MAX
"""Items that may wait in one direction of one stream, or for a step: one of each session."""
STUCK_WRITE_MS: Final = 1_000
"""How long a caller to whom too many answers wait may take to read on and hear so."""
SEQUENCES_PER_REPLICA_MAX: Final = 4096
"""Sessions whose tokens and epoch a replica remembers; the longest unused makes room."""
RELEASES_REMEMBERED_MAX: Final = 2**16
"""Sessions, running and released, whose newest epoch and round a replica remembers: far more than
run at a time, so that one that has long been quiet is not forgotten for short ones."""
ENGINE_SEQUENCES_MAX: Final = 64
"""Sequences in one step of an engine, by default (`--max-num-seqs`)."""
FEATURES_MAX: Final = 64
"""Committed tokens whose features a draft is given, and drafts from, at most."""
EAGLE_WINDOWS: Final = 4
"""Sessions whose newest features such a draft keeps, for each that a step may have."""
FEATURES_WIDTH_MAX: Final = 2**15
"""Numbers in the features of a token."""
HYBRID_SCORE_MIN: Final = 0.6
"""Tokens that a look-up must expect to be accepted before it stands in for a model, by default."""
HYBRID_MODEL_TOKENS: Final = 1
"""Draft tokens of a hybrid's model, heads or early exit in a round, at most, by default."""
LOOK_AHEAD_MAX: Final = 64
"""Outcomes of one round of a session that a draft may guess."""
LOOK_AHEAD_DEFAULT: Final = 16
"""Those that it guesses by default, where it takes nothing from the target."""
LOOK_AHEAD_BYTES_MAX: Final = 256 * 2**10
"""Bytes of proposals that a draft pushes for one round of a session, by default."""
SUFFIX_SEEDS_MAX: Final = 65_536
"""Seeds of which suffix decoding remembers who had them first."""
DRAFTED_SEEDS_MAX: Final = 65_536
"""Seeds of which a coordinator remembers that a session with drafts had them."""
AUDITED_SEEDS_MAX: Final = 65_536
"""Seeds of which a coordinator remembers that a session with one of them was audited."""
AUDITS_CHOSEN_MAX: Final = 16
"""Sessions of a coordinator that are chosen for an audit and have not been through it."""
REPLICAS_MAX: Final = 1024
"""Of one role in a deployment."""
LOG_BYTES_MAX: Final = 16 * 2**20
"""Of one log file, which is then put aside ..."""
LOG_FILES_KEPT: Final = 3
"""... and so many of these are kept."""
LOG_DIRECTORY_BYTES_MAX: Final = 512 * 2**20
"""Of all log files of a deployment's replicas on one machine, those that have gone among them."""
EMBEDDED_REDIS_BYTES_MAX: Final = 2**30
"""Data in the memory of an embedded Redis, which then refuses writes; on disk it takes up to three
times as much while its file is rewritten."""
PASSWORD_BYTES_MAX: Final = 4096
"""Of a file that holds the password of Redis."""
REPLICA_TEXT_MAX: Final = 4096
"""Characters of each text that a replica announces of itself."""
REPLICA_NUMBER_MAX: Final = 10**12
"""Of each number that a replica announces, and of the replicas that a deployment has started."""
TENSOR_PARALLEL_SIZE_MAX: Final = 64
"""Ranks that one model may be shared among."""
COLLECTIVE_TIMEOUT_S: Final = 60
"""How long ranks of a model wait for each other within a step before the replica is given up."""
FRAME_OF_CALLS_BYTES_MAX: Final = 2**27
"""Bytes that a leader tells its followers at a time: the tokens of a step, above all."""
PAGE_SIZE: Final = 16
"""Tokens of a page of keys and values: what sequences share is a multiple of it."""
KV_CACHE_BYTES_DEFAULT: Final = 2**30
"""Bytes of keys and values on CPU, by default (`--kv-cache-memory-bytes`)."""
BATCHED_TOKENS_DEFAULT: Final = 512
"""Tokens of a step, by default (`--max-num-batched-tokens`)."""
BATCHED_TOKENS_MIN: Final = 64
"""Room for a round and for a part of a prefix."""
DRAFT_SUPPORT_ENTRIES: Final = 64
"""Entries of a draft distribution on the wire, by default."""
DRAFT_SUPPORT_ENTRIES_MAX: Final = 4096
"""Entries of a draft distribution that are accepted from a peer."""
RUN_AHEAD_ROUNDS_MAX: Final = 16
"""Rounds a target may decode without a proposal before it hears from the coordinator."""
ANSWERS_HELD_MS: Final = 40
"""How long the verdict of a round that a target runs ahead may wait for others, to leave in one
message with them."""
MAILBOX_REPLIES_MAX: Final = 64
"""Replies that may wait for one session on one side."""

HTTP_BODY_BYTES_MAX: Final = 4 * 2**20
HTTP_BODIES_BYTES_MAX: Final = 64 * HTTP_BODY_BYTES_MAX
"""Of all bodies together that a coordinator has begun to read ..."""
HTTP_TENANT_BODIES_BYTES_MAX: Final = HTTP_BODIES_BYTES_MAX // 4
"""... and of those of one tenant."""
HTTP_BODY_S_MAX: Final = 60
"""How long a body may take to come ..."""
HTTP_BODY_PART_S_MAX: Final = 10
"""... and each part of it."""
HTTP_VALUES_MAX: Final = 2**19
"""Values and keys of a body, of which a prompt's tokens are the most."""
HTTP_CONTAINERS_MAX: Final = 2**16
"""Lists and objects of a body."""
HTTP_FIELDS_MAX: Final = 128
"""Of one object of a body, known or not."""
CHAT_PARTS_MAX: Final = 8192
"""Text parts of all messages of a body."""
HTTP_CONNECTIONS_MAX: Final = 2 * SESSIONS_PER_COORDINATOR_MAX
"""To one coordinator, or half of its file descriptors where these are fewer. Beyond it the oldest
connection without a request makes room; requests that find no such connection are refused."""
HTTP_HEADERS_S: Final = 10
"""How long a connection may take to send the headers of a request, its TLS handshake included."""
HTTP_KEEP_ALIVE_S: Final = 75
"""How long a connection without a request is kept."""
HTTP_LAST_REQUEST_S: Final = 1
"""How long a server that stops waits for requests on connections that it has accepted."""
HTTP_STUCK_WRITE_S: Final = 30
"""How long a client that reads nothing is waited for, once a buffer of 64 KiB is full for it."""
ANSWERS_MAX: Final = 16
"""Texts for one prompt of an HTTP request (`n`)."""
PROMPTS_MAX: Final = 128
"""Of one HTTP request: each is a session, or `n` of them."""
EVENTS_AHEAD_MAX: Final = 64
"""Events of one HTTP request's sessions that may wait for its client."""

SESSION_LEASE_MS: Final = 2_000
"""How long the sessions of a coordinator that says nothing stay its own ..."""
SESSION_LEASE_RENEWAL_MS: Final = 500
"""... and how often it says that it lives."""
SESSION_TTL_S: Final = DEADLINE_MS_MAX // 1000 + 900
"""How long a session that is not finished stays readable after its last write. One that runs may
write nothing until its deadline, and then be waited for (`resume_grace_ms`, at most 600 s): it does
not expire under its owner."""
TAKE_OVERS_MAX: Final = 32
"""Sessions that a coordinator takes over at a time; clients of others are asked to wait ..."""
TAKE_OVER_RETRY_MS: Final = 100
"""... for so long, as are those whose session was taken over while it was being taken over."""
LEASE_WAIT_SPREAD_MS: Final = 250
"""Clients that were told when to ask again do so within this time after it, not all at once."""
FINISHED_TTL_S: Final = 600
UNCOMMITTED_TOKENS_MAX: Final = 256
UNCOMMITTED_MS_MAX: Final = 10_000
"""Past either bound a session waits for the store."""

TOKEN_ID_MAX: Final = 2**31 - 1
SESSION_TOKENS_MAX: Final = 2**31 - 1
"""Committed tokens that a message may speak of; what a model takes is less."""
TENANT_CHARS_MAX: Final = 256
TRACEPARENT_CHARS_MAX: Final = 256
ERROR_MESSAGE_CHARS_MAX: Final = 1024
"""Longer error texts are cut, so that a status always fits its metadata limit."""
FRAME_BYTES_MAX: Final = 4 * 2**20
"""Items are gathered into one frame up to here; an item that is larger travels alone."""
KEEPALIVE_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
CONNECT_TIMEOUT_MS: Final = 2_000
LINK_BACKOFF_MS_MIN: Final = 50
LINK_BACKOFF_MS_MAX: Final = 2_000
"""Between attempts to open a broken stream anew: doubled from the first bound to the second."""
RELEASES_IN_FLIGHT_MAX: Final = 1024
"""Releases beyond it are dropped: the replica evicts the session in time."""
SILENT_SESSION_MS: Final = 2_000
"""A session that has said nothing for so long, since it was answered, keeps its pages from
nobody."""
LOST_REPLICA_GRACE_S: Final = 5
"""How long a replica whose engine is lost may take to send the answers it has, before it ends."""
STEP_CRASHES_UNHEALTHY: Final = 3
"""Crashed steps in a row after which a replica reports that it does not serve."""
STEP_S_MAX: Final = 300
"""A step that has not ended by then never will: a device or a driver hangs. The replica is lost."""

APPEND_TOKENS_MAX: Final = 65_536
"""Tokens in one append; a session that lacks more is sent in several."""
APPENDS_PER_CALL_MAX: Final = 512
"""Sessions in one call of the store's `append`; the others are in the next."""
CALLS_PER_PIPELINE_MAX: Final = 64
"""Sessions that are opened, ended or read in one round trip; prompts may be long."""
RECORD_WHOLE_BYTES: Final = 16 * 2**10
"""Tokens and log-probabilities of a session that are read and decoded at once; more are read in
parts, and decoded on a thread ..."""
RECORD_PART_BYTES: Final = 256 * 2**10
"""... of this size."""
LOAD_TRIES_MAX: Final = 3
"""How often a long record is read whose tokens were replaced meanwhile, after a take-over."""
RECORD_READS_MAX: Final = 16
"""Calls of one caller that read stored sessions (`GetSession`, `Cancel`) at a time."""
REPLAY_TOKENS_INLINE: Final = 512
"""Stored tokens, log-probabilities counted with them, that a resumption pushes through its
completion on the event loop; more go to a thread."""
SLOTS_PER_SCRIPT_MAX: Final = 256
"""Slots of a caller that one run of a script renews or frees: Redis does nothing else meanwhile."""
OPEN_TRIES_MAX: Final = 3
"""How often a store that does not answer is asked to open a session before the client hears."""
UNTOLD_SESSIONS_MAX: Final = SESSIONS_PER_COORDINATOR_MAX
"""Sessions that do not run and whose release or end the store has not answered yet: the store is
asked again for as long as the coordinator lives. For each session beyond them it is asked ..."""
ABANDON_TRIES_MAX: Final = 20
"""... so many times."""
CANCEL_WAIT_S: Final = 10
"""How long a caller of `Cancel` waits for the store to record the end of a session that does not
run."""
COMMIT_RETRY_MS_MIN: Final = 20
COMMIT_RETRY_MS_MAX: Final = 500
"""First and longest wait between two tries to reach a store that does not answer."""
REDIS_TIMEOUT_MS: Final = 900
"""How long Redis may take to accept a connection and to answer ..."""
REDIS_TIMEOUT_SLICES: Final = 9
"""... in so many parts: a pause of this process lasts for one part at most, however long it is."""
REDIS_SENTINEL_TIMEOUT_MS: Final = 200
"""How long one Sentinel may take to say where the primary is before the next one is asked."""
REDIS_ELECTION_MS_MAX: Final = 3_000
"""How long a starting process waits for a Sentinel to name a primary that is up."""
REDIS_WAIT_MS: Final = 500
"""How long a write may take to reach `redis_wait_replicas` replicas before it is tried again."""
REDIS_WAIT_REPLICAS_MAX: Final = 16
REDIS_CONNECTIONS_MAX: Final = 16
REDIS_LOADING_MS_MAX: Final = 20_000
"""How long a starting coordinator waits for a Redis that still reads its file."""
EMBEDDED_REDIS_START_MS_MAX: Final = 20_000
EMBEDDED_REDIS_STOP_MS_MAX: Final = 5_000
SOCKET_PATH_BYTES_MAX: Final = 100
"""Longest path of a Unix socket; Linux has room for 107 bytes, macOS for 103."""

API_KEY_CHARS_MIN: Final = 16
API_KEY_CHARS_MAX: Final = 512
API_KEYS_MAX: Final = 4096
"""Keys of one server, from a file and from settings together."""
KEY_FILE_BYTES_MAX: Final = 2**20
KEY_FILE_LOOK_MS: Final = 1_000
"""Between two looks at whether a file of keys, or of a certificate, has changed."""
REQUESTS_PER_MINUTE_MAX: Final = 1_000_000
KEY_CONCURRENCY_MAX: Final = SESSIONS_PER_COORDINATOR_MAX
SLOT_LEASE_MS: Final = 5_000
"""How long a request of a dead coordinator counts among those that its key runs ..."""
SLOT_RENEWAL_MS: Final = 1_000
"""... and how often a living one says that it still runs."""
SLOT_RETRY_MS: Final = 1_000
"""When to try again whose key runs as many requests as it may: nobody knows when one ends."""
HEALTH_WATCHES_MAX: Final = 64
"""Callers that may watch a server's health at a time: they need no key."""
PEM_BYTES_MAX: Final = 2**20
"""Of a file of certificates, or of a key."""
