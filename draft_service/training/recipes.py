"""How a drafter of each kind is made: what it begins as, and what it needs of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.models.drafter_checkpoint import TrainedKind
from outrider.models.eagle import load_eagle_on
from outrider.models.early_exit import load_exit
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.medusa import load_heads
from outrider.models.student import load_drafter
from outrider.settings import blaming

from .dataset import Learner, Start
from .documents import Document
from .heads import (
    Eagle,
    Exit,
    Heads,
    layers_before_exit,
    make_new_eagle,
    make_new_exit,
    make_new_heads,
)
from .options import HEADS, LAYERS, DistillOptions
from .student import Student, copying_layers, kept_layers, make_student
from .teacher import Features, Target


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter of one kind is made."""

    kind: TrainedKind
    features: Features | None
    """What of the target it learns from beside its answers; None = nothing."""
    num_learned_min: int
    """Learned tokens of a document that something can be drafted for."""
    drafter: Start | None
    """What learns on; None = what is made."""
    make: Callable[[npt.NDArray[np.int64]], Start]
    """What learns, for a head of these tokens [N], ascending."""

    def long_enough(self, documents: Sequence[Document]) -> list[Document]:
        return [document for document in documents if document.num_learned >= self.num_learned_min]


def recipe_for(options: DistillOptions, target: Target, module: Any) -> Recipe:
    """What is asked for, on the target's module. Raises `SettingError` for what this target cannot
    have."""
    return _RECIPES[TrainedKind(options.kind)](options, target, module)


def _student(options: DistillOptions, target: Target, module: Any) -> Recipe:
    drafter, layers = None, []
    if options.start_from is not None:
        with blaming("start_from"):
            student, info = load_drafter(
                options.start_from,
                target.directory,
                name=_start_name(options),
                target=target.name,
                dtype=target.dtype,
                device=target.device,
                trust_remote_code=target.trust_remote_code,
            )
        drafter = _learned(options, Student(student), info.logit_token_ids or ())
    else:
        num_layers = module.config.get_text_config().num_hidden_layers
        layers = kept_layers(options.layers or LAYERS, num_layers, copying_layers(module))

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_student(module, layers, token_ids)

    return Recipe(TrainedKind.STUDENT, None, 1, drafter, make)


def _medusa(options: DistillOptions, target: Target, module: Any) -> Recipe:
    drafter = None
    if options.start_from is not None:
        with blaming("start_from"):
            loaded = load_heads(options.start_from, module, **_names(options, target))
        drafter = _learned(options, Heads(loaded.module), loaded.token_ids)

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_heads(module, options.heads or HEADS, token_ids, options.seed)

    # The first learned token of a document is the newest one of the first draft.
    return Recipe(TrainedKind.MEDUSA, Features.of(module), 2, drafter, make)


def _eagle(options: DistillOptions, target: Target, module: Any) -> Recipe:
    drafter = None
    if options.start_from is not None:
        embeddings = module.get_input_embeddings().weight
        rows = module.get_output_embeddings().weight
        with blaming("start_from"):
            loaded = load_eagle_on(options.start_from, embeddings, rows, **_names(options, target))
        drafter = _learned(options, Eagle(loaded.module), loaded.token_ids)

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_eagle(module, token_ids, options.seed)

    return Recipe(TrainedKind.EAGLE, Features.of(module), 2, drafter, make)


def _early_exit(options: DistillOptions, target: Target, module: Any) -> Recipe:
    drafter = None
    if options.start_from is not None:
        with blaming("start_from"):
            loaded = load_exit(options.start_from, module, **_names(options, target))
        num_layers = loaded.num_layers
        drafter = _learned(options, Exit(loaded.module, num_layers), loaded.token_ids)
    else:
        num_layers = layers_before_exit(module, options.layers)

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_exit(module, num_layers, token_ids, options.seed)

    return Recipe(TrainedKind.EARLY_EXIT, Features.of(module, num_layers), 1, drafter, make)


def _learned(options: DistillOptions, learner: Learner, token_ids: Sequence[int]) -> Start:
    """A drafter that learns on. Raises `SettingError` where it cannot be read."""
    name = _start_name(options)
    with blaming("start_from"):
        key = tensors_fingerprint(Path(options.start_from or name))
    ids = np.array(token_ids, dtype=np.int64)
    return Start(learner, ids, f"the drafter `{name}`", key, is_trained=True)


def _start_name(options: DistillOptions) -> str:
    return options.start_name or str(options.start_from)


def _names(options: DistillOptions, target: Target) -> dict[str, Any]:
    return {
        "name": _start_name(options),
        "target_directory": target.directory,
        "target_name": target.name,
    }


_RECIPES: Final[dict[TrainedKind, Callable[[DistillOptions, Target, Any], Recipe]]] = {
    TrainedKind.STUDENT: _student,
    TrainedKind.MEDUSA: _medusa,
    TrainedKind.EAGLE: _eagle,
    TrainedKind.EARLY_EXIT: _early_exit,
}
