"""How a drafter of each kind comes about: what it begins as, and what it needs of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.models.drafter_checkpoint import TrainedKind
from outrider.models.eagle_checkpoint import load_eagle_on
from outrider.models.early_exit_checkpoint import LoadedExit, load_exit
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.medusa_checkpoint import load_heads
from outrider.settings import blaming

from .copying import copying_layers
from .documents import Document
from .eagle import Eagle, make_new_eagle
from .exits import Exit, layers_before_exit, make_new_exit
from .heads import Heads, make_new_heads
from .learner import Learner, Start
from .options import HEADS, LAYERS, DistillOptions
from .student import kept_layers, load_student, make_student
from .target import Target
from .teacher import Features


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
    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_heads(module, options.heads or HEADS, token_ids, options.seed)

    drafter = None
    if options.start_from is not None:
        load = partial(load_heads, options.start_from, module)
        drafter = _learned(options, target, load, lambda loaded: Heads(loaded.module))
    # The first learned token of a document is the newest one of the first draft.
    return Course(TrainedKind.MEDUSA, Features.of(module), 2, drafter, make)


def _early_exit(options: DistillOptions, target: Target, module: Any) -> Course:
    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_exit(module, num_layers, token_ids, options.seed)

    drafter, num_layers = None, 0

    def learner(loaded: LoadedExit) -> Exit:
        nonlocal num_layers
        num_layers = loaded.num_layers
        return Exit(loaded.module, num_layers)

    if options.start_from is None:
        num_layers = layers_before_exit(module, options.layers)
    else:
        load = partial(load_exit, options.start_from, module)
        drafter = _learned(options, target, load, learner)
    features = Features.of(module, num_layers)
    return Course(TrainedKind.EARLY_EXIT, features, 1, drafter, make)


def _eagle(options: DistillOptions, target: Target, module: Any) -> Course:
    def make(token_ids: npt.NDArray[np.int64]) -> Start:
        return make_new_eagle(module, token_ids, options.seed)

    drafter = None
    if options.start_from is not None:
        embeddings = module.get_input_embeddings().weight
        rows = module.get_output_embeddings().weight
        load = partial(load_eagle_on, options.start_from, embeddings, rows)
        drafter = _learned(options, target, load, lambda loaded: Eagle(loaded.module))
    return Course(TrainedKind.EAGLE, Features.of(module), 2, drafter, make)


class _Loaded(Protocol):
    @property
    def token_ids(self) -> tuple[int, ...]: ...


_AnyLoaded = TypeVar("_AnyLoaded", bound=_Loaded)


def _learned(
    options: DistillOptions,
    target: Target,
    load: Callable[..., _AnyLoaded],
    learner: Callable[[_AnyLoaded], Learner],
) -> Start:
    """What learns on. Raises `SettingError` for what was made for another target or in another
    way, or that cannot be read."""
    name = _start_name(options)
    with blaming("start_from"):
        loaded = load(name=name, target_directory=target.directory, target_name=target.name)
        key = tensors_fingerprint(Path(options.start_from or name))
    ids = np.array(loaded.token_ids, dtype=np.int64)
    return Start(learner(loaded), ids, f"the drafter `{name}`", key, is_trained=True)


def _start_name(options: DistillOptions) -> str:
    return options.start_name or str(options.start_from)


_COURSES: Final[dict[TrainedKind, Callable[[DistillOptions, Target, Any], Course]]] = {
    TrainedKind.STUDENT: _student,
    TrainedKind.MEDUSA: _medusa,
    TrainedKind.EAGLE: _eagle,
    TrainedKind.EARLY_EXIT: _early_exit,
}
