"""Child process of a coordinator that compiles constraints, one at a time. A process can be killed:
the compiler has no time limit, and may need minutes for a schema of 50 bytes.

It needs about 30 MB besides the tokenizer. It reads lines of JSON from standard input and answers
on standard output; anything that a library prints goes to standard error:

    <- {"tokenizer": of Hugging Face's tokenizers, as JSON, "eos_token_ids": [...]}
    <- {"kind": "regex", "text": "a+"}
    -> ""                                              or the reason for a refusal

The kernel kills it if a constraint takes too much time or memory. It ends when its standard input
is closed.
"""

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
    os.dup2(2, 1)  # So that nothing that a library prints is taken for an answer.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first, trouble = json.loads(sys.stdin.readline()), ""
    try:
        tokenizer = GrammarTokenizer(first["tokenizer"], tuple(first["eos_token_ids"]))
    except ConfigError as error:
        trouble = error.message
    limit_memory()  # Once: memory that a constraint leaves counts for the next ones.
    for line in sys.stdin:
        asked, answer = json.loads(line), trouble
        if not trouble:
            limit(COMPILE_S_MAX, COMPILE_WAIT_S_MAX)
            try:
                tokenizer.compile(Constraint(ConstraintKind(asked["kind"]), asked["text"]))
            except BadRequest as error:
                answer = error.reason
            except MemoryError:
                os.abort()  # As the compiler itself does.
            limit(0, 0)
        os.write(output, json.dumps(answer).encode() + b"\n")


def limit(cpu_s: float, wait_s: int) -> None:
    """Limits the code that follows, in seconds of CPU time and of elapsed time; 0 = no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.alarm(wait_s)


def limit_memory() -> None:
    """Limits this process to `COMPILE_BYTES_MAX` more than it has now."""
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux only.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
