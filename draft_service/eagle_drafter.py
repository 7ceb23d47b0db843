"""Drafting from what the target's own head read, with a head apart from the target."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.errors import BadRequest
from outrider.hidden_states import Features
from outrider.limits import DRAFT_SUPPORT_ENTRIES, FEATURES_MAX
from outrider.models.eagle import LoadedEagle
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import Proposal


class _Window(NamedTuple):
    """The newest committed pairs of a session, P of `FEATURES_MAX` at most."""

    keys: Tensor
    """[P, heads, width of one]"""
    values: Tensor
    """The same of values."""
    queries: Tensor
    joined: Tensor
    """Of the newest pair alone: see `Pairs` ..."""
    features: Tensor
    """... [D], and what it was made of."""
    tokens: tuple[int, ...]
    """Those behind the places of the pairs."""
    end: int
    """The place behind the newest pair."""

    def is_of(self, token_ids: Sequence[int]) -> bool:
        return tuple(token_ids[self.end - len(self.tokens) + 1 : self.end + 1]) == self.tokens


class EagleDrafter:
    """A `Drafter` that goes on from features which come with the requests. Of a session it keeps
    what attention sees of the newest pairs, of `sessions_max` sessions at most, the longest unused
    makes room; one that is unknown, or that misses some, begins with what has come. A look-up
    proposes where there is nothing to go on from, as before the first verdict, and, if asked to,
    where it is confident. Which of them does depends on committed tokens and on earlier rounds
    alone."""

    def __init__(
        self,
        eagle: LoadedEagle,
        lookup: LookupDrafter,
        *,
        min_score: float | None = None,
        sessions_max: int,
        entries_max: int = DRAFT_SUPPORT_ENTRIES,
    ) -> None:
        """The look-up goes first where it expects `min_score` of its tokens to be accepted; None =
        never. `entries_max` bounds the support of each draft distribution."""
        self._head = eagle.module
        self._sampler = DraftSampler(DraftVocabulary.of(eagle.token_ids), entries_max)
        self._lookup = lookup
        self._min_score = min_score
        self._sessions_max = sessions_max
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self.on_dropped: Callable[[str], None] = lambda session_id: None
        """Hears whose pairs made room: who sent them has them still."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """See `Drafter.propose`. A round whose logits cannot be drawn from has what was drawn so
        far. Raises `BadRequest` for features that cannot be this target's."""
        with torch.inference_mode():
            self._hear(requests)
            looked_up = [self._looked_up(request) for request in requests]
            mine = [
                request for request, found in zip(requests, looked_up, strict=True) if found is None
            ]
            drafted = iter(self._draft(mine) if mine else ())
        return [next(drafted) if found is None else found for found in looked_up]

    def _looked_up(self, request: DraftRequest) -> Proposal | None:
        """What the look-up proposes; None where the head does."""
        goes_on = self._goes_on(request)
        if goes_on and self._min_score is None:
            return None
        guess = self._lookup.guess(request).within(request)
        is_sure = self._min_score is not None and guess.score >= self._min_score
        return None if goes_on and not is_sure else guess.proposal(request)

    def release(self, session_id: str) -> None:
        self._lookup.release(session_id)
        self._windows.pop(session_id, None)

    def _goes_on(self, request: DraftRequest) -> bool:
        window = self._window(request)
        has_pair = window is not None and window.end == len(request.token_ids) - 1
        return has_pair and request.num_draft_tokens > 0

    def _window(self, request: DraftRequest) -> _Window | None:
        """What is kept of the session, if it is of these tokens; else it is forgotten."""
        window = self._windows.get(request.session_id)
        if window is None or window.is_of(request.token_ids):
            return window
        del self._windows[request.session_id]
        return None

    def _hear(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if request.session_id in self._windows:
                self._windows.move_to_end(request.session_id)
        heard = [(request, rows) for request in requests if (rows := self._new_rows(request))]
        if not heard:
            return
        weight = self._head.embeddings
        features = torch.cat([_tensor(rows) for _, rows in heard]).to(weight)
        tokens = [v for request, rows in heard for v in _behind(request, rows)]
        places = [place for _, rows in heard for place in range(rows.first, rows.end)]
        asked = torch.tensor([tokens, places], device=weight.device)
        pairs = self._head.pairs(features, *asked)
        end = 0
        for request, rows in heard:
            own, end = slice(end, end + len(rows)), end + len(rows)
            window = self._windows.pop(request.session_id, None)
            keys, values, behind = pairs.keys[own], pairs.values[own], (*_behind(request, rows),)
            if window is not None and window.end == rows.first:
                keys = torch.cat([window.keys, keys])
                values = torch.cat([window.values, values])
                behind = window.tokens + behind
            self._windows[request.session_id] = _Window(
                keys[-FEATURES_MAX:].clone(),
                values[-FEATURES_MAX:].clone(),
                pairs.queries[end - 1].clone(),
                pairs.joined[end - 1].clone(),
                features[end - 1].clone(),
                behind[-FEATURES_MAX:],
                rows.end,
            )
        while len(self._windows) > self._sessions_max:
            dropped, _ = self._windows.popitem(last=False)
            self.on_dropped(dropped)

    def _new_rows(self, request: DraftRequest) -> Features | None:
        rows = request.features
        if rows is None:
            return None
        vocab_size, width = self._head.embeddings.shape
        length = len(request.token_ids)
        if rows.width != width:
            raise BadRequest("features.width", f"{rows.width} given; the target's has {width}")
        if rows.end >= length:
            raise BadRequest("features", f"are of places up to {rows.end}, of {length} tokens")
        window = self._window(request)
        known = window.end if window is not None and window.end >= rows.first else rows.first
        new = rows.since(known)
        is_known = new is not None and max(_behind(request, new)) < vocab_size
        return new if is_known else None

    def _draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        windows = [self._windows[request.session_id] for request in requests]
        drafts = [AutoregressiveDraft(request) for request in requests]
        keys: Any
        values: Any
        keys, values, *newest, _, ends = (list(column) for column in zip(*windows, strict=True))
        lengths, places = torch.tensor([[*map(len, keys)], ends], device=keys[0].device)
        keys, values = (
            nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (keys, values)
        )
        queries, joined, features = map(torch.stack, newest)
        seen = torch.arange(keys.shape[1], device=keys.device) < lengths[:, None]

        def next_logits(active: Sequence[int]) -> Tensor:
            nonlocal features, joined, keys, queries, seen, values
            depth = len(drafts[active[0]].token_ids)
            if depth > 0:
                tokens = torch.tensor([draft.newest for draft in drafts], device=keys.device)
                pairs = self._head.pairs(features, tokens, places + (depth - 1))
                queries, joined = pairs.queries, pairs.joined
                keys = torch.cat([keys, pairs.keys[:, None]], 1)
                values = torch.cat([values, pairs.values[:, None]], 1)
                seen = nn.functional.pad(seen, (0, 1), value=True)
            # Of a query [S, heads, E] each over its L keys and values, of which it sees some.
            mixed = nn.functional.scaled_dot_product_attention(
                queries[:, :, None], keys.transpose(1, 2), values.transpose(1, 2),
                attn_mask=seen[:, None, None],
            )  # fmt: skip
            features = self._head.guess(features, joined, mixed[:, :, 0])
            return self._head.logits(features[active])

        self._sampler.run(drafts, next_logits)
        return [draft.proposal for draft in drafts]


def _behind(request: DraftRequest, rows: Features) -> Sequence[int]:
    return request.token_ids[rows.first + 1 : rows.end + 1]


def _tensor(rows: Features) -> Tensor:
    """[n, D], bfloat16."""
    numbers = torch.frombuffer(bytearray(rows.rows), dtype=torch.bfloat16)
    return numbers.view(len(rows), rows.width)
