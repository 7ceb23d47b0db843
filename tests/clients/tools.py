"""The load generators: how each is told what to do, and where it leaves its report."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from tests.clients.outcome import Asked, Outcome, from_aiperf, from_guidellm

PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Names of variables, in small letters: nobody is asked beyond this machine."""
STREAMS = 2


class Tool(ABC):
    """A program in an environment of its own."""

    name: str

    def __init__(self, environments: Path) -> None:
        self.program = (environments / self.name / "bin" / self.name).absolute()

    @abstractmethod
    def words(
        self, base_url: str, model: str, tokenizer: Path, asked: Asked, out: Path
    ) -> list[str]:
        """Its command line, for a report in `out`. Prompts are made up, by a tokenizer that is
        given as a directory."""

    @abstractmethod
    def read(self, out: Path) -> Outcome:
        """What its report says."""

    def environment(self, inherited: Mapping[str, str], home: Path) -> dict[str, str]:
        """Its variables: nothing of a model hub's account or cache, but `home`."""
        kept = {name: value for name, value in inherited.items() if name.lower() not in PROXIES}
        return kept | {"HF_HOME": str(home)}


class GuideLlm(Tool):
    name = "guidellm"

    def words(
        self, base_url: str, model: str, tokenizer: Path, asked: Asked, out: Path
    ) -> list[str]:
        route = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[asked.endpoint]
        data = f"prompt_tokens={asked.input_tokens},output_tokens={asked.output_tokens}"
        return [
            str(self.program), "run",
            "--backend", f"kind=openai_http,target={base_url},model={model},request_format={route}",
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={asked.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,{data}",
            "--output", f"kind=json,path={out / 'report.json'}",
            "--disable-console",
        ]  # fmt: skip

    def environment(self, inherited: Mapping[str, str], home: Path) -> dict[str, str]:
        return super().environment(inherited, home) | {"HF_HUB_OFFLINE": "1"}

    def read(self, out: Path) -> Outcome:
        return from_guidellm(json.loads((out / "report.json").read_text("utf-8")))


class AiPerf(Tool):
    name = "aiperf"

    def words(
        self, base_url: str, model: str, tokenizer: Path, asked: Asked, out: Path
    ) -> list[str]:
        return [
            str(self.program), "profile", "--model", model, "--url", base_url,
            "--endpoint-type", asked.endpoint, "--streaming",
            "--extra-inputs", "ignore_eos:true",
            "--tokenizer", str(tokenizer),
            "--concurrency", str(STREAMS), "--request-count", str(asked.requests),
            "--prompt-input-tokens-mean", str(asked.input_tokens),
            "--prompt-output-tokens-mean", str(asked.output_tokens),
            "--random-seed", "1", "--ui-type", "none", "--no-gpu-telemetry",
            "--output-artifact-dir", str(out),
        ]  # fmt: skip

    def environment(self, inherited: Mapping[str, str], home: Path) -> dict[str, str]:
        # Told to be offline it takes a tokenizer from its cache alone, not from a directory.
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        kept = super().environment(inherited, home)
        return {name: value for name, value in kept.items() if name not in offline}

    def read(self, out: Path) -> Outcome:
        lines = (out / "profile_export.jsonl").read_text("utf-8").splitlines()
        report = json.loads((out / "profile_export_aiperf.json").read_text("utf-8"))
        return from_aiperf(report, [json.loads(line) for line in lines])


TOOLS = (GuideLlm, AiPerf)
