"""Status of long work in one line, every so many seconds: on a terminal, or when asked."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

TERMINAL_S = 10.0
"""Seconds between two lines on a terminal."""


class Progress:
    """Writer of status lines to stderr; `show` is called as often as there may be something new."""

    def __init__(self, every_s: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin.

        Args:
            every_s: seconds between two lines. Default: `TERMINAL_S` if stderr is a terminal, else no lines.
            clock: seconds of real time.
        """
        self._every_s = TERMINAL_S if every_s is None and sys.stderr.isatty() else every_s
        self._clock = clock
        self._began = self._last = clock()

    def show(self, text: str) -> None:
        """Write the text and the time since the beginning, if a line is due."""
        now = self._clock()
        if self._every_s is not None and now >= self._last + self._every_s:
            self._last = now
            print(f"{now - self._began:.0f} s: {text}", file=sys.stderr, flush=True)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--progress-s``, of which `Progress` takes the value."""
    parser.add_argument(
        "--progress-s",
        metavar="S",
        type=float,
        help=f"a line of status every S seconds (default: {TERMINAL_S:g} on a terminal, else none)",
    )
