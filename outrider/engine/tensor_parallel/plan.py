"""Which weights of a model are shared out, and among how many ranks they can be.

The library states a style for each module by its path. What a style does to a weight [out, in]:

| style | a rank holds | its input | its output |
| --- | --- | --- | --- |
| `colwise` | rows | whole | its share |
| `rowwise` | columns | its share | summed over the ranks |
| `colwise_gather_output` | rows | whole | gathered |
| `rowwise_split_input` | columns | whole, cut | summed over the ranks |
| `replicated_with_grad_allreduce` | everything | its share | its share |

Embedding and head are always shared out by the vocabulary, whatever the plan says of them; their
last share is padded, so that any vocabulary will do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from outrider.errors import SettingError

COLWISE: Final = "colwise"
ROWWISE: Final = "rowwise"
COLWISE_GATHERED: Final = "colwise_gather_output"
ROWWISE_SPLIT: Final = "rowwise_split_input"
_WITHOUT_EFFECT: Final = frozenset({"replicated_with_grad_allreduce", "embedding_rowwise"})
"""What needs nothing here: gradients, and the embedding, which is shared out anyway."""
_STYLES: Final = _WITHOUT_EFFECT | {COLWISE, ROWWISE, COLWISE_GATHERED, ROWWISE_SPLIT}
_LAYER_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")
_ATTENTION: Final = re.compile(r"(^|\.)(self_)?(attn|attention)\.")


class Plan:
    """The styles of a model's modules."""

    def __init__(self, styles: Mapping[str, str]) -> None:
        """`styles` by a module's path, with `*` for the numbers of layers."""
        self._styles = styles

    def style(self, path: str) -> str | None:
        """The style of the module at `path`; None for one that every rank holds whole."""
        found = self._styles.get(_LAYER_NUMBER.sub(".*", path))
        return None if found in _WITHOUT_EFFECT else found

    @property
    def splits_heads(self) -> bool:
        """Whether a rank runs only its share of the attention heads."""
        return any(
            style == COLWISE and _ATTENTION.search(path) for path, style in self._styles.items()
        )


def plan_of(module: Any, name: str, key: str) -> Plan:
    """The plan that the library has for a model. Raises `SettingError` about the setting `key` for
    a model without one, and for one whose plan has a style that is not known here."""
    styles: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    kind = type(module).__name__
    if not any(style in (COLWISE, COLWISE_GATHERED) for style in styles.values()):
        raise SettingError(key, f"model {name} ({kind}) has no plan to be shared out by; use 1")
    unknown = sorted(set(styles.values()) - _STYLES)
    if unknown:
        reason = f"its plan asks for {unknown[0]}, which is not known here"
        raise SettingError(key, f"model {name} ({kind}) cannot be shared out: {reason}; use 1")
    return Plan(styles)


def check_size(module: Any, plan: Plan, size: int, name: str, key: str) -> None:
    """Raises `SettingError` naming the sizes that do, unless `size` ranks get equal shares of
    everything that the plan shares out."""
    widths = dict(_widths(module, plan))
    greatest = math.gcd(*widths.values())
    if greatest % size == 0:
        return
    allowed = [n for n in range(1, greatest + 1) if greatest % n == 0]
    wrong = next(f"{width} {what}" for what, width in widths.items() if width % size)
    raise SettingError(
        key,
        f"{size} given; model {name} has {wrong}, which it does not divide; "
        f"{', '.join(map(str, allowed))} {'does' if len(allowed) == 1 else 'do'}",
    )


def _widths(module: Any, plan: Plan) -> Iterator[tuple[str, int]]:
    """What is shared out in equal parts, each kind once, the heads first."""
    config = module.config.get_text_config()
    if plan.splits_heads:
        for attribute, what in (
            ("num_attention_heads", "attention heads"),
            ("num_key_value_heads", "key-value heads"),
        ):
            found = getattr(config, attribute, None)
            # Some models have a number for each layer.
            for heads in {found} if isinstance(found, int) else sorted(set(found or ())):
                yield what, heads
    for path, linear in sharded_linears(module, plan):
        columns = plan.style(path) in (ROWWISE, ROWWISE_SPLIT)
        width = linear.in_features if columns else linear.out_features
        yield f"{'inputs' if columns else 'outputs'} of {path.rpartition('.')[2]}", width


def sharded_linears(module: Any, plan: Plan) -> list[tuple[str, torch.nn.Linear]]:
    """Path and module of all that have a style, but for the head."""
    head = module.get_output_embeddings()
    return [
        (path, found)
        for path, found in module.named_modules()
        if isinstance(found, torch.nn.Linear) and found is not head and plan.style(path) is not None
    ]
