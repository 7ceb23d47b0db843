"""Compiles constraints to grammars, and caches the grammars by tenant and digest."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from math import prod
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider import limits
from outrider.errors import BadRequest, ConfigError, Overloaded
from outrider.foundation.fair_turns import TwoLanes, WaitingLimits
from outrider.foundation.shared_calls import SharedCalls
from outrider.grammar.constraint import Constraint, ConstraintKind, containers_in
from outrider.grammar.token_mask import TokenMask

_SPACES: Any = {"whitespace_pattern": " "}
"""Allows one space where JSON allows any number of spaces, because some models would write spaces
without end. A schema's own `x-guidance` takes precedence."""
if version("llguidance").startswith("1.7."):  # In this version the pattern allows several spaces.
    _SPACES = {"whitespace_flexible": False, "item_separator": " ?, ?", "key_separator": " ?: ?"}
_REASON_CHARS_MAX = 400
_Key = tuple[str, bytes]  # a tenant, and the digest of a constraint


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Grammar:
    """A compiled constraint."""

    constraint: Constraint
    start: LLMatcher
    """The matcher before the first token. Callers use copies of it."""
    tokenizer: GrammarTokenizer
    digest: bytes
    tenant: str = ""
    compile_s: float = 0.0  # CPU time of the compilation

    @property
    def key(self) -> _Key:
        return self.tenant, self.digest

    def is_used_up(self) -> bool:
        """Whether the grammar can compute no more masks. All copies of its matcher share the
        lexer's states, whose number is limited."""
        return _first_mask_error(self.start) is not None


@dataclass(frozen=True, slots=True)
class _Refusal:
    kind: str
    reason: str
    until_s: float = math.inf  # on the clock `Grammars.now`
    """The refusal of a slow constraint expires, because a constraint may be slow by chance."""

    def error(self) -> BadRequest:
        """A new error. An error shared by all callers would keep their stack frames alive."""
        return BadRequest(self.kind, self.reason)


