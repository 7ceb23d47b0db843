"""What `outrider distill` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import SettingError
from outrider.limits import SEED_MAX
from outrider.settings import check_range

KINDS: Final = ("student", "medusa", "early-exit", "eagle")
"""`TrainedKind`s, whose module needs torch."""
HEADS: Final = 4
LAYERS: Final = 5
DRAFT_VOCAB: Final = 8192


_BOUNDS: Final = {
    "minutes": (0.01, 7 * 24 * 60.0), "layers": (1, 256), "heads": (1, 8),
    "draft_vocab": (2, 2**20), "seed": (0, SEED_MAX), "tokens": (0, 2**26), "steps": (1, 10**7),
}  # fmt: skip
"""What each may be. The teacher's cache takes some 260 bytes for each of the tokens, and but for a
student two for each number of the target's width, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """Wrong values raise `SettingError`."""

    out: Path
    """The drafter's directory; it must not exist, be empty, or hold a drafter alone, which is
    replaced."""
    kind: str = KINDS[0]
    """What it is, of `KINDS`: a small model of its own, heads on the target, one behind its first
    layers, or one apart from it that reads what the target's own head read."""
    minutes: float = 30.0
    """For writing, reading and training together, earlier parts of the same run included; measuring
    is not limited."""
    layers: int | None = None
    """Of the kind `student`, taken from the target's: see `kept_layers`; None = `LAYERS`, or those
    of `start_from`. Of the kind `early-exit` those of the target that draft; None = about a fifth
    of them."""
    heads: int | None = None
    """Of the kind `medusa`, one for each token of a draft; None = `HEADS`, or those of
    `start_from`."""
    draft_vocab: int | None = None
    """Rows of the target's head that the drafter has; None = `DRAFT_VOCAB`, or those of
    `start_from`."""
    start_from: Path | None = None
    """A drafter of this target and kind that learns on, in place of a new one ..."""
    start_name: str | None = None
    """... and what it is called on the card; None = as its path is."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids that the target answers before it asks itself."""
    measure: tuple[tuple[int, ...], ...] = ()
    """Token ids of prompts that are not learned from, and so none of `prompts` and of the corpus;
    the card says what is accepted of the answers to these."""
    corpus: Path | None = None
    """Folder of texts, and of conversations that the target wrote before."""
    seed: int = 0
    tokens: int | None = None
    """That the target writes; None = what the minutes allow."""
    steps: int | None = None
    """Of training; None = what the minutes allow."""

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            check_range(name, getattr(self, name), low, high)
        if self.kind not in KINDS:
            raise SettingError(
                "kind", f"{self.kind!r} is wrong; it must be one of {', '.join(KINDS)}"
            )
        for name, kinds in (("layers", ("student", "early-exit")), ("heads", ("medusa",))):
            if self.kind not in kinds and getattr(self, name) is not None:
                raise SettingError(name, f"a drafter of the kind `{self.kind}` has none")
        for name in ("layers", "heads", "draft_vocab"):
            if self.start_from is not None and getattr(self, name) is not None:
                raise SettingError(name, "the drafter that is started from keeps what it has")


def draft_model(kind: str, directory: Path | str) -> str:
    """What `--draft-model` calls a drafter of this kind in a directory."""
    return str(directory) if kind == KINDS[0] else f"{kind}:{directory}"
