"""One owner for each output directory: its lock, its settings for those who would start the run again, and its lines.

The lock is one of the kernel, so that it ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Awaitable, Callable, Mapping
from io import FileIO
from pathlib import Path

import trio

from fray.rl.records.run_files import RECIPE_FILE, read_state

LOCK_FILE, LINES_FILE = "run.lock", "progress.log"
FOLLOW_PERIOD_S = 0.5
"""Seconds between two looks at a run that is followed."""
SHOWN_LINES = 5
"""Lines from before that are shown to who begins to follow a run."""
LIVING = ("pending", "running")
"""States of a run that has not ended; the process of one of them may have been lost."""


class OutputLock:
    """Lock of an output directory, to be held while a process runs the run.

    Args:
        output: None: there is nothing to lock, and each process gets it.
    """

    def __init__(self, output: Path | None) -> None:
        self._output = output
        self._file: FileIO | None = None

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def try_acquire(self) -> bool:
        """Return whether this process has the lock now. It is released at the end of the ``with`` block."""
        if self._output is None or self._file is not None:
            return True
        self._output.mkdir(parents=True, exist_ok=True)
        # The file stays: were it removed, two processes could lock two files of one name.
        file = FileIO(self._output / LOCK_FILE, "a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:
            # A file system without locks: nothing protects the output there.
            pass
        self._file = file
        return True


def differences(output: Path, settings: Mapping[str, str]) -> list[str]:
    """Return how settings differ from those of the run in a directory: ``trainer.lr: 0.001 there, 0.002 here``.

    Empty if that run has not written any.
    """
    file = output / RECIPE_FILE
    if not file.is_file():
        return []
    there: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    keys = dict.fromkeys([*there, *settings])
    return [
        f"{key}: {there.get(key, 'not set')} there, {settings.get(key, 'not set')} here"
        for key in keys
        if there.get(key) != settings.get(key)
    ]


def add_line(output: Path, text: str) -> None:
    """Add a line to those that the run has printed."""
    with (output / LINES_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


async def follow_lines(output: Path, is_living: Callable[[], Awaitable[bool]], say: Callable[[str], None]) -> None:
    """Say the last lines of a run, and each further one, until the run has ended or its process is lost.

    Args:
        is_living: whether the run has a process, or will have one.
    """
    lines = _Lines(output / LINES_FILE)
    for line in lines.new()[-SHOWN_LINES:]:
        say(line)
    while True:
        # Before the lines are read: what is written until then is not missed.
        has_ended = read_state(output).get("state") not in LIVING or not await is_living()
        for line in lines.new():
            say(line)
        if has_ended:
            return
        await trio.sleep(FOLLOW_PERIOD_S)


class _Lines:
    """The lines of a file that grows."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    def new(self) -> list[str]:
        """Return the lines that are complete, and were not returned before."""
        if not self._file.is_file():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read)
            found = file.read()
        complete = found[: found.rfind(b"\n") + 1]
        self._read += len(complete)
        return complete.decode(errors="replace").splitlines()
