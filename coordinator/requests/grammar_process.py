"""A process in which a coordinator compiles constraints, one at a time. It may be killed: the
compiler does not stop by itself, however long a schema of 50 bytes takes.

It has about 30 MB beside the tokenizer. Lines of JSON come on its standard input and go to what was
its standard output; what a library prints goes to standard error:

    <- {"tokenizer": of Hugging Face's tokenizers, as JSON, "eos_token_ids": [...]}
    <- {"kind": "regex", "text": "a+"}
    -> ""                                              or why it is refused

The kernel ends it where a constraint takes too long or too much memory. It ends with its standard
input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress

from outrider.errors import BadRequest, ConfigError
from outrider.grammar.compiler import GrammarTokenizer
from outrider.grammar.constraint import Constraint, ConstraintKind
from outrider.limits import COMPILE_BYTES_MAX, COMPILE_S_MAX, COMPILE_WAIT_S_MAX


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # No library's print is taken for an answer.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first, trouble = json.loads(sys.stdin.readline()), ""
    try:
        tokenizer = GrammarTokenizer(first["tokenizer"], tuple(first["eos_token_ids"]))
    except ConfigError as error:
        trouble = error.message
    limit_memory()  # Once: what a constraint leaves is not added to what the next one has.
    for line in sys.stdin:
        asked, answer = json.loads(line), trouble
        if not trouble:
            limit(COMPILE_S_MAX, COMPILE_WAIT_S_MAX)
            try:
                tokenizer.compile(Constraint(ConstraintKind(asked["kind"]), asked["text"]))
            except BadRequest as error:
                answer = error.reason
            except MemoryError:
                os.abort()  # As the compiler does.
            limit(0, 0)
        os.write(output, json.dumps(answer).encode() + b"\n")


def limit(cpu_s: float, wait_s: int) -> None:
    """Begins to count, or ends it: what comes next has so many seconds."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.alarm(wait_s)


def limit_memory() -> None:
    """From now on there are so many bytes more than at present."""
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux alone.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
