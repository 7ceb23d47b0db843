"""The process behind `llama_cpp_side.LlamaCppProcess`: llama.cpp by its Python binding.

Runs in an environment of its own, by its path, and imports nothing but what is there and the
standard library. Reads JSON lines: first what to load, answered when it is loaded, then one request
after the other, until its input ends. An answer is `{}`, `{"token_ids", "seconds"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final

_SEED_RANGE: Final = 2**32
"""The binding's seeds have 32 bits."""


def main() -> None:
    """Answers lines until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What the library prints is no answer.
    model: Any = None
    eos: frozenset[int] = frozenset()
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object] = {}
        try:
            if model is None:
                model, eos = _load(request), frozenset(request["eos_token_ids"])
            else:
                answer = _decode(model, eos, request)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _load(setup: dict[str, Any]) -> Any:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafting: dict[str, object] = {}
    if setup["lookup_tokens"]:
        drafting = {
            "draft_model": LlamaPromptLookupDecoding(num_pred_tokens=setup["lookup_tokens"]),
            # Implied by a draft; unsaid, the binding has room for the logits of one batch alone.
            "logits_all": True,
        }
    return Llama(
        model_path=setup["model"],
        n_ctx=setup["context_tokens"],
        n_threads=setup["num_threads"],
        n_threads_batch=setup["num_threads"],
        verbose=False,
        **drafting,
    )


def _decode(model: Any, eos: frozenset[int], request: dict[str, Any]) -> dict[str, object]:
    """Greedy at temperature 0, else sampled at the temperature and nothing else."""
    model.set_seed(request["seed"] % _SEED_RANGE)
    completion: list[int] = []
    started_s = time.perf_counter()
    tokens = model.generate(
        request["prompt_ids"], temp=request["temperature"], top_k=0, top_p=1.0, min_p=0.0
    )
    for token_id in tokens:
        completion.append(int(token_id))
        if token_id in eos or len(completion) == request["max_tokens"]:
            break
    return {"token_ids": completion, "seconds": time.perf_counter() - started_s}


if __name__ == "__main__":
    main()
