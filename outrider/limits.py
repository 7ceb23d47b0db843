"""Limits of requests and resources, and many periods and timeouts. Other periods and timeouts stand
in the module that they belong to. A request beyond a limit is refused, and the error names the
request's field."""

NUM_DRAFT_TOKENS_MAX = 16  # of a round
TEMPERATURE_MAX = 2.0
GREEDY_TEMPERATURE = 1e-5  # a request with a lower temperature is greedy
PENALTY_MAX = 2.0
REPETITION_PENALTY_MAX = 10.0
SEED_BITS = 64
SEED_MAX = 2**SEED_BITS - 1
STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 256
STOP_TOKEN_IDS_MAX = 128
LOGPROBS_MAX = 20
LOGIT_BIAS_ENTRIES_MAX = 1024
LOGIT_BIAS_MAX = 100.0
MAX_TOKENS_DEFAULT = 16_384  # of a request without `max_tokens`, if the context has the room
DEADLINE_MS_DEFAULT = 600_000
DEADLINE_MS_MAX = 3_600_000
CHAT_MESSAGES_MAX = 4096
CONTENT_PARTS_MAX = 4096  # texts of one message
ROLE_CHARS_MAX = 64
DRAFT_DEADLINE_MS_MAX = 600_000  # largest time limit for drafting in a round
SILENT_DRAFT_S = 5.0  # a draft that is silent for this time after its time limit counts as lost
UNTIMED_DRAFT_S = 20  # assumed time limit for drafting in a round without a time limit

CONSTRAINT_BYTES_MAX = 64 * 2**10  # of a JSON schema, or of all choices together
SCHEMA_DEPTH_MAX = 32
REGEX_BYTES_MAX = 16 * 2**10
CHOICES_MAX = 1024
ALTERNATIVES_MAX = 256
"""Alternatives of one schema that are lists or objects. The time to compute a mask may grow with
the cube of their number."""
LIST_ALTERNATIVE = 4
"""An alternative that may be a list counts as this many alternatives."""
COMPILE_S_MAX = 2.0  # constraints that take longer to compile are refused
MASK_S_MAX = 0.25  # for a token's mask; a constraint that exceeds this time twice is refused
FOLLOWED_AT_ONCE = 64  # tokens that a constraint's matcher must read within MASK_S_MAX
TOO_SLOW_S = 60  # how long a constraint that was too slow is refused
COMPILE_BYTES_MAX = 2**30  # of memory for compiling a constraint, not counting the tokenizer
COMPILE_THREADS = 2  # constraints that are compiled at the same time in one process
LONG_COMPILE_THREADS = 1  # long constraints that a replica compiles besides
SHORT_CONSTRAINT_BYTES = 4 * 2**10  # a larger constraint is long
COMPILE_WAIT_S_MAX = 20  # how long a request waits for its constraint
COMPILATIONS_MAX = 256  # constraints of a process that wait to be compiled
COMPILATIONS_PER_TENANT_MAX = 64  # constraints of a tenant that wait to be compiled
CHECKED_CONSTRAINTS_MAX = 4096  # checked constraints that a coordinator remembers
COMPILATION_BYTES_PER_TENANT_MAX = COMPILATIONS_PER_TENANT_MAX * CONSTRAINT_BYTES_MAX
COMPILATION_BYTES_MAX = COMPILATIONS_MAX * CONSTRAINT_BYTES_MAX
"""The same limits for a replica, which counts the bytes of the constraints that wait."""
GIVEN_READ_MAX = 16  # newest parameters, and constraints, that a replica keeps as they were read
GRAMMARS_MAX = 64  # recently used constraints, kept compiled even if no session uses them
GRAMMAR_BYTES_MAX = 256 * 2**10  # of these constraints; compiled, they take some hundred times this
LEXER_STATES_MAX = 2**15  # 1 to 2 KB each; a constraint that has used them up is compiled again
MATCHERS_MAX = 1024  # sessions whose matchers a replica keeps

