"""Suffix decoding: drafts what most often followed the last tokens, in the session and in earlier
answers to the same tenant.

Oliaro et al., "SuffixDecoding" (2024, arXiv 2411.04975). A draft grows while the product of its
tokens' shares among the occurrences is large enough, and is at most a multiple of the match's
length. The paper keeps a tree of all suffixes, which takes O(depth) memory a token. Here an index
finds the latest occurrences of the last tokens, and their continuations are counted in each round.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter, TextIndex, share_of
from outrider.errors import check
from outrider.limits import SUFFIX_SEEDS_MAX

MATCH_IN_SESSION_MIN = 1
MATCH_IN_HISTORY_MIN = 2
"""Minimum lengths of a match. In a long history, single tokens match often and predict little."""


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Limits of the search, of the history and of drafts. The defaults were nearly the best over
    texts of a 135M chat model at K = 8. A look-up takes 45 us."""

    depth: int = 16
    """Matches of this length or more count as equally long."""
    min_score: float = 0.1
    """A draft ends before the product of its tokens' shares falls below this."""
    tokens_per_tenant: int = 2**17
    """Maximum number of tokens of earlier outputs for a tenant. The oldest are dropped first."""
    tokens_total: int = 2**19
    """Maximum number of tokens for all tenants. The tenant with the oldest last output loses its
    tokens first."""
    occurrences_max: int = 64
    """Maximum number of occurrences of the last tokens that are compared, latest first, in the
    session, and the same number in the tenant's history."""
    tokens_per_match: int = 4
    """Maximum number of draft tokens for each token of the match."""


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """An earlier occurrence of a session's last tokens."""

    text: TextIndex
    place: int
    """The place after the occurrence."""
    length: int
    """How many tokens before the place match the session's end."""

    def follower(self, drafted: Sequence[int]) -> int | None:
        """The token that follows here after as many tokens as were drafted. Beyond the end of the
        text the drafted tokens follow, so that a session's own repetition is continued."""
        place = self.place + len(drafted)
        beyond = place - self.text.end
        return self.text.token(place) if beyond < 0 else drafted[beyond]


class _SessionText(TextIndex):
    """A session's tokens, and what is needed to add its output to the history."""

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(MATCH_IN_SESSION_MIN)
        self.tenant = request.tenant
        self.seed = request.noise.seed
        self.prompt_length = request.prompt_length


class SuffixDrafter(LookupDrafter):
    """Looks up a session's own text and the finished outputs of its tenant.

    Of a tenant's sessions with one seed, only the first adds to the history, when it ends. The
    others have the same noise. If noise is keyed by the round, the first session's output depends
    on this noise. It would steer the drafts of the others, and so bias the tests of these drafts.
    Then the others do not read the history either, because what it holds may depend on the length
    of the first session's output. When a seed is forgotten, so is the output of its session.

    A round takes at most O(occurrences_max * (depth + distinct match lengths * K)), a token that is
    appended or forgotten O(1). `TextIndex` states the memory.
    """

    def __init__(
        self, config: SuffixConfig | None = None, seeds_max: int = SUFFIX_SEEDS_MAX
    ) -> None:
        """`seeds_max`: the number of seeds whose first session is remembered."""
        super().__init__(_SessionText)
        self._config = config or SuffixConfig()
        self._history = History(self._config.tokens_per_tenant, self._config.tokens_total)
        self._seeds_max = seeds_max
        self._first_of_seed: OrderedDict[tuple[str, int], str | None] = OrderedDict()
        """By tenant and seed, oldest first: the first session; None once it has ended."""

    def _guess(self, request: DraftRequest, text: TextIndex) -> Guess:
        is_first = self._is_first(request)
        tail = text.slice(text.end - self._config.depth, text.end)
        found = self._occurrences(text, text.earlier(), tail)
        if is_first or request.rule.absolute_noise:
            history = self._history.of(request.tenant)
            if history is not None:
                found += self._occurrences(history, history.occurrences(tail), tail)
        return _continuation(found, request.num_draft_tokens, self._config)

    def release(self, session_id: str) -> None:
        """Ends the session. Adds its output, as committed at its last request, to the history, with
        the last tokens of the prompt before it."""
        text = self._texts.pop(session_id, None)
        if text is None or self._first_of_seed.get((text.tenant, text.seed)) != session_id:
            return
        self._first_of_seed[text.tenant, text.seed] = None
        if text.end > text.prompt_length:
            start = max(0, text.prompt_length - self._config.depth)
            self._history.add(text.tenant, text.seed, text.slice(start, text.end))

    def _is_first(self, request: DraftRequest) -> bool:
        """Whether the session is the tenant's first with its seed."""
        key = request.tenant, request.noise.seed
        first = self._first_of_seed.setdefault(key, request.session_id)
        if len(self._first_of_seed) > self._seeds_max:
            forgotten, _ = self._first_of_seed.popitem(last=False)
            self._history.forget(*forgotten)
        return first == request.session_id

    def _occurrences(
        self, text: TextIndex, places: Iterable[int], tail: Sequence[int]
    ) -> list[_Occurrence]:
        return [
            _Occurrence(text, place, text.match_length(place, tail))
            for place in islice(places, self._config.occurrences_max)
        ]


