"""The options of `outrider distill`."""

from pathlib import Path
from typing import Annotated, Final, Literal

from outrider.errors import SettingError
from outrider.foundation.settings import Internal, between, checked
from outrider.limits import SEED_MAX

LAYERS = 5
DRAFT_VOCAB = 8192
STUDENT: Final = "student"


@checked()
class DistillOptions:
    """The drafter to make."""

    out: Internal[Path]
    """The drafter's directory, as `check_out` returns it."""
    kind: Literal["student", "eagle3"] = "student"
    """`student` is a small model. `eagle3` is a layer that reads the hidden states of three of the
    target's layers. Its files have the format of `speculators`, which other programs also load."""
    minutes: Annotated[float, between(0.01, 7 * 24 * 60)] = 30.0
    """Minutes in which the target writes and reads texts, and the drafter is trained. Measuring
    does not count. If a run was interrupted, its earlier minutes count. With `--tokens`, writing
    has no limit. With `--steps`, reading and training have no limit."""
    layers: Annotated[int | None, between(1, 256)] = None
    """Number of layers of a student; unset = 5. A student gets copies of the target's first layers,
    its last layer, and the two layers that copy from earlier text (an induction head)."""
    draft_vocab: Annotated[int | None, between(2, 2**20)] = None
    """Number of tokens that the drafter can propose; unset = 8192."""
    start_from: Internal[str | None] = None
    """The name of a drafter of the same target and kind. Training begins with its weights and keeps
    its `layers` and `draft_vocab`. None = training begins with a new drafter."""
    prompts: Internal[tuple[tuple[int, ...], ...]] = ()
    """Token ids of prompts that the target answers before it writes prompts itself."""
    measure: Internal[tuple[tuple[int, ...], ...]] = ()
    """Token ids of prompts for measuring: the model card reports how often draft tokens are
    accepted in the answers. Training uses `prompts`, so `prompts` must contain none of these."""
    corpus: Internal[tuple[Path, ...]] = ()
    """Files of further texts to train on."""
    seed: Annotated[int, between(0, SEED_MAX)] = 0
    """Seed of all random numbers."""
    tokens: Annotated[int | None, between(0, 2**26)] = None
    """Number of tokens that the target writes; unset = as many as the minutes allow; 0 = train only
    with the texts of `--corpus`. Each token takes about 260 bytes on disk. With `--kind eagle3`,
    each token of texts and prompts takes another 6 bytes for each hidden dimension. If `--steps`
    is also set, a run without a GPU can be repeated exactly."""
    steps: Annotated[int | None, between(1, 10**7)] = None
    """Number of training steps; unset = as many as the minutes allow."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.kind != STUDENT:
            raise SettingError("layers", f"cannot be set for a drafter of the kind `{self.kind}`")
        for name in ("layers", "draft_vocab"):
            if self.start_from is not None and getattr(self, name) is not None:
                raise SettingError(name, "cannot be set: the drafter of --start-from decides it")


def draft_model(kind: str, directory: Path | str) -> str:
    """Returns the value of `--draft-model` for a drafter of this kind in a directory."""
    return str(directory) if kind == STUDENT else f"{kind}:{directory}"
