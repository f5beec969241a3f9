"""The daemon ``fray-controller``, which writes how long each step of its loop takes, in CPU time of its thread.

A step (`fray.controller.loop.Loop.run_turn`) takes the waiting events, decides, saves and publishes; a pass of the
event loop also runs the tasks of connections, among them those that answer what a dashboard asks.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fray.controller import main
from fray.controller.loop import Loop
from fray.controller.metrics.loop_delay import LoopDelayMeter

FILE = "BENCH_STEPS_FILE"
"""Environment variable with the path of the file."""
RECORD = struct.Struct("<cdd")
STEP, PASS = b"s", b"p"


def read_steps(file: Path, kind: bytes, begin: float, end: float) -> list[float]:
    """Return the CPU times, in seconds, of what ended between two times of the clock."""
    found = RECORD.iter_unpack(file.read_bytes())
    return [cpu_s for each, at, cpu_s in found if each == kind and begin <= at < end]


def _run() -> int:
    with Path(os.environ[FILE]).open("wb") as out:

        def measured(kind: bytes, run: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any, *args: Any) -> Any:
                before = time.thread_time()
                result = run(self, *args)
                out.write(RECORD.pack(kind, time.time(), time.thread_time() - before))
                return result

            return wrapped

        began = time.thread_time()
        begin_pass, end_pass = LoopDelayMeter.after_io_wait, LoopDelayMeter.before_io_wait

        def begin(self: LoopDelayMeter, timeout: float) -> None:
            nonlocal began
            begin_pass(self, timeout)
            began = time.thread_time()

        def end(self: LoopDelayMeter, timeout: float) -> None:
            out.write(RECORD.pack(PASS, time.time(), time.thread_time() - began))
            end_pass(self, timeout)

        # Of the class, since the daemon makes its own: nothing else of it differs.
        Loop.run_turn = measured(STEP, Loop.run_turn)  # type: ignore[method-assign]
        LoopDelayMeter.after_io_wait = begin  # type: ignore[method-assign]
        LoopDelayMeter.before_io_wait = end  # type: ignore[method-assign]
        return main.main()


if __name__ == "__main__":
    sys.exit(_run())
