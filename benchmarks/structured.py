"""`python -m benchmarks.structured`: JSON by ten schemas, plain and speculative, under two rules.

Temperature 1, at most 256 tokens. Of the completions that end within those: all must parse and meet
their schema. With drafts also the share of draft tokens that is accepted, with masks on both sides
and with the target's alone, which should be no more. Exit code 1 where a completion is not valid,
fewer than 70 % end, or masks on both sides accept less. Everything runs in this process, without
sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from outrider.replica.process_setup import available_cores, build_engine, use_threads

_TEMPERATURE: Final = 1.0
_SEQUENCES: Final = 64
_ENDED_MIN: Final = 0.7
"""Share of the completions that must end within their tokens."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to decode."""

    rule: str
    num_draft_tokens: int
    draft_masks: bool

    @property
    def masks(self) -> str:
        """Whose there are."""
        return "both" if self.draft_masks else "target"


MODES: Final = (
    *(Mode(rule, 0, draft_masks=True) for rule in ("token", "coupled")),
    *(Mode(rule, 4, draft_masks=masks) for rule in ("token", "coupled") for masks in (True, False)),
)


@dataclass(frozen=True, slots=True)
class ModeReport:
    """What came of all prompts in one mode."""

    mode: Mode
    num_prompts: int
    num_ended: int
    """Within the tokens that they had."""
    num_valid: int
    """Of those."""
    num_draft_tokens: int
    num_accepted: int
    mean_acceptance_length: float
    invalid: tuple[str, ...]
    """The first few that ended and are not valid."""

    @property
    def ended(self) -> float:
        """Share of the completions."""
        return self.num_ended / max(1, self.num_prompts)

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens."""
        return self.num_accepted / max(1, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class _Models:
    target: Any
    draft: Any
    text: Any


def main() -> int:
    """Measures, prints a line for each mode, and one JSON object in the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo-drafter")
    parser.add_argument("--dtype", default="auto", help="of both models' weights")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines of `schema` and `prompt` [built in]"
    )
    parser.add_argument("--prompts-per-schema", type=int, default=20, help="of those built in")
    parser.add_argument("--seed", type=int, default=20_261_122, help="of the first prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--modes", type=int, nargs="*", default=list(range(len(MODES))))
    options = parser.parse_args()
    use_threads(available_cores())
    reports = asyncio.run(_measure(options))
    missed = _missed(reports)
    print(json.dumps({"modes": [asdict(report) for report in reports], "missed": missed}))  # noqa: T201
    return int(bool(missed))


def _missed(reports: Sequence[ModeReport]) -> list[str]:
    """What is not as it must be, in words."""
    missed = []
    for report in reports:
        mode = report.mode
        name = f"{mode.rule} K={mode.num_draft_tokens} masks={mode.masks}"
        if report.num_valid < report.num_ended:
            missed.append(f"{name}: {report.num_ended - report.num_valid} ended and are not valid")
        if report.ended < _ENDED_MIN:
            missed.append(f"{name}: {report.ended:.3f} ended, less than {_ENDED_MIN}")
    by_mode = {report.mode: report for report in reports}
    for mode, both in by_mode.items():
        alone = by_mode.get(replace(mode, draft_masks=False))
        if mode.draft_masks and alone is not None and both.acceptance < alone.acceptance:
            missed.append(
                f"{mode.rule} K={mode.num_draft_tokens}: acceptance {both.acceptance:.3f} with "
                f"both masks, {alone.acceptance:.3f} with the target's alone"
            )
    return missed


async def _measure(options: argparse.Namespace) -> list[ModeReport]:
    models = _load(options.model, options.draft_model, options.dtype)
    asked = list(_asked(options))
    reports = []
    for mode in (MODES[index] for index in options.modes):
        async with _client(models, draft_masks=mode.draft_masks) as client:
            report = await _run(client, mode, options, asked)
        reports.append(report)
        print(  # noqa: T201
            f"{mode.rule:8} K={mode.num_draft_tokens} "
            f"masks={mode.masks} ended {report.ended:.3f} "
            f"valid {report.num_valid}/{report.num_ended} acceptance {report.acceptance:.3f} "
            f"tokens a round {report.mean_acceptance_length:.2f}",
            file=sys.stderr,
            flush=True,
        )
    return reports


def _asked(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], str]]:
    """Each prompt with its schema. Raises `SystemExit` for a file that has others."""
    from .structured_prompts import TASKS

    if options.prompts is None:
        for task in TASKS:
            for prompt in list(task.prompts())[: options.prompts_per_schema]:
                yield task.schema, prompt
        return
    lines = options.prompts.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            found = json.loads(line)
            yield dict(found["schema"]), str(found["prompt"])
        except (KeyError, TypeError, ValueError) as error:
            raise SystemExit(
                f"--prompts: line {number} is no JSON object of `schema` and `prompt`: {error!r}"
            ) from None


