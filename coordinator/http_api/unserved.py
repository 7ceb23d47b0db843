"""What OpenAI's and vLLM's requests may ask for and Outrider does not do.

Refused by name where it asks for something; taken as not there where its value asks for nothing, as
clients send it that write every field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

Unserved = Mapping[str, tuple[Any, ...]]
"""Fields, and the values (beside null) that ask for nothing."""
_ANY: Final = object()
"""Every value: a label, or a hint that changes no answer."""

_EVERYWHERE: Final[Unserved] = {
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "prompt_logprobs": (),
    "priority": (0,),
    "metadata": (_ANY,),
    "request_id": (_ANY,),
    "service_tier": ("auto", "default"),
}
IN_COMPLETIONS: Final[Unserved] = {
    **_EVERYWHERE,
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
}
IN_CHAT: Final[Unserved] = {
    **_EVERYWHERE,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (_ANY,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
}
IN_MESSAGES: Final[Unserved] = {
    "name": (_ANY,),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}


def without_unserved(values: Any, unserved: Unserved) -> Any:
    """The values without those of fields that are not served. Raises `ValueError`, naming the
    field, for one that asks for something. What is no mapping is left to others to refuse."""
    if not isinstance(values, dict):
        return values
    for name in unserved.keys() & values.keys():
        idle = unserved[name]
        if not (values[name] is None or _ANY in idle or _is_among(values[name], idle)):
            raise UnservedField(name, idle)
    return {name: value for name, value in values.items() if name not in unserved}


class UnservedField(ValueError):
    """A field asks for what is not served."""

    def __init__(self, name: str, idle: tuple[Any, ...]) -> None:
        allowed = " or ".join(json.dumps(value) for value in idle)
        super().__init__("is not served; leave it out" + (allowed and f", or give {allowed}"))
        self.name = name


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether it is one of them; 1 is not true, though Python finds them equal."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
