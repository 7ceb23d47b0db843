"""What a deterministic step of the demo target costs: run as a script, it times steps of two
engines in turn, one deterministic and one not."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from outrider.engine.interface import SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.models.loading import load_model
from outrider.models.module_replacement import speed_up
from outrider.models.sources import resolve_model

PART = 500
"""Tokens of a context that are run in one step."""


@dataclass(frozen=True)
class Shape:
    """Sessions with so many tokens held, and new ones, of which all but a prompt's give logits."""

    num_sessions: int
    num_tokens: int
    context: int

    @property
    def names(self) -> list[str]:
        return [f"s{index}" for index in range(self.num_sessions)]

    def hold_context(self, engine: PagedEngine) -> None:
        ids = tuple(7 * place % 40_000 for place in range(self.context))
        for name in self.names:
            for start in range(0, self.context, PART):
                engine.forward([SequenceStep(name, ids[start : start + PART], 0)])

    def step_ms(self, engine: PagedEngine) -> float:
        for name in self.names:
            engine.keep(name, self.context)
        ids = tuple(range(100, 100 + self.num_tokens))
        num_logits = self.num_tokens if self.num_tokens <= 16 else 1
        steps = [SequenceStep(name, ids, num_logits) for name in self.names]
        start = time.perf_counter()
        engine.forward(steps)
        return (time.perf_counter() - start) * 1e3


SHAPES = (
    Shape(1, 1, 256), Shape(1, 5, 256), Shape(1, 9, 256), Shape(1, 1, 1500), Shape(4, 1, 256),
    Shape(16, 1, 256), Shape(16, 5, 256), Shape(1, 512, 0), Shape(1, 512, 512),
)  # fmt: skip


def engine(deterministic: bool) -> PagedEngine:
    module, info = load_model(resolve_model("demo"), name="demo", dtype="bfloat16")
    speed_up(module)
    return PagedEngine(module, info, deterministic=deterministic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="of each engine and shape")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engines = [engine(deterministic) for deterministic in (False, True)]
    for shape in SHAPES:
        for subject in engines:
            shape.hold_context(subject)
            shape.step_ms(subject)
        times = [[shape.step_ms(subject) for subject in engines] for _ in range(arguments.steps)]
        plain, fixed = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(after / before for before, after in times)
        print(f"{shape}: {plain:.1f} ms, {fixed:.1f} deterministic; ratio {ratio:.2f}", flush=True)
        for subject in engines:
            for name in shape.names:
                subject.release(name)


if __name__ == "__main__":
    main()