GRPC_MESSAGE_BYTES_MAX = 8 * 2**20
GRPC_INLINE_BYTES = 64 * 2**10  # fields of a longer message are counted before it is decoded
GRPC_FIELDS_MAX = 2**13  # of a message, such as 4,096 messages of a chat, 1,024 choices and biases
GRPC_NUMBERS_BYTES_MAX = 5 * 2**19  # of a message's lists of numbers; a token id has up to 5 bytes
GRPC_MESSAGES_AWAITED_MAX = 8  # messages of a caller that may arrive at a time; others wait
GRPC_MESSAGE_S_MAX = 60  # for the message of a call to arrive
GRPC_STUCK_WRITE_S = 30  # a call whose client takes no data for this time ends
GRPC_METADATA_BYTES_MAX = 16 * 2**10
GRPC_PENDING_CALLS_MAX = 2048  # calls of one method that are not yet begun; gRPC drops others
GRPC_PENDING_S_MAX = 60  # gRPC drops a call that has not begun after this time
GRPC_HANDSHAKE_MS = 10_000  # for TLS and the first HTTP/2 frame of a connection
GRPC_IDLE_MS = 300_000  # a connection without calls is closed after this time
GRPC_AGE_MS = 300_000  # an older connection takes no new calls, so clients connect anew
GRPC_AGE_GRACE_MS = DEADLINE_MS_MAX + 60_000  # how long an old connection's calls may still run
BULK_ITEM_BYTES = 32 * 2**10  # larger items travel on a second stream, the bulk stream

TOKENIZER_THREADS = 2  # prompts that a coordinator tokenizes at the same time
LONG_TOKENIZER_THREADS = 1  # long prompts that it tokenizes besides
SHORT_PROMPT_BYTES = 64 * 2**10  # a longer prompt is long; some texts take 1 us a byte
PROMPT_BYTES_PER_TENANT_MAX = 64 * 2**20  # of a tenant's prompts that wait to be tokenized
PROMPT_BYTES_MAX = 4 * PROMPT_BYTES_PER_TENANT_MAX
SESSIONS_PER_COORDINATOR_MAX = 4096
GRPC_STREAMS_MAX = 1024  # calls of one connection at a time; clients keep others back
GRPC_CALLS_PER_CALLER_MAX = 2 * SESSIONS_PER_COORDINATOR_MAX  # calls of a caller at a time
STRANGER_CALLS_PER_ADDRESS_MAX = 64  # calls without a valid key, such as probes, of an address
HEALTH_MESSAGE_S_MAX = 2  # for the message of a health check to arrive
STRANGER_CALLS_MAX = 1024  # watches of health without a valid key, in all
STREAM_QUEUE_ITEMS_MAX = SESSIONS_PER_COORDINATOR_MAX
"""Items that wait in one direction of a stream, or for a step of a replica."""
STUCK_WRITE_MS = 1_000  # a full stream is cut if its client reads nothing for this time
SEQUENCES_PER_REPLICA_MAX = 4096  # the least recently used sequence is evicted first
RELEASES_REMEMBERED_MAX = 2**16  # sessions whose newest epoch and round a replica remembers
ENGINE_SEQUENCES_MAX = 64  # sequences in one step, by default (`--max-num-seqs`)
FEATURES_MAX = 512  # committed tokens whose features (hidden states) one message may have
FEATURES_BYTES_MAX = 4 * 2**20  # of features in one message
FEATURES_STEP_BYTES_MAX = 8 * 2**20  # of features in all messages of a step
FEATURES_WIDTH_MAX = 2**15  # numbers in the features of a token
LOOK_AHEAD_MAX = 64  # outcomes of a round that a draft may predict
LOOK_AHEAD_DEFAULT = 16  # predicted outcomes by default, if drafting does not delay the target
LOOK_AHEAD_BYTES_MAX = 256 * 2**10  # of the proposals that a draft pushes for one round
SUFFIX_TENANTS = 4  # suffix decoding has room for the full histories of this many tenants
SUFFIX_SEEDS_MAX = 65_536  # seeds that suffix decoding remembers, each with its first session
DRAFTED_SEEDS_MAX = 65_536  # seeds of sessions with drafts that a coordinator remembers
AUDITED_SEEDS_MAX = 65_536  # seeds of audited sessions that a coordinator remembers
AUDITS_CHOSEN_MAX = 16  # sessions of a coordinator that are chosen for an audit and not yet audited
REPLICAS_MAX = 1024  # of one role in a deployment
PROCESS_START_S = 180  # for a replica's process to start, once the Ray cluster has room for it
LOG_BYTES_MAX = 16 * 2**20  # a larger log file is rotated
LOG_FILES_KEPT = 3  # rotated files that are kept
LOG_DIRECTORY_BYTES_MAX = 512 * 2**20  # of all replicas' logs on one machine
EMBEDDED_REDIS_BYTES_MAX = 2**30  # of memory; the server's files may take three times as much
PASSWORD_BYTES_MAX = 4096  # of a file that holds the password of Redis
REPLICA_TEXT_MAX = 4096  # characters of each text that a replica announces
REPLICA_NUMBER_MAX = 10**12  # largest number that a replica may announce
TENSOR_PARALLEL_SIZE_MAX = 64  # ranks of one model
COLLECTIVE_TIMEOUT_S = 60  # how long ranks wait for each other within a step
FRAME_OF_CALLS_BYTES_MAX = 2**27  # of a message from the leading rank to the other ranks
PAGE_SIZE = 16  # tokens in a page of keys and values; sessions share whole pages
KV_CACHE_BYTES_DEFAULT = 2**30  # of keys and values on CPU (`--kv-cache-memory-bytes`)
BATCHED_TOKENS_DEFAULT = 512  # tokens of a step, without `--max-num-batched-tokens`
BATCHED_TOKENS_VLLM = 2048  # the same with vLLM; `vllm serve` has this default, too
BATCHED_TOKENS_MIN = 64  # enough for a round and a part of a prefix
DRAFT_SUPPORT_ENTRIES = 64  # tokens that a draft keeps of its distribution q, the likeliest first
DRAFT_SUPPORT_ENTRIES_MAX = 4096  # tokens that a distribution q in a message may have
RUN_AHEAD_ROUNDS_MAX = 64  # rounds that a target may run without another request
STREAM_INTERVAL_MS = 40  # between messages in plain decoding, by default (`--stream-interval-ms`)
LOOP_LAG_MS_MAX = 500  # a longer delay of a coordinator's event loop counts as overload
LOOP_LAG_CHECKS = 4  # requests are refused after this many overloads in a row; checked every 0.25 s
MAILBOX_REPLIES_MAX = 128  # replies of one replica that may wait for one session

