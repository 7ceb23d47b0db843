"""A deployment's status as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from outrider.registry.registry import ROLES

if TYPE_CHECKING:
    from rich.console import RenderableType

Facts = dict[str, Any]
_COLUMNS: Final = ("replica", "address", "health", "runs, on, does")


def status_table(found: Facts) -> RenderableType:
    """What `outrider status` found."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    deployment = found["deployment"]
    if not found["running"]:
        holder = found.get("lease", {}).get("holder")
        return Text("nothing runs" if holder is None else f"starting (pid {holder})")
    head: list[RenderableType] = []
    foot: list[RenderableType] = []
    if deployment is not None:
        head.append(
            Text(
                f"{deployment['served_model_name']}, drafted by {deployment['draft_model']}: "
                f"pid {deployment['pid']}, since {deployment['started_at']}"
            )
        )
        if deployment["http_address"]:
            foot.append(Text(f"HTTP {deployment['http_address']}"))
        foot.append(Text(f"log {deployment['log']}", no_wrap=True, overflow="ignore"))
    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, overflow="fold")
    wanted = {} if deployment is None else deployment["wanted"]
    for role in ROLES:
        replicas = found[f"{role}s"]
        for facts in replicas:
            table.add_row(*map(_cell, (facts.get("name", role), *_row(facts))))
        if len(replicas) != wanted.get(role, len(replicas)):
            table.add_row(role, "", "", f"{len(replicas)} of {wanted[role]} that are wanted")
    if error := found.get("registry_error"):
        foot.insert(0, Text(f"what replicas do is not known: {error}", style="yellow"))
    return Group(*head, table, *foot)


def _cell(words: str) -> RenderableType:
    from rich.text import Text

    styles = {"serving": "green", "not serving": "red", "leaving": "yellow"}
    return Text(words, style=styles.get(words, ""))


def _row(facts: Facts) -> tuple[str, ...]:
    """All cells but the first one."""
    health = "serving" if facts["serving"] else "not serving"
    if facts.get("leaving"):
        health = "leaving"
    lines = (_runs(facts), _where(facts), _does(facts))
    return facts["address"], health, "\n".join(line for line in lines if line)


def _where(facts: Facts) -> str:
    """Its process, and when that was last heard of in Redis."""
    if "lease_age_s" not in facts:
        return ""
    parts = [f"{facts['host']}, pid {facts['pid']}", facts["device"]]
    parts.append(f"heard of {facts['lease_age_s']:.1f} s ago")
    return ", ".join(part for part in parts if part)


def _runs(facts: Facts) -> str:
    """A replica's or a coordinator's description."""
    if facts["error"] is not None:
        return str(facts["error"])
    if "num_running" in facts:
        return (
            f"{facts['model']}, {facts['num_running']} sessions running, "
            f"{facts['max_model_len']} tokens at most"
        )
    parts = [facts["model"], facts["dtype"]]
    parts += [
        f"{name} {facts[f'{name}_fingerprint'][:12]}"
        for name in ("weights", "tokenizer")
        if facts[f"{name}_fingerprint"]
    ]
    if facts["numerics"]:
        parts.append(f"bit-equal rows {facts['numerics'][:12]}")
    return ", ".join(part for part in parts if part)


def _does(facts: Facts) -> str:
    """What it has lately been doing, as far as it says so."""
    figures = facts.get("figures") or {}
    shares = (
        ("busy", "busy"), ("places", "fill"), ("pages", "kv_usage"), ("accepted", "acceptance"),
        ("ahead", "look_ahead_hits"), ("wait for drafts", "draft_waits"),
    )  # fmt: skip
    parts = []
    if (rate := figures.get("tokens_per_second")) is not None:
        parts.append(f"{rate:.0f} tokens/s")
    parts += [f"{figures[key]:.0%} {word}" for word, key in shares if figures.get(key) is not None]
    if (queue := figures.get("queue_steps")) is not None:
        parts.append(f"queue {queue:.1f} steps")
    return ", ".join(parts)
