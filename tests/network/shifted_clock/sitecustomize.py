"""Wall clock of a host of the laboratory: Python's `time.time`, shifted by the seconds in the file ``FRAY_LAB_CLOCK``.

Linux has no namespace for the wall clock. So the clock that libraries in C read is not shifted.
"""

import os
import time
from pathlib import Path

_file = Path(os.environ.get("FRAY_LAB_CLOCK", "/nonexistent"))
_time_ns = time.time_ns


def _shift_ns() -> int:
    try:
        return round(float(_file.read_text() or 0) * 1e9)
    except (OSError, ValueError):
        return 0


time.time_ns = lambda: _time_ns() + _shift_ns()
time.time = lambda: time.time_ns() / 1e9
