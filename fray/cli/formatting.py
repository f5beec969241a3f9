"""Formatting for people: tables that fit the terminal, and short durations. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from fray.errors import InvalidRequest

CUT = "…"
GAP = "  "
LEAST = 16
"""Width down to which a column is truncated; one of that width or less is not truncated at all."""
NAMES = frozenset(
    {
        *("ID", "NAME", "JOB", "RUN", "NODE", "NAMESPACE", "USER", "OWNER", "GROUP", "MACHINE", "DEVICE", "ATTEMPT"),
        *("KEY", "TARGET", "FROM", "MODEL", "SAMPLER", "WEIGHTS", "CHECKPOINT", "OUTPUT"),
    }
)
"""Heads of columns that are copied into other commands: they are never truncated, but left out if there is no room."""
COLORED = frozenset({"STATE", "STATUS", "PHASE", "OUTCOME"})
"""Heads of columns whose first word has a color."""
COLORS = {
    **dict.fromkeys(("failed", "silent", "degraded", "refused:"), "red"),
    **dict.fromkeys(("pending", "waiting", "starting", "creating", "restarting"), "yellow"),
    **dict.fromkeys(("running", "succeeded", "alive", "ready", "held", "joined"), "green"),
}


class Line(str):
    """Line of a table.

    Attributes:
        parts: the line in parts, each with its color; empty: none.
    """

    __slots__ = ("parts",)
    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[str, str]]) -> Line:
        line = cls("".join(text for text, _ in parts))
        line.parts = tuple(parts)
        return line


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, *, optional: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a table (each a `Line`), with columns as wide as their content.

    If that is more than ``width`` (None: no limit), columns without content are left out, the widest columns of text
    are truncated, then other columns are left out, as far as is needed. `NAMES` are whole or absent, so that what is
    shown can be copied.

    Args:
        optional: heads of the columns that may be left out, the first one first. What is then still too wide, stays.
    """
    cells = [list(heads), *([_clean(cell) for cell in row] for row in rows)]
    widths = {column: max(len(row[column]) for row in cells) for column in range(len(heads))}
    if width is not None:
        widths = _chosen(heads, cells, widths, width, optional)
    return [_line(heads, row, widths, has_colors=number > 0) for number, row in enumerate(cells)]


def _chosen(
    heads: Sequence[str], cells: Sequence[Sequence[str]], widths: dict[int, int], width: int, optional: Sequence[str]
) -> dict[int, int]:
    """Return the columns that are shown in this width, each with its own."""
    texts = {column for column in widths if heads[column] not in NAMES}

    def fitting(columns: set[int]) -> dict[int, int] | None:
        found = {column: widths[column] for column in sorted(columns)}
        return found if _fit(found, texts & columns, width) else None

    columns = set(widths)
    leaving = [heads.index(head) for head in optional if head in heads]
    for column in widths:
        is_empty = len(cells) > 1 and not any(row[column] for row in cells[1:])
        if is_empty and _total({each: widths[each] for each in columns}) > width:
            columns.remove(column)
    left = []
    for column in leaving:
        if column in columns and fitting(columns) is None:
            columns.remove(column)
            left.append(column)
    # A wide column that had to go leaves room for narrow ones that went before it.
    shown = fitting(columns) or {column: widths[column] for column in sorted(columns)}
    for column in reversed(left):
        least = min(widths[column], LEAST) if column in texts else widths[column]
        if _total(shown) + len(GAP) + least <= width:
            columns.add(column)
            shown = fitting(columns) or shown
    return shown


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + len(GAP) * (len(widths) - 1)


def _fit(widths: dict[int, int], texts: set[int], width: int) -> bool:
    """Truncate the columns of text, the widest first, if that makes the table fit; return whether it fits."""
    over = _total(widths) - width
    if over > sum(max(0, widths[column] - LEAST) for column in texts):
        return False
    while over > 0:
        widest = max(texts, key=lambda column: widths[column])
        second = max((widths[column] for column in texts - {widest}), default=LEAST)
        cut = min(over, max(1, widths[widest] - max(second, LEAST)))
        widths[widest] -= cut
        over -= cut
    return True


def _line(heads: Sequence[str], row: Sequence[str], widths: dict[int, int], *, has_colors: bool) -> Line:
    parts: list[tuple[str, str]] = []
    for column, room in widths.items():
        text = _cell(row[column], room)
        word = text.partition(" ")[0].rstrip(",")
        color = COLORS.get(word, "") if has_colors and heads[column] in COLORED else ""
        parts += [(GAP, "")] if parts else []
        parts += [(text[: len(word)], color), (text[len(word) :], "")] if color else [(text, "")]
    # Without spaces at the end, after which a terminal of that width would begin a new line.
    while parts and not (text := parts[-1][0].rstrip()):
        parts.pop()
    if parts:
        parts[-1] = (text, parts[-1][1])
    return Line.of(parts)


def _clean(text: str) -> str:
    """Return the text in one line; its indentation stays."""
    return " " * (len(text) - len(text.lstrip(" "))) + " ".join(text.split())


def _cell(text: str, room: int) -> str:
    return text.ljust(room) if len(text) <= room else text[: room - 1] + CUT


def wrapped(line: str, width: int | None, indent: int) -> list[str]:
    """Return a line in lines of at most this width (None: no limit), all but the first indented by so many spaces.

    What is copied stays whole, even if it is longer: words, and commands in backticks.
    """
    if width is None or len(line) <= width:
        return [line]
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _KEPT), line)
    lines = textwrap.wrap(whole, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [each.replace(_KEPT, " ") for each in lines]


_COMMAND, _KEPT = re.compile("`[^`]*`"), "\x1f"


def fields(pairs: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Return ``name  value`` lines of at most this width (None: no limit); names without a value are left out, further
    lines of a value are indented below it.
    """
    filled = [(name, value) for name, value in pairs if value]
    room = max((len(name) for name, _ in filled), default=0)
    lines = []
    for name, value in filled:
        heads = [name.ljust(room), *[" " * room] * value.count("\n")]
        for head, line in zip(heads, value.splitlines(), strict=True):
            lines += wrapped(f"{head}{GAP}{line}", width, room + len(GAP))
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
