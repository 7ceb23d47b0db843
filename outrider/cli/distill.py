"""`outrider distill TARGET --out DIR` trains a drafter for a target."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from draft_service.training.options import STUDENT, DistillOptions, draft_model
from outrider.bench.prompts import encoder, read_prompts
from outrider.bench.report import Report
from outrider.config.deployment import TargetConfig, deployment_settings
from outrider.drafters.names import SHIPPED, LookupKind
from outrider.errors import SettingError
from outrider.foundation.settings import build, settings_of
from outrider.replica.threads import available_cores, use_threads

from .command import Arguments, Option, argument, command, json_option
from .options import setting_option
from .output import program, progress, tell

if TYPE_CHECKING:
    from draft_service.training.documents import Template
    from draft_service.training.teacher import Target
    from outrider.models.tokenizer import TokenizerText

_TURNS = ("one", "Two?")
"""Two user turns that share no token."""
_SETTINGS = {
    **settings_of(DistillOptions),
    **{key: deployment_settings()[key] for key in ("dtype", "device", "trust_remote_code")},
}


@command(
    "distill",
    argument("target", "the target model: `demo`, a directory, a .gguf file, or a hub id"),
    Option("--out", type=Path, required=True, metavar="DIR", help="directory for the drafter"),
    *map(setting_option, _SETTINGS.values()),
    Option(
        "--start-from",
        metavar="DRAFTER",
        help="continue training this drafter (a directory, a hub id, "
        f"{' or '.join(f'`{name}`' for name in SHIPPED)}); it must have the same target and --kind",
    ),
    Option(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSONL file with a `prompt` in each line; the target answers these prompts first, and "
        "then prompts that it writes itself",
    ),
    Option(
        "--measure",
        type=Path,
        metavar="FILE",
        help="JSONL file with a `prompt` in each line; also measure the acceptance in the target's "
        "answers to these prompts. None of these prompts may be in --prompts. The command does "
        "not check whether --corpus contains them",
    ),
    Option(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="folder of further texts to train on: .txt and .md files, and .jsonl files with a "
        "`text` in each line",
    ),
    json_option(),
    epilog="To continue a run that was killed, give the same command again. Intermediate results "
    "are in $OUTRIDER_CACHE/distillation.",
)
def distill(arguments: Arguments) -> int:
    given = {
        key: _SETTINGS[key].parse(raw, _SETTINGS[key].flag)
        for key, raw in arguments.settings.items()
    }
    config = build(TargetConfig, given, model=arguments.target)
    from draft_service.training.documents import corpus_files
    from draft_service.training.storage import check_out

    options = build(
        DistillOptions,
        given,
        out=check_out(arguments.out),
        start_from=arguments.start_from,
        corpus=() if arguments.corpus is None else corpus_files(arguments.corpus),
    )
    use_threads(available_cores())  # Must be set before torch is imported.
    progress(f"loading {arguments.target}")  # Importing the libraries takes seconds.
    from draft_service.training.distilling import distill as make
    from outrider.models.sources import cache_dir

    target, text = _target(config)
    options = replace(
        options,
        prompts=_prompts("prompts", arguments.prompts, text),
        measure=_prompts("measure", arguments.measure, text),
    )
    distilled = make(options, target, cache_dir(), _report)
    progress.rest()
    of_texts, *of_prompts = map(asdict, distilled.measured)
    values = {
        "out": str(distilled.out),
        "training_steps": distilled.num_steps,
        "seconds": round(distilled.seconds, 1),
        "acceptance": of_texts,
        "acceptance_on_prompts": of_prompts[0] if of_prompts else None,
    }
    # The printed command serves a small model in a hybrid with the look-up `suffix`.
    served = draft_model(options.kind, distilled.out)
    if options.kind == STUDENT:
        served = f"hybrid:{LookupKind.SUFFIX},{served}"
    serves = shlex.join([program(), "serve", arguments.target, "--draft-model", served])
    shown = Report.of(f"A drafter for {arguments.target}", values).shown
    return tell(Report(values, [*shown, serves]), arguments.json)


def _target(config: TargetConfig) -> tuple[Target, TokenizerText | None]:
    from draft_service.training.teacher import Target
    from outrider.models.loading import load_tokenizer
    from outrider.models.sources import resolve_model
    from outrider.models.tokenizer import TokenizerText

    name, trust = config.model, config.trust_remote_code
    directory = resolve_model(name, trust_remote_code=trust)
    tokenizer = load_tokenizer(directory, trust_remote_code=trust)
    text = None if tokenizer is None else TokenizerText(tokenizer, name)
    encode = None if text is None else text.encode
    return Target(replace(config, directory=str(directory)), _template(text), encode), text


def _template(text: TokenizerText | None) -> Template:
    """The tokens that the chat template puts before and after a user's turn: the common start and
    the common end of two conversations with different turns."""
    from draft_service.training.documents import Template

    if text is None:
        return Template((), ())
    if not text.chat_template:
        return Template(tuple(text.encode("")), ())
    first, other = map(encoder(text, raw=False), _TURNS)
    before = len(commonprefix([first, other]))  # noqa: RUF071 (lists of ids)
    rest = [first[before:][::-1], other[before:][::-1]]
    after = len(commonprefix(rest))  # noqa: RUF071
    return Template(tuple(first[:before]), tuple(first[len(first) - after :]))


def _prompts(
    key: str, path: Path | None, text: TokenizerText | None
) -> tuple[tuple[int, ...], ...]:
    if path is None:
        return ()
    try:
        prompts = read_prompts(path)
    except SettingError as error:
        raise SettingError(key, error.reason) from error
    if text is None:
        raise SettingError(key, "cannot be used: the target has no tokenizer")
    encode = encoder(text, raw=not text.chat_template)
    return tuple(tuple(encode(prompt.text)) for prompt in prompts)


def _report(stage: str, part: float, detail: str) -> None:
    progress.update(f"{stage}: {part:.0%}{detail and f', {detail}'}", stage)
