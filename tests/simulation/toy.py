"""The toy pair of languages of all simulations, and the output of its target alone.

A token depends only on the two before it: so few contexts that all rows are computed once."""

import math
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider.config.emulated_spec import EmulatedSpec
from outrider.engine.emulated import _NO_TOKEN, EmulatedEngine
from outrider.errors import check
from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import GenerateRequest
from outrider.models.tokenizer import TokenizerText
from outrider.sessions.store import FinishReason
from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.verdict_laws import score

SPEC = EmulatedSpec(
    vocab_size=7,
    support=7,
    exponent=0.8,
    deviation=0.6,
    order=2,
    verify_ms=15.0,
    draft_ms=2.0,
    max_model_len=96,
    num_pages=6,
    eos=6,
)
BYTES = (b"a", b"b", b"c", b"d", *(bytes([byte]) for byte in "é".encode()), b"e")
"""What each token stands for: a letter, or half of one. The last one is EOS."""
UNLIKELY_S = 0.003
_NUM_SYMBOLS = SPEC.vocab_size + 1
"""The last one stands for positions before the first token."""


@cache
def _rows(role: Any) -> torch.Tensor:
    """Logits [symbols squared, V] after any two symbols."""
    symbols = [*range(SPEC.vocab_size), _NO_TOKEN]
    contexts = [[first, second] for first in symbols for second in symbols]
    return EmulatedEngine(SPEC, role)._logits(np.array(contexts, dtype=np.uint64)).clone()


class QuickEngine(EmulatedEngine):
    """An emulated engine with a table of logits."""

    def _logits(self, contexts: Any) -> torch.Tensor:
        symbols = np.minimum(contexts, SPEC.vocab_size).astype(np.int64)
        # Not by torch, which takes several times as long to pick a row or two.
        rows = _rows(self._role).numpy()
        return torch.from_numpy(rows[symbols[:, 0] * _NUM_SYMBOLS + symbols[:, 1]])


class UnevenEngine(QuickEngine):
    """Takes longer for a token that was not the likeliest: as with a grammar, the time of a
    proposal depends on what was drawn."""

    def _step_time(self, steps: Sequence[SequenceStep]) -> float:
        seconds = super()._step_time(steps)
        return seconds + (UNLIKELY_S if any(self._is_unlikely(step) for step in steps) else 0.0)

    def _is_unlikely(self, step: SequenceStep) -> bool:
        if len(step.token_ids) != 1:
            return False
        before = self._contexts(step._replace(num_logits=2))[:1]
        context = np.array(before, dtype=np.uint64)
        return int(self._logits(context)[0].argmax()) != step.token_ids[0]


@cache
def _law(sampling: SamplingParams) -> torch.Tensor:
    """Probabilities [symbols squared, V]."""
    return target_probabilities(_rows("target").clone(), sampling)


@cache
def ranked_law(sampling: SamplingParams) -> tuple[float, ...]:
    """Probabilities of the likeliest token, the second, ...; the same after any prefix."""
    ranked = _law(sampling).sort(dim=1, descending=True).values
    check(bool(torch.allclose(ranked, ranked[:1].expand_as(ranked))), "ranks depend on the prefix")
    return tuple(p for p in ranked[0].tolist() if p > 0)


@cache
def _ranks(sampling: SamplingParams) -> list[list[int]]:
    """Rank of each token after any two symbols; impossible ones are last."""
    order = _law(sampling).argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1).tolist()  # type: ignore[no-any-return]


