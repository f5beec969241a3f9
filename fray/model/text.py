"""Quantities and lists as short English text, for messages and explanations."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SIGNALS = [
    "HUP",
    "INT",
    "QUIT",
    "ILL",
    "TRAP",
    "ABRT",
    "BUS",
    "FPE",
    "KILL",
    "USR1",
    "SEGV",
    "USR2",
    "PIPE",
    "ALRM",
    "TERM",
    "STKFLT",
    "CHLD",
    "CONT",
    "STOP",
    "TSTP",
    "TTIN",
    "TTOU",
    "URG",
    "XCPU",
    "XFSZ",
    "VTALRM",
    "PROF",
    "WINCH",
    "IO",
    "PWR",
    "SYS",
]
"""Names of signals 1 to 31 on Linux, wherever this runs: their numbers come from nodes."""
_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def near_text(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean …?"`` with the most similar names; nothing if none is similar."""
    names = list(names)
    near = difflib.get_close_matches(name, names, 3, 0.7)
    if not near:  # the same in other case
        near = [each for each in names if each.replace("_", "").lower() == name.replace("_", "").lower()]
    return f"; did you mean {', '.join(near)}?" if near else ""


def byte_size_text(amount: float, separator: str = " ") -> str:
    """Return bytes in the largest unit (powers of 1024) that leaves a number of 1 or more: ``1.5 GB``.

    Args:
        separator: text between number and unit; with ``""`` the result is what `ResourceConfig` accepts.
    """
    value, unit = float(amount), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        if abs(value) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{value:.4g}{separator}{unit}"


def duration_text(seconds: float) -> str:
    """Return a duration in one unit: ``12 s``, ``58 min``, ``3.5 h``, ``2.1 days``. Negative durations count as 0."""
    seconds = max(seconds, 0.0)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    amount, unit = (seconds / 3600, "h") if seconds < 172_800 else (seconds / 86_400, "days")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def list_text(names: Iterable[object], limit: int = 4, separator: str = ", ") -> str:
    """Return the first ``limit`` names, and how many are left out: ``a, b, c, d and 3 more``."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return separator.join(listed[:limit]) + more


def plural(count: int, noun: str, many: str = "") -> str:
    """Return ``1 job``, ``2 jobs``; with ``many`` that plural instead of the one with an ``s``."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 77`` for a number without a name."""
    return f"SIG{_SIGNALS[number - 1]}" if 0 < number <= len(_SIGNALS) else f"signal {number}"


def visible_text(text: str, *, colors: bool = False) -> str:
    """Return a line for a terminal, in which control characters are visible (``^[``) and do nothing; tabs stay.

    Args:
        colors: sequences that only set colors stay, too, and end with the line.
    """
    # Titles, links, the clipboard, and text that hides other text: a terminal obeys them.
    if text.isprintable():
        return text
    if not colors or "\x1b[" not in text:
        return _CONTROL.sub(_caret, text)
    parts = _COLORS.split(text)
    shown = [part if index % 2 else _CONTROL.sub(_caret, part) for index, part in enumerate(parts)]
    return "".join(shown) + (RESET if len(parts) > 1 else "")


def name_pattern(name: str) -> re.Pattern[str]:
    """Return what finds a name as a whole word of a text: ``gpu-1`` is not in ``gpu-10``, nor in ``gpu-1.lab``."""
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)")


def without_colors(text: str) -> str:
    """Return a text without sequences that set colors."""
    return _COLORS.sub("", text)


RESET = "\x1b[0m"
"""Sequence that ends all colors of a terminal."""
_COLORS = re.compile(r"(\x1b\[[0-9;:]*m)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""Control characters but the tab, with those of 8 bits (C1)."""


def _caret(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"^{chr(code ^ 64)}" if code < 128 else f"\\x{code:02x}"


def encodable(text: str) -> str:
    """Return text that SQLite can store: messages of user code may contain half a surrogate pair."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
