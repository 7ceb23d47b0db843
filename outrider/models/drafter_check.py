"""Checks whether a published head reads the layers of its target that it was trained to read.

Files of heads number the target's layers in several ways, or do not state the layers. A head that
reads wrong layers raises no error, but drafts badly. For the check, the target writes a short text.
`DraftHead.ways` has the possible ways to read the target. For each way, the head predicts the next
two tokens at each place of the text. The *agreement* is the share of predictions that are the
target's likeliest token. A head pairs each token's id with the previous token's feature. For the
way that the files state, the check also reports the agreement with each token's own feature ("pairs
one off"). A served head cannot use this feature, because it drafts before the feature exists."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import BadRequest
from outrider.interfaces.engine import ModelInfo
from outrider.models.compatibility import self_check_tokens
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.sharding import Ranks, of_leader
from outrider.models.target_layers import layers_of, tapped_layers
from outrider.models.tokenizer import TokenizerText

TOKENS_WRITTEN = 64
AGREEMENT_MIN = 0.2
"""The check warns if the agreement is below this share. The agreement of published heads is 0.6 or
more, but only 0.1 if they read a wrong layer."""
_GAIN_MIN = 0.1
"""A way replaces the stated way only if its agreement is larger by at least this number."""
_DEPTHS = 2
_PROMPT = "Explain in a few sentences why the sky is blue."
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt, the text that the target wrote after the prompt, and the target's hidden states."""

    token_ids: Tensor  # [T]: the prompt, then the `TOKENS_WRITTEN` tokens of the text
    hidden: Sequence[Tensor]
    """The input [T, D] of each layer, and of the norm after the last layer if the target has this
    norm."""
    likeliest: Tensor  # [T]: the target's likeliest token after each token
    num_layers: int


Reader = Callable[[Sequence[int]], Reading]
DraftCheck = Callable[[LoadedDraftHead | None, Reader, ModelInfo], LoadedDraftHead | None]
"""`checked_head` without its last two parameters."""


def checked_head(
    loaded: LoadedDraftHead | None, read: Reader, info: ModelInfo, tokenizer: Any | None, name: str
) -> LoadedDraftHead | None:
    """Chooses the way in which the head reads the target, and returns the head set to this way. If
    this is not the stated way, or the agreement is too small, the `note` of the result is a warning
    about the head `name`. Every rank must make this call, because all ranks together run the
    target. A rank without a head passes None for `loaded`."""
    note = ""
    try:
        with torch.inference_mode():
            prompt = _prompt(info, tokenizer)
            reading = read(prompt)
            if loaded is not None:
                note = _check(loaded, reading, len(prompt))
    except Exception as error:  # noqa: BLE001 (a head that is not checked can only cost speed)
        _log.debug("the check of drafter %s has failed", name, exc_info=True)
        note = f"is not checked: {error!r}"
    if not note or loaded is None:
        return loaded
    note = f"drafter {name} {note}"
    _log.warning("%s", note)
    return replace(loaded, note=note)


def _prompt(info: ModelInfo, tokenizer: Any | None) -> Sequence[int]:
    """Returns a prompt, if possible in the target's chat format, on which heads are trained."""
    if tokenizer is None:
        return self_check_tokens(info)
    text = TokenizerText(tokenizer, info.name)
    try:
        ids = text.encode_chat([{"role": "user", "content": _PROMPT}])
    except BadRequest:
        ids = text.encode(_PROMPT)
    return ids[: info.max_model_len // 2]


def _check(loaded: LoadedDraftHead, reading: Reading, prompt_length: int) -> str:
    head = loaded.module
    text, hidden, likeliest = reading.token_ids, reading.hidden, reading.likeliest
    ways = head.ways(reading.num_layers)
    token_ids = torch.tensor(loaded.token_ids, device=text.device)
    num_chains = len(text) - _DEPTHS
    first = max(0, prompt_length - 2)  # from here, the target wrote the predicted tokens

    def agreement(way: str, offset: int = 0) -> float:
        head.read_as(ways[way])
        features = head.fuse(torch.cat([hidden[index] for index in head.layer_ids], -1))
        chains = features[None, offset : offset + num_chains]
        right = [
            token_ids[head.logits(drafted[0]).argmax(-1)] == likeliest[depth : depth + num_chains]
            for depth, drafted in enumerate(head.unroll(chains, text[None, 1:], _DEPTHS), start=1)
        ]
        return float(torch.stack(right)[:, first:].double().mean())

    best = stated = next(iter(ways))
    try:
        agreements = {way: agreement(way) for way in ways}
        shares = agreements | {"pairs one off": agreement(stated, 1)}
        highest = max(ways, key=lambda way: agreements[way])
        if agreements[highest] >= agreements[stated] + _GAIN_MIN:
            best = highest
    finally:
        head.read_as(ways[best])
    tried = "; ".join(f"{way}: {share:.0%}" for way, share in shares.items())
    summary = f"of {_DEPTHS * TOKENS_WRITTEN} predictions ({tried})"
    _log.info("the head agrees with its target in these shares %s", summary)
    if agreements[best] < AGREEMENT_MIN:
        return (
            f"agrees with its target in only {agreements[best]:.0%} {summary}; heads that fit a "
            f"target agree in {AGREEMENT_MIN:.0%} or more. This head was made for another target, "
            "or reads the target in an unknown way"
        )
    if best != stated:
        return (
            f"reads the {best} in place of the {stated}, because with the {best} it agrees with "
            f"its target in {agreements[best]:.0%} {summary}"
        )
    return ""


def read_library(target: Any, ranks: Ranks | None, prompt: Sequence[int]) -> Reading:
    """A `Reader` of a transformers module, which may be divided among `ranks`."""
    new = torch.tensor([prompt], device=next(target.parameters()).device)
    text, cache = [new], None
    for _ in range(TOKENS_WRITTEN):
        output = target(input_ids=new, past_key_values=cache, use_cache=True)
        cache, new = output.past_key_values, likeliest_tokens(output.logits[:, -1:], ranks)
        text.append(new)
    whole, num_layers = torch.cat(text, -1), len(layers_of(target))
    has_norm = isinstance(getattr(target.base_model, "norm", None), nn.Module)
    with tapped_layers(target, range(num_layers + has_norm)) as taps:
        logits = target(input_ids=whole, use_cache=False).logits[0]
        hidden = [tap.rows_read() for tap in taps]
    return Reading(whole[0], hidden, likeliest_tokens(logits, ranks), num_layers)


def likeliest_tokens(logits: Tensor, ranks: Ranks | None) -> Tensor:
    """Returns the likeliest tokens [..] by logits [.., V]. Of several ranks, only the leader needs
    logits."""
    if ranks is None:
        return logits.argmax(-1)
    return of_leader(ranks, logits.argmax(-1) if ranks.rank == 0 else logits.sum(-1).long())