def _continuation(found: Sequence[_Occurrence], num_tokens: int, config: SuffixConfig) -> Guess:
    """The guess with the best score. Each length of a match gives a guess, from the occurrences of
    this length or more."""
    best = NO_GUESS
    for length in sorted({occurrence.length for occurrence in found}, reverse=True):
        limit = min(num_tokens, config.tokens_per_match * length)
        if best.score >= limit:
            break
        matching = [occurrence for occurrence in found if occurrence.length >= length]
        guess = _most_frequent(matching, length, limit, config.min_score)
        if guess.score > best.score:
            best = guess
    return best


def _most_frequent(
    matching: Sequence[_Occurrence], length: int, limit: int, min_score: float
) -> Guess:
    """Drafts the most frequent next token, and of equally frequent ones the lowest id. Then
    continues with the occurrences that have this token."""
    drafted: list[int] = []
    score, product = 0.0, 1.0
    while len(drafted) < limit:
        followed: dict[int, list[_Occurrence]] = {}
        num_all = 0
        for occurrence in matching:
            token_id = occurrence.follower(drafted)
            if token_id is not None and token_id >= 0:
                followed.setdefault(token_id, []).append(occurrence)
                num_all += 1
        if not followed:
            break
        token_id, matching = max(followed.items(), key=lambda item: (len(item[1]), -item[0]))
        product *= share_of(len(matching), num_all, length)
        if product < min_score:
            break
        drafted.append(token_id)
        score += product
    return Guess(tuple(drafted), score)


END = -1
"""Follows every output. No token has this id, so no match or draft extends over two outputs."""


class _TenantHistory(TextIndex):
    def __init__(self) -> None:
        super().__init__(MATCH_IN_HISTORY_MIN)
        self.lengths: OrderedDict[int, int] = OrderedDict()
        """Seed -> length of its output, `END` included; oldest first."""


class History:
    """Outputs by tenant. To add an output takes O(1) for each of its tokens and for each token that
    is dropped."""

    def __init__(self, tokens_per_tenant: int, tokens_total: int) -> None:
        self._tokens_per_tenant = min(tokens_per_tenant, tokens_total)
        self._tokens_total = tokens_total
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()
        """Ordered by the last output, oldest first."""
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens of all tenants, including an `END` for each output."""
        return self._num_tokens

    def of(self, tenant: str) -> TextIndex | None:
        """The tenant's outputs, one after another, each with an `END`; None if there are none.
        Valid until the next `add`."""
        return self._tenants.get(tenant)

    def add(self, tenant: str, seed: int, token_ids: Sequence[int]) -> None:
        """Adds an output, or its last part if it exceeds the tenant's share. Drops older outputs of
        the tenant first, then those of others. The tenant must have no output of this seed yet."""
        room = self._tokens_per_tenant - 1
        if room < 1:
            return
        added = [*token_ids[-room:], END]
        history = self._tenants.setdefault(tenant, _TenantHistory())
        self._tenants.move_to_end(tenant)
        check(seed not in history.lengths, f"tenant {tenant!r} has an output of seed {seed}")
        history.extend(added)
        history.lengths[seed] = len(added)
        self._num_tokens += len(added)
        while len(history) > self._tokens_per_tenant:
            self._forget_oldest(tenant)
        while self._num_tokens > self._tokens_total:
            self._forget_oldest(next(iter(self._tenants)))

    def forget(self, tenant: str, seed: int) -> None:
        """Forgets the tenant's output of this seed, if it is kept, and all before it. Then the
        history depends neither on that output's tokens nor on their number."""
        while tenant in self._tenants and seed in self._tenants[tenant].lengths:
            self._forget_oldest(tenant)

    def _forget_oldest(self, tenant: str) -> None:
        history = self._tenants[tenant]
        _, length = history.lengths.popitem(last=False)
        history.cut(length)
        self._num_tokens -= length
        if not history.lengths:
            del self._tenants[tenant]
