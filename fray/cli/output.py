"""Output of verbs: lines and JSON on standard output, messages for people on standard error."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from fray.cli.formatting import Line
from fray.errors import InvalidRequest
from fray.model.text import RESET, visible_text
from fray.monitoring.json_form import plain

CLEAR = "\x1b[H\x1b[2J"
"""Clears a terminal."""
COLOR_CODES = {"red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m"}


_color_choice = "auto"


def choose_colors(choice: str) -> None:
    """Set the value of ``--color`` for this process: ``auto``, ``always`` or ``never``."""
    global _color_choice
    _color_choice = choice


def has_colors(stream: TextIO) -> bool:
    """Return whether a stream gets colors: a terminal does, unless ``NO_COLOR`` is set (https://no-color.org)."""
    if _color_choice != "auto":
        return _color_choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(lines: Iterable[str]) -> None:
    """Print lines on standard output; on a terminal, control characters in them do nothing."""
    colors = has_colors(sys.stdout)
    for line in lines:
        # Part by part, so that only Fray's own colors reach the terminal.
        parts = line.parts if colors and isinstance(line, Line) else ((line, ""),)
        text = "".join(_painted(safe_text(part, sys.stdout), color) for part, color in parts)
        sys.stdout.write(f"{text}\n")


def _painted(text: str, color: str) -> str:
    return f"{COLOR_CODES[color]}{text}{RESET}" if color else text


def say_screen(lines: Iterable[str]) -> None:
    """Print lines on standard output in place of what a terminal shows; elsewhere below what was printed."""
    with screen():
        say(lines)


class _Screen(io.StringIO):
    """Output that is kept until it is shown at once."""

    def __init__(self, shown_on: TextIO) -> None:
        super().__init__()
        self._shown_on = shown_on
        self.notes: list[str] = []

    def isatty(self) -> bool:
        return self._shown_on.isatty()


@contextmanager
def screen() -> Iterator[None]:
    """Print what the block prints in place of what a terminal shows; elsewhere below what was printed.

    At once, after the block has got it: a terminal that is cleared first would be empty meanwhile. If the block raises,
    nothing is printed.
    """
    out = sys.stdout
    with redirect_stdout(_Screen(out)) as shown:
        yield
    out.write((CLEAR if out.isatty() else "") + shown.getvalue())
    out.flush()
    for text in shown.notes:
        note(text)


def safe_text(text: str, stream: TextIO) -> str:
    """Return lines for a stream: on a terminal without effective control characters, else as they are."""
    return "\n".join(map(visible_text, text.split("\n"))) if stream.isatty() else text


def say_json(value: object) -> None:
    """Print one JSON document; objects of `fray.model` are objects whose keys are their fields."""
    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def note(text: str) -> None:
    """Print a message about the command, not part of its result, on standard error."""
    if isinstance(sys.stdout, _Screen):
        # Below the screen, which would clear it.
        sys.stdout.notes.append(text)
        return
    sys.stdout.flush()
    sys.stderr.write(f"fray: {safe_text(text, sys.stderr)}\n")
    sys.stderr.flush()


def can_ask() -> bool:
    """Return whether a person can answer a question: standard input and standard error are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


async def confirmed(question: str) -> bool:
    """Ask, and return whether the answer is yes."""
    import trio

    note(question)
    answer = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    return answer.strip().lower() in ("y", "yes")


def width() -> int | None:
    """Return the width of the terminal; None if the output is not one, so that nothing is truncated for programs and
    files.
    """
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return max(40, shutil.get_terminal_size().columns)


def clock(seconds: float | None) -> str:
    """Return a time in this machine's zone: ``14:03:05`` today, else with its date; empty for None."""
    if seconds is None:
        return ""
    local = time.localtime(seconds)
    today = time.localtime()
    same_day = local[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", local)


@contextmanager
def explained_missing(program: str, extra: str) -> Iterator[None]:
    """Raise InvalidRequest where an import within the block fails: the program needs this extra of Fray."""
    try:
        yield
    except ImportError as error:
        raise InvalidRequest(
            f"{program} needs packages that are missing ({error}): pip install 'fray[{extra}]'"
        ) from None