HTTP_BODY_BYTES_MAX = 4 * 2**20
HTTP_BODIES_BYTES_MAX = 64 * HTTP_BODY_BYTES_MAX  # of all bodies that are being validated
HTTP_BODY_IN_MEMORY_BYTES = 64 * 2**10  # a gateway keeps longer bodies in temporary files
HTTP_SPOOLED_BYTES_MAX = 2**30  # of all bodies of a gateway's running requests
HTTP_OWNERS_MIN = 4  # a tenant, or an address, has at most this fraction of the bytes and places
MAPPED_BLOCK_BYTES_MIN = 128 * 2**10
"""Memory for parts of bodies of at least this size is returned to the system when it is freed."""
HTTP_BODY_S_MAX = 60  # for a body to arrive
HTTP_BODY_PART_S_MAX = 10  # for each part of a body to arrive
HTTP_BODY_INLINE_BYTES = 16 * 2**10  # a longer body is parsed in several steps
HTTP_BODY_STEP_MS = 5  # of the event loop's time for a step, if the step can be divided
HTTP_BODY_REST_MS = 5  # for other work after a step; less after a shorter step
HTTP_VALUES_MAX = 2**19  # values and keys of a body, such as the token ids of a prompt
HTTP_STRINGS_MAX = 2**16  # keys and texts of a body
HTTP_CONTAINERS_MAX = 2**14  # lists and objects of a body
HTTP_FIELDS_MAX = 128  # fields of one object in a body, known or unknown
HTTP_CONNECTIONS_MAX = 2 * SESSIONS_PER_COORDINATOR_MAX
"""Connections of a coordinator or a gateway. At the limit, a new connection replaces a connection
without a request. If every connection has a request, the new connection's request is refused."""
HTTP_FILES_PER_CONNECTION = 2
"""A process that may open few files has fewer connections: one for so many files."""
HTTP_FILES_PER_CONNECTION_OF_GATEWAY = 4
"""The same at a gateway, whose requests may each have a temporary file and a connection to a
coordinator, too."""
HTTP_HEADERS_S = 10  # for the TLS handshake and the headers of a request
HTTP_KEEP_ALIVE_S = 75  # how long a connection without a request is kept
HTTP_LAST_REQUEST_S = 1  # how long a stopping server still takes requests on open connections
HTTP_STUCK_WRITE_S = 30  # a client that reads nothing for this time is disconnected
EVENT_ID_CHOICES_MAX = 64  # with more choices, event ids would be too long, so there are none
IDEMPOTENCY_KEY_CHARS_MAX = 128
REPEATED_REQUESTS_MAX = 256  # of a tenant that wait for running requests with the same key
ANSWERS_MAX = 16  # texts for one prompt of an HTTP request (`n`)
PROMPTS_MAX = 128  # of one HTTP request; each prompt opens `n` sessions
TOOLS_MAX = 128  # of one HTTP request
TOOLS_BYTES_MAX = 256 * 2**10  # of all tools of an HTTP request, as JSON
CALLS_MAX = 64  # tool calls in one answer or message
TEMPLATE_VARIABLES_MAX = 32  # of one HTTP request, for the chat template
TEMPLATE_VARIABLE_CHARS_MAX = 4096  # of each of these variables, as JSON
EVENTS_AHEAD_MAX = 64  # events of one HTTP request that may wait for its client

