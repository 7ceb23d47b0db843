"""Drafters as they learn, one class for each kind.

kind         a chain begins behind           and reads along it
student      every place, of one token       the text's tokens
Medusa       every learned token but the     the text's tokens, and what the target's head read at
             last of a document              the first place
EAGLE        the same                        the text's tokens, and its own guesses of what the
                                             target's head read
early exit   every place, of one token       what the target's layer N put out there

Draft token i of a chain is scored against what the target says of the place i further on. So the
tokens that a head is given are those of the text, as they are where a draft has been accepted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import SettingError
from outrider.models.drafter_checkpoint import (
    LoadedHead,
    TrainedDescription,
    TrainedKind,
    head_of,
    save_head,
)
from outrider.models.eagle import EagleHead, load_eagle_on
from outrider.models.early_exit import (
    ExitHead,
    check_exit,
    last_norm,
    layers_of,
    load_exit,
    norm_weight,
)
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import parameters_on_meta
from outrider.models.medusa import DraftHeads, load_heads
from outrider.models.student import load_drafter, narrow_head, save_drafter
from outrider.settings import blaming

from .documents import Array
from .options import HEADS, LAYERS, DistillOptions
from .teacher import Batch, Target

NUM_DEPTHS = 3
"""Tokens of the chains that an EAGLE head learns from, and is measured with."""
_CHAIN_INNER_WIDTHS = 2
_EXIT_INNER_WIDTHS = 4
"""The inner width of a new head, in widths of the target."""
_FIRST_SCALE = 0.25
"""What the target's norm is multiplied by in a new exit head: the norm was made for what the last
layer puts out, and is far too sure of what an early one does. (Cross-entropy before any training,
behind layer 6 of the demo target: 15.2 with 1, 8.5 with 0.5, 6.7 with 0.3, 6.5 with 0.2.)"""
_LAYERS_FOR_EACH = 5
"""Of the target's layers one in so many stands before an exit by default."""
_QUIET_DEVIATION = 1e-3
"""Of the weights that a change goes through: at first a drafter passes on what it is given."""


class Depth(NamedTuple):
    """Draft token i of C chains, which go along the texts of a batch."""

    hidden: Tensor
    """[C, D]: what the head reads of it."""
    rows: Tensor
    """[C], ascending: the rows of the batch whose answers are about its place."""


class Learner:
    """A drafter of one kind that learns. `load` or `make` gives it a module, once."""

    kind: ClassVar[TrainedKind]
    num_learned_min: ClassVar[int] = 2
    """Learned tokens of a document that something can be drafted for: the first one may be the
    newest token of the first draft."""
    layer: int | None = 0
    """What of the target it learns from beside its answers: see `TeacherCache`."""
    num_depths: int | None = None
    """Tokens of a chain that a step drafts; None = one, and further ones come from further
    steps."""
    began: str
    """What it begins as; for people."""
    key: str
    """What tells it from every other of the same target and texts."""
    module: Any
    weights: dict[str, nn.Parameter]
    """Those that learn."""
    token_ids: Array
    """[N], ascending: of its logits."""

    def __init__(self, options: DistillOptions, target: Any) -> None:
        """On the target's module. Raises `SettingError` for what it cannot have."""
        self._options = options
        self._target = target
        self._embeddings = target.get_input_embeddings().weight
        self._width: int = self._embeddings.shape[1]
        self._num_layers: int = target.config.get_text_config().num_hidden_layers
        self.is_trained = False

    @property
    def head(self) -> Tensor:
        """[N, D], the target's rows for its tokens, which stay as they are."""
        weight: Tensor = self.module.head.weight
        return weight

    def load(self, start: Path, target: Target) -> None:
        """Takes a trained drafter, which learns on. Raises `SettingError`."""
        name = self._options.start_name or str(start)
        with blaming("start_from"):
            names = {
                "name": name, "target_directory": target.directory, "target_name": target.name,
            }  # fmt: skip
            loaded = self._load(start, target, names)
            self.key = tensors_fingerprint(start)
        self.is_trained, self.began = True, f"the drafter `{name}`"
        self._train(loaded.module, np.array(loaded.token_ids, dtype=np.int64))

    def make(self, token_ids: Array) -> None:
        """Makes a new one for a head of these tokens [N], ascending. New weights depend on the seed
        and on their shapes alone."""
        self._train(self._make(torch.from_numpy(token_ids)), token_ids)
        self.key = f"{self.began}, {len(token_ids)}"

    def draft(self, batch: Batch) -> list[Depth]:
        """Draft token 1, 2, .. that a step finds in each text, given the tokens before it; with a
        gradient where one is wanted."""
        raise NotImplementedError

    def save(self, directory: Path, description: TrainedDescription) -> None:
        """Writes its files, but for the card."""
        token_ids = torch.from_numpy(self.token_ids)
        save_head(directory, self.module, token_ids, description, self.layer or 0)

    def _load(self, start: Path, target: Target, names: Any) -> LoadedHead[Any]:
        raise NotImplementedError

    def _make(self, token_ids: Tensor) -> Any:
        raise NotImplementedError

    def _train(self, module: Any, token_ids: Array) -> None:
        self.module, self.token_ids = module.requires_grad_(False), token_ids
        shared = {weight.data_ptr() for weight in (self._embeddings, self.head)}
        self.weights = {
            name: weight
            for name, weight in module.named_parameters()
            if weight.data_ptr() not in shared
        }
        for weight in self.weights.values():
            weight.requires_grad_(True)

    def _rows(self, token_ids: Tensor) -> nn.Parameter:
        return head_of(self._target.get_output_embeddings().weight, token_ids)

    def _fill(self, module: nn.Module, quiet: Collection[str]) -> None:
        """Gives linear layers without values their first ones, in the form of the target's: next to
        nothing where their own name is in `quiet`, else as the library begins such a layer."""
        generator = torch.Generator().manual_seed(self._options.seed)
        for name, linear in module.named_modules():
            if isinstance(linear, nn.Linear) and linear.weight.is_meta:
                values = torch.empty(linear.weight.shape)
                if name.rpartition(".")[2] in quiet:
                    values.normal_(std=_QUIET_DEVIATION, generator=generator)
                else:
                    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
                linear.weight = nn.Parameter(values.to(self._embeddings))


