"""What is refused before anything is run."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import SettingError

from .documents import HELD_OUT_EVERY, Document
from .options import DistillOptions


def check_prompts(name: str, prompts: Sequence[Sequence[int]], length_max: int) -> None:
    """Raises `SettingError` for a prompt that is too long for the target to answer."""
    for number, prompt in enumerate(prompts, start=1):
        if not 0 < len(prompt) <= length_max:
            raise SettingError(
                name,
                f"number {number} has {len(prompt)} tokens; 1 to {length_max} are allowed",
            )


def check_apart(options: DistillOptions, given: Sequence[Document]) -> None:
    """Raises `SettingError` for a prompt to measure with that is to be learned from."""
    numbers = {prompt: number for number, prompt in enumerate(options.prompts, start=1)}
    begun = {document.prompt for document in given}
    for number, prompt in enumerate(options.measure, start=1):
        where = None
        if prompt in numbers:
            where = f"number {numbers[prompt]} of --prompts"
        elif prompt in begun:
            where = "the prompt of a conversation in --corpus"
        if where is not None:
            raise SettingError(
                "measure",
                f"number {number} is also {where}; what is measured must not be learned from",
            )


def check_split(given: Sequence[Document], num_texts: int, writes: bool) -> None:
    """Raises `SettingError` where what is given cannot do: for what is held out of it depends
    on nothing else."""
    held_out = {document.is_held_out for document in given}
    if held_out == {True}:
        what = "all of them held out"
    elif held_out == {False} and not writes:
        what = "none of them held out, and the target is to write nothing"
    else:
        return
    raise SettingError(
        "corpus",
        f"holds {num_texts} texts, {what}; it must hold more: about one in {HELD_OUT_EVERY} is "
        "held out, as its own words say",
    )
