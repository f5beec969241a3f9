"""Log format of daemons: readable lines on a terminal, one JSON object per line elsewhere.

Use the standard library's loggers below ``fray`` and pass facts as ``extra``: they become fields of the JSON object
and, unless the text has them already, ``key=value`` after the readable line. The text itself names the job and the
node: other handlers (of a driver that embeds a cluster) print nothing else. Never log a token or a key.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

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


def configure(json_lines: bool | None = None, *, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send everything below ``fray`` to ``stream`` (default: standard error). Call once, in ``main``.

    Args:
        json_lines: None selects JSON unless the stream is a terminal.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    as_json = not stream.isatty() if json_lines is None else json_lines
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logger = logging.getLogger("fray")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    # Or a handler of the root logger, which user code or a library may have installed, would print each line again.
    logger.propagate = False
