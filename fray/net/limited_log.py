"""Log lines that strangers can cause, limited in number: what is left out is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attrs import define, field

LINES_LIMIT = 10
PERIOD_S = 10.0


@define(eq=False)
class LimitedLog:
    """Lines of one kind: at most `LINES_LIMIT` in `PERIOD_S`. The next one after that says how many were left out."""

    logger: logging.Logger
    level: int = logging.INFO
    _clock: Callable[[], float] = time.monotonic
    _began: float = field(default=float("-inf"), init=False)
    _count: int = field(default=0, init=False)

    def write(self, text: str, *args: object) -> None:
        """Log the line, or count it."""
        now = self._clock()
        if now >= self._began + PERIOD_S:
            left_out, self._began, self._count = self._count - LINES_LIMIT, now, 0
            if left_out > 0:
                text, args = f"{text} (and %d more of this kind before)", (*args, left_out)
        self._count += 1
        if self._count <= LINES_LIMIT:
            self.logger.log(self.level, text, *args)
