"""Secrets that a job prints are not shown. Pure.

What is looked for is each line of a secret's value, as it is: an encoded or a cut one passes. Values under
`LEAST_CHARS` are not looked for, since they would stand in innocent lines too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

LEAST_CHARS = 8

Hide: TypeAlias = Callable[[bytes], bytes]
"""Puts the names in the place of values, in any number of whole lines."""


class Redactor:
    """Puts ``[secret NAME]`` in the place of values.

    Attributes:
        hide: does so to whole lines; None where there is nothing to hide.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        lines = [(line, name) for name, value in secrets.items() for line in (value, *value.splitlines())]
        self._names = {_bytes(line): b"[secret %s]" % name.encode() for line, name in lines if len(line) >= LEAST_CHARS}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))
        self.hide: Hide | None = self._hide if self._names else None

    def __repr__(self) -> str:
        return f"<Redactor of {sorted(set(self._names.values()))}>"

    def _hide(self, lines: bytes) -> bytes:
        return self._pattern.sub(lambda match: self._names[match[0]], lines)

    def text(self, text: str) -> str:
        """The same to a text."""
        return self._hide(_bytes(text)).decode("utf-8", "surrogateescape") if self._names else text

    def seam(self, data: bytes, at: int) -> int:
        """Where to cut, at ``at`` or before: a value of which the beginning stands there is left whole."""
        return min((_begins(data, at, value) for value in self._names), default=at) or at


def _begins(data: bytes, at: int, value: bytes) -> int:
    start = data.find(value[:1], max(0, at - len(value) + 1), at)
    while start >= 0:
        if data.startswith(value[: min(8, len(data) - start)], start) and data.startswith(
            value[: len(data) - start], start
        ):
            return start
        start = data.find(value[:1], start + 1, at)
    return at


def _bytes(text: str) -> bytes:
    """As a process is given it, where that is possible: what came from bytes that are no UTF-8 is those again."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")
