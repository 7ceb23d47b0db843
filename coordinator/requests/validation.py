"""Checks requests against all limits, fills in their defaults, and tokenizes their prompts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from typing_extensions import TypeIs  # from Python 3.13 on in `typing`

from coordinator.requests.grammar_check import ConstraintChecks
from outrider import limits
from outrider.config.deployment import CoordinatorConfig
from outrider.errors import BadRequest, DataLoss
from outrider.foundation.bounds import check_bounds
from outrider.foundation.fair_turns import TwoLanes, WaitingLimits
from outrider.foundation.shared_calls import SharedCalls
from outrider.grammar.constraint import Constraint
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.request import ChatMessage, GenerateRequest, Prompt
from outrider.sessions.store import SessionRecord, SharedText
from outrider.speculation.sampling_params import Rule, check_sampling

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText

_ROLE = re.compile(rf"[A-Za-z0-9_-]{{1,{limits.ROLE_CHARS_MAX}}}")

_NOT_STORED = {"prompt", "model", "names", "default_max_tokens", "tools", "template_variables"}
_OWN = {"seed", "max_tokens"}
"""Parameters in which the sessions of one request may differ, besides the prompt."""
_EXCLUDED: dict[str, bool | set[str]] = {
    **dict.fromkeys(_NOT_STORED, True),
    "constraint": {"field"},
}
"""`_NOT_STORED` and the part of a constraint that is not stored, for pydantic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParameters(GenerateRequest):
    """A checked request with every default filled in. It has all that is needed to run the request,
    and to resume its session after a failure."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    rule: Rule
    num_draft_tokens: int
    deadline_ms: int
    weights: str = ""
    """`ReplicaDescription.weights` of the targets that may run the request."""

    @classmethod
    def of(cls, record: SessionRecord) -> GenerationParameters:
        """Reads what `ParametersWriter` wrote. Raises `DataLoss`."""
        try:
            values = json.loads(record.parameters) | {"prompt": ()}
            if record.shared is not None:
                values |= json.loads(record.shared.text)
            prompt = record.token_ids[: record.prompt_length]
            return replace(_adapter().validate_python(values), prompt=prompt)
        except (TypeError, ValueError) as error:
            raise DataLoss(f"the session's parameters cannot be read: {error}") from error


class ParametersWriter:
    """Writes parameters as JSON for the session store. The up to 2,048 sessions of a request differ
    in few parameters. The others are written and hashed once if they are large."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[object], SharedText] | None = None
        """The tenant and the common parameters of the newest session with large parameters."""

    def write(self, parameters: GenerationParameters, tenant: str) -> tuple[str, SharedText | None]:
        """Returns `SessionRecord.parameters` and `SessionRecord.shared`."""
        common = [tenant, *(getattr(parameters, name) for name in _common_fields())]
        # The sessions of a request have the same objects, so the comparison is fast.
        if self._last is None or self._last[0] != common:
            text = _adapter().dump_json(parameters, exclude=_EXCLUDED).decode()
            if len(text) < limits.SHARED_BYTES_MIN:
                return text, None
            others = _EXCLUDED | dict.fromkeys(_OWN, True)
            text = _adapter().dump_json(parameters, exclude=others).decode()
            self._last = common, SharedText.of(tenant, text)
        return _adapter().dump_json(parameters, include=_OWN).decode(), self._last[1]


@cache
def _common_fields() -> tuple[str, ...]:
    names = (field.name for field in fields(GenerationParameters))
    return tuple(name for name in names if name not in _NOT_STORED | _OWN)


_adapter = cache(lambda: TypeAdapter(GenerationParameters))


