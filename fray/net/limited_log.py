"""Log lines that strangers can cause, limited in number: what is left out is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import trio
from attrs import define, field

LINES_LIMIT = 10
PERIOD_S = 10.0


@define(eq=False)
class LimitedLog:
    """Lines of one kind: at most `LINES_LIMIT` in `PERIOD_S`. The number of those that were left out is logged after
    that: by `run`, which belongs to its owner (a listener, a gateway). A log of the whole process (of all its dialers)
    has none, and may be written by several loops: it says the number with the next line.
    """

    logger: logging.Logger
    level: int = logging.INFO
    _clock: Callable[[], float] = time.monotonic
    _began: float = field(default=float("-inf"), init=False)
    _count: int = field(default=0, init=False)
    _left_out: trio.Event = field(factory=trio.Event, init=False)
    """Set while lines are left out that were not reported."""

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
        else:
            self._left_out.set()

    async def run(self) -> None:
        """Log the number of lines that were left out, `PERIOD_S` after the first of them, until cancelled."""
        while True:
            # No tick while nothing happens: every process that listens runs this.
            await self._left_out.wait()
            await trio.sleep(PERIOD_S)
            left_out, self._count, self._left_out = self._count - LINES_LIMIT, 0, trio.Event()
            if left_out > 0:
                self.logger.log(self.level, "%d more lines like the last ones were left out", left_out)