class GrammarTokenizer:
    """The bytes of each token of a tokenizer, and the tokens that end a text."""

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        """`tokenizer` is a fast tokenizer of Hugging Face, or the JSON of its backend. Raises
        `ConfigError` for other tokenizers, or without end tokens. Takes about a second."""
        if not eos_token_ids:
            raise ConfigError("constraints need an end-of-text token; the model has none")
        try:
            text = tokenizer if isinstance(tokenizer, str) else backend_json(tokenizer)
            self.tokens = LLTokenizer(text, eos_token=list(eos_token_ids))
        except Exception as error:
            raise ConfigError(
                f"the model's tokenizer does not support constraints: {error}"
            ) from error
        self._limits = LLParserLimits(
            max_lexer_states=limits.LEXER_STATES_MAX, verbose_errors=False
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        is_eos = np.isin(np.arange(self.tokens.vocab_size), eos_token_ids)
        self.eos_mask = TokenMask(np.packbits(is_eos, bitorder="little"), is_over=True)
        """The mask that allows only the tokens of `eos_token_ids`."""

    def compile(self, constraint: Constraint) -> Grammar:
        """If compilation fails, raises `BadRequest` with `constraint.kind` as its field."""
        error: str | None = None
        try:
            text = _grammar_text(constraint)
            start = LLMatcher(self.tokens, text, log_level=0, limits=self._limits)
            # The first mask is slow and would delay a step, so this thread computes it.
            error = _first_mask_error(start)
        except ValueError as refused:
            error = str(refused)
        if error is not None:
            reason = " ".join(error.split())[:_REASON_CHARS_MAX]
            raise BadRequest(constraint.kind, f"cannot be compiled: {reason}")
        return Grammar(constraint, start, self, constraint.digest())


def _first_mask_error(start: LLMatcher) -> str | None:
    """Computes a mask with a copy of a matcher. Returns the copy's error, if any."""
    copied = start.deep_copy()
    copied.compute_bitmask()
    return copied.get_error() if copied.is_error() else None


def backend_json(tokenizer: Any) -> str:
    """The JSON of the backend of a fast tokenizer of Hugging Face, without padding and truncation.
    Raises `ConfigError` for other tokenizers."""
    backend = copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise ConfigError("the model's tokenizer is not a fast tokenizer of Hugging Face")
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


class Grammars:
    """The grammars of one process: some recently used ones, and all that are still referenced. The
    number and the bytes of the kept constraints are limited, because a grammar may take some
    hundred times the memory of its constraint. The tenant with the most bytes loses its grammars
    first, so that no tenant's constraints are compiled again because of another tenant.
    Any thread may call `find` and `get`. Tenants share no grammars, so that response times and
    refusals reveal nothing about another tenant's requests."""

    def __init__(self, load: Callable[[], GrammarTokenizer]) -> None:
        """Calls `load` at the first constraint, which is refused if `load` raises `ConfigError`."""
        self._load = cache(load)
        self.clock: Callable[[], float] = time.thread_time
        self.now: Callable[[], float] = time.monotonic
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._cached: OrderedDict[_Key, Grammar | _Refusal] = OrderedDict()
        """The least recently used first."""
        self._num_bytes: Counter[str] = Counter()
        """Tenant -> bytes of the constraints of its grammars in `_cached`."""
        self._held: WeakValueDictionary[_Key, Grammar] = WeakValueDictionary()
        """All grammars that are still referenced."""
        self._slow: WeakSet[Grammar] = WeakSet()  # grammars that have delayed a step once
        self.slow_ahead: WeakSet[Grammar] = WeakSet()
        """Grammars that took too long to process draft tokens. They are no longer applied to draft
        tokens. Only the thread that runs steps may use this set."""
        self._calls = SharedCalls[_Key, Grammar | _Refusal]()
        allowed = WaitingLimits(
            limits.COMPILATION_BYTES_PER_TENANT_MAX,
            limits.COMPILATION_BYTES_MAX,
            "bytes of constraints await compilation",
            "compilation_bytes",
        )
        self._threads = TwoLanes(
            limits.COMPILE_THREADS,
            limits.LONG_COMPILE_THREADS,
            "grammar",
            limits.SHORT_CONSTRAINT_BYTES,
            allowed,
        )

    def find(self, digest: bytes, tenant: str = "") -> Grammar | BadRequest | None:
        """The grammar, or the error that refused the constraint. None = unknown."""
        entry = self._look_up((tenant, digest))
        return entry.error() if isinstance(entry, _Refusal) else entry

    def get(self, constraint: Constraint, tenant: str = "") -> Grammar:
        """The grammar of a constraint, compiled on this thread if it is unknown. If the constraint
        is refused, raises `BadRequest` with `constraint.kind` as its field."""
        entry = self._look_up((tenant, constraint.digest())) or self._compile(constraint, tenant)
        if isinstance(entry, _Refusal):
            raise entry.error()
        return entry

    async def prepare(self, constraint: Constraint, tenant: str = "") -> Grammar:
        """Like `get`, but compiles on other threads, at which tenants take turns. Raises
        `Overloaded` if too many constraints wait, or if this constraint waits too long."""
        key = tenant, constraint.digest()
        entry = self._look_up(key)
        if entry is None:
            compiling = partial(self._compile, constraint, tenant)
            try:
                async with asyncio.timeout(limits.COMPILE_WAIT_S_MAX):
                    entry = await self._calls.share(
                        key,
                        lambda: asyncio.create_task(
                            self._threads.run(tenant, compiling, len(constraint.text))
                        ),
                    )
            except TimeoutError:
                raise Overloaded("other constraints are being compiled; try later") from None
        if isinstance(entry, _Refusal):
            raise entry.error()
        return entry

    def renewed(self, used_up: Grammar) -> Grammar:
        """A new grammar for the constraint of `used_up`. If no other session has compiled the
        constraint again, compiles it on this thread, which delays the current step. If `used_up`
        took longer than `MASK_S_MAX` to compile, raises `BadRequest` instead."""
        key = used_up.key
        with self._lock:
            if self._known(key) is used_up:
                self._drop(key)
            is_known = self._known(key) is not None
        if not is_known and used_up.compile_s > limits.MASK_S_MAX:
            reason = "needs too many lexer states, and is too slow to compile again"
            raise BadRequest(used_up.constraint.kind, reason)
        return self.get(used_up.constraint, used_up.tenant)

    def note_slow(self, grammar: Grammar) -> None:
        """Records that a grammar has delayed a step. The second time, refuses the constraint for
        `TOO_SLOW_S` and raises `BadRequest`."""
        if grammar not in self._slow:
            self._slow.add(grammar)
            return
        reason = f"takes more than {limits.MASK_S_MAX:g} s a token; simplify it"
        refusal = _Refusal(grammar.constraint.kind, reason, self.now() + limits.TOO_SLOW_S)
        self._keep(grammar.key, refusal)
        raise refusal.error()

    def close(self) -> None:
        """Starts no more compilations. Does not wait for running ones."""
        self._threads.close()

    def _look_up(self, key: _Key) -> Grammar | _Refusal | None:
        with self._lock:
            entry = self._known(key)
            if isinstance(entry, _Refusal) and entry.until_s <= self.now():
                self._drop(key)
                return None
            if entry is not None:
                self._insert(key, entry)
            return entry

    def _compile(self, constraint: Constraint, tenant: str) -> Grammar | _Refusal:
        entry: Grammar | _Refusal
        try:
            with self._loading:
                tokenizer = self._load()
            began = self.clock()
            compiled = tokenizer.compile(constraint)
            entry = replace(compiled, tenant=tenant, compile_s=self.clock() - began)
        except ConfigError as error:
            entry = _Refusal(constraint.kind, error.message)
        except BadRequest as error:
            entry = _Refusal(error.field, error.reason)
        self._keep((tenant, constraint.digest()), entry)
        return entry

    def _keep(self, key: _Key, entry: Grammar | _Refusal) -> None:
        with self._lock:
            self._drop(key)
            self._insert(key, entry)
            if isinstance(entry, Grammar):
                self._held[key] = entry

    def _known(self, key: _Key) -> Grammar | _Refusal | None:
        return self._cached.get(key) or self._held.get(key)

    def _insert(self, key: _Key, entry: Grammar | _Refusal) -> None:
        """Keeps `entry` as the newest. Forgets others, the oldest of the tenant with the most
        constraints or, if their bytes are too many, with the most bytes."""
        self._forget(key)
        while len(self._cached) >= limits.GRAMMARS_MAX:
            self._forget_oldest(Counter(tenant for tenant, _ in self._cached))
        while self._cached and self._num_bytes.total() + _size(entry) > limits.GRAMMAR_BYTES_MAX:
            self._forget_oldest(self._num_bytes)
        self._cached[key] = entry
        self._num_bytes[key[0]] += _size(entry)

    def _forget_oldest(self, amounts: Counter[str]) -> None:
        """Forgets the oldest constraint of the tenant with the largest amount."""
        largest = max((tenant for tenant, _ in self._cached), key=amounts.__getitem__)
        self._forget(next(key for key in self._cached if key[0] == largest))

    def _forget(self, key: _Key) -> None:
        if (entry := self._cached.pop(key, None)) is not None:
            self._num_bytes[key[0]] -= _size(entry)
            self._num_bytes += Counter()  # Removes entries that are 0.

    def _drop(self, key: _Key) -> None:
        self._forget(key)
        self._held.pop(key, None)


def _size(entry: Grammar | _Refusal) -> int:
    return len(entry.constraint.text) if isinstance(entry, Grammar) else 0


def _grammar_text(constraint: Constraint) -> str:
    match constraint.kind:
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, constraint.choices)))
        case _:
            schema = json.loads(constraint.text)
            options = schema.get("x-guidance")
            if isinstance(options, dict) and options.get("lenient", False) is not False:
                reason = "x-guidance.lenient is not allowed: it ignores parts of a schema"
                raise BadRequest(constraint.kind, reason)
            check_alternatives(schema, constraint.kind)
            return LLMatcher.grammar_from_json_schema(constraint.text, defaults=_SPACES)


