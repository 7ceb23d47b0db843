"""Suffix decoding: drafts tokens that most often followed the last tokens, in the session and in
earlier answers to the same tenant.

The method is from Oliaro et al., "SuffixDecoding" (2024, arXiv 2411.04975). A *match* is an earlier
occurrence of the last tokens. The *share* of a token is the fraction of the matches that the token
follows. The paper's tree of all suffixes takes O(depth) memory for each token. Here, an index finds
the latest matches instead, and each round counts the tokens that follow the matches."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter, TextIndex, chance_of
from outrider.errors import check
from outrider.limits import SUFFIX_SEEDS_MAX

MATCH_IN_SESSION_MIN = 1
MATCH_IN_HISTORY_MIN = 2
"""In earlier answers, single tokens match often and predict little."""


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Limits of the search, of the history and of drafts."""

    depth: int = 16
    """Matches of this many tokens or more count as equally long."""
    min_score: float = 0.1
    """A draft ends before the estimated chance that all its tokens are accepted falls below this
    value."""
    tokens_per_tenant: int = 2**17
    """Maximum length of a tenant's history. The oldest outputs are dropped first."""
    tokens_total: int = 2**19
    """Maximum length of all histories together. The tenant that has added no output for the longest
    time loses outputs first."""
    occurrences_max: int = 64
    """Maximum number of matches that are read, for session and history separately."""
    tokens_per_match: int = 4
    """Maximum number of draft tokens for each token of the match."""


class _Occurrence(NamedTuple):
    text: TextIndex
    place: int  # the index in `text` of the token after the occurrence
    length: int  # number of tokens before the place that equal the session's last tokens

    def follower(self, drafted: Sequence[int]) -> int:
        """The token at `place + len(drafted)`. If the session's text ends before this place, the
        token is one of `drafted`."""
        place = self.place + len(drafted)
        beyond = place - self.text.end
        return self.text.token(place) if beyond < 0 else drafted[beyond]


class _SessionText(TextIndex):
    def __init__(self, request: DraftRequest) -> None:
        super().__init__(MATCH_IN_SESSION_MIN)
        self.tenant = request.tenant
        self.seed = request.noise.seed
        self.prompt_length = request.prompt_length


