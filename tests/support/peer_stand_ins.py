"""Environments of peers with a fake vLLM that counts up from a prompt's last token."""

import json
import venv
from pathlib import Path
from typing import Any, Final

from outrider.bench.libraries import TargetInputs

EOS: Final = 40
_VLLM: Final = """
import json, os, time
from types import SimpleNamespace

def note(**value):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(value) + "\\n")

print("what a library prints when it is imported", flush=True)

def SamplingParams(**options):
    note(temperature=options["temperature"])
    return SimpleNamespace(**options)

NOTED = {"cache": "CACHE_ROOT", "bind": "CPU_OMP_THREADS_BIND"}

class LLM:
    def __init__(self, model, max_num_seqs, speculative_config={}, **options):
        variables = {name: os.environ[f"VLLM_{variable}"] for name, variable in NOTED.items()}
        note(dtype=options["dtype"], **variables)
        drafting = speculative_config.get("num_speculative_tokens", 0)
        if drafting == 3:
            raise RuntimeError("no such drafts")
        self.llm_engine = Engine(drafting == 8)

class Engine:
    def __init__(self, is_fast):
        self.is_fast, self.running = is_fast, {}

    def add_request(self, request_id, prompt, params):
        if not prompt["prompt_token_ids"]:
            raise ValueError("an empty prompt")
        self.running[request_id] = [prompt["prompt_token_ids"][-1], params.max_tokens]
        note(running=len(self.running))

    def step(self):
        # The fast setting outruns whatever else a busy machine does.
        time.sleep(0.0 if self.is_fast else 0.02)
        outputs = []
        for name, state in list(self.running.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            ended = state[0] == 40 or not state[1]
            if ended:
                del self.running[name]
            tokens = SimpleNamespace(token_ids=[state[0]])
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens], finished=ended))
        return outputs
"""


def make_environment(environments: Path, name: str) -> None:
    root = environments / name
    venv.create(root, with_pip=False, symlinks=True)
    [packages] = root.glob("lib/python*/site-packages")
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").write_text(_VLLM)
    (packages / "vllm" / "sampling_params.py").write_text(
        'class RequestOutputKind:\n    DELTA = "delta"\n'
    )
    (root / "installed").touch()


def notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def inputs(environments: Path, **named: Any) -> TargetInputs:
    """Inputs of a library, for a target that no process loads."""
    setup = {
        "gguf": "/model.gguf",
        "directory": "/model",
        "context_tokens": 77,
        "batch": 2,
        "target": {"num_threads": 1},
        "engine": {"quantization": "none"},
        "precision": "float32",
    }
    known: dict[str, Any] = {"token_ids": {}} | named
    return TargetInputs(setup=setup, eos_token_ids=(EOS,), environments=environments, **known)
