"""`get_session` of a running deployment."""

from pathlib import Path

import pytest
from stack import toy_stack

from outrider.client import GenerateRequest
from outrider.errors import BadRequest, NotFound
from outrider.sessions.store import FinishReason

PROMPT = (1, 2, 3)


async def test_an_ended_session_can_be_read(tmp_path: Path) -> None:
    async with toy_stack(tmp_path) as stack:
        answer = await stack.client.complete(GenerateRequest(PROMPT, max_tokens=5))
        view = await stack.client.get_session(answer.session_id)
        assert view.token_ids == (*PROMPT, *answer.token_ids)
        assert (view.state, view.finish_reason) == ("finished", FinishReason.LENGTH)
        for missing, error in (("0" * 31 + "1", NotFound), ("no id", BadRequest)):
            with pytest.raises(error):
                await stack.client.get_session(missing)