class SuffixDrafter(LookupDrafter):
    """Drafts from a session's own text, and from its tenant's history of finished outputs.

    Of a tenant's sessions with the same seed, only the first adds its output to the history, when
    this session ends. The drafter remembers `seeds_max` seeds. When it forgets a seed, it also
    forgets the seed's output. Under the rules token and block, only the first session reads the
    history (`drafter.py` says why). The others read no outputs, not even those of other seeds,
    because the length of the first session's output may decide which outputs are kept.

    A round takes at most O(occurrences_max * (depth + L * K)) for matches of L different lengths.
    """

    def __init__(
        self, config: SuffixConfig | None = None, seeds_max: int = SUFFIX_SEEDS_MAX
    ) -> None:
        super().__init__(_SessionText)
        self._config = config or SuffixConfig()
        self._history = History(self._config.tokens_per_tenant, self._config.tokens_total)
        self._seeds_max = seeds_max
        self._first_of_seed: OrderedDict[tuple[str, int], str | None] = OrderedDict()
        """The first session of each tenant and seed, or None after it has ended. Oldest first."""

    def _guess(self, request: DraftRequest, text: TextIndex) -> Guess:
        """For each match length, makes a guess from all matches of at least this length. Returns
        the guess with the highest score."""
        key = request.tenant, request.noise.seed
        is_first = self._first_of_seed.setdefault(key, request.session_id) == request.session_id
        if len(self._first_of_seed) > self._seeds_max:
            forgotten, _ = self._first_of_seed.popitem(last=False)
            self._history.forget(*forgotten)
        tail = text.slice(text.end - self._config.depth, text.end)
        occurrences = self._occurrences(text, tail, 1)  # The first match is `tail` itself.
        if is_first or request.rule.absolute_noise:
            history = self._history.of(request.tenant)
            if history is not None:
                occurrences += self._occurrences(history, tail)
        best, least = NO_GUESS, max(self._config.min_score, request.min_chance)
        for length in sorted({occurrence.length for occurrence in occurrences}, reverse=True):
            limit = min(request.num_draft_tokens, self._config.tokens_per_match * length)
            if best.score >= limit:
                break
            matching = [occurrence for occurrence in occurrences if occurrence.length >= length]
            guess = _most_frequent(matching, length, limit, least)
            if guess.score > best.score:
                best = guess
        return best

    def release(self, session_id: str) -> None:
        """If the session is the first with its seed, adds to the history the last tokens of the
        prompt, and the output up to the last call of `guess`."""
        text = self._texts.get(session_id)
        if text is not None:
            for _ in self.end(session_id, text.slice(0, text.end)):
                pass

    def end(self, session_id: str, token_ids: Sequence[int]) -> Iterator[int]:
        """If the session is the first with its seed, the iterator adds to the history the last
        tokens of the prompt and the output."""
        text = self._texts.pop(session_id, None)
        if text is None or self._first_of_seed.get((text.tenant, text.seed)) != session_id:
            return iter(())
        self._first_of_seed[text.tenant, text.seed] = None
        if len(token_ids) <= text.prompt_length:
            return iter(())
        start = max(0, text.prompt_length - self._config.depth)
        return self._learn(text.tenant, text.seed, token_ids[start:])

    def _learn(self, tenant: str, seed: int, token_ids: Sequence[int]) -> Iterator[int]:
        """Adds an output to the history, in pieces that overlap so that matches are found."""
        overlap = self._config.depth
        if len(token_ids) > overlap + PIECE_TOKENS:
            room = min(self._config.tokens_per_tenant, self._config.tokens_total)
            token_ids = token_ids[-max(1, room * PIECE_TOKENS // (PIECE_TOKENS + overlap + 1)) :]
        stops = [*range(overlap + PIECE_TOKENS, len(token_ids), PIECE_TOKENS), len(token_ids)]
        start = 0
        for stop in stops:
            if self._first_of_seed.get((tenant, seed), "") is not None:
                return  # The seed was forgotten, so its output must be, too.
            self._history.add(tenant, seed, token_ids[start:stop])
            yield stop - start
            start = stop - overlap

    def _occurrences(
        self, text: TextIndex, tail: Sequence[int], num_left_out: int = 0
    ) -> list[_Occurrence]:
        stop = num_left_out + self._config.occurrences_max
        places = islice(text.occurrences(tail), num_left_out, stop)
        return [_Occurrence(text, place, text.match_length(place, tail)) for place in places]


def _most_frequent(
    matching: Sequence[_Occurrence], length: int, limit: int, min_score: float
) -> Guess:
    """Drafts the token that follows the most occurrences (of equally frequent tokens, the lowest
    id). Each later token comes from the occurrences that continued with all drafted tokens."""
    drafted: list[int] = []
    score, product = 0.0, 1.0
    while len(drafted) < limit:
        followed: dict[int, list[_Occurrence]] = {}
        for occurrence in matching:
            followed.setdefault(occurrence.follower(drafted), []).append(occurrence)
        num_all = len(matching) - len(followed.pop(END, ()))
        if not followed:
            break
        token_id, matching = max(followed.items(), key=lambda item: (len(item[1]), -item[0]))
        product *= chance_of(len(matching), num_all, length, len(drafted))
        if product < min_score:
            break
        drafted.append(token_id)
        score += product
    return Guess(tuple(drafted), score)


PIECE_TOKENS = 1024
"""Number of tokens that are learned at a time. This takes about 2 ms."""
END = -1
"""Separates the pieces of outputs in a history. Neither matches nor drafts extend over two."""


class _TenantHistory(TextIndex):
    def __init__(self) -> None:
        super().__init__(MATCH_IN_HISTORY_MIN)
        self.lengths: OrderedDict[int, int] = OrderedDict()
        """Maps a seed to the length of its output, with an `END` after each piece. Oldest output
        first."""


class History:
    """The finished outputs of each tenant."""

    def __init__(self, tokens_per_tenant: int, tokens_total: int) -> None:
        self._tokens_per_tenant = min(tokens_per_tenant, tokens_total)
        self._tokens_total = tokens_total
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()
        """The tenant that has added no output for the longest time comes first."""
        self._num_tokens = 0

    def of(self, tenant: str) -> TextIndex | None:
        """The tenant's outputs in one text; None = no outputs. Valid until the next `add`."""
        return self._tenants.get(tenant)

    def add(self, tenant: str, seed: int, token_ids: Sequence[int]) -> None:
        """Adds an output, or the next piece of the newest output. If it is longer than a history
        may be, adds only its last tokens. To make room, drops old outputs, first those of this
        tenant. If the tenant has an output of `seed`, it must be the newest."""
        room = self._tokens_per_tenant - 1
        if room < 1:
            return
        added = [*token_ids[-room:], END]
        history = self._tenants.setdefault(tenant, _TenantHistory())
        self._tenants.move_to_end(tenant)
        newest = next(reversed(history.lengths), seed)
        check(
            seed == newest or seed not in history.lengths, f"{seed} is no new output of {tenant!r}"
        )
        length = history.lengths.pop(seed, 0)
        history.extend(added)
        history.lengths[seed] = length + len(added)
        self._num_tokens += len(added)
        while len(history) > self._tokens_per_tenant:
            self._forget_oldest(tenant)
        while self._num_tokens > self._tokens_total:
            self._forget_oldest(next(iter(self._tenants)))

    def forget(self, tenant: str, seed: int) -> None:
        """Forgets the tenant's output of this seed, if any. Also forgets all older outputs, because
        the output's length has decided which older outputs were kept."""
        while tenant in self._tenants and seed in self._tenants[tenant].lengths:
            self._forget_oldest(tenant)

    def _forget_oldest(self, tenant: str) -> None:
        history = self._tenants[tenant]
        _, length = history.lengths.popitem(last=False)
        history.cut(length)
        self._num_tokens -= length
        if not history.lengths:
            del self._tenants[tenant]
