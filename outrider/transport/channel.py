"""Opens gRPC channels. Sets options of channels and servers (message sizes, keepalive, ...)."""

from dataclasses import dataclass

import grpc

from outrider import limits

_BOTH_ENDS = (
    ("grpc.max_receive_message_length", limits.GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.GRPC_MESSAGE_BYTES_MAX),
    # The soft and the hard bound are equal, because between them gRPC refuses calls at random.
    ("grpc.max_metadata_size", limits.GRPC_METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", limits.GRPC_METADATA_BYTES_MAX),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def _keepalive(after_ms: int, timeout_ms: int) -> tuple[tuple[str, int], ...]:
    """Options that ping a connection `after_ms` after the last data, and close it `timeout_ms`
    later. gRPC answers pings on threads of its own, so a busy interpreter does not matter."""
    return (
        ("grpc.keepalive_time_ms", after_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC 1.85 waits this long for the answer to a ping, by default 60 s.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )


def server_options(
    *, shares_port: bool = False, age_ms: int | None = None
) -> list[tuple[str, int]]:
    """Returns the options of a server. A connection older than `age_ms` (plus or minus 10 %) takes
    no new calls. With `shares_port`, several servers may listen on the same port (SO_REUSEPORT),
    and the kernel gives each new connection to one of them."""
    return [
        *_BOTH_ENDS,
        *_keepalive(limits.KEEPALIVE_MS, limits.KEEPALIVE_TIMEOUT_MS),
        # This is half of the links' interval between pings, because a ping may arrive early.
        ("grpc.http2.min_ping_interval_without_data_ms", limits.LINK_KEEPALIVE_MS // 2),
        ("grpc.server_handshake_timeout_ms", limits.GRPC_HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", limits.GRPC_IDLE_MS),
        ("grpc.max_concurrent_streams", limits.GRPC_STREAMS_MAX),
        # gRPC would refuse calls within this limit while earlier ones are not yet deallocated.
        ("grpc.http.overload_protection", 0),
        # gRPC would enlarge the windows of all calls, also of those whose messages nobody awaits.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", int(shares_port)),
        *(() if age_ms is None else (("grpc.max_connection_age_ms", age_ms),)),
        ("grpc.max_connection_age_grace_ms", limits.GRPC_AGE_GRACE_MS),
        # Soft and hard bound are equal for the same reason as above.
        ("grpc.server.max_pending_requests", limits.GRPC_PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", limits.GRPC_PENDING_CALLS_MAX),
        ("grpc.server_max_unrequested_time_in_server", limits.GRPC_PENDING_S_MAX),
    ]


_CHANNEL = (
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 2 * limits.LINK_BACKOFF_MS_MIN),
    ("grpc.min_reconnect_backoff_ms", limits.CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", limits.LINK_BACKOFF_MS_MAX),
    # Without this option, channels to the same address would share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Links and clients retry calls themselves.
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Trust:
    """How a channel checks the server's certificate, and which certificate the channel shows."""

    credentials: grpc.ChannelCredentials | None = None  # credentials for TLS; None = no TLS
    server_name: str = ""  # name in the server's certificate; empty = host of the address


PLAIN = Trust()


def open_channel(address: str, trust: Trust = PLAIN, *, is_link: bool = False) -> grpc.aio.Channel:
    """Returns a channel for asyncio. The first call connects to the server. A link notices sooner
    that the server hangs."""
    options = _channel_options(trust, is_link=is_link)
    if trust.credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, trust.credentials, options)


def open_blocking_channel(address: str, trust: Trust = PLAIN) -> grpc.Channel:
    """Like `open_channel`, but for blocking calls."""
    options = _channel_options(trust)
    if trust.credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, trust.credentials, options)


def _channel_options(trust: Trust, *, is_link: bool = False) -> list[tuple[str, int | str]]:
    times_ms = limits.KEEPALIVE_MS, limits.KEEPALIVE_TIMEOUT_MS
    if is_link:
        times_ms = limits.LINK_KEEPALIVE_MS, limits.LINK_KEEPALIVE_TIMEOUT_MS
    options: list[tuple[str, int | str]] = [*_CHANNEL, *_keepalive(*times_ms)]
    if trust.server_name:
        options.append(("grpc.ssl_target_name_override", trust.server_name))
    return options
