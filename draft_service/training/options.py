"""What `outrider distill` is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from outrider.errors import SettingError
from outrider.limits import SEED_MAX
from outrider.settings import Internal, between, checked

HEADS = 4
LAYERS = 5
DRAFT_VOCAB = 8192
STUDENT = "student"


@checked()
class DistillOptions:
    """The drafter."""

    out: Internal[Path]
    """The drafter's directory; it must not exist, be empty, or hold a drafter alone that
    was made so, which is replaced."""
    kind: Literal["student", "medusa", "early-exit", "eagle3"] = "student"
    """`student`: a small model of its own; `medusa`: heads on the target; `early-exit`: a head
    behind the target's first layers; `eagle3`: a layer that reads three of the target's, written
    in the form of `speculators`, which other programs load, too."""
    minutes: Annotated[float, between(0.01, 7 * 24 * 60)] = 30.0
    """To write, to read and to train, on a CPU or on a GPU, earlier parts of the same run included;
    measuring comes on top."""
    layers: Annotated[int | None, between(1, 256)] = None
    """Of a student: the target's first ones, two that copy, and its last; unset = 5. Of `--kind
    early-exit`: the first ones, which draft; unset = a fifth of the target's."""
    heads: Annotated[int | None, between(1, 8)] = None
    """Of `--kind medusa`: tokens of a draft; unset = 4."""
    draft_vocab: Annotated[int | None, between(2, 2**20)] = None
    """Tokens that the drafter can propose; unset = 8192."""
    start_from: Internal[Path | None] = None
    """A drafter of this target and kind that learns on, in place of a new one, which has its own
    `layers`, `heads` and `draft_vocab` ..."""
    start_name: Internal[str | None] = None
    """... and what it is called on the card; None = as its path is."""
    prompts: Internal[tuple[tuple[int, ...], ...]] = ()
    """Token ids that the target answers before it asks itself."""
    measure: Internal[tuple[tuple[int, ...], ...]] = ()
    """Token ids of prompts that are not learned from, and so none of `prompts` and of the corpus;
    the card says what is accepted of the answers to these."""
    corpus: Internal[Path | None] = None
    """Folder of texts, and of conversations that the target wrote before."""
    seed: Annotated[int, between(0, SEED_MAX)] = 0
    """Of all randomness."""
    tokens: Annotated[int | None, between(0, 2**26)] = None
    """That the target writes, of which each takes some 260 bytes on disk, and but for a student two
    for each number of the target's width, too (six, and those of prompts as well, for `eagle3`);
    unset = what the minutes allow. With `--steps` and without a GPU, a run can be repeated
    exactly."""
    steps: Annotated[int | None, between(1, 10**7)] = None
    """Of training; unset = what the minutes allow."""

    def __post_init__(self) -> None:
        for name, kinds in (("layers", (STUDENT, "early-exit")), ("heads", ("medusa",))):
            if self.kind not in kinds and getattr(self, name) is not None:
                raise SettingError(name, f"a drafter of the kind `{self.kind}` has none")
        for name in ("layers", "heads", "draft_vocab"):
            if self.start_from is not None and getattr(self, name) is not None:
                raise SettingError(name, "the drafter that is started from keeps what it has")


def draft_model(kind: str, directory: Path | str) -> str:
    """What `--draft-model` calls a drafter of this kind in a directory."""
    return str(directory) if kind == STUDENT else f"{kind}:{directory}"