def _load(model: str, draft_model: str, dtype: str) -> _Models:
    from outrider.config import DraftConfig, TargetConfig
    from outrider.models.drafter_checkpoint import is_trained_drafter
    from outrider.models.sources import resolve_model
    from outrider.tokenizer import TokenizerText

    directory, draft = resolve_model(model), resolve_model(draft_model)
    target_config = TargetConfig(model=model, directory=str(directory), dtype=dtype)
    draft_config = DraftConfig(model=draft_model, directory=str(draft), dtype=dtype)
    if is_trained_drafter(draft):
        draft_config = replace(draft_config, target=model, target_directory=str(directory))
    return _Models(
        build_engine(target_config, "target", available_cores()),
        build_engine(draft_config, "draft", available_cores()),
        TokenizerText.load(directory),
    )


@asynccontextmanager
async def _client(models: _Models, *, draft_masks: bool) -> AsyncIterator[Any]:
    """A client of a coordinator, a target and a draft in this process."""
    from coordinator.options import CoordinatorOptions
    from coordinator.requests.validation import RequestDefaults
    from coordinator.routing.request_header import Timeouts
    from coordinator.service import CoordinatorService
    from draft_service.service import DraftService
    from outrider.client import Client, InProcessTransport
    from outrider.drafters.ngram import NgramDrafter
    from outrider.grammar.compiler import Grammars
    from outrider.replica.executor import ThreadExecutor
    from outrider.sessions.memory_store import MemoryStore
    from outrider.transport.memory_link import MemoryLink
    from target_service.service import TargetService

    def grammars() -> Grammars:
        ends = models.target.info.eos_token_ids
        return Grammars(lambda: models.text.grammar_tokenizer(ends))

    target = TargetService(
        models.target, ThreadExecutor("target", lambda: 0.0), max_num_seqs=_SEQUENCES,
        grammars=grammars(),
    )  # fmt: skip
    draft = DraftService.with_model(
        models.draft, ThreadExecutor("draft", lambda: 0.0), max_num_seqs=_SEQUENCES,
        grammars=grammars() if draft_masks else None,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    service = CoordinatorService(
        CoordinatorOptions(
            name="structured",
            served_model_name="",
            defaults=RequestDefaults(num_draft_tokens=4, deadline_ms=3_600_000),
            length_control=False,
            run_ahead_rounds=8,
            max_sessions=1024,
            patience=Timeouts(300.0, 300.0, 1.0, 300.0, 1.0),
        ),
        store=MemoryStore(lambda: loop.time() * 1e3),
        targets={"target": MemoryLink(target)},
        drafts={"draft": MemoryLink(draft)},
        stand_in=NgramDrafter(),
        text=models.text,
    )
    await service.start()
    try:
        yield Client(InProcessTransport(service))
    finally:
        await service.close()
        for replica in (target, draft):
            await replica.close()


async def _run(
    client: Any,
    mode: Mode,
    options: argparse.Namespace,
    asked: Sequence[tuple[dict[str, Any], str]],
) -> ModeReport:
    from outrider.grammar.constraint import Constraint
    from outrider.limits import DEADLINE_MS_MAX
    from outrider.request import ChatMessage, GenerateRequest
    from outrider.speculation.sampling_params import Rule, SamplingParams

    gate = asyncio.Semaphore(options.concurrency)

    async def one(index: int, schema: dict[str, Any], prompt: str) -> tuple[dict[str, Any], Any]:
        request = GenerateRequest(
            (ChatMessage("user", prompt),),
            sampling=SamplingParams(temperature=_TEMPERATURE),
            max_tokens=options.max_tokens,
            seed=options.seed + index,
            rule=Rule(mode.rule),
            num_draft_tokens=mode.num_draft_tokens,
            deadline_ms=DEADLINE_MS_MAX,
            constraint=Constraint.of_schema(schema),
        )
        async with gate:
            return schema, await client.complete(request)

    found = await asyncio.gather(*(one(i, *entry) for i, entry in enumerate(asked)))
    return _reported(mode, found)


def _reported(mode: Mode, found: Sequence[tuple[dict[str, Any], Any]]) -> ModeReport:
    ended = [(schema, done) for schema, done in found if done.finish_reason == "stop"]
    invalid = [done.text for schema, done in ended if not _is_valid(schema, done.text)]
    metrics = [done.metrics for _, done in found]
    accepted = sum(entry.num_accepted_draft_tokens for entry in metrics)
    rounds = sum(entry.num_rounds for entry in metrics)
    return ModeReport(
        mode=mode,
        num_prompts=len(found),
        num_ended=len(ended),
        num_valid=len(ended) - len(invalid),
        num_draft_tokens=sum(entry.num_draft_tokens for entry in metrics),
        num_accepted=accepted,
        mean_acceptance_length=1 + accepted / max(1, rounds),
        invalid=tuple(invalid[:5]),
    )


def _is_valid(schema: dict[str, Any], text: str) -> bool:
    import jsonschema

    checker = jsonschema.FormatChecker()
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=checker)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
