"""What a leader does to its engine, as words of 64 bits that a follower does to its own.

A frame is a run of calls in the order they were made. A text is its number of bytes and then those,
padded to whole words; a list is its length and then its items.

| call | words after its number |
| --- | --- |
| forward 1 | how many steps; each: sequence, number of logits, tokens, parents |
| attach 2 | sequence, tokens, salt |
| keep 3 | sequence, length, path |
| fork 4 | sequence, branch |
| mark_idle 5 | sequence |
| release 6 | sequence |
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.engine.interface import Engine, SequenceStep
from outrider.engine.tensor_parallel.rank_rpc import WORD_BYTES, WORD_TYPE
from outrider.errors import check

_FORWARD, _ATTACH, _KEEP, _FORK, _MARK_IDLE, _RELEASE = range(1, 7)


class CallWriter:
    """Notes calls, named as `Engine` names them, until they are taken as one frame."""

    def __init__(self) -> None:
        self._words = array(WORD_TYPE)

    def __len__(self) -> int:
        """Words noted so far."""
        return len(self._words)

    def take(self) -> array[int]:
        """The calls since the last time."""
        words, self._words = self._words, array(WORD_TYPE)
        return words

    def forward(self, steps: Sequence[SequenceStep]) -> None:
        """See `Engine.forward`."""
        self._words.extend((_FORWARD, len(steps)))
        for step in steps:
            self._text(step.sequence_id)
            self._words.append(step.num_logits)
            self._numbers(step.token_ids)
            self._numbers(step.parents)

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str) -> None:
        """See `Engine.attach`."""
        self._words.append(_ATTACH)
        self._text(sequence_id)
        self._numbers(token_ids)
        self._text(salt)

    def keep(self, sequence_id: str, length: int, path: Sequence[int]) -> None:
        """See `Engine.keep`."""
        self._words.append(_KEEP)
        self._text(sequence_id)
        self._words.append(length)
        self._numbers(path)

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """See `Engine.fork`."""
        self._words.append(_FORK)
        self._text(sequence_id)
        self._text(branch_id)

    def mark_idle(self, sequence_id: str) -> None:
        """See `Engine.mark_idle`."""
        self._words.append(_MARK_IDLE)
        self._text(sequence_id)

    def release(self, sequence_id: str) -> None:
        """See `Engine.release`."""
        self._words.append(_RELEASE)
        self._text(sequence_id)

    def _numbers(self, numbers: Sequence[int]) -> None:
        self._words.append(len(numbers))
        self._words.extend(numbers)

    def _text(self, text: str) -> None:
        encoded = text.encode()
        self._words.append(len(encoded))
        self._words.frombytes(encoded + bytes(-len(encoded) % WORD_BYTES))


def replay(words: array[int], engine: Engine) -> None:
    """Makes the calls of a frame on another engine. Raises what they raise, and `InvariantError`
    for words that are no frame."""
    reader = _Reader(words)
    while not reader.at_end:
        call = reader.number()
        if call == _FORWARD:
            engine.forward([reader.step() for _ in range(reader.number())])
        elif call == _ATTACH:
            engine.attach(reader.text(), reader.numbers(), reader.text())
        elif call == _KEEP:
            engine.keep(reader.text(), reader.number(), reader.numbers())
        elif call == _FORK:
            engine.fork(reader.text(), reader.text())
        elif call == _MARK_IDLE:
            engine.mark_idle(reader.text())
        else:
            check(call == _RELEASE, f"{call} is no call of an engine")
            engine.release(reader.text())


class _Reader:
    def __init__(self, words: array[int]) -> None:
        self._words = words
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._next == len(self._words)

    def number(self) -> int:
        return self._take(1)[0]

    def numbers(self) -> tuple[int, ...]:
        return tuple(self._take(self.number()))

    def text(self) -> str:
        num_bytes = self.number()
        return self._take(-(-num_bytes // WORD_BYTES)).tobytes()[:num_bytes].decode()

    def step(self) -> SequenceStep:
        sequence_id, num_logits = self.text(), self.number()
        return SequenceStep(sequence_id, self.numbers(), num_logits, self.numbers())

    def _take(self, count: int) -> array[int]:
        end = self._next + count
        check(count >= 0 and end <= len(self._words), "a frame of calls is cut short")
        taken = self._words[self._next : end]
        self._next = end
        return taken
