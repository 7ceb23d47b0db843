"""A child process in which a coordinator compiles constraints, one at a time. The compiler has no
time limit, and may need minutes for a schema of 50 bytes. If a constraint takes too much time, a
timer's signal kills the process. If a constraint takes too much memory, the compiler aborts.

The process reads lines of JSON from standard input until the input is closed: first the tokenizer,
then the constraints. For each constraint, it writes one line to standard output.

    <- {"tokenizer": content of the tokenizer.json, as a string, "eos_token_ids": [...]}
    <- {"kind": "regex", "text": "a+"}
    -> ""                              if the constraint compiles, otherwise the reason to refuse it
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
    os.dup2(2, 1)  # Otherwise the coordinator could read a library's output as an answer.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first, load_error = json.loads(sys.stdin.readline()), ""
    try:
        tokenizer = GrammarTokenizer(first["tokenizer"], tuple(first["eos_token_ids"]))
    except ConfigError as error:
        load_error = error.message
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux only.
        # One limit serves all constraints, because each reuses the memory of earlier constraints.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in sys.stdin:
        request, answer = json.loads(line), load_error
        if not load_error:
            limit(COMPILE_S_MAX, COMPILE_WAIT_S_MAX)
            try:
                tokenizer.compile(Constraint(ConstraintKind(request["kind"]), request["text"]))
            except BadRequest as error:
                answer = error.reason
            except MemoryError:
                os.abort()  # The compiler itself also aborts when it is out of memory.
            limit(0, 0)
        os.write(output, json.dumps(answer).encode() + b"\n")


def limit(cpu_s: float, wait_s: int) -> None:
    """Limits the CPU time and the elapsed time from now on, both in s. 0 = no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.alarm(wait_s)
