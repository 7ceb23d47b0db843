"""The areas of the product that are mutated, their tests, and the type of a mutant."""

import difflib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

_LEFT_OUT: Final = ("triton_kernels.py",)
"""Files that no test imports on a machine without Triton."""


@dataclass(frozen=True, slots=True)
class Area:
    """A part of the product."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self, root: Path) -> list[str]:
        paths = [root / source for source in self.sources]
        found = [path for path in paths if path.suffix == ".py"]
        found += [file for path in paths if path.is_dir() for file in path.rglob("*.py")]
        return sorted(str(path.relative_to(root)) for path in found if path.name not in _LEFT_OUT)


def nearest_tests(file: str, root: Path) -> tuple[str, ...]:
    """The unit tests of a file of the product, or else those of its folder; empty without any."""
    module = Path(file)
    places = [name for name in module.parent.parts if name != "outrider"]
    folder = Path("tests", "unit", *places)
    for path in (folder / f"test_{module.stem}.py", folder):
        if (root / path).exists():
            return (str(path),)
    return ()


AREAS: Final = {
    "core": Area(
        ("outrider/speculation",),
        (
            "tests/unit/speculation",
            *(
                f"tests/exactness/core/test_core_{name}.py"
                for name in ("enumeration", "masks", "rounds", "traps")
            ),
        ),
    ),
    "transport": Area(("outrider/transport",), ("tests/unit/transport",)),
    "store": Area(
        ("outrider/sessions", "outrider/redis"),
        (
            "tests/unit/sessions",
            "tests/unit/redis",
            "tests/integration/test_redis_store.py",
            "tests/unit/coordinator/decoding",
        ),
    ),
    "length control": Area(("coordinator/draft_length",), ("tests/unit/coordinator",)),
    "coordinator": Area(
        (
            "coordinator/decoding/loop.py",
            "coordinator/decoding/committer.py",
            "coordinator/decoding/resumption.py",
            "coordinator/decoding/runs.py",
            "coordinator/decoding/sessions.py",
            "coordinator/routing/target_client.py",
            "coordinator/routing/draft_client.py",
            "coordinator/routing/replica_pool.py",
            "coordinator/routing/discovery.py",
            "coordinator/admission.py",
            "coordinator/health.py",
            "coordinator/served_model.py",
            "coordinator/service.py",
            "coordinator/streams.py",
        ),
        ("tests/unit/coordinator", "tests/unit/draft_service", "tests/unit/target_service"),
    ),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of some lines of a file."""

    area: str
    file: str
    operator: str
    line: int
    """Number, from 1, of the first line that it changes."""
    before: tuple[str, ...]
    after: tuple[str, ...]

    @classmethod
    def between(cls, area: str, file: Path, operator: str, before: str, after: str) -> Self:
        old, new = before.splitlines(), after.splitlines()
        codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        changes = [code for code in codes if code[0] != "equal"]
        first, last = changes[0], changes[-1]
        return cls(
            area,
            str(file),
            operator,
            first[1] + 1,
            tuple(old[first[1] : last[2]]),
            tuple(new[first[3] : last[4]]),
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        lines = {name: tuple(values[name]) for name in ("before", "after")}
        return cls(**{name: values[name] for name in cls.__slots__} | lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def applied(self, source: str) -> str | None:
        """The changed source. None if its lines are missing, or if they occur more than once and
        not at the mutant's own place."""
        lines, size = source.splitlines(), len(self.before)
        places = [
            place
            for place in range(len(lines) - size + 1)
            if tuple(lines[place : place + size]) == self.before
        ]
        if self.line - 1 in places:
            places = [self.line - 1]
        if len(places) != 1:
            return None
        return "\n".join([*lines[: places[0]], *self.after, *lines[places[0] + size :], ""])
