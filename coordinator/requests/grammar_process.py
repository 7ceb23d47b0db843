"""A child process of a coordinator, which compiles constraints, one at a time. The compiler may
need minutes for a schema of 50 bytes, and has no time limit. A process can be killed.

The process needs about 30 MB besides the tokenizer. It reads lines of JSON from standard input, and
answers each but the first on standard output. What libraries print goes to standard error.

    <- {"tokenizer": JSON of Hugging Face's tokenizers, as a string, "eos_token_ids": [...]}
    <- {"kind": "regex", "text": "a+"}
    -> ""                                              or the reason for a refusal

The kernel kills the process if a constraint takes too much processor time or too long. The compiler
aborts it if a constraint takes too much memory. It ends when its standard input is closed.
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
    os.dup2(2, 1)  # What a library prints must not be taken for an answer.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first, trouble = json.loads(sys.stdin.readline()), ""
    try:
        tokenizer = GrammarTokenizer(first["tokenizer"], tuple(first["eos_token_ids"]))
    except ConfigError as error:
        trouble = error.message
    limit_memory()  # For all constraints together, as memory that one leaves is used again.
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
    """Limits the processor time and the elapsed time of the code that follows, s. 0 = no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.alarm(wait_s)


def limit_memory() -> None:
    """Limits the memory of this process to `COMPILE_BYTES_MAX` more than it has now."""
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux only.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
