"""Sessions for tests of stores."""

from outrider.sessions.state import Session
from outrider.sessions.store import Append, Finish, FinishReason, SessionRecord
from outrider.speculation.sampling_params import Rule

IDS = tuple(f"{k:032x}" for k in range(3))
OWNERS = ("anna", "bert")


def new_session(
    session_id: str = IDS[0],
    owner: str = OWNERS[0],
    prompt_ids: tuple[int, ...] = (5, 0, 2**31 - 1),
) -> SessionRecord:
    return SessionRecord.new(
        session_id, "tenant", owner, 2**64 - 1, Rule.BLOCK, '{"ü": 1}', prompt_ids
    )


def next_append(session: Session) -> Append:
    append = session.next_append()
    assert append is not None
    return append


def end_of(session: Session, reason: FinishReason = FinishReason.STOP) -> Finish:
    session.finish(reason)
    return session.ending()