class Medusa(Learner):
    """Heads on the target: a step drafts one token with each."""

    kind = TrainedKind.MEDUSA

    def draft(self, batch: Batch) -> list[Depth]:
        """Chains that the documents are long enough for; those of row r begin with its hidden
        states and are scored against row r + 1, r + 2, .."""
        features = batch.features.to(self.head.dtype)
        following = batch.token_ids.reshape(-1)[batch.rows + 1]
        rows = torch.arange(len(features), device=features.device)
        found: list[Depth] = []
        for depth in range(len(self.module.heads)):
            goes_on = batch.behind[rows] > 0
            features, rows = features[goes_on], rows[goes_on]
            if not len(rows):
                break
            features = self.module.advance(depth, features, following[rows])
            rows = rows + 1
            found.append(Depth(features, rows))
        return found

    def _load(self, start: Path, target: Target, names: Any) -> LoadedHead[Any]:
        rows = self._target.get_output_embeddings().weight
        return load_heads(start, self._embeddings, rows, **names)

    def _make(self, token_ids: Tensor) -> Any:
        inner, num_heads = _CHAIN_INNER_WIDTHS * self._width, self._options.heads or HEADS
        self.began = f"{num_heads} heads that pass on what the target's own head reads"
        module = DraftHeads(self._embeddings, self._rows(token_ids), inner, num_heads)
        self._fill(module.heads, ("down",))
        return module

    def _train(self, module: Any, token_ids: Array) -> None:
        super()._train(module, token_ids)
        self.num_depths = len(module.heads)


class Eagle(Learner):
    """A head apart from the target: a step drafts `NUM_DEPTHS` tokens."""

    kind = TrainedKind.EAGLE
    began = "a layer that passes on what the target's own head read"
    num_depths = NUM_DEPTHS

    def draft(self, batch: Batch) -> list[Depth]:
        """Chains that the documents are long enough for; those of row r begin with its pair and are
        scored against row r + 1, r + 2, .. The first pair of a document is that of its first
        learned token: when an answer begins, there are no hidden states of what stands before."""
        sizes = batch.sizes
        parts = (batch.features.to(self.head.dtype), batch.token_ids.reshape(-1)[batch.rows + 1])
        features, tokens = (
            nn.utils.rnn.pad_sequence([*torch.split(part, sizes)], batch_first=True)
            for part in parts
        )
        lengths = torch.tensor(sizes, device=features.device)
        is_pair = torch.arange(features.shape[1], device=features.device) < lengths[:, None]
        tokens = nn.functional.pad(tokens, (0, NUM_DEPTHS - 1))
        found: list[Depth] = []
        for depth, guessed in enumerate(self.module.unroll(features, tokens, NUM_DEPTHS)):
            [rows] = (batch.behind > depth).nonzero(as_tuple=True)
            if not len(rows):
                break
            found.append(Depth(guessed[is_pair][rows], rows + depth + 1))
        return found

    def _load(self, start: Path, target: Target, names: Any) -> LoadedHead[Any]:
        rows = self._target.get_output_embeddings().weight
        return load_eagle_on(start, self._embeddings, rows, **names)

    def _make(self, token_ids: Tensor) -> Any:
        inner = _CHAIN_INNER_WIDTHS * self._width
        module = EagleHead(self._embeddings, self._rows(token_ids), inner)
        self._fill(module.layer, ("join", "out", "down"))
        return module


