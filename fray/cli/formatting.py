"""Formatting for people: tables that fit the terminal, and short durations. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fray.errors import InvalidRequest

CUT = "…"
GAP = "  "
LEAST = 6
"""Minimum width of a truncated column."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table, with columns as wide as their content. If that is more than ``width`` (None: no
    limit), the widest columns are truncated.
    """
    cells = [list(heads), *([_clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    if width is not None:
        widths = fitted(widths, width - len(GAP) * (len(widths) - 1))
    return [GAP.join(_cell(text, room) for text, room in zip(row, widths, strict=True)).rstrip() for row in cells]


def fitted(widths: Sequence[int], room: int) -> list[int]:
    """Return the widths, the widest reduced until they fit into ``room``, but none below `LEAST`."""
    found = list(widths)
    while sum(found) > room and max(found) > LEAST:
        widest = found.index(max(found))
        second = max((width for index, width in enumerate(found) if index != widest), default=LEAST)
        over = sum(found) - room
        found[widest] = max(LEAST, min(found[widest] - 1, max(found[widest] - over, second)))
    return found


def _clean(text: str) -> str:
    """Return the text in one line; its indentation stays."""
    return " " * (len(text) - len(text.lstrip(" "))) + " ".join(text.split())


def _cell(text: str, room: int) -> str:
    return text.ljust(room) if len(text) <= room else text[: room - 1] + CUT


def fields(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return ``name  value`` lines; names without a value are left out, further lines of a value are indented
    below it.
    """
    filled = [(name, value) for name, value in pairs if value]
    room = max((len(name) for name, _ in filled), default=0)
    lines = []
    for name, value in filled:
        first, *more = value.splitlines()
        lines.append(f"{name.ljust(room)}{GAP}{first}")
        lines += [" " * (room + len(GAP)) + line for line in more]
    return lines


def span(seconds: float | None) -> str:
    """Return a duration: ``0.3s``, ``12s``, ``3m05s``, ``2h10m``, ``4d03h``; empty for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"


def parse_span(text: str) -> float:
    """Return the seconds of ``90``, ``30s``, ``10m``, ``2h``, ``1d``.

    Raises:
        ValueError: not a duration.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    seconds = float(number) * unit
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def span_of(text: str | None, option: str) -> float | None:
    """Return the seconds of a duration. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return parse_span(text)
    except ValueError:
        raise InvalidRequest(f"{option} {text!r} is not a valid duration; examples: 30s, 10m, 2h, 1d") from None


def amount(number: float) -> str:
    """Return a number without trailing zeros: ``4``, ``0.5``."""
    return f"{number:g}"
