"""Frames of a traceback that travel with an error: they continue its traceback in the process that receives it.

So every printer shows one traceback from the caller's line to the line that failed, each with its source.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeAlias

from fray.tracebacks import REMOTE_FRAME, line_number, traceback_entries, traceback_of

FrameRow: TypeAlias = tuple[int, str, int, str, str, int, str, str]
"""Number of the frame in its error, file, line number, name, qualified name, first line number, text of the line,
path of the file below the folder from which its module is imported, or empty."""

FRAMES_LIMIT = 1000
"""Maximum number of frames sent of one error, the innermost."""

_NO_LOCATION = 0xF8
"""Entry of a code object's table of locations for instructions without one, less 1 their number (up to 8)."""


def dump_frames(error: BaseException, numbers: dict[FrameType, int]) -> list[FrameRow]:
    """Return the frames of ``error.__traceback__``. ``numbers`` is shared by all errors that are sent together."""
    return [_row(entry, numbers) for entry in traceback_entries(error)[-FRAMES_LIMIT:]]


def _row(entry: TracebackType, numbers: dict[FrameType, int]) -> FrameRow:
    frame, code = entry.tb_frame, entry.tb_frame.f_code
    # Numbered, as one frame may be in the tracebacks of an error and of its group, where it is one frame again.
    number = numbers.setdefault(frame, len(numbers))
    lineno = line_number(entry)
    line = linecache.getline(code.co_filename, lineno, frame.f_globals).strip()
    relative = _relative(code.co_filename, str(frame.f_globals.get("__name__", ""))) if line else ""
    names = code.co_name, code.co_qualname
    return number, code.co_filename, lineno, *names, code.co_firstlineno, line, relative


def _relative(path: str, module: str) -> str:
    # By the name of the module and not by ``sys.path``, in which each process has other folders.
    depth = module.count(".") + path.endswith("/__init__.py")
    return "/".join(path.rsplit("/", depth + 1)[1:])


def load_frames(rows: Sequence[FrameRow], frames: dict[int, FrameType]) -> TracebackType | None:
    """Return the traceback of such rows. ``frames`` is shared as ``numbers`` is."""
    entries = []
    for number, path, lineno, name, qualname, first, line, relative in rows:
        if number not in frames:
            frames[number] = _frame(_local_path(path, relative, lineno, line), name, qualname, first)
        entries.append((frames[number], lineno))
    return traceback_of(entries)


def _local_path(path: str, relative: str, lineno: int, line: str) -> str:
    """Return the file of this machine that has the same line, else the remote path, with its line to print."""
    if not line:
        return path
    for candidate in (path, *(f"{folder}/{relative}" for folder in sys.path if relative and folder)):
        linecache.checkcache(candidate)
        if linecache.getline(candidate, lineno).strip() == line:
            return candidate
    # A file of this name with another text was edited since, or is another one: its line would be a wrong one.
    if linecache.getlines(path) and path not in _remote_lines:
        path = f"<remote>{path}"
    lines = _remote_lines.setdefault(path, [])
    lines.extend("\n" for _ in range(lineno - len(lines)))
    lines[lineno - 1] = line + "\n"
    # Without a time of modification the entry is kept, as that of a file that a loader has read.
    linecache.cache[path] = (len(lines), None, lines, path)
    return path


_remote_lines: dict[str, list[str]] = {}
"""Lines of files that are not on this machine: those that were in tracebacks; the others are blank."""


def _frame(path: str, name: str, qualname: str, first: int) -> FrameType:
    """Return a frame that has run: tracebacks are made of frames, and Python makes frames by running code alone."""
    found: list[FrameType] = []
    names: dict[str, Any] = {"keep": lambda: found.append(sys._getframe(1)), REMOTE_FRAME: True}
    exec(_code(path, name, qualname, first), names, {})
    return found.pop()


@lru_cache(maxsize=512)
def _code(path: str, name: str, qualname: str, first: int) -> CodeType:
    code = compile("keep()", path, "exec")
    units = len(code.co_code) // 2
    # The columns are not known here, and those of this code would be shown as markers below a wrong place.
    table = bytes(_NO_LOCATION | (min(8, units - at) - 1) for at in range(0, units, 8))
    return code.replace(co_name=name, co_qualname=qualname, co_firstlineno=first, co_linetable=table)
