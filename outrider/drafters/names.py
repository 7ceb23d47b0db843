"""The names that `--draft-model` takes, and what each drafter needs."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from outrider.errors import SettingError, did_you_mean

DEMO = "demo"
SHIPPED = (f"{DEMO}-drafter", f"{DEMO}-head")
"""The model and the EAGLE-3 head that come with this package for the target `demo`."""
_HYBRID = "hybrid"
EAGLE3 = "eagle3"
MTP = "mtp"
_KINDS = (_HYBRID, MTP, EAGLE3)
_KIND = re.compile(r"[A-Za-z][\w-]+")
"""Text before a colon that matches this counts as a kind of drafter. No hub id has a colon, and a
directory with a colon can be written as `./NAME`. A Windows drive such as `C:` does not match."""
_FORMS = (
    "`ngram`, `suffix`, a model, `eagle3:DIR_OR_ID`, `mtp` or `hybrid:LOOKUP,MODEL`, "
    "whose MODEL may also be a head"
)
NEAR_WORD = 0.75
"""The least similarity, by `difflib`, at which a name counts as misspelt. A draft's name is
compared with `_WORDS`, and a target's name with `demo`."""


class LookupKind(StrEnum):
    """Drafters that look up earlier text."""

    NGRAM = "ngram"
    SUFFIX = "suffix"


_LOOKUPS = {kind.value: kind for kind in LookupKind}
_WORDS = (*_LOOKUPS, DEMO, *SHIPPED, *_KINDS)


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A look-up, a model, a head, or a hybrid of a look-up and a model or head."""

    lookup: LookupKind | None
    runs_on: Literal["coordinator", "target", "draft"]
    """The role that runs the model or head; `coordinator` if a look-up drafts alone, even if the
    target runs it."""
    name: str = ""
    """The model or head: a directory, a .gguf file, a hub id, or `mtp` for the MTP layer in the
    target's own files. Empty if a look-up drafts alone."""
    kind: str = ""
    """The head's kind, `mtp` or `eagle3`; empty without a head."""


def parse_drafter(name: str) -> DrafterChoice:
    """The drafter that a `--draft-model` names. Raises `SettingError`."""
    form, colon, rest = name.partition(":")
    if name in _LOOKUPS:
        return DrafterChoice(_LOOKUPS[name], "coordinator")
    if name == MTP:
        return DrafterChoice(None, "target", MTP, MTP)
    if form == _HYBRID:
        first, _, second = rest.partition(",")
        if first not in _LOOKUPS or not second:
            lookups = " or ".join(f"`{kind}`" for kind in _LOOKUPS)
            raise _wrong(name, f"a hybrid is `{_HYBRID}:LOOKUP,MODEL`, where LOOKUP is {lookups}")
        other = parse_drafter(second)
        if other.lookup is not None:
            raise _wrong(name, "its second part must be a model or a head")
        return replace(other, lookup=_LOOKUPS[first])
    if form == EAGLE3:
        if not rest:
            raise _wrong(name, "the name of the head is missing")
        return DrafterChoice(None, "target", rest, EAGLE3)
    if colon and form in (*_LOOKUPS, MTP):
        raise _wrong(name, f"`{form}` takes no argument")
    if colon and _KIND.fullmatch(form):
        raise _wrong(name, f"there is no kind `{form}`{did_you_mean(form, _KINDS)}")
    return DrafterChoice(None, "draft", name)


def eagle3_name(draft_model: str, name: str) -> str:
    """Inserts `eagle3:` before the head's `name`, with which `draft_model` ends."""
    return draft_model.removesuffix(name) + f"{EAGLE3}:{name}"


def same_drafter(name: str, other: str) -> bool:
    """Whether two values of `draft_model` may mean the same drafter. A published head may be named
    without `eagle3:`, because its files say that it is an EAGLE-3 head."""
    return bool({*_meanings(name)} & {*_meanings(other)})


def _meanings(draft_model: str) -> tuple[DrafterChoice, ...]:
    choice = parse_drafter(draft_model)
    if choice.runs_on != "draft":
        return (choice,)
    return choice, parse_drafter(eagle3_name(draft_model, choice.name))


def check_model_name(name: str) -> None:
    """Raises `SettingError` if `name` resembles one of `_WORDS`, and so is probably misspelt.
    `name` must not be a local path. A name with a slash is always accepted."""
    if "/" in name or name in (DEMO, *SHIPPED):
        return
    if hint := did_you_mean(name, _WORDS, NEAR_WORD):
        raise SettingError(
            "draft_model",
            f"{name!r} is wrong: no directory has this name, and a model of the hub is written "
            f"OWNER/NAME{hint}",
        )


def _wrong(name: str, reason: str) -> SettingError:
    return SettingError("draft_model", f"{name!r} is wrong: {reason}; it must be {_FORMS}")


_MODEL_MEMORY = "its weights, keys and values"
_HEAD_MEMORY = "its weights; for each token one layer's key and value, and a hidden state"
DRAFTER_COLUMNS = ("draft_model", "proposes", "files", "memory", "training", "q")
DRAFTERS = (
    (
        "ngram",
        "the tokens that followed the longest earlier match in the session",
        "none",
        "200 bytes a token",
        "none",
        "one-hot",
    ),
    (
        "suffix",
        "what most often followed the last tokens in the session and the tenant's answers",
        "none",
        "200 bytes a token; bounded history",
        "none",
        "one-hot",
    ),
    (
        "PATH_OR_ID",
        "tokens drawn by a model with the target's tokenizer",
        "the model's",
        _MODEL_MEMORY,
        "none",
        "sparse",
    ),
    (
        SHIPPED[0],
        "tokens drawn by a small model for the target demo",
        "in this package",
        _MODEL_MEMORY,
        "none",
        "sparse",
    ),
    (
        "PATH_OR_ID of PARD",
        "tokens drawn by a PARD model in one pass",
        "the model's",
        _MODEL_MEMORY,
        "none",
        "sparse",
    ),
    (
        "eagle3:DIR_OR_ID",
        "tokens drawn by an EAGLE-3 head, on the target or on draft replicas",
        "a published head, or outrider distill --kind eagle3",
        _HEAD_MEMORY,
        "needed unless published",
        "sparse",
    ),
    (
        SHIPPED[1],
        "tokens drawn by an EAGLE-3 head for the target demo",
        "in this package",
        _HEAD_MEMORY,
        "none",
        "sparse",
    ),
    (
        MTP,
        "tokens drawn by the target's own MTP layer, sent with the verdicts",
        "the target's",
        _HEAD_MEMORY,
        "none",
        "sparse",
    ),
    (
        "hybrid:LOOKUP,MODEL",
        "tokens of the look-up if the look-up is confident, else tokens drawn by the model or head",
        "the model's",
        "the sum of both parts",
        "the model's",
        "one-hot or sparse",
    ),
)
"""The rows of `outrider drafters`, the cheapest drafter first. `q` is `one-hot` if each draw is
certain, and `sparse` if q is sent for the likeliest tokens."""
