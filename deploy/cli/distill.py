"""`outrider distill TARGET --out DIR`: makes a drafter for a target."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.prompts import read_prompts
from draft_service.training.options import (
    DRAFT_VOCAB,
    HEADS,
    KINDS,
    LAYERS,
    DistillOptions,
    draft_model,
)
from outrider.config import DTYPES, TargetConfig
from outrider.drafters.names import (
    SHIPPED,
    DrafterChoice,
    DraftModel,
    LookupKind,
    parse_drafter,
)
from outrider.errors import BadRequest, SettingError
from outrider.replica.process_setup import available_cores, use_threads
from outrider.settings import blaming

from .command import Arguments, argument, command, grouped, json_option, option
from .output import program, progress

if TYPE_CHECKING:
    from draft_service.training.documents import Template
    from draft_service.training.measuring import Measured
    from draft_service.training.teacher import Target
    from draft_service.training.training import Point
    from outrider.tokenizer import TokenizerText

_TURNS: Final = ("one", "Two?")
"""Two user turns with nothing in common."""


_DEFAULTS: Final = DistillOptions(out=Path())
_DRAFTER: Final = (
    option(
        "--kind", choices=KINDS, default=str(KINDS[0]),
        help="a small model of its own, heads on the target that draft from what its own head "
        "reads, one behind its first layers, or one in the draft service that is sent what its own "
        "head reads",
    ),
    option(
        "--layers", type=int, metavar="N",
        help="of a student: the target's first ones, two that copy, and its last "
        f"[{LAYERS}]; of --kind early-exit: the first ones, which draft [a fifth of the target's]",
    ),
    option(
        "--heads", type=int, metavar="N", help=f"of --kind medusa: tokens of a draft [{HEADS}]"
    ),
    option(
        "--draft-vocab", type=int, metavar="N",
        help=f"tokens that the drafter can propose [{DRAFT_VOCAB}]",
    ),
    option(
        "--start-from", metavar="DRAFTER",
        help="a drafter of this target and --kind, made before, that learns on: a directory, a "
        "hub id or " + " or ".join(f"`{name}`" for name in SHIPPED.values()),
    ),
)  # fmt: skip


@command(
    "distill",
    argument("target", "`demo`, a directory, a .gguf file, or a hub id"),
    option("--out", type=Path, required=True, metavar="DIR", help="the drafter's directory"),
    option(
        "--minutes", type=float, default=_DEFAULTS.minutes, metavar="N",
        help="to write, to read and to train, on a CPU or on a GPU; measuring comes on top",
    ),
    *grouped("The drafter", _DRAFTER),
    option(
        "--prompts", type=Path, metavar="FILE",
        help="JSONL of `prompt`: the target answers these before it asks itself",
    ),
    option(
        "--measure", type=Path, metavar="FILE",
        help="JSONL of `prompt`: the card says what is accepted of the answers to these; none may "
        "be among --prompts or begin a conversation in --corpus, whose texts are not searched",
    ),
    option(
        "--corpus", type=Path, metavar="DIR",
        help="folder of .txt, .md and .jsonl(.gz) to learn from, too: lines of `text`, or of "
        "`prompt`, `answer` (token ids) and `temperature` that the target wrote before",
    ),
    option("--seed", type=int, default=_DEFAULTS.seed, metavar="N", help="of all randomness"),
    option(
        "--tokens", type=int, metavar="N",
        help="that the target writes [what the minutes allow]; with --steps and without a GPU, a "
        "run can be repeated exactly",
    ),
    option("--steps", type=int, metavar="N", help="of training [what the minutes allow]"),
    option("--dtype", choices=DTYPES, default=DTYPES[0], help="of the target's weights"),
    option("--device", default="auto", help="`auto`, `cpu`, `cuda` or `cuda:N`"),
    option("--trust-remote-code", is_flag=True, help="run Python code of the model's files"),
    json_option(),
    epilog="A run that is killed goes on where it was when the same command is given again: what "
    "it has made lies in $OUTRIDER_CACHE/distillation.",
)  # fmt: skip
def distill(arguments: Arguments) -> int:
    """Makes it, and says on standard error how far it has come."""
    start_name = arguments.start_from
    given = {
        name: value for name, value in vars(arguments).items()
        if name in DistillOptions.__dataclass_fields__
    }  # fmt: skip
    given |= {"prompts": (), "measure": (), "start_name": start_name}
    given["start_from"] = None if start_name is None else Path(start_name)
    options = DistillOptions(**given)
    if start_name is not None:
        _check_start(start_name)
    TargetConfig(device=arguments.device)  # Raises for one that is none.
    use_threads(available_cores())  # Before torch is imported.
    progress(f"loading {arguments.target}")  # The libraries alone take seconds.
    from draft_service.training.distilling import distill as make
    from draft_service.training.storage import check_out
    from outrider.models.sources import cache_dir, resolve_model

    check_out(options.out)
    target, text = _target(arguments)
    if start_name is not None:
        trust, heads = arguments.trust_remote_code, options.kind != KINDS[0]
        with blaming("start_from"):
            start = resolve_model(start_name, trust_remote_code=trust, heads=heads)
        options = replace(options, start_from=start)
    options = replace(
        options,
        prompts=_prompts("prompts", arguments.prompts, text),
        measure=_prompts("measure", arguments.measure, text),
    )
    found = make(options, target, cache_dir(), _report)
    progress.rest()
    if arguments.json:
        of_prompts = None if found.of_prompts is None else _acceptance(found.of_prompts)
        summary = {"out": str(found.out), "steps": found.num_steps}
        summary |= {"seconds": round(found.seconds, 1), **_acceptance(found.measured)}
        print(json.dumps(summary | {"of_prompts": of_prompts}))
        return 0
    print(f"{found.out}: {found.num_steps} steps in {found.seconds / 60:.1f} minutes")
    for name, measured in (("held-out texts", found.measured), ("--measure", found.of_prompts)):
        if measured is not None:
            print(
                f"acceptance, {name}: {measured.greedy:.3f} at temperature 0, "
                f"{measured.sampled:.3f} at 1"
            )
    # A model drafts behind a look-up.
    served = draft_model(options.kind, found.out)
    if options.kind == KINDS[0]:
        served = f"hybrid:{LookupKind.SUFFIX},{served}"
    print(shlex.join([program(), "serve", arguments.target, "--draft-model", served]))
    return 0


def _check_start(name: str) -> None:
    """Raises `SettingError` for a name of `--draft-model` that is no model's."""
    with suppress(SettingError):
        if parse_drafter(name) == DrafterChoice(None, DraftModel(name)):
            return
    shipped = " or ".join(SHIPPED.values())
    raise SettingError(
        "start_from",
        f"{name!r} is no drafter that can learn; it must be a directory, a hub id or {shipped}",
    )


