"""Log of daemons: readable lines on a terminal, one JSON object per line elsewhere, and in a file that is rotated.

Use the standard library's loggers below ``fray`` and pass facts as ``extra``: they become fields of the JSON object
and, unless the text has them already, ``key=value`` after the readable line. The text itself names the job and the
node: other handlers (of a driver that embeds a cluster) print nothing else. Never log a token or a key.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

FILE_BYTES, FILES_KEPT = 16 * 1024 * 1024, 4
"""Size from which on a log file is renamed to ``FILE.1``, and number of such files that are kept."""

# What a record has without `extra`; "taskName" since Python 3.12, the other two are added by formatters.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields given with ``extra``, except names with an underscore, which other libraries (Ray) add to every
    record."""
    return {key: value for key, value in vars(record).items() if key not in _OWN and not key.startswith("_")}


def _encodable(text: str) -> str:
    """Replace lone surrogates (from a file name, say), which a text stream cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


class JsonFormatter(logging.Formatter):
    """``{"time": seconds since the epoch, "level": …, "part": …, "text": …, facts…}``"""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "part": record.name,
            "text": record.getMessage(),
            **_extra_fields(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return _encodable(json.dumps(entry, default=str, ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """``12:34:56 controller  node joined  node=a``; the level only from warnings on."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        message = record.getMessage()
        facts = "".join(f"  {key}={value}" for key, value in _extra_fields(record).items() if str(value) not in message)
        text = f"{clock} {record.name.removeprefix('fray.')}  {level}{message}{facts}"
        return _encodable(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


class _LogFile(RotatingFileHandler):
    """File that only its owner may read: lines name users, jobs and machines."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return TextIOWrapper(open(descriptor, "ab"), encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: standard error has it, which a full disk must not fill with tracebacks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-json``, ``--log-text``, ``--log-file`` and ``--quiet``: the arguments of `configure`."""
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--log-json", dest="json_lines", action="store_true", default=None, help="log JSON lines")
    style.add_argument("--log-text", dest="json_lines", action="store_false", help="log readable lines")
    parser.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help=f"log JSON lines to this file, too; from {FILE_BYTES >> 20} MiB on it is renamed to FILE.1, and "
        f"{FILES_KEPT} such files are kept",
    )
    parser.add_argument("--quiet", action="store_true", help="with --log-file: log there alone, not to standard error")


def configure(
    json_lines: bool | None = None,
    file: Path | None = None,
    *,
    quiet: bool = False,
    stream: TextIO | None = None,
    level: int = logging.INFO,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Send everything below ``fray`` to ``stream`` (default: standard error). Call once, in ``main``.

    Args:
        json_lines: None selects JSON unless the stream is a terminal.
        file: file that gets JSON lines, too, and is rotated at ``file_bytes``.
        quiet: if there is such a file, ``stream`` gets nothing.

    Raises:
        OSError: the file cannot be opened.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    as_json = not stream.isatty() if json_lines is None else json_lines
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    handlers: list[logging.Handler] = [] if quiet and file is not None else [handler]
    if file is not None:
        handlers.append(_LogFile(file, maxBytes=file_bytes, backupCount=FILES_KEPT))
        handlers[-1].setFormatter(JsonFormatter())
    logger = logging.getLogger("fray")
    for former in logger.handlers:
        former.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    # Or a handler of the root logger, which user code or a library may have installed, would print each line again.
    logger.propagate = False
