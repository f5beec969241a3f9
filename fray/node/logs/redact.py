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
        self._names = {
            line.encode(): b"[secret %s]" % name.encode() for line, name in lines if len(line) >= LEAST_CHARS
        }
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))
        self.hide: Hide | None = self._hide if self._names else None

    def __repr__(self) -> str:
        return f"<Redactor of {sorted(set(self._names.values()))}>"

    def _hide(self, lines: bytes) -> bytes:
        return self._pattern.sub(lambda match: self._names[match[0]], lines)

    def text(self, text: str) -> str:
        """The same to a text."""
        return self._hide(text.encode("utf-8", "replace")).decode() if self._names else text
