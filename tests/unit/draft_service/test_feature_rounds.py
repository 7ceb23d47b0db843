"""A head that drafts apart from its target, from features that the target sends: rounds through
both services."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from outrider.drafters.drafter import DraftDeadline
from outrider.drafters.features import Features
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo
from outrider.interfaces.messages import DraftItem, ProposalReply, Resync, VerdictReply, VerifyItem
from outrider.limits import PAGE_SIZE
from outrider.models.eagle3 import LoadedEagle3
from outrider.replica.step_request import StepRequest, Unfinished
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from target_service import verifier
from tests.support.models import flat_module, tiny_eagle3, twin
from tests.support.rounds import (
    RULES,
    Replica,
    make_head,
    outcome_of,
    proposal_of_head,
    run_step,
    step_request,
)

VOCAB, LENGTH = 24, 120
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
HEAD_IDS = tuple(range(0, VOCAB, 2))
SEED = 3
TOLERANCE = 1e-2  # allowed difference of features in bfloat16 from those of the library


@dataclass
class Pair:
    """A target that keeps features, a copy of its module, and a draft that reads them."""

    module: Any
    head: LoadedEagle3
    target: Replica
    draft: Replica
    held: dict[int, int] = field(default_factory=dict)
    """Number of tokens that the draft has of each session."""

    async def verify(
        self, tokens: Sequence[int], proposal: EncodedProposal, first: int | None, **head: Any
    ) -> VerdictReply:
        made = make_head(tokens, seed=SEED, prompt_length=len(PROMPT), **head)
        reply = await self.target.ask(VerifyItem(made, proposal, features_from=first))
        assert isinstance(reply, VerdictReply), reply
        return reply

    async def verify_together(self, lengths: Sequence[int]) -> list[VerdictReply]:
        """Runs the first tokens of sessions of these lengths in one step, without proposals."""
        items = [
            VerifyItem(make_head(range(length), session=number), features_from=0)
            for number, length in enumerate(lengths)
        ]
        replies = await self.target.send(*items)
        return sorted(replies, key=lambda reply: reply.key.session_id)

    def item(
        self, tokens: Sequence[int], features: Features | None, num: int = 3, **options: Any
    ) -> DraftItem:
        held = min(self.held.get(options.setdefault("session", 1), 0), len(tokens) - 1)
        head = make_head(tokens, held, seed=SEED, prompt_length=len(PROMPT), **options)
        return DraftItem(head, num, features=features)

    async def propose(self, *asked: Any, **options: Any) -> ProposalReply:
        reply = await self.draft.ask(self.item(*asked, **options))
        assert isinstance(reply, ProposalReply), reply
        self.held[options.get("session", 1)] = reply.cached_length
        return reply

    def features(self, tokens: Sequence[int], first: int, end: int | None = None) -> Features:
        """Features of these positions as they are sent, computed by the library's own pass."""
        states = self.module(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[index][0] for index in self.head.module.layer_ids], -1)
        rows = self.head.module.fuse(taps)[first : len(tokens) - 1 if end is None else end]
        rows = rows.detach().bfloat16()
        return Features(first, rows.shape[1], rows.view(torch.uint8).numpy().tobytes())

    def expected(
        self, tokens: Sequence[int], rows: bytes, rule: Rule, sampling: SamplingParams, num: int = 3
    ) -> Proposal:
        """The tokens of the head's own chains over all features at once."""
        numbers = torch.frombuffer(bytearray(rows), dtype=torch.bfloat16)
        features = numbers.view(1, -1, self.head.module.width).double()
        assert features.shape[1] == len(tokens) - 1

        def logits_after(text: Sequence[int]) -> torch.Tensor:
            num_passes = len(text) - len(tokens) + 1
            *_, hidden = self.head.module.unroll(features, torch.tensor([text[1:]]), num_passes)
            return self.head.module.logits(hidden[:, -1])

        noise = RoundNoise(SEED, rule, len(tokens))
        return proposal_of_head(logits_after, tokens, len(PROMPT), noise, sampling, num, HEAD_IDS)


@asynccontextmanager
async def running(num_pages: int = 64) -> AsyncIterator[Pair]:
    module = flat_module(VOCAB, LENGTH)
    original = twin(module)
    head, fusing, drafts = (tiny_eagle3(original, HEAD_IDS) for _ in range(3))
    fusing.module.drop_pairs()
    drafts.module.drop_fuse()
    info = ModelInfo("tiny", VOCAB, LENGTH, "float64", (), "w", "t")
    engine = PagedEngine(module, info, draft_layer=fusing, drafts_apart=True)
    num_bytes = num_pages * PAGE_SIZE * 2 * 2 * 8 * 8
    described = replace(info, name="head", logit_token_ids=HEAD_IDS)
    drafting = HeadEngine(drafts, described, max_num_seqs=8, kv_cache_memory_bytes=num_bytes)
    drafter = FeatureDrafter(drafts, drafting)
    async with (
        Replica("target", engine, max_num_seqs=8) as target,
        Replica("draft", drafter, 0.0, max_num_seqs=8) as draft,
    ):
        yield Pair(original, head, target, draft)


