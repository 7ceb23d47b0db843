"""Drafters in training: small models (students) and EAGLE-3 heads.

A student drafts one token after every position of a text. An EAGLE-3 head drafts a *chain* of
`NUM_DEPTHS` tokens after every position but the first. In place of its earlier draft tokens, the
head reads the text's tokens (teacher forcing). Each draft token is compared with the target's
distribution."""

import copy
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outrider.drafters.names import EAGLE3
from outrider.errors import SettingError
from outrider.foundation.settings import blaming
from outrider.models import eagle3, student
from outrider.models.target_layers import last_norm, layers_of
from outrider.replica.engines import load_options

from .documents import Array
from .options import LAYERS, STUDENT, DistillOptions
from .teacher import Batch, Target

NUM_DEPTHS = 3  # length of the chains that train and measure an EAGLE-3 head
_LAYERS_WITH_TAPS = 7  # With fewer layers, two of the three `Eagle3.taps` would be equal.
_FIRST_SCALE = 0.25
"""The last norm of a new EAGLE-3 head begins with the weight of the target's last norm times this
factor. Without the factor, predictions are far too confident, because the target's norm was trained
for the last layer's output, and the head reads earlier layers."""
_QUIET = ("fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight")
_QUIET_DEVIATION = 1e-3
"""Small initial standard deviation of `_QUIET`. `Eagle3.make` adds an identity matrix to the
columns of `fc` that read the last tap. So a new head passes the last tap on almost unchanged."""


class Depth(NamedTuple):
    """The draft tokens at the same depth of C chains along the texts of a batch."""

    hidden: Tensor  # [C, D]: the input from which `Learner.head` computes the tokens' logits
    rows: Tensor  # [C], ascending: each token's index among the R rows of `Batch`


class Learner:
    """A drafter of one kind in training. `load` or `make` gives it a module."""

    kind: ClassVar[str]
    taps: tuple[int, ...] = ()  # the target's layers, from 0, whose inputs the drafter reads
    num_depths: int | None = None
    """Length of the chains that `draft` returns. None = `draft` returns one token for each
    position, and the measurement treats the tokens of consecutive positions as a chain."""
    stored_form: ClassVar[str]  # the sentences of the model card about the stored weights
    module: Any
    weights: dict[str, nn.Parameter]  # the trained weights: all except embeddings and output head
    token_ids: Array  # [N], ascending: the token of each column of the drafter's logits

    def __init__(self, options: DistillOptions, target: Any) -> None:
        """Raises `SettingError` if the options do not fit the target's module `target`."""
        self._options = options
        self._target = target
        self._embeddings = target.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[N, D]: the rows of the target's output head for `token_ids`."""
        raise NotImplementedError

    def load(self, start: Path, target: Target) -> None:
        """Loads a trained drafter. Raises `ConfigError` if it does not fit the target."""
        raise NotImplementedError

    def make(self, token_ids: Array) -> None:
        """Makes a new drafter that can propose the tokens `token_ids` [N], ascending."""
        raise NotImplementedError

    def draft(self, batch: Batch) -> list[Depth]:
        """Drafts chains along the texts of `batch`. Element i has draft token i of each chain."""
        raise NotImplementedError

    def save(self, directory: Path, target: Target, fingerprint: str) -> None:
        """Writes the drafter's files, without the card. `fingerprint` is the target's."""
        raise NotImplementedError

    def _train(self, module: Any, token_ids: npt.ArrayLike) -> None:
        self.module, self.token_ids = module.requires_grad_(False), np.asarray(token_ids)
        embeddings = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
        fixed = {id(weight) for weight in (self.head, *embeddings)}
        self.weights = {
            name: weight for name, weight in module.named_parameters() if id(weight) not in fixed
        }
        for weight in self.weights.values():
            weight.requires_grad_(True)


