"""Drafting with a model: K sequential steps, each over all sessions that still want a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafting.drafter import DraftRequest
from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.drafting import draft_tokens
from outrider.speculation.proposal import EMPTY_PROPOSAL, DraftDistribution, Proposal
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import TokenHistory, target_probabilities


class _Branch:
    """One session's proposal as it grows."""

    __slots__ = ("num_wanted", "q", "request", "token_ids", "unseen")

    def __init__(self, request: DraftRequest, unseen: tuple[int, ...], num_wanted: int) -> None:
        self.request = request
        self.unseen = unseen
        """Tokens that the engine must run before the next draw."""
        self.num_wanted = num_wanted
        self.token_ids: list[int] = []
        self.q: list[DraftDistribution | None] = []

    def proposal(self) -> Proposal:
        """What has been drafted; q where the rule looks at it."""
        q = tuple(self.q) if self.request.rule.needs_q else ()
        return Proposal(tuple(self.token_ids), q)


class ModelDrafter:
    """The `Drafter` that asks a model. After `propose` the engine holds the committed tokens and
    all drafted ones but the last, which was drawn and never run.

    It proposes less than was asked for, or nothing, where the model cannot go on: when the prefix
    holds a token outside its vocabulary, or comes near its `max_model_len`.
    """

    def __init__(self, engine: Engine, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        """`entries_max` bounds the support of each draft distribution."""
        self._engine = engine
        self._entries_max = entries_max

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """See `Drafter.propose`. The engine must hold a proper prefix of each request's tokens. A
        request for no tokens runs the prefix all the same, so that it is held when one comes."""
        branches = [self._begin(request) for request in requests]
        with torch.inference_mode():
            self._grow([branch for branch in branches if branch is not None])
        return [EMPTY_PROPOSAL if branch is None else branch.proposal() for branch in branches]

    def release(self, session_id: str) -> None:
        """See `Drafter.release`."""
        self._engine.release(session_id)

    def _grow(self, active: list[_Branch]) -> None:
        """Each branch to its length: one pass over all that lack a token, then their draws."""
        depth = 0
        while active:
            logits = self._engine.forward([_step(branch) for branch in active])
            active, rows = _that_want_more(active, logits)
            self._draw(active, rows, depth)
            depth += 1
            active = [branch for branch in active if len(branch.token_ids) < branch.num_wanted]

    def _begin(self, request: DraftRequest) -> _Branch | None:
        info = self._engine.info
        committed = request.token_ids
        held = self._engine.length(request.session_id)
        check(held < len(committed), f"{held} slots are held of {len(committed)} committed tokens")
        # x_K is drawn from the row of the token before it and needs no slot of its own.
        num_wanted = min(request.num_draft_tokens, info.max_model_len - len(committed) + 1)
        unseen = tuple(committed[held:])
        if len(committed) > info.max_model_len or max(unseen) >= info.vocab_size:
            return None
        return _Branch(request, unseen, num_wanted)

    def _draw(self, branches: Sequence[_Branch], rows: list[torch.Tensor], depth: int) -> None:
        """Draws token `depth` of each branch from its row of logits [V]."""
        by_rule: dict[Rule, list[int]] = {}
        for index, branch in enumerate(branches):
            by_rule.setdefault(branch.request.rule, []).append(index)
        probabilities = _probabilities(branches, rows)
        for indices in by_rule.values():
            drawn = draft_tokens(
                torch.stack([probabilities[index] for index in indices]),
                [branches[index].request.noise for index in indices],
                [depth] * len(indices),
                self._entries_max,
            )
            for index, (token_id, q) in zip(indices, drawn, strict=True):
                branch = branches[index]
                branch.token_ids.append(token_id)
                branch.q.append(q)
                branch.unseen = (token_id,)


def _step(branch: _Branch) -> SequenceStep:
    num_logits = 1 if branch.num_wanted > 0 else 0
    return SequenceStep(branch.request.session_id, branch.unseen, num_logits)


def _that_want_more(
    branches: Sequence[_Branch], logits: Sequence[torch.Tensor]
) -> tuple[list[_Branch], list[torch.Tensor]]:
    """The branches that draw a token, and the row [V] that each draws it from."""
    wanting = [i for i, branch in enumerate(branches) if branch.num_wanted > 0]
    return [branches[i] for i in wanting], [logits[i][0] for i in wanting]


def _probabilities(
    branches: Sequence[_Branch], rows: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The sampled distribution [V] of each branch, by its index. Branches with the same parameters
    and without penalties go through the transforms together."""
    probabilities: dict[int, torch.Tensor] = {}
    together: dict[SamplingParams, list[int]] = {}
    for index, branch in enumerate(branches):
        sampling = branch.request.sampling
        if sampling.penalised:
            history = _history(branch)
            row = rows[index][None]
            probabilities[index] = target_probabilities(row, sampling, history)[0]
        else:
            together.setdefault(sampling, []).append(index)
    for sampling, indices in together.items():
        stacked = target_probabilities(torch.stack([rows[i] for i in indices]), sampling)
        probabilities.update(zip(indices, stacked, strict=True))
    return probabilities


def _history(branch: _Branch) -> TokenHistory:
    """Penalties count what has been drafted as if it were output: for the target it will be."""
    committed, prompt_length = branch.request.token_ids, branch.request.prompt_length
    return TokenHistory(
        prompt_ids=committed[:prompt_length],
        output_ids=(*committed[prompt_length:], *branch.token_ids),
    )