SESSION_LEASE_MS = 2_000  # how long a silent coordinator keeps its sessions
SESSION_LEASE_RENEWAL_MS = 500  # how often a coordinator renews the lease
SESSION_RESERVE_S = 600
"""An unfinished session is kept for this time and `resume_grace_ms` after its owner's last sign of
life. Running sessions survive if Redis or all coordinators are away for this time."""
SESSION_RENEWAL_S = 60  # how often an owner renews the time to live of its sessions
STORE_TENANT_SHARE = 0.25  # of the store's memory, for the sessions of one tenant
STORE_SHARED_FROM = 0.5  # share of the memory from which new sessions must fit the tenant's share
STORE_PAUSED_FROM = 0.75  # share of the memory from which sessions above the tenant's share wait
STORE_FULL_SHARE = 0.875
"""Share of the store's memory above which no new session is opened. The rest is a reserve for the
tokens of running sessions."""
SHARED_BYTES_MIN = 1024  # of parameters of a session; larger ones are stored once for many sessions
KEY_TTL_S = DEADLINE_MS_MAX // 1000 + 900
"""How long the value of an `Idempotency-Key` is kept after its last use. This covers the largest
deadline, `resume_grace_ms` (at most 600 s), and a reserve."""
TAKE_OVERS_MAX = 32  # sessions that a coordinator takes over at a time
TAKE_OVERS_OF_TENANT_MIN = 4  # of a tenant, even if other tenants have `TAKE_OVERS_MAX`
TAKE_OVER_RETRY_MS = 100  # delay before a client retries a take-over that is not possible yet
LEASE_WAIT_SPREAD_MS = 250  # longest random delay of a retry; it spreads the clients' retries
FINISHED_TTL_S = 600  # time that a finished session is kept
UNCOMMITTED_TOKENS_MAX = 256  # a session with more decided but uncommitted tokens waits for Redis
UNCOMMITTED_MS_MAX = 10_000  # a session also waits if Redis has taken none of them for this time

TOKEN_ID_MAX = 2**31 - 1
SESSION_TOKENS_MAX = 2**31 - 1  # largest committed length that a message may state
TENANT_CHARS_MAX = 256
TRACEPARENT_CHARS_MAX = 256
ERROR_MESSAGE_CHARS_MAX = 1024  # so that a gRPC status fits into the metadata
FRAME_BYTES_MAX = 4 * 2**20  # of items in one frame; a larger item travels alone
KEEPALIVE_MS = 10_000  # a connection without data is pinged after this time
KEEPALIVE_TIMEOUT_MS = 5_000  # without an answer to a ping, the connection is closed
LINK_KEEPALIVE_MS = 1_000  # the same from a coordinator to a target or draft
LINK_KEEPALIVE_TIMEOUT_MS = 1_000
CONNECT_TIMEOUT_MS = 2_000
LINK_BACKOFF_MS_MIN = 50
LINK_BACKOFF_MS_MAX = 2_000  # the wait between attempts to reopen a stream doubles up to this
RELEASES_IN_FLIGHT_MAX = 4  # calls of a link that release a session; more would delay its items
RELEASES_WAITING_MAX = SESSIONS_PER_COORDINATOR_MAX
"""Releases of a link that wait for earlier ones. Beyond this number, the oldest are dropped, and
the replica evicts their sessions."""
SILENT_SESSION_MS = 2_000  # a session that is silent for longer may lose its pages to others
LOST_REPLICA_GRACE_S = 5  # after the loss of its engine, a replica has this time to send answers
STEP_CRASHES_UNHEALTHY = 3  # crashed steps in a row that make a replica unhealthy
LATE_STEP_S = 3.0  # a replica whose step takes longer refuses items (`replica/step_watch.py`)
LATE_STEP_FACTOR = 30  # a step is not late before this multiple of its expected time
HUNG_STEP_S = 15.0  # a step that takes longer counts as hung, and the replica as lost
HUNG_STEP_FACTOR = 60  # a step is not hung before this multiple of its expected time
FIRST_STEP_S = 300  # the same limits for a step that may have to compile kernels