def check_fields(request: GenerateRequest, model: ReplicaDescription) -> None:
    """Checks every field that can be checked before the prompt is tokenized. Raises `BadRequest`
    for the first field outside its limits."""
    sampling, names = request.sampling, request.names
    check_bounds(request)
    check_sampling(sampling, names.sampling, model.vocab_size)
    if sampling.min_tokens and request.constraint is not None:
        kind = request.constraint.kind.value
        reason = f"cannot be combined with {kind}, which decides where the answer ends"
        raise BadRequest(f"{names.sampling}min_tokens", reason)
    num_ends = len({*model.eos_token_ids, *sampling.stop_token_ids})
    if sampling.min_tokens and num_ends >= model.vocab_size:
        reason = "all tokens would end the answer, so min_tokens cannot be reached; give fewer ids"
        raise BadRequest(f"{names.sampling}stop_token_ids", reason)
    check_roles(request.prompt)
    for index, text in enumerate(request.stop):
        if reason := wrong_stop_string(text):
            raise BadRequest(f"stop[{index}]", reason)
    least, most = int(request.prompt_logprobs is None), model.max_model_len
    if (given := request.max_tokens) is not None and not least <= given <= most:
        raise BadRequest(names.max_tokens, f"got {given}; allowed: {least}..{most}")
    if request.rule is Rule.GREEDY and not sampling.greedy:
        raise BadRequest(names.rule, "greedy needs temperature 0; allowed: token, block, coupled")


def wrong_stop_string(text: str) -> str:
    """Says why a text cannot be a stop string; empty = it can be one."""
    size, most = len(text.encode()), limits.STOP_STRING_BYTES_MAX
    return "" if 1 <= size <= most else f"has {size} bytes; allowed: 1..{most}"


def resolve(
    request: GenerateRequest,
    prompt_field: str,
    prompt_ids: tuple[int, ...],
    model: ReplicaDescription,
    config: CoordinatorConfig,
    random_seed: int,
) -> GenerationParameters:
    """Fills in the defaults of a request that `check_fields` has accepted. Raises `BadRequest` if
    the prompt is empty, has an unknown token, or leaves too little room for `max_tokens`."""
    num_ids, length = len(prompt_ids), model.max_model_len
    if not prompt_ids:
        raise BadRequest(prompt_field, "the prompt is empty; at least one token is needed")
    if num_ids >= length:
        most = f"allowed: up to {length - 1}, so that an answer fits the model's length of {length}"
        raise BadRequest(prompt_field, f"the prompt has {num_ids} tokens; {most}")
    check_ids(prompt_ids, prompt_field, model.vocab_size)
    room = length - num_ids
    if (max_tokens := request.max_tokens) is None:
        max_tokens = min(room, request.default_max_tokens)
    if max_tokens > room:
        raise BadRequest(
            request.names.max_tokens,
            f"got {max_tokens}; allowed: up to {room}, because the prompt has {num_ids} "
            f"tokens, and the model's length is {length}",
        )
    if (least := request.sampling.min_tokens) > max_tokens:
        reason = f"got {least}; allowed: up to max_tokens, which is {max_tokens}"
        raise BadRequest(f"{request.names.sampling}min_tokens", reason)
    rule = request.rule
    if request.sampling.greedy:
        rule = Rule.GREEDY
    elif rule is None:  # With a given seed, tokens must not depend on the drafter.
        rule = Rule(config.unseeded_rule) if request.seed is None else Rule.COUPLED
    num_draft_tokens, deadline_ms = request.num_draft_tokens, request.deadline_ms
    known = {field.name: getattr(request, field.name) for field in fields(request)}
    known |= {
        "prompt": prompt_ids,
        "model": "",
        "max_tokens": max_tokens,
        "seed": random_seed if request.seed is None else request.seed,
        "rule": rule,
        "num_draft_tokens": (
            config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        ),
        "deadline_ms": config.deadline_ms if deadline_ms is None else deadline_ms,
        "default_max_tokens": limits.MAX_TOKENS_DEFAULT,
        "tools": (),
        "template_variables": {},
    }
    return GenerationParameters(**known)


def check_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises `BadRequest` if an id is outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        reason = f"{bad} is not a token id; allowed: 0..{vocab_size - 1}"
        raise BadRequest(f"{field}[{index}]", reason)


def _is_chat(prompt: tuple[ChatMessage, ...] | tuple[int, ...]) -> TypeIs[tuple[ChatMessage, ...]]:
    return bool(prompt) and isinstance(prompt[0], ChatMessage)


def check_roles(prompt: Prompt) -> None:
    """Raises `BadRequest` if the role of a chat message is not a plain name."""
    if isinstance(prompt, str) or not _is_chat(prompt):
        return
    for index, turn in enumerate(prompt):
        if reason := wrong_role(turn.role):
            raise BadRequest(f"chat.messages[{index}].role", reason)