class Eagle3(Learner):
    """One layer, which reads the inputs of three layers of the target. The target has not run the
    draft tokens. So for a draft token, the head reads its own previous output instead."""

    kind = EAGLE3
    stored_form = (
        "Its files have the format of speculators 0.9. If `name_or_path` in its `config.json` is a "
        "directory, change it to the target's directory on your machine."
    )
    num_depths = NUM_DEPTHS

    def __init__(self, options: DistillOptions, target: Any) -> None:
        super().__init__(options, target)
        with blaming("kind"):
            last_norm(target)
            num_layers = len(layers_of(target))
        if num_layers < _LAYERS_WITH_TAPS:
            raise SettingError(
                "kind",
                f"an EAGLE-3 head needs a target with at least {_LAYERS_WITH_TAPS} layers; the "
                f"target has {num_layers}",
            )
        self.taps = (2, num_layers // 2, num_layers - 3)

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.module.lm_head.weight
        return weight

    def draft(self, batch: Batch) -> list[Depth]:
        """Draft token i of the chain that begins in row r is compared with row r + i, if row r + i
        belongs to the same document. The head reads pairs of a token and the hidden states at the
        previous token, so the first token of a text has no pair."""
        module, width = self.module, batch.token_ids.shape[1]
        features = module.fuse(batch.features[:, :-1].to(self.head.dtype))
        tokens = nn.functional.pad(batch.token_ids[:, 1:], (0, NUM_DEPTHS - 1))
        # A text of `width` tokens has `width - 1` pairs. Pair 0 belongs to token 1.
        pairs = batch.rows - batch.rows // width - 1
        [starts] = (batch.rows % width > 0).nonzero(as_tuple=True)
        depths: list[Depth] = []
        for depth, hidden in enumerate(module.unroll(features, tokens, NUM_DEPTHS)):
            starts = starts[batch.num_later[starts] >= depth]
            if not len(starts):
                break
            read = module.norm(hidden.flatten(0, 1)[pairs[starts]])
            depths.append(Depth(read, starts + depth))
        return depths

    def save(self, directory: Path, target: Target, fingerprint: str) -> None:
        is_id = "/" in target.name and not Path(target.name).exists()
        eagle3.save_speculators(
            directory,
            self.module,
            self.token_ids.tolist(),
            num_draft_tokens=NUM_DEPTHS,
            target_name=target.name if is_id else str(target.directory),
            architectures=[type(self._target).__name__],
        )

    def load(self, start: Path, target: Target) -> None:
        name = self._options.start_from or str(start)
        loaded = eagle3.load_eagle3(start, self._target, name=name, target_name=target.name)
        self.taps = loaded.module.layer_ids
        self._train(loaded.module, loaded.token_ids)

    def make(self, token_ids: Array) -> None:
        """Before training, the head passes on the input of the target's third-last layer. Each tap
        is normalised, so that training need not learn its scale."""
        sizes, width = self._target.config.get_text_config(), self._embeddings.shape[1]
        heads = sizes.num_attention_heads
        rope = getattr(sizes, "rope_parameters", None) or {}
        layer = eagle3.Eagle3LayerConfig(
            vocab_size=len(self._embeddings),
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=heads,
            num_key_value_heads=getattr(sizes, "num_key_value_heads", heads),
            head_dim=getattr(sizes, "head_dim", None) or width // heads,
            rms_norm_eps=1e-5,
            rope_theta=rope.get("rope_theta", 10_000.0),
            max_position_embeddings=sizes.max_position_embeddings,
        )
        config = eagle3.Eagle3Config(
            layer=layer,
            draft_vocab_size=len(token_ids),
            layer_ids=self.taps,
            target_width=width,
            norm_before_residual=True,
            fc_norm=True,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._options.seed)
            module = eagle3.Eagle3Head(config, self._embeddings).requires_grad_(False)
            for name in _QUIET:
                module.get_parameter(name).normal_(0, _QUIET_DEVIATION)
        module.fc.weight[:, -width:].diagonal().add_(1)
        module.norm.weight.copy_(_FIRST_SCALE * _norm_weight(last_norm(self._target), width))
        for weight in module.parameters():  # Buffers, such as rotary frequencies, keep float32.
            weight.data = weight.to(self._embeddings)
        rows = self._target.get_output_embeddings().weight.detach()
        module.lm_head.weight = nn.Parameter(rows[torch.from_numpy(token_ids).to(rows.device)])
        self._train(module.to(self._embeddings.device), token_ids)


class Student(Learner):
    """A small model of the target's architecture, with copies of some of the target's layers.
    Embeddings and head are the target's, and are neither stored nor trained."""

    kind = STUDENT
    stored_form = (
        "It uses the target's embeddings and output head, which are not stored here. Matrices are "
        "stored as int8 with one scale for each row."
    )

    def __init__(self, options: DistillOptions, target: Any) -> None:
        super().__init__(options, target)
        self._layers: list[int] = []
        if options.start_from is None:
            num_layers = target.config.get_text_config().num_hidden_layers
            self._layers = kept_layers(options.layers or LAYERS, num_layers, copying_layers(target))

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight

    def draft(self, batch: Batch) -> list[Depth]:
        read = self.module.base_model(input_ids=batch.token_ids, use_cache=False)
        hidden = read.last_hidden_state.flatten(0, 1)[batch.rows]
        return [Depth(hidden, torch.arange(len(hidden), device=hidden.device))]

    def save(self, directory: Path, target: Target, fingerprint: str) -> None:
        description = student.StudentDescription(target=target.name, target_fingerprint=fingerprint)
        student.save_student(directory, self.module, torch.from_numpy(self.token_ids), description)

    def load(self, start: Path, target: Target) -> None:
        options = load_options(target.config) | {"name": self._options.start_from or str(start)}
        module, info = student.load_student(start, target.directory, target=target.name, **options)
        use_plain_attention(module)
        self._train(module, info.logit_token_ids)

    def make(self, token_ids: Array) -> None:
        rows = self._target.get_output_embeddings().weight
        all_layers = layers_of(self._target)
        dropped = [layer for index, layer in enumerate(all_layers) if index not in self._layers]
        # `deepcopy` does not copy these modules and weights. Both models share them.
        shared = [self._embeddings, rows, *dropped]
        module = copy.deepcopy(self._target, {id(obj): obj for obj in shared})
        layers: Any = nn.ModuleList(layer for layer in layers_of(module) if layer not in dropped)
        module.base_model.layers = layers
        for index, layer in enumerate(layers):
            for part in layer.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = index
        narrow = rows.detach()[torch.from_numpy(token_ids).to(rows.device)]
        student.narrow_head(module, len(token_ids)).weight = nn.Parameter(narrow)
        config = module.config.get_text_config()
        config.num_hidden_layers = len(layers)
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[index] for index in self._layers]
        module.config.tie_word_embeddings = config.tie_word_embeddings = False
        use_plain_attention(module)
        self._train(module.eval(), token_ids)


