"""Trap 8 through the services: a draft token is not dropped for what it is. Here the draft fails
after one of its own tokens, as a model in half precision does whose numbers overflow there."""

from __future__ import annotations

from typing import Any

from exactness.law import fit
from rounds import Listener, make_head, session_name
from toy_engine import ToyEngine, toy_logits

from draft_service.service import DraftService
from outrider.messages import DraftItem, ProposalReply, VerdictReply, VerifyItem
from outrider.replica.scheduler import InlineExecutor
from outrider.speculation.accept_reject import decide
from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

PROMPT = (0, 1, 2)
FATAL = 2
"""After this first token the draft has no logits."""
TARGET_SALT, DRAFT_SALT = 10, 4
NUM_ROUNDS = 4_000
PER_STEP = 500


class Side:
    """A service, and every answer by its session."""

    def __init__(self, service: Any) -> None:
        self._link: MemoryLink[Any, Any] = MemoryLink(service)
        self._listener = Listener(self._link)

    async def ask(self, items: list[Any]) -> list[Any]:
        heard = len(self._listener.answers)
        for item in items:
            self._link.send(item)
        answers = (await self._listener.wait(heard + len(items)))[heard:]
        by_key = {answer.key: answer for answer in answers}
        return [by_key[item.head.key] for item in items]


async def first_tokens(target: Side, seeds: range, proposals: list[SealedProposal]) -> list[Any]:
    """The first token that one round under each seed commits."""
    heads = [make_head(PROMPT, session=s, seed=s, rule=Rule.TOKEN, round_index=1) for s in seeds]
    items = [VerifyItem(head, p) for head, p in zip(heads, proposals, strict=True)]
    tokens = []
    for seed, proposal, reply in zip(seeds, proposals, await target.ask(items), strict=True):
        assert isinstance(reply, VerdictReply), reply
        uniforms = RoundNoise(seed, Rule.TOKEN, len(PROMPT)).accept_uniforms(len(proposal))
        outcome = decide(reply.verdict, proposal.token_ids, Rule.TOKEN, uniforms)
        tokens.append(outcome.token_ids[:1])
    return tokens


async def test_trap_08_a_failure_of_the_draft_is_no_reason_to_drop_what_it_drew() -> None:
    """The first committed token has the target's law, though the draft fails after one of three
    tokens; dropping those proposals, on the same rounds, has not. False alarm 1e-6."""
    draft_engine = ToyEngine(vocab_size=3, salt=DRAFT_SALT)
    draft_engine.breaks_after = lambda held: tuple(held) == (*PROMPT, FATAL)
    executor = InlineExecutor(lambda: 0.0)
    draft_service = DraftService.with_model(draft_engine, executor, max_num_seqs=64)
    target_service = TargetService(
        ToyEngine(vocab_size=3, salt=TARGET_SALT), executor, max_num_seqs=64
    )
    draft, target = Side(draft_service), Side(target_service)
    kept: list[Any] = []
    dropped: list[Any] = []
    for first in range(1, NUM_ROUNDS, PER_STEP):
        seeds = range(first, first + PER_STEP)
        heads = [make_head(PROMPT, session=s, seed=s, rule=Rule.TOKEN) for s in seeds]
        replies = await draft.ask([DraftItem(head, 2) for head in heads])
        assert all(isinstance(reply, ProposalReply) for reply in replies)
        proposals = [reply.proposal for reply in replies]
        for reply in replies:
            failed = reply.proposal.token_ids[0] == FATAL
            assert len(reply.proposal) == (1 if failed else 2)
            assert reply.cached_length == len(PROMPT) + len(reply.proposal) - 1
        kept += await first_tokens(target, seeds, proposals)
        whole = [proposal if len(proposal) == 2 else NOTHING_SEALED for proposal in proposals]
        dropped += await first_tokens(target, seeds, whole)
        for session in seeds:
            draft_service.release(session_name(session), 1)
    row = target_probabilities(toy_logits(TARGET_SALT, PROMPT, 3)[None], SamplingParams())[0]
    law = {(token_id,): float(p) for token_id, p in enumerate(row)}
    right, wrong = fit(kept, law), fit(dropped, law)
    print(right, wrong)
    assert not right.rejects
    assert wrong.rejects
    for service in (draft_service, target_service):
        service.check_integrity()
        await service.close()
