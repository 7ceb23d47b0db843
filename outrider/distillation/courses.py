"""How a drafter of each kind comes about: what it begins as, and what it needs of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.distillation.copying import copying_layers
from outrider.distillation.documents import Document
from outrider.distillation.eagle import load_learned_eagle, make_new_eagle
from outrider.distillation.exits import (
    layers_before_exit,
    load_learned_exit,
    make_new_exit,
)
from outrider.distillation.heads import load_learned_heads, make_new_heads
from outrider.distillation.learner import Start
from outrider.distillation.options import HEADS, LAYERS, DistillOptions
from outrider.distillation.student import kept_layers, load_student, make_student
from outrider.distillation.target import Target
from outrider.distillation.teacher import Features
from outrider.engine.drafter_files import TrainedKind


@dataclass(frozen=True, slots=True)
class Course:
    """The way to a drafter."""

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
        """Of these, those that something can be learned from."""
        return [document for document in documents if document.num_learned >= self.num_learned_min]


def course_of(options: DistillOptions, target: Target, module: Any) -> Course:
    """What is asked for, on the target's module. Raises `SettingError` for what this target cannot
    have."""
    return _COURSES[TrainedKind(options.kind)](options, target, module)


def _student(options: DistillOptions, target: Target, module: Any) -> Course:
    drafter, layers = None, []
    if options.start_from is not None:
        drafter = load_student(
            options.start_from,
            target.directory,
            name=_start_name(options),
            target_name=target.name,
            dtype=target.dtype,
            device=target.device,
            trust_remote_code=target.trust_remote_code,
        )
    else:
        num_layers = module.config.get_text_config().num_hidden_layers
        layers = kept_layers(options.layers or LAYERS, num_layers, copying_layers(module))

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_student(module, layers, token_ids)

    return Course(TrainedKind.STUDENT, None, 1, drafter, make)


def _medusa(options: DistillOptions, target: Target, module: Any) -> Course:
    drafter = None
    if options.start_from is not None:
        drafter = load_learned_heads(
            options.start_from,
            module,
            name=_start_name(options),
            target_directory=target.directory,
            target_name=target.name,
        )

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_heads(module, options.heads or HEADS, token_ids, options.seed)

    # The first learned token of a document is the newest one of the first draft.
    return Course(TrainedKind.MEDUSA, Features.of(module), 2, drafter, make)


def _early_exit(options: DistillOptions, target: Target, module: Any) -> Course:
    drafter = None
    if options.start_from is not None:
        drafter, num_layers = load_learned_exit(
            options.start_from,
            module,
            name=_start_name(options),
            target_directory=target.directory,
            target_name=target.name,
        )
    else:
        num_layers = layers_before_exit(module, options.layers)

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_exit(module, num_layers, token_ids, options.seed)

    features = Features.of(module, num_layers)
    return Course(TrainedKind.EARLY_EXIT, features, 1, drafter, make)


def _eagle(options: DistillOptions, target: Target, module: Any) -> Course:
    drafter = None
    if options.start_from is not None:
        drafter = load_learned_eagle(
            options.start_from,
            module,
            name=_start_name(options),
            target_directory=target.directory,
            target_name=target.name,
        )

    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_eagle(module, token_ids, options.seed)

    return Course(TrainedKind.EAGLE, Features.of(module), 2, drafter, make)


def _start_name(options: DistillOptions) -> str:
    return options.start_name or str(options.start_from)


_COURSES: Final[dict[TrainedKind, Callable[[DistillOptions, Target, Any], Course]]] = {
    TrainedKind.STUDENT: _student,
    TrainedKind.MEDUSA: _medusa,
    TrainedKind.EAGLE: _eagle,
    TrainedKind.EARLY_EXIT: _early_exit,
}
