"""Calls a coordinator from Python.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate(GenerateRequest("The capital of France is")):
            if isinstance(event, Tokens):
                print(event.text_delta, end="")

A `Client` belongs to one event loop. A `SyncClient` blocks, and any thread may call it.
`Client(InProcessTransport(c))` calls the coordinator `c` in this process.

    trust = caller_trust(authority=Path("ca.pem"))    # if the server has TLS
    Client("inference.example:50051", api_key=os.environ["OUTRIDER_API_KEY"], trust=trust)

Every call has a deadline. Every error is one of `outrider.errors`. Closing a stream early cancels
its session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.client.client import Client, SyncClient
from outrider.client.transport import (
    Completion,
    CompletionBuilder,
    CoordinatorDescription,
    InProcessTransport,
    SessionView,
    Transport,
)
from outrider.grammar.constraint import Constraint
from outrider.interfaces.request import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    ResumeRequest,
    RoundReport,
    Started,
    Tokens,
    Usage,
)
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.channel import Trust

if TYPE_CHECKING:
    from outrider.transport.tls import caller_trust

__all__ = [
    "ChatMessage",
    "Client",
    "Completion",
    "CompletionBuilder",
    "Constraint",
    "CoordinatorDescription",
    "Event",
    "Finished",
    "GenerateRequest",
    "InProcessTransport",
    "Metrics",
    "ResumeRequest",
    "RoundReport",
    "Rule",
    "SamplingParams",
    "SessionView",
    "Started",
    "SyncClient",
    "Tokens",
    "Transport",
    "Trust",
    "Usage",
    "caller_trust",
]


def __getattr__(name: str) -> Any:
    """Imports `caller_trust` at its first use, because the import is slow."""
    if name != "caller_trust":
        raise AttributeError(name)
    from outrider.transport.tls import caller_trust

    return caller_trust
