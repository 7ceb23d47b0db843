"""Counts the requests that this process has refused because of a limit."""

from collections import Counter

from outrider.errors import Overloaded, TooLarge

REFUSALS: Counter[str] = Counter()
"""`limit` of the errors -> number of refusals since the process started. Coordinators and
gateways export these numbers as `outrider_refusals_total`."""


def count_refusal(error: Exception) -> None:
    """Must be called once for each error that is sent to a caller."""
    if isinstance(error, Overloaded | TooLarge) and error.limit:
        REFUSALS[error.limit] += 1
