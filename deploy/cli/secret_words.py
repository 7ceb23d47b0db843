"""Keeps secrets out of the command line that a process runs with.

Other users read command lines in a list of processes, and `ray.init` stores the one of its process
in Ray's head. So a command whose words have secrets starts itself again without them: they travel
in a variable, which the new process removes from its environment before it starts another one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from outrider.config import deployment_settings

VARIABLE: Final = "OUTRIDER_SECRET_WORDS"
"""JSON list of the words that were left out."""
_END_OF_FLAGS: Final = "--"


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's words without secret flags and their values, and these."""
    flags = {one.flag for one in deployment_settings().values() if one.secret}
    others: list[str] = []
    secret: list[str] = []
    left = iter(words)
    for word in left:
        if word == _END_OF_FLAGS:
            others += [word, *left]
            break
        flag, has_value, _ = word.partition("=")
        if flag not in flags:
            others.append(word)
        elif has_value:
            secret.append(word)
        else:
            secret += [word, *([value] if (value := next(left, None)) is not None else [])]
    return others, secret


def environment_with(secret: Sequence[str]) -> dict[str, str]:
    """This process's variables, and one that hands the secret words to a process it starts."""
    handed: Mapping[str, str] = {VARIABLE: json.dumps(secret)} if secret else {}
    return {**os.environ, **handed}


def own_words() -> list[str]:
    """This process's words, with the secret ones that it was handed."""
    words = sys.argv[1:]
    handed = json.loads(os.environ.pop(VARIABLE, "[]"))
    end = words.index(_END_OF_FLAGS) if _END_OF_FLAGS in words else len(words)
    return [*words[:end], *handed, *words[end:]]


def leave_out() -> None:
    """Starts this program again in this process, where its command line has secrets."""
    words = sys.argv[1:]
    others, secret = split(words)
    if secret:
        interpreter = sys.orig_argv[: len(sys.orig_argv) - len(words)]
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [*interpreter, *others], environment_with(secret))  # noqa: S606