def _target(arguments: Arguments) -> tuple[Target, TokenizerText | None]:
    from draft_service.training.teacher import Target
    from outrider.models.loading import load_tokenizer
    from outrider.models.sources import resolve_model
    from outrider.tokenizer import TokenizerText

    name, trust = arguments.target, arguments.trust_remote_code
    directory = resolve_model(name, trust_remote_code=trust)
    tokenizer = load_tokenizer(directory, trust_remote_code=trust)
    text = None if tokenizer is None else TokenizerText(tokenizer, name)
    encode = None if text is None else text.encode
    target = Target(
        name, directory, _template(text), encode, arguments.dtype, arguments.device, trust
    )
    return target, text


def _template(text: TokenizerText | None) -> Template:
    """What stands around a user's turn: what two conversations of other turns have in common."""
    from draft_service.training.documents import Template

    if text is None:
        return Template((), ())
    try:
        one, other = (text.encode_chat([{"role": "user", "content": c}]) for c in _TURNS)
    except BadRequest:  # no chat template
        return Template(tuple(text.encode("")), ())
    before = len(commonprefix([one, other]))  # noqa: RUF071 (lists of ids)
    rest = [one[before:][::-1], other[before:][::-1]]
    after = len(commonprefix(rest))  # noqa: RUF071
    return Template(tuple(one[:before]), tuple(one[len(one) - after :]))


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
        raise SettingError(key, "the target has no tokenizer, and takes no text")
    found = []
    for prompt in prompts:
        try:
            ids = text.encode_chat([{"role": "user", "content": prompt.text}])
        except BadRequest:
            ids = text.encode(prompt.text)
        found.append(tuple(ids))
    return tuple(found)


def _report(stage: str, part: float, point: Point | None) -> None:
    """Says how far a stage is; of training also what was measured last."""
    found = ""
    if point is not None:
        found = f"accepted {point.greedy:.3f} at T=0, {point.sampled:.3f} at T=1"
    progress.begin(stage)
    progress.update(f"{stage}: {part:.0%} {found}".rstrip())


def _acceptance(measured: Measured) -> dict[str, Any]:
    return {
        "greedy": measured.greedy,
        "sampled": measured.sampled,
        "by_position": measured.by_position,
        "num_positions": measured.num_tokens,
    }
