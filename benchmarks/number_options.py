"""Options that are several numbers, with commas between them."""

from __future__ import annotations

from argparse import ArgumentTypeError


def whole_numbers(text: str) -> tuple[int, ...]:
    """For `type=` of an argument."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is wrong; it must be whole numbers with commas between"
        raise ArgumentTypeError(message) from None


def numbers(text: str) -> tuple[float, ...]:
    """The same for numbers of any kind."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is wrong; it must be numbers with commas between"
        raise ArgumentTypeError(message) from None