_UNIONS = ("anyOf", "oneOf")
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "x-guidance"),
}
"""Keys that by themselves do not restrict an answer."""
_APART = _NOTES | {"allOf", "$ref", "patternProperties", "enum", "const", *_UNIONS}
"""Keys that `_Document._own` ignores, or handles one by one."""
_MANY = 1e9
_REFERENCES_MAX = 8  # references that are followed to find the type of an alternative


def check_alternatives(schema: dict[str, Any], field: str) -> None:
    """*Alternatives* are entries of anyOf, oneOf or enum that may be an object or a list. Raises
    `BadRequest` if a schema has more than `ALTERNATIVES_MAX`, because masks would take too long."""
    try:
        num_alternatives = _Document(schema).num_alternatives
    except RecursionError:
        raise BadRequest(field, "has too many nested references") from None
    most, weight = limits.ALTERNATIVES_MAX, limits.LIST_ALTERNATIVE
    if num_alternatives > most:
        raise BadRequest(
            field,
            "has too many alternatives that are objects or lists: the sum over anyOf, oneOf and "
            f"enum is {num_alternatives:.0f}; allowed: {most}. An alternative that may be a list "
            f"counts {weight}; if schemas are combined, as in allOf, their counts are multiplied",
        )


class _Document:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._reached: dict[int, float] = {}
        """The result of `_reach` for each visited part, by the part's `id`."""
        parts: list[Any] = [schema]
        for part in parts:
            parts += containers_in(part)
        schemas = [part for part in parts if isinstance(part, dict)]
        self._all_listed = sum(map(self._listed, schemas))
        self.num_alternatives = sum(map(self._own, schemas))

    def _own(self, schema: dict[str, Any]) -> float:
        """Counts the alternatives that a schema lists. Also counts the combinations of alternatives
        from parts, such as entries of `allOf`, that apply together. Returns the larger count."""
        at_once = [*_list_at(schema, "allOf"), *containers_in(schema.get("patternProperties"))]
        counts = [self._reach(part) for part in at_once]
        counts.append(self._reach_by(schema.get("$ref")))
        unions = [_list_at(schema, key) for key in _UNIONS]
        counts += [self._of_union(entries) + sum(map(self._reach, entries)) for entries in unions]
        counts.append(sum(self._reach(schema[key]) for key in schema if key not in _APART))
        listed = self._listed(schema)
        if sum(count > 0 for count in counts) < 2:
            return listed
        # A combination has at most one alternative of each part. It weighs `LIST_ALTERNATIVE`.
        ways = prod(1 + count / limits.LIST_ALTERNATIVE for count in counts) - 1
        return min(max(listed, limits.LIST_ALTERNATIVE * ways), _MANY)

    def _listed(self, schema: dict[str, Any]) -> float:
        values = [{"const": value} for value in _list_at(schema, "enum")]
        return sum(map(self._of_union, [values, *(_list_at(schema, key) for key in _UNIONS)]))

    def _of_union(self, entries: list[Any]) -> float:
        """The sum of the alternatives' weights, or 0 if only one weight is above 0."""
        counted = [weight for weight in map(self._weight, entries) if weight > 0]
        return float(sum(counted)) if len(counted) > 1 else 0.0

    def _weight(self, entry: Any) -> int:
        for _ in range(_REFERENCES_MAX):
            if not isinstance(entry, dict) or "$ref" not in entry:
                break
            entry = self._target(entry["$ref"])
        if not isinstance(entry, dict):
            return 0 if entry is False else limits.LIST_ALTERNATIVE
        types = entry.get("type")
        kinds = {str(kind) for kind in (types if isinstance(types, list) else [types])}
        values = [entry["const"]] if "const" in entry else entry.get("enum")
        is_plain = isinstance(values, list) and not containers_in(values)
        if is_plain or (kinds and kinds <= _SCALARS):
            return 0
        return 1 if kinds and kinds <= {"object", *_SCALARS} else limits.LIST_ALTERNATIVE

    def _reach(self, value: Any) -> float:
        """The number of alternatives in a value and in all parts to which it refers."""
        if not isinstance(value, dict | list):
            return 0.0
        known = self._reached.get(id(value))
        if known is not None:
            return known
        # A recursive reference to this value counts as all alternatives of the schema.
        self._reached[id(value)] = self._all_listed
        num_alternatives = sum(map(self._reach, containers_in(value)))
        if isinstance(value, dict):
            num_alternatives += self._own(value) + self._reach_by(value.get("$ref"))
        self._reached[id(value)] = num_alternatives = min(num_alternatives, _MANY)
        return num_alternatives

    def _reach_by(self, reference: Any) -> float:
        """`_reach` of the referenced part. A missing part counts as all alternatives."""
        if not isinstance(reference, str):
            return 0.0
        target = self._target(reference)
        return self._all_listed if target is None else self._reach(target)

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        value: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) else None
        return value


def _list_at(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
