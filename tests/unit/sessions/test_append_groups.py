"""How the appends of a commit are divided among runs of a script."""

from dataclasses import replace

import pytest

from outrider import limits
from outrider.redis.connection import Call, Script
from outrider.sessions.state import Session
from tests.simulation.redis_data import Reply
from tests.support.script_store import ScriptStore
from tests.support.session_model import IDS, OWNERS, new_session, next_append


async def test_a_large_commit_is_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that breaks off loses only its own appends, and Redis serves others between runs."""
    sizes: list[int] = []

    class Noting(ScriptStore):
        async def run(self, script: Script, call: Call) -> Reply:
            sizes.append(len(call[0]) // 3)
            return await super().run(script, call)

    store = Noting(lambda: 1e12)
    appends = []
    for session_id in IDS[:3]:
        record = new_session(session_id, OWNERS[0])
        await store.open(record)
        session = Session(record)
        session.decide((1, 2, 3), session.counters)
        appends.append(next_append(session))
    appends.append(replace(appends[0], session_id="f" * 32))
    for most, divided in ((12, [1, 1, 1, 1]), (24, [2, 2]), (10_000, [4])):
        monkeypatch.setattr(limits, "APPEND_BYTES_MAX", most)
        sizes.clear()
        *stored, missing = await store.append(appends)
        assert sizes == divided
        assert len(set(map(str, stored))) == 1
        assert isinstance(stored[0], int)
        assert isinstance(missing, Exception)