LEARNERS: dict[str, type[Learner]] = {learner.kind: learner for learner in (Student, Eagle3)}


def _norm_weight(norm: nn.Module, width: int) -> Tensor:
    """Measures the factors [D] of an RMS or layer norm, because model families store them in
    different ways (Gemma stores the factor minus 1)."""
    signs = torch.ones(width).to(next(norm.parameters(), torch.empty(0)))
    signs[1::2] = -1
    with torch.no_grad():
        weight: Tensor = (norm(signs[None]) - norm(-signs[None]))[0] / 2 * signs
    return weight


def use_plain_attention(module: Any) -> None:
    """On a CPU, replaces fused attention by plain attention, which is faster for whole texts."""
    if module.device.type == "cpu":
        module.set_attn_implementation("eager")


_NUM_TEXTS, _NUM_TOKENS = 8, 64
_SCORE_MIN = 0.2  # least mean share of attention for both heads of `copying_layers`


def kept_layers(
    num_wanted: int, num_layers: int, copying: tuple[int, int] | None = None
) -> list[int]:
    """Returns the layers of the target that a student gets, ascending. If more than one layer is
    wanted, the last layer is kept. If at least four are wanted, the two `copying` layers are kept.
    All other kept layers are the target's first layers. Raises `SettingError` if the target has too
    few layers."""
    if num_wanted > num_layers:
        raise SettingError("layers", f"{num_wanted} is more than the target's {num_layers}")
    kept = {num_layers - 1} if num_wanted > 1 else set()
    if copying is not None and num_wanted >= 4:
        kept |= set(copying)
    firsts = [layer for layer in range(num_layers) if layer not in kept]
    return sorted([*kept, *firsts[: num_wanted - len(kept)]])


def copying_layers(target: Any) -> tuple[int, int] | None:
    """Returns the two layers with which the target copies from earlier text (an induction head). An
    attention head of the lower layer attends to the previous token. A head of the upper layer
    attends to the token that followed an earlier occurrence of the current token. In repeated
    random texts, measures the mean share of attention that heads give to these tokens. Returns None
    if the shares are too low, as in an untrained model, or if the library returns no attention."""
    embeddings = target.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(embeddings.shape[0], (_NUM_TEXTS, _NUM_TOKENS), generator=generator)
    ids = torch.cat([texts, texts], dim=1).to(embeddings.device)
    implementation = target.config._attn_implementation
    target.set_attn_implementation("eager")  # Other implementations do not return attention.
    try:
        with torch.inference_mode():
            read = target.base_model(input_ids=ids, use_cache=False, output_attentions=True)
    finally:
        target.set_attn_implementation(implementation)

    def most(rows: Tensor, columns: Tensor) -> list[float]:
        looks = (weights[:, :, rows, columns] for weights in read.attentions or ())
        return [float(look.float().mean(dim=(0, 2)).max()) for look in looks]

    rows = torch.arange(1, ids.shape[1])
    again = rows[_NUM_TOKENS - 1 :]
    before, after = most(rows, rows - 1), most(again, again - _NUM_TOKENS + 1)
    pairs = [
        (first, max(range(first + 1, len(after)), key=lambda layer: after[layer]))
        for first in range(len(before) - 1)
    ]
    copying = [(a, b) for a, b in pairs if before[a] >= _SCORE_MIN and after[b] >= _SCORE_MIN]
    return max(copying, key=lambda pair: before[pair[0]], default=None)