APPEND_TOKENS_MAX = 65_536  # tokens in one append; more tokens are sent in several appends
APPEND_BYTES_MAX = 2**20  # of tokens and log-probabilities in one run of the script that appends
APPENDS_PER_CALL_MAX = 512  # sessions in one `append` of the store
CALLS_PER_PIPELINE_MAX = 64  # sessions opened, ended or read in one round trip
RECORD_PART_BYTES = 256 * 2**10  # of a session's tokens in one answer of Redis
RECORD_INLINE_BYTES = 16 * 2**10  # of a session's record; a longer record is decoded on a thread
LOAD_TRIES_MAX = 3  # tries to read a session's record while its tokens change
RECORD_READS_MAX = 16  # `GetSession` and `Cancel` calls of one caller at a time
REPLAY_TOKENS_INLINE = 512  # tokens replayed on the event loop; more are replayed on a thread
SLOTS_PER_SCRIPT_MAX = 256  # slots (permissions to run a request) that one script renews or frees
STARTS_MAX = 16  # requests that a coordinator checks between two looks at other work
OPENINGS_MAX = 16  # sessions that a coordinator opens at a time; tenants take turns
ENDINGS_MAX = 16  # sessions that a coordinator stops at a time; tenants take turns
CLOSINGS_MAX = 64  # stopped sessions whose end is being stored; tenants take turns
OPEN_TRIES_MAX = 3  # tries to open a session before the client gets an error
UNSTORED_ENDS_MAX = SESSIONS_PER_COORDINATOR_MAX  # ended sessions whose end is not stored yet
ABANDON_TRIES_MAX = 20  # tries to store a session's end if UNSTORED_ENDS_MAX is exceeded
CANCEL_WAIT_S = 10  # how long `Cancel` waits for the store if no coordinator runs the session
COMMIT_RETRY_MS_MIN = 20
COMMIT_RETRY_MS_MAX = 500  # the wait between tries to reach the store doubles up to this
REDIS_TIMEOUT_MS = 900  # for a call to Redis, including a new connection
REDIS_TIMEOUT_SLICES = 9  # parts of this timeout; `outrider.redis.connection.calling` says why
REDIS_SENTINEL_TIMEOUT_MS = 200  # for one Sentinel before the next is asked
REDIS_ELECTION_MS_MAX = 3_000  # how long a starting process waits for a primary
REDIS_WAIT_MS = 500  # for a write to reach `redis_wait_replicas` replicas
REDIS_WAIT_REPLICAS_MAX = 16
REDIS_CONNECTIONS_MAX = 16
REDIS_LOADING_MS_MAX = 20_000  # how long a starting process waits for a Redis that loads its file
EMBEDDED_REDIS_START_MS_MAX = 20_000
EMBEDDED_REDIS_STOP_MS_MAX = 5_000

SOCKET_PATH_BYTES_MAX = 100  # Linux accepts up to 107

API_KEY_CHARS_MIN = 16
API_KEY_CHARS_MAX = 512
FILE_BYTES_MAX = 2**20  # of a file of settings, keys or certificates
KEY_FILE_CHECK_MS = 1_000  # between checks of key and certificate files
REQUESTS_PER_MINUTE_MAX = 1_000_000
KEY_CONCURRENCY_MAX = SESSIONS_PER_COORDINATOR_MAX
SLOT_LEASE_MS = 5_000  # how long requests of a dead coordinator count towards their key's limit
SLOT_RENEWAL_MS = 1_000  # how often a coordinator renews its slots
SLOT_RETRY_MS = 1_000  # delay before a retry with a key whose slots are all taken