class EarlyExit(Learner):
    """A head that reads what the target's first layers put out."""

    kind = TrainedKind.EARLY_EXIT
    num_learned_min = 1

    def __init__(self, options: DistillOptions, target: Any) -> None:
        super().__init__(options, target)
        self.layer: int = options.layers or max(1, round(self._num_layers / _LAYERS_FOR_EACH))
        with blaming("kind" if options.layers is None else "layers"):
            check_exit(target, self.layer)
        self.began = f"the target's own norm and head behind its layer {self.layer}"

    def draft(self, batch: Batch) -> list[Depth]:
        return _next_tokens(self.module(batch.features.to(self.head.dtype)))

    def _load(self, start: Path, target: Target, names: Any) -> LoadedHead[Any]:
        loaded = load_exit(start, self._target, **names)
        self.layer = loaded.num_layers
        return loaded

    def _make(self, token_ids: Tensor) -> Any:
        """It does what the target's own norm and head would there, but less surely."""
        module = ExitHead(self._rows(token_ids), _EXIT_INNER_WIDTHS * self._width)
        scale = _FIRST_SCALE * norm_weight(last_norm(self._target), self._width)
        module.scale = nn.Parameter(scale.to(self._embeddings))
        self._fill(module, ("mix", "down"))
        return module


class Student(Learner):
    """A small model of the target's architecture, with its embeddings and copies of some of its
    layers. Embeddings and head stay as they are: so students need less data, and nothing of both
    has to be kept. It learns as it is served, without dropout."""

    kind = TrainedKind.STUDENT
    num_learned_min = 1
    layer = None

    def __init__(self, options: DistillOptions, target: Any) -> None:
        super().__init__(options, target)
        self._layers: list[int] = []
        if options.start_from is None:
            num_wanted = options.layers or LAYERS
            self._layers = kept_layers(num_wanted, self._num_layers, copying_layers(target))
            self.began = f"the target's layers {', '.join(map(str, self._layers))}"

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight

    def draft(self, batch: Batch) -> list[Depth]:
        read = self.module.base_model(input_ids=batch.token_ids, use_cache=False)
        return _next_tokens(read.last_hidden_state.flatten(0, 1)[batch.rows])

    def save(self, directory: Path, description: TrainedDescription) -> None:
        save_drafter(directory, self.module, torch.from_numpy(self.token_ids), description)

    def _load(self, start: Path, target: Target, names: Any) -> LoadedHead[Any]:
        module, info = load_drafter(
            start, target.directory, name=names["name"], target=target.name, dtype=target.dtype,
            device=target.device, trust_remote_code=target.trust_remote_code,
        )  # fmt: skip
        student: Any = module
        # Not a copy of them, which would learn and not be stored.
        student.get_input_embeddings().weight = self._embeddings
        return LoadedHead(student, info.logit_token_ids)

    def _make(self, token_ids: Tensor) -> Any:
        target = self._target
        found = layers_of(target)
        config = copy.deepcopy(target.config)
        text_config = config.get_text_config()
        text_config.num_hidden_layers = len(self._layers)
        kinds = getattr(text_config, "layer_types", None)
        if kinds:
            text_config.layer_types = [kinds[index] for index in self._layers]
        config.tie_word_embeddings = text_config.tie_word_embeddings = False
        with parameters_on_meta():
            # In this way rotations keep float32, which a `to(dtype)` would take from them.
            student: Any = type(target)._from_config(config, dtype=self._embeddings.dtype)
        before = target.get_output_embeddings().weight.detach()
        shared = {self._embeddings.data_ptr(), before.data_ptr()}
        kept = {
            name: values.clone()
            for name, values in target.state_dict().items()
            if ".layers." not in name and values.data_ptr() not in shared
        }
        student.load_state_dict(kept, strict=False, assign=True)
        for mine, index in zip(layers_of(student), self._layers, strict=True):
            copies = {name: values.clone() for name, values in found[index].state_dict().items()}
            mine.load_state_dict(copies, assign=True)
        student.get_input_embeddings().weight = self._embeddings
        rows = before[token_ids.to(before.device)]
        narrow_head(student, len(token_ids)).weight = nn.Parameter(rows)
        return student.to(self._embeddings.device).eval()

    def _train(self, module: Any, token_ids: Array) -> None:
        super()._train(module, token_ids)
        use_plain_attention(module)


