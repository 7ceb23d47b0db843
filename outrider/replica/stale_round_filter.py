"""The fence before a replica's queue: late and repeated rounds go no further."""

from __future__ import annotations

from collections import OrderedDict

from outrider.errors import StaleEpoch
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.messages import Refused, RoundHead
from outrider.replica.step_request import CANCELLED_CODE, refusal

_RELEASED = 2**64
"""In place of the newest round of a session that was released: no round has this number."""


class StaleRoundFilter:
    """Knows the newest round that was asked of each session, and holds back older ones: they come
    late or twice, and would only throw away what newer rounds have cached, or bring back a session
    that was released.

    Remembers `SEQUENCES_PER_REPLICA_MAX` sessions; one that it has forgotten may pass again.
    """

    def __init__(self) -> None:
        self._asked: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def admit(self, head: RoundHead) -> Refused | None:
        """Notes the round; or returns why it is refused: ABORTED for an epoch that is over,
        CANCELLED for a round behind one of the same epoch."""
        asked = self._asked.get(head.session_id)
        if asked is not None:
            epoch, latest = asked
            if head.epoch < epoch:
                over = StaleEpoch(f"epoch {head.epoch} is over, {epoch} was seen")
                return refusal(head.key, over)
            if head.epoch == epoch and head.round < latest:
                over_by = "it was released" if latest == _RELEASED else f"{latest} was asked for"
                return Refused(head.key, CANCELLED_CODE, f"round {head.round} is over, {over_by}")
        self._note(head.session_id, head.epoch, head.round)
        return None

    def release(self, session_id: str, epoch: int) -> bool:
        """Ends all rounds of the epoch, also those that are still to come; False, and nothing
        ended, if a newer epoch was seen."""
        asked = self._asked.get(session_id)
        if asked is not None and asked[0] > epoch:
            return False
        self._note(session_id, epoch, _RELEASED)
        return True

    def _note(self, session_id: str, epoch: int, latest: int) -> None:
        self._asked[session_id] = (epoch, latest)
        self._asked.move_to_end(session_id)
        if len(self._asked) > SEQUENCES_PER_REPLICA_MAX:
            self._asked.popitem(last=False)
