"""The names of metrics in a PromQL expression."""

from __future__ import annotations

import re

KEYWORDS = {
    "and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right",
    "bool", "offset", "inf", "nan",
}  # fmt: skip
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MATCHERS = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"\[[^\[\]]*\]")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_IDENTIFIER = re.compile(r"(?<![\w.$])[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\(|\w)")


def metric_names(expression: str) -> set[str]:
    """Every identifier that is no function, keyword, label, string or duration."""
    text = _STRING.sub('""', expression)
    for pattern in (_MATCHERS, _RANGE, _GROUPING):
        text = pattern.sub(" ", text)
    return {name for name in _IDENTIFIER.findall(text) if name.lower() not in KEYWORDS}


def label_names(expression: str) -> set[str]:
    """Labels that it groups by or looks at."""
    text = _STRING.sub('""', expression)
    listed = ",".join(_GROUPING.findall(text) + _MATCHERS.findall(text))
    return set(re.findall(r"[a-zA-Z_]\w*", listed))