@cache
def toy_text() -> TokenizerText:
    """A byte-level tokenizer whose tokens are `BYTES`."""
    characters = bytes_to_unicode()
    vocab = {characters[token[0]]: token_id for token_id, token in enumerate(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerText(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "toy")


@cache
def _grammar_tokenizer() -> GrammarTokenizer:
    return GrammarTokenizer(toy_text().backend_json(), (SPEC.eos,))


def toy_grammars() -> Grammars:
    """Grammars whose compilation takes no time."""
    grammars = Grammars(_grammar_tokenizer)
    grammars.clock = grammars.now = lambda: 0.0
    return grammars


def allowed_after(constraint: Constraint, shown: Sequence[int]) -> list[bool]:
    """By token: whether a constraint, which lists choices, allows it after these."""
    text = b"".join(BYTES[token_id] for token_id in shown)
    choices = [choice.encode() for choice in constraint.choices]
    letters = [any(one.startswith(text + letter) for one in choices) for letter in BYTES]
    letters[SPEC.eos] = text in choices
    return letters


@dataclass(frozen=True)
class Ending:
    """Where plain decoding of tokens, one after the other, ends."""

    num_tokens: int
    text: str
    finish_reason: FinishReason | None
    """None: the tokens do not end an answer. `text` then has all their letters."""
    stop_string: str | None = None
    stop_token_id: int | None = None


def ending_of(request: GenerateRequest, token_ids: Sequence[int]) -> Ending:
    decoder, text = getincrementaldecoder("utf-8")("replace"), ""
    for num, token_id in enumerate(token_ids, start=1):
        is_eos = token_id == SPEC.eos and not request.ignore_eos
        if is_eos or token_id in request.sampling.stop_token_ids:
            text += decoder.decode(b"", final=True)
            stop_token_id = None if is_eos else token_id
            return Ending(num, text, FinishReason.STOP, stop_token_id=stop_token_id)
        text += decoder.decode(BYTES[token_id], final=num == request.max_tokens)
        found = [(text.find(stop), stop) for stop in request.stop if stop in text]
        if found:
            start, stop = min(found)
            return Ending(num, text[:start], FinishReason.STOP, stop)
        if num == request.max_tokens:
            return Ending(num, text, FinishReason.LENGTH)
    return Ending(len(token_ids), text + decoder.decode(b"", final=True), None)


def rule_of(request: GenerateRequest) -> Rule:
    """The rule that a request is decoded by."""
    return Rule.GREEDY if request.sampling.greedy else request.rule or Rule.TOKEN


def fault_free(request: GenerateRequest, shown: Sequence[int]) -> list[int]:
    """The token after each prefix of the prompt and what was shown, under coupled and greedy, where
    the target alone decides."""
    rule, seed = rule_of(request), request.seed or 0
    check(rule.absolute_noise, f"under {rule} a token depends on what was drafted")
    contexts = torch.tensor(_contexts(request, shown))
    if request.constraint is None:
        rows = _law(request.sampling)[contexts]
    else:
        prefixes = [shown[:place] for place in range(len(shown))]
        allowed = torch.tensor([allowed_after(request.constraint, one) for one in prefixes])
        logits = _rows("target")[contexts].masked_fill(~allowed, -math.inf)
        rows = target_probabilities(logits, request.sampling)
    return [
        score(row, Proposal(()), RoundNoise(seed, rule, place)).correction[0]
        for place, row in enumerate(rows.split(1), start=len(request.prompt))
    ]


def ranks_of(request: GenerateRequest, shown: Sequence[int]) -> list[int]:
    """Rank of each shown token among those possible there."""
    ranks, contexts = _ranks(request.sampling), _contexts(request, shown)
    return [ranks[context][token_id] for context, token_id in zip(contexts, shown, strict=True)]


@cache
def _raw_logprobs() -> list[list[float]]:
    """The target's log-probabilities [symbols squared, V], whatever the request's sampling."""
    return _rows("target").double().log_softmax(dim=1).tolist()  # type: ignore[no-any-return]


def logprobs_of(
    request: GenerateRequest, shown: Sequence[int], first: int
) -> list[PositionLogprobs]:
    """The log-probabilities of the shown tokens from index `first` on."""
    found = []
    for context, token_id in zip(_contexts(request, shown)[first:], shown[first:], strict=True):
        row = _raw_logprobs()[context]
        ranked = sorted(enumerate(row), key=lambda entry: (-entry[1], entry[0]))
        found.append(PositionLogprobs(row[token_id], tuple(ranked[: request.logprobs])))
    return found


def _contexts(request: GenerateRequest, shown: Sequence[int]) -> list[int]:
    """Row of the context of each shown token."""
    tokens = [*[SPEC.vocab_size] * 2, *request.prompt, *shown]
    pairs = pairwise(tokens[len(request.prompt) : -1])
    return [first * _NUM_SYMBOLS + second for first, second in pairs]
