"""Output of verbs: lines and JSON on standard output, messages for people on standard error."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from enum import Enum
from typing import Any, TextIO

import attrs

from fray.model.text import visible_text

CLEAR = "\x1b[H\x1b[2J"
"""Clears a terminal."""


def say(lines: Iterable[str]) -> None:
    """Print lines on standard output; on a terminal, control characters in them do nothing."""
    for line in lines:
        sys.stdout.write(f"{safe_text(line, sys.stdout)}\n")


def say_screen(lines: Iterable[str]) -> None:
    """Print lines on standard output in place of what a terminal shows; elsewhere below what was printed."""
    if sys.stdout.isatty():
        sys.stdout.write(CLEAR)
    say(lines)


def safe_text(text: str, stream: TextIO) -> str:
    """Return lines for a stream: on a terminal without effective control characters, else as they are."""
    return "\n".join(map(visible_text, text.split("\n"))) if stream.isatty() else text


def say_json(value: object) -> None:
    """Print one JSON document; objects of `fray.model` are objects whose keys are their fields."""
    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def note(text: str) -> None:
    """Print a message about the command, not part of its result, on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"fray: {safe_text(text, sys.stderr)}\n")
    sys.stderr.flush()


def plain(value: Any) -> Any:
    """Return the value as JSON types. Every field is there, also empty ones: programs can rely on the keys."""
    if attrs.has(type(value)):
        return {
            field.name: plain(getattr(value, field.name))
            for field in attrs.fields(type(value))
            if field.repr is not False
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


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
