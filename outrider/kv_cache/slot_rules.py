"""Rules that every engine keeps about sequences and their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.errors import BadRequest, check


def check_steps(
    steps: Sequence[SequenceStep],
    info: ModelInfo,
    max_num_seqs: int,
    length: Callable[[str], int],
) -> None:
    """Raises unless these steps may be run on sequences of these lengths; changes nothing.

    `BadRequest` for what a request can cause, `InvariantError` for what only a service can.
    """
    check(len(steps) <= max_num_seqs, f"{len(steps)} sequences in a step; at most {max_num_seqs}")
    check(
        len({step.sequence_id for step in steps}) == len(steps),
        "a sequence has more than one step in one call",
    )
    for step in steps:
        ids = step.token_ids
        check(len(ids) > 0, f"{step.sequence_id}: a step without tokens")
        check(0 <= step.num_logits <= len(ids), f"{step.sequence_id}: {step.num_logits} logits")
        if step.parents:
            check(_is_tree(step.parents, len(ids)), f"{step.sequence_id}: bad parents of a tree")
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < info.vocab_size)
            raise BadRequest("token_ids", f"{wrong} is not in 0..{info.vocab_size - 1}")
        total = length(step.sequence_id) + len(ids)
        if total > info.max_model_len:
            raise BadRequest(
                "token_ids", f"{total} tokens; the model takes at most {info.max_model_len}"
            )


def prefixes(held: Sequence[int], step: SequenceStep) -> list[list[int]]:
    """The tokens that each row of logits of a step follows, behind those that were held."""
    paths: list[list[int]] = []
    for index, token_id in enumerate(step.token_ids):
        parent = step.parents[index] if step.parents else index - 1
        paths.append([*(paths[parent] if parent >= 0 else held), token_id])
    return paths[len(paths) - step.num_logits :]


def _is_tree(parents: Sequence[int], num: int) -> bool:
    return len(parents) == num and all(-1 <= parent < i for i, parent in enumerate(parents))


def check_kept(held: int, length: int, path: Sequence[int]) -> None:
    """Raises `InvariantError` unless `Engine.keep` may be asked this of a sequence of `held`."""
    check(0 <= length <= held, f"cannot keep {length} of {held} slots")
    previous = length - 1
    for slot in path:
        check(previous < slot < held, f"slot {slot} of a path is not in {previous + 1}..{held - 1}")
        previous = slot