LEARNERS = {learner.kind: learner for learner in (Student, Medusa, Eagle, EarlyExit)}


def _next_tokens(hidden: Tensor) -> list[Depth]:
    """The first draft token of every row [R, D]; what comes behind it is that of the next row."""
    return [Depth(hidden, torch.arange(len(hidden), device=hidden.device))]


def use_plain_attention(module: Any) -> None:
    """Of whole texts, a CPU computes it quicker so than in the library's fused form."""
    if module.device.type == "cpu":
        module.set_attn_implementation("eager")


_LAYERS_TO_COPY = 4
"""A student of fewer has the first layers and the last alone."""
_NUM_TEXTS = 8
_NUM_TOKENS = 64
"""Of a text, before it is written again."""
_SCORE_MIN = 0.2
"""Part of a head's attention that must lie there."""


def kept_layers(
    num_wanted: int, num_layers: int, copying: tuple[int, int] | None = None
) -> list[int]:
    """Of so many layers those that a student starts from: the last, two that copy where the target
    has them and there is room for four, and the first ones. (Acceptance after 80,000 tokens of the
    demo target, of four layers: the first ones and the last 0.235; spread evenly 0.230, two at each
    end 0.231.)"""
    if num_wanted > num_layers:
        raise SettingError("layers", f"{num_wanted} is more than the target's {num_layers}")
    kept = {num_layers - 1} if num_wanted > 1 else set()
    if copying is not None and num_wanted >= _LAYERS_TO_COPY:
        kept |= set(copying)
    firsts = [layer for layer in range(num_layers) if layer not in kept]
    return sorted([*kept, *firsts[: num_wanted - len(kept)]])


def copying_layers(target: Any) -> tuple[int, int] | None:
    """The layer with the head that most looks at the token before, and, of those behind it, the
    one with the head that most looks at what followed an earlier occurrence; None where heads do
    neither, as in a model that was not trained, or where the library does not tell."""
    before, after = _scores(target)
    pairs = [
        (first, max(range(first + 1, len(after)), key=lambda layer: after[layer]))
        for first in range(len(before) - 1)
    ]
    copying = [(a, b) for a, b in pairs if before[a] >= _SCORE_MIN and after[b] >= _SCORE_MIN]
    return max(copying, key=lambda pair: before[pair[0]], default=None)


def _scores(target: Any) -> tuple[list[float], list[float]]:
    """Of each layer, the largest part of a head's attention to the token before, and to the one
    behind the earlier occurrence; means over random texts."""
    embeddings = target.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(embeddings.shape[0], (_NUM_TEXTS, _NUM_TOKENS), generator=generator)
    ids = torch.cat([texts, texts], dim=1).to(embeddings.device)
    implementation = target.config._attn_implementation
    target.set_attn_implementation("eager")  # The others do not tell what they looked at.
    try:
        with torch.inference_mode():
            read = target.base_model(input_ids=ids, use_cache=False, output_attentions=True)
    finally:
        target.set_attn_implementation(implementation)
    places = torch.arange(1, ids.shape[1])
    again = torch.arange(_NUM_TOKENS, ids.shape[1])

    def most(columns: Tensor, rows: Tensor) -> list[float]:
        """The largest means over texts and places, of all heads; weights [B, heads, T, T]."""
        looks = (weights[:, :, rows, columns] for weights in read.attentions or ())
        return [float(look.float().mean(dim=(0, 2)).max()) for look in looks]

    return most(places - 1, places), most(again - _NUM_TOKENS + 1, again)
