"""Redaction of secrets in output. Pure.

Each line of a secret's value is searched for verbatim: an encoded or truncated one passes. Values shorter than
`LEAST_CHARS` are not searched for, since they would match innocent lines too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

LEAST_CHARS = 8

Hide: TypeAlias = Callable[[bytes], bytes]
"""Replaces secrets by their names in any number of whole lines."""


class Redactor:
    """Replaces values of secrets by ``[secret NAME]``.

    Attributes:
        hide: does so in whole lines; None where there are no secrets.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # A value of several lines (a private key) is printed line by line, and lines are searched one by one.
        lines = [(line, name) for name, value in secrets.items() for line in (value, *value.splitlines())]
        self._names = {_bytes(line): b"[secret %s]" % name.encode() for line, name in lines if len(line) >= LEAST_CHARS}
        # A regular expression takes the first alternative: a secret that begins with another one would be replaced in
        # part.
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))
        self.hide: Hide | None = self._hide if self._names else None

    def __repr__(self) -> str:
        return f"<Redactor of {sorted(set(self._names.values()))}>"

    def _hide(self, lines: bytes) -> bytes:
        return self._pattern.sub(lambda match: self._names[match[0]], lines)

    def text(self, text: str) -> str:
        """Return the text with secrets replaced."""
        return self._hide(_bytes(text)).decode("utf-8", "surrogateescape") if self._names else text

    def seam(self, data: bytes, at: int) -> int:
        """Return where to cut, at ``at`` or before, so that no secret is split."""
        # ``or at``: a secret that fills the whole piece cannot be kept together, and a cut at 0 would make no progress.
        return min((_secret_start(data, at, value) for value in self._names), default=at) or at


def _secret_start(data: bytes, at: int, value: bytes) -> int:
    start = data.find(value[:1], max(0, at - len(value) + 1), at)
    while start >= 0:
        # A short comparison first: it dismisses most places without copying a long value.
        if data.startswith(value[: min(8, len(data) - start)], start) and data.startswith(
            value[: len(data) - start], start
        ):
            return start
        start = data.find(value[:1], start + 1, at)
    return at


def _bytes(text: str) -> bytes:
    """Return the text as a process receives it; what came from invalid UTF-8 becomes the same bytes again, if
    possible."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")
