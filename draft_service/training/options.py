"""The options of `outrider distill`."""

from pathlib import Path
from typing import Annotated, Final, Literal

from outrider.errors import SettingError
from outrider.limits import SEED_MAX
from outrider.settings import Internal, between, checked

LAYERS = 5
DRAFT_VOCAB = 8192
STUDENT: Final = "student"


@checked()
class DistillOptions:
    """The drafter to make."""

    out: Internal[Path]
    """The drafter's directory, new or empty."""
    kind: Literal["student", "eagle3"] = "student"
    """`student`: a small model of its own; `eagle3`: a layer that reads three of the target's
    layers, saved in the form of `speculators`, which other programs load too."""
    minutes: Annotated[float, between(0.01, 7 * 24 * 60)] = 30.0
    """Time to write, read and train, including earlier parts of the same run; measuring is
    extra."""
    layers: Annotated[int | None, between(1, 256)] = None
    """Layers of a student: the target's first ones, two of an induction head, and its last;
    unset = 5."""
    draft_vocab: Annotated[int | None, between(2, 2**20)] = None
    """Number of tokens that the drafter can propose; unset = 8192."""
    start_from: Internal[Path | None] = None
    """A drafter of this target and kind that is trained further in place of a new one. It keeps its
    `layers` and `draft_vocab`."""
    start_name: Internal[str | None] = None
    """The name of `start_from` on the card; None = its path."""
    prompts: Internal[tuple[tuple[int, ...], ...]] = ()
    """Token ids of prompts that the target answers before it writes prompts itself."""
    measure: Internal[tuple[tuple[int, ...], ...]] = ()
    """Token ids of prompts that are not learned from, and so must not be among `prompts`; the card
    reports the acceptance in the answers to these."""
    corpus: Internal[Path | None] = None
    """Folder of texts."""
    seed: Annotated[int, between(0, SEED_MAX)] = 0
    """Seed of all randomness."""
    tokens: Annotated[int | None, between(0, 2**26)] = None
    """Number of tokens that the target writes; unset = as many as the minutes allow. Each takes
    about 260 bytes on disk. With `--kind eagle3` each token, also of prompts, takes another 6 bytes
    for each hidden dimension. With `--steps` and without a GPU a run can be repeated exactly."""
    steps: Annotated[int | None, between(1, 10**7)] = None
    """Number of training steps; unset = as many as the minutes allow."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.kind != STUDENT:
            raise SettingError("layers", f"a drafter of the kind `{self.kind}` has none")
        for name in ("layers", "draft_vocab"):
            if self.start_from is not None and getattr(self, name) is not None:
                raise SettingError(name, "the drafter that is started from keeps what it has")


def draft_model(kind: str, directory: Path | str) -> str:
    """The `--draft-model` for a drafter of this kind in a directory."""
    return str(directory) if kind == STUDENT else f"{kind}:{directory}"