@pytest.mark.parametrize(("rule", "sampling"), RULES)
@pytest.mark.parametrize("rows_max", [512, 5])
async def test_what_is_drafted_round_after_round(
    rule: Rule, sampling: SamplingParams, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some draft tokens are accepted, some rejected. The head drafts from what verdicts send as if
    it saw all features at once. If a message has few rows, the prompt's rows come with several
    verdicts, and nothing is drafted until all are there."""
    monkeypatch.setattr("outrider.drafters.features.FEATURES_MAX", rows_max)
    async with running() as pair:
        tokens, proposal, accepted, shown = list(PROMPT), EMPTY_ENCODED_PROPOSAL, [], b""
        for index in range(12):
            options: dict[str, Any] = {"rule": rule, "sampling": sampling, "round_index": index}
            length, first = len(tokens), max(0, pair.held.get(1, 0) - 1)
            reply = await pair.verify(tokens, proposal, first, **options)
            outcome = outcome_of(reply, proposal, rule, SEED, length)
            accepted.append(outcome.num_accepted)
            tokens += outcome.token_ids
            new = reply.features
            assert (new.first, new.end) == (first, min(len(tokens) - 1, first + rows_max))
            assert _close(new, pair.features(tokens, first, new.end))
            shown += new.rows
            found = await pair.propose(tokens, new, **options)
            proposal = found.proposal
            assert found.cached_length == new.end + 1
            if new.end < len(tokens) - 1:
                assert not proposal
            else:
                assert proposal.decode() == pair.expected(tokens, shown, rule, sampling)
        assert rule is Rule.GREEDY or len(set(accepted)) > 1


def _close(ours: Features, theirs: Features) -> bool:
    a, b = (
        torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16).float()
        for features in (ours, theirs)
    )
    return bool((a - b).abs().max() < TOLERANCE * b.abs().max())


async def test_features_of_all_that_is_held_can_be_had_again() -> None:
    text = [*PROMPT, *(i * 7 % VOCAB for i in range(3 * PAGE_SIZE))]
    async with running() as pair:
        for session in (1, 2):
            for first in (0, 5):
                rounds = {"session": session, "round_index": first}
                found = (await pair.verify(text, EMPTY_ENCODED_PROPOSAL, first, **rounds)).features
                # The verdict's own token has no slot.
                assert (found.first, found.end) == (first, len(text))
                assert _close(found, pair.features([*text, 0], first))
        assert pair.target.engine.page_counts().prefix_hits > 0


@pytest.mark.parametrize(
    ("num_rows", "sent"), [(64, [22, 2, 12]), (20, [6, 2, 12]), (2, [0, 2, 0])]
)
async def test_a_step_sends_so_many_features_first_to_those_that_lack_fewest(
    num_rows: int, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as pair:
        num_bytes = num_rows * pair.head.module.width * 2
        monkeypatch.setattr(verifier, "FEATURES_STEP_BYTES_MAX", num_bytes)
        replies = await pair.verify_together([22, 2, 12])
        assert [len(reply.features or b"") for reply in replies] == sent


async def test_a_verdict_comes_without_features_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ranges: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    async with running() as pair:
        monkeypatch.setattr(pair.target.engine, "held_features", fail)
        replies = await pair.verify_together([3, 4])
        assert [reply.features for reply in replies] == [None, None]
        assert "2 verdicts are sent without features" in caplog.text


async def test_sessions_are_drafted_for_together_each_from_its_own() -> None:
    text = [*PROMPT, *(i * 7 % VOCAB for i in range(40))]
    asked = {1: (12, Rule.TOKEN, 2), 2: (38, Rule.COUPLED, 3), 3: (2, Rule.TOKEN, 1)}
    async with running() as pair:
        before = await pair.propose(text, pair.features(text, 0), 1, session=9)
        assert before.cached_length == len(text)
        for number, (length, rule, num) in asked.items():
            features = pair.features(text[:length], 0)
            pair.draft.link.send(pair.item(text[:length], features, num, session=number, rule=rule))
        replies = {int(r.key.session_id, 16): r for r in (await pair.draft.listener.wait(4))[1:]}
        for number, (length, rule, num) in asked.items():
            rows = pair.features(text[:length], 0).rows
            expected = pair.expected(text[:length], rows, rule, SamplingParams(), num)
            assert replies[number].proposal.decode() == expected
        assert pair.draft.engine.page_counts().prefix_hits > 0


async def test_the_pair_that_is_drafted_from_is_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_written: list[int] = []
    async with running() as pair:
        cache = pair.draft.engine._layer._pairs.cache
        write = type(cache).write

        def counted(self: Any, slots: torch.Tensor, *written: torch.Tensor) -> None:
            num_written.append(len(slots))
            write(self, slots, *written)

        monkeypatch.setattr(type(cache), "write", counted)
        for end, num in ((5, [4, 1]), (6, [1]), (8, [1, 1])):
            text = PROMPT[:end]
            num_written.clear()
            await pair.propose(text, pair.features(text, 0), 1)
            assert num_written == num


async def test_a_session_that_was_forgotten_is_asked_for_again() -> None:
    text = [*PROMPT, *(i * 5 % VOCAB for i in range(20))]
    async with running() as pair:
        await pair.propose(text[:20], pair.features(text[:20], 0))
        pair.draft.engine.release(make_head(text).session_id)
        pair.held[1] = 20
        again = pair.item(text[:21], pair.features(text[:21], 19), round_index=1)
        found = await pair.draft.ask(again)
        assert isinstance(found, Resync)
        pair.held[1] = found.cached_length
        # The page that is left is used; rows behind a gap change nothing.
        for first, expected in ((17, (0, PAGE_SIZE)), (15, (3, 21))):
            features = pair.features(text[:21], first)
            reply = await pair.propose(text[:21], features, round_index=1)
            assert (len(reply.proposal), reply.cached_length) == expected


async def test_features_of_few_tokens_take_pages_for_these_alone() -> None:
    long, short = ([i * step % VOCAB for i in range(3 * PAGE_SIZE)] for step in (5, 7))
    async with running(num_pages=3) as pair:
        for end, session in ((3, 1), (3, 2), (6, 1)):
            text = long if session == 1 else short[: end + 1]
            await pair.propose(text, pair.features(text, 0, end), session=session)
        assert pair.held == {1: 7, 2: 4}
        assert pair.draft.engine.length(make_head(short, session=2).session_id) == 4


async def test_features_of_tokens_that_were_never_committed_are_forgotten() -> None:
    """Such tokens remain when a coordinator dies after it has decided more than was stored."""
    first, second = ([*PROMPT, *(i * step % VOCAB for i in range(12))] for step in (5, 7))
    async with running() as pair:
        await pair.propose(first, pair.features(first, 0), rule=Rule.TOKEN)
        pair.held[1] = 9
        features = pair.features(second, 8)
        found = await pair.propose(second, features, rule=Rule.TOKEN, epoch=2)
        whole = pair.features(second, 0, 8).rows + features.rows
        assert found.proposal.decode() == pair.expected(second, whole, Rule.TOKEN, SamplingParams())


@pytest.mark.parametrize(
    ("features", "name"),
    [(Features(0, 4, bytes(8)), "features.width"), (Features(0, 24, bytes(7 * 48)), "features")],
)
async def test_features_that_cannot_be_are_refused(features: Features, name: str) -> None:
    async with running() as pair:
        text = (1, 2, 3, 4, 1, 2, 3)
        good = pair.features(text, 0)
        expected = (await pair.propose(text, good, session=9)).proposal
        for number, rows in ((1, features), (2, good)):
            pair.draft.link.send(pair.item(text, rows, session=number))
        replies = {int(r.key.session_id, 16): r for r in (await pair.draft.listener.wait(3))[1:]}
        assert replies[1].message.startswith(f"{name}:")
        assert replies[2].proposal == expected


def interrupted(pair: Pair, text: Sequence[int]) -> tuple[StepRequest[DraftItem], list[int]]:
    """An item whose draft is unfinished, as the step ended because another session's time was over,
    and its text with what is drafted."""
    first = step_request(pair.item(text, pair.features(text, 0)), DraftDeadline())
    times = iter([0.0] * 3)
    hasty = step_request(
        pair.item(text, pair.features(text, 0), 2, session=2),
        DraftDeadline(1.0, lambda: next(times, 2.0)),
    )
    worker, name = pair.draft.service._worker, first.session_id
    assert run_step(worker, [first, hasty])[0] is Unfinished.CONTINUES
    drafted = [*text, *worker._unfinished[name].draft.token_ids]
    assert pair.draft.engine.length(name) == len(drafted) - 1
    return first, drafted


async def test_an_unfinished_draft_goes_on_and_holds_no_guesses() -> None:
    async with running() as pair:
        expected = (await pair.propose(PROMPT, pair.features(PROMPT, 0), session=9)).proposal
        first, _ = interrupted(pair, PROMPT)
        [found] = run_step(pair.draft.service._worker, [first])
        assert (found.proposal, found.cached_length) == (expected, len(PROMPT))


async def test_a_draft_that_is_given_up_leaves_no_slots_of_its_guesses() -> None:
    async with running() as pair:
        _, text = interrupted(pair, PROMPT)
        pair.held[1] = len(PROMPT)
        again = pair.item([*text, 0], pair.features([*text, 0], len(PROMPT) - 1), round_index=1)
        [found] = run_step(pair.draft.service._worker, [again])
        assert len(found.proposal) == 3


async def test_a_stream_that_breaks_leaves_no_page_of_guesses() -> None:
    """The unfinished draft of a head fills a page from hidden states that it guessed. Another
    session with these tokens must not begin on that page."""
    async with running() as pair:
        worker = pair.draft.service._worker
        first, text = interrupted(pair, [*PROMPT, *PROMPT][: PAGE_SIZE - 1])
        name = first.session_id
        assert pair.draft.engine.length(name) >= PAGE_SIZE
        worker.leave({name: False})
        assert name not in worker._unfinished
        assert pair.draft.engine.page_counts().num_evictable == 0
        assert pair.draft.engine.attach("other", [*text, 0], first.item.head.tenant) == 0
