"""Verdicts: what the target says of a proposal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accept_probability[i]` [K] belongs to draft token i; `correction[n]` [K+1] is the token
    that follows when n draft tokens were accepted."""

    accept_probability: tuple[float, ...]
    correction: tuple[int, ...]
