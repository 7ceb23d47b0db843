"""All drafters beside each other: `python tests/drafter_bench.py --prompts FILE`. Not a test.

Each drafter gets a deployment of the demo target. Every prompt is decoded plainly and with drafts
in turn, at both temperatures; what a proposal weighs on the wire is asked of the draft replica
itself. Prints a Markdown table for each temperature.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rounds import Listener, ask, make_head

from benchmarks.prompts import BenchPrompt
from benchmarks.speedup import SpeedupOptions
from outrider.client import Client
from outrider.messages import DraftItem, ProposalReply
from outrider.request import ChatMessage, GenerateRequest, RoundReport
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.grpc_link import draft_link

DRAFTERS = (
    "ngram", "suffix", "demo-drafter", "hybrid:suffix,demo-drafter", "quantized:8", "quantized:4",
)  # fmt: skip
TEMPERATURES = (0.0, 1.0)
PLACES = 8
"""Of each answer, at which a proposal is asked for to be weighed."""


@dataclass
class Tally:
    """Of one drafter at one temperature."""

    tokens: dict[tuple[str, bool], int] = field(default_factory=lambda: defaultdict(int))
    """By category, and whether with drafts."""
    seconds: dict[tuple[str, bool], float] = field(default_factory=lambda: defaultdict(float))
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_ms: float = 0.0
    proposals: list[ProposalReply] = field(default_factory=list)

    def rate(self, category: str, speculative: bool) -> float:
        key = (category, speculative)
        return self.tokens[key] / self.seconds[key]

    def total_rate(self, speculative: bool) -> float:
        chosen = [key for key in self.tokens if key[1] is speculative]
        return sum(self.tokens[k] for k in chosen) / sum(self.seconds[k] for k in chosen)

    def row(self, drafter: str, categories: Sequence[str], mebibytes: float) -> str:
        plain = self.total_rate(False)
        speculative = self.total_rate(True)
        generated = sum(n for key, n in self.tokens.items() if key[1])
        per_proposal = sum(p.num_bytes for p in self.proposals) / max(1, len(self.proposals))
        cells = [
            f"`{drafter}`",
            f"{self.accepted / max(1, self.drafted):.2f}",
            f"{generated / self.rounds:.2f}",
            f"{self.draft_ms / self.rounds:.1f}",
            *(
                f"{self.rate(c, True):.1f} ({self.rate(c, True) / self.rate(c, False):.2f})"
                for c in categories
            ),
            f"{speculative:.1f} ({speculative / plain:.2f})",
            f"{mebibytes:.0f}",
            f"{per_proposal:.0f}",
        ]
        return "| " + " | ".join(cells) + " |"


async def decode(
    client: Client, prompt: BenchPrompt, temperature: float, num_tokens: int, k: int | None
) -> tuple[float, list[int], list[RoundReport]]:
    """Seconds, tokens and rounds of one answer."""
    request = GenerateRequest(
        (ChatMessage("user", prompt.text),), sampling=SamplingParams(temperature=temperature),
        max_tokens=num_tokens, num_draft_tokens=k, include_rounds=True,
    )  # fmt: skip
    begin, tokens, rounds = time.perf_counter(), list[int](), []
    async for event in client.generate(request):
        if isinstance(event, RoundReport):
            rounds.append(event)
        else:
            tokens.extend(getattr(event, "token_ids", ()))
    return time.perf_counter() - begin, tokens, rounds


async def weigh(
    link: Any, listener: Listener, tokens: Sequence[int], session: int, temperature: float
) -> list[ProposalReply]:
    """Proposals of four tokens for some of an answer's prefixes."""
    rule = Rule.GREEDY if temperature == 0 else Rule.TOKEN
    found = []
    for place in range(1, PLACES + 1):
        prefix = tokens[: max(1, len(tokens) * place // PLACES)]
        head = make_head(
            prefix, session=session, round_index=place, rule=rule,
            sampling=SamplingParams(temperature=temperature),
        )  # fmt: skip
        reply = await ask(link, listener, DraftItem(head, 4))
        if isinstance(reply, ProposalReply):
            found.append(reply)
    return found


async def measure(
    server: str, draft: str | None, prompts: Sequence[BenchPrompt], num_tokens: int
) -> dict[float, Tally]:
    found = {temperature: Tally() for temperature in TEMPERATURES}
    link = None if draft is None else draft_link(draft)
    listener = None if link is None else Listener(link)
    async with Client(server) as client:
        for warm_up in prompts[:2]:
            await decode(client, warm_up, 1.0, 16, None)
        for index, prompt in enumerate(prompts):
            for temperature, tally in found.items():
                for speculative in (index % 2 == 0, index % 2 == 1):
                    seconds, tokens, rounds = await decode(
                        client, prompt, temperature, num_tokens, None if speculative else 0
                    )
                    tally.tokens[prompt.category, speculative] += len(tokens)
                    tally.seconds[prompt.category, speculative] += seconds
                    if speculative:
                        tally.rounds += len(rounds)
                        tally.drafted += sum(len(r.proposed_token_ids) for r in rounds)
                        tally.accepted += sum(r.num_accepted for r in rounds)
                        tally.draft_ms += sum(r.draft_ms for r in rounds)
                        if link is not None and listener is not None:
                            session = 1 + index * len(found) + list(found).index(temperature)
                            tally.proposals += await weigh(
                                link, listener, tokens, session, temperature
                            )
            sys.stderr.write(f"prompt {index + 1} of {len(prompts)}\n")
    if link is not None:
        await link.close()
    return found


def outrider(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", "from deploy.cli.main import main; raise SystemExit(main())"]
    done = subprocess.run(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout


def draft_mebibytes(port: str) -> float:
    """Of memory that the process which listens there shares with nobody."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and str(found.laddr.port) == port and found.pid:
            return float(psutil.Process(found.pid).memory_full_info().uss) / 2**20
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafters", default=";".join(DRAFTERS), help="with semicolons between")
    arguments = parser.parse_args()
    prompts = SpeedupOptions(
        prompts=arguments.prompts, num_prompts=arguments.num_prompts
    ).load_prompts()
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    rows: dict[float, list[str]] = {temperature: [] for temperature in TEMPERATURES}
    for drafter in arguments.drafters.split(";"):
        with tempfile.TemporaryDirectory() as directory:
            environment = {**os.environ, "OUTRIDER_STATE_DIR": directory}
            serve = (
                "serve",
                "demo",
                "--draft-model",
                drafter,
                "--grpc-port",
                "0",
                "--no-http",
                "--detach",
            )
            outrider(*serve, environment=environment)
            try:
                status = json.loads(outrider("status", "--json", environment=environment))
                draft = (status.get("draft") or {}).get("address")
                server = status["coordinator"]["address"]
                found = asyncio.run(measure(server, draft, prompts, arguments.max_tokens))
                mebibytes = 0.0 if draft is None else draft_mebibytes(draft.rpartition(":")[2])
            finally:
                outrider("stop", "--quiet", environment=environment)
        for temperature, tally in found.items():
            rows[temperature].append(tally.row(drafter, categories, mebibytes))
            print(drafter, temperature, rows[temperature][-1], file=sys.stderr)
    headings = [
        "drafter", "accepted", "tokens a round", "draft, ms a round", *categories, "all", "MiB",
        "bytes a proposal",
    ]  # fmt: skip
    for temperature, lines in rows.items():
        print(f"temperature {temperature:g}; tokens/s (over plain)\n")
        print("| " + " | ".join(headings) + " |\n|" + " --- |" * len(headings))
        print("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