def wrong_role(role: str) -> str:
    """Says why a text cannot be the role of a chat message; empty = it can be one. Chat templates
    write roles between special tokens, so a role with special tokens could forge a message."""
    if _ROLE.fullmatch(role):
        return ""
    most, allowed = limits.ROLE_CHARS_MAX, "a name such as system, user or assistant, of up to"
    return f"got {role[:most]!r}; allowed: {allowed} {most} letters, digits, - and _"


class PromptEncoder:
    """Tokenizes prompts, and checks whether constraints can be compiled for the tokenizer."""

    def __init__(self, text: TokenizerText | None) -> None:
        """If `text` is None, the model has no tokenizer, so prompts must be token ids."""
        self._text = text
        allowed = WaitingLimits(
            limits.PROMPT_BYTES_PER_TENANT_MAX,
            limits.PROMPT_BYTES_MAX,
            "bytes of prompts await tokenizing",
            "prompt_bytes",
        )
        self.threads = TwoLanes(
            limits.TOKENIZER_THREADS,
            limits.LONG_TOKENIZER_THREADS,
            "tokenizer",
            limits.SHORT_PROMPT_BYTES,
            allowed,
        )
        """For calls of the tokenizer. Their sizes are in bytes of text."""
        self._calls = SharedCalls[tuple[int, bool], tuple[int, ...]]()
        """Running calls by (`id` of the prompt object, `add_special_tokens`). A running call keeps
        its prompt alive, so the `id` is unique. All generations of a request share the prompt."""
        self._checks: ConstraintChecks | None = None

    async def encode(
        self,
        request: GenerateRequest,
        tokens_max: int,
        tenant: str,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[str, tuple[int, ...]]:
        """Returns the field to name in errors (`FieldNames.prompt`), and the prompt's token ids.
        `add_special_tokens` affects only plain text. Simultaneous calls with the same prompt object
        tokenize it once. Raises `BadRequest` if the prompt cannot be tokenized, or has more bytes
        than `tokens_max` tokens can have, and `Overloaded` if too many wait."""
        text, prompt = self._text, request.prompt
        if not isinstance(prompt, str) and not _is_chat(prompt):
            return request.names.prompt or "token_ids", prompt
        field = request.names.prompt or ("text" if isinstance(prompt, str) else "chat")
        if text is None:
            raise BadRequest(field, "the model has no tokenizer; give token ids")
        contents = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
        if not isinstance(prompt, str):
            contents += [json.dumps(turn.more, ensure_ascii=False) for turn in prompt if turn.more]
        size = sum(len(content.encode(errors="surrogatepass")) for content in contents)
        bytes_max = tokens_max * text.token_bytes_max
        if size > bytes_max:
            most = f"up to {bytes_max}, because the model's limit is {tokens_max} tokens"
            raise BadRequest(field, f"has {size} bytes; allowed: {most}")

        def tokenize() -> tuple[int, ...]:
            if isinstance(prompt, str):
                return tuple(text.encode(prompt, add_special_tokens, field))
            turns = [{"role": turn.role, "content": turn.content, **turn.more} for turn in prompt]
            tools, variables = request.tools, request.template_variables
            return tuple(text.encode_chat(turns, tools, variables, field))

        return field, await self._calls.share(
            (id(prompt), add_special_tokens),
            lambda: asyncio.create_task(self.threads.run(tenant, tokenize, size)),
        )

    async def check_constraint(
        self, constraint: Constraint, eos_token_ids: tuple[int, ...], tenant: str
    ) -> None:
        """Raises `BadRequest` if the constraint cannot be compiled for the model's tokenizer within
        `COMPILE_S_MAX` and `COMPILE_BYTES_MAX`. The error's field is the constraint's kind. Raises
        `Overloaded` if the check cannot be made now."""
        text = self._text
        if text is None:
            reason = "the model has no tokenizer, so constraints cannot be used"
            raise BadRequest(constraint.kind, reason)
        if self._checks is None:
            self._checks = ConstraintChecks(lambda: (text.backend_json(), eos_token_ids))
        await self._checks.check(constraint, tenant)

    async def close(self) -> None:
        """Does not wait for running calls of the tokenizer."""
        self.threads.close()
        if self._checks is not None:
            await self._checks.close()
