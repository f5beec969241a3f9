#!/usr/bin/env python3
"""Lists the files of Fray that one launch, one actor call or one printed line runs through, in the order of first use.

``python tools/trace.py launch`` (or ``call``, ``log``) does the thing twice in a ``local`` cluster and traces the
second time with `sys.setprofile`. It is a tour of the code: open the files in the order in which they are printed.

A *move* is a call of a function of Fray whose file differs from that of the previous one in the same thread.
``--json`` prints the figures alone; ``--moves`` prints each move.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trio

import fray
from fray import Entrypoint, JobRequest

PACKAGE = str(Path(fray.__file__).parent) + "/"
SETTLE_S = 0.3
"""Seconds that the cluster gets to finish what the traced operation has started."""


class Trace:
    """Calls of functions of Fray in this process, while it is entered."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.functions: set[tuple[str, str]] = set()
        self.calls = 0
        self.moves: list[tuple[str, str]] = []
        self._last: dict[int, str] = {}
        self._active = False

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if not self._active or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name in ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            return
        path = code.co_filename.removeprefix(PACKAGE)
        self.calls += 1
        self.files[path] = self.files.get(path, 0) + 1
        self.functions.add((path, code.co_qualname))
        thread = threading.get_ident()
        last = self._last.get(thread)
        if last is not None and last != path:
            self.moves.append((last, path))
        self._last[thread] = path

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while the block runs."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def install(self) -> None:
        """Hook into this thread and all that start from now on; nothing is counted yet."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def figures(self) -> dict[str, int]:
        """Return the four counts."""
        return {
            "files": len(self.files),
            "functions": len(self.functions),
            "calls": self.calls,
            "moves": len(self.moves),
        }


def double(number: int) -> int:
    """Return twice ``number``; the traced job."""
    return 2 * number


class Counter:
    """The traced actor."""

    def __init__(self) -> None:
        self.count = 0

    async def add(self, amount: int) -> int:
        """Add and return the count."""
        self.count += amount
        return self.count


async def trace_launch(trace: Trace) -> None:
    """Trace from ``scope.launch`` to the value of the job."""
    async with fray.open_cluster("local") as cluster, cluster.open_scope("trace") as scope:
        for number in range(2):
            request = JobRequest(name=f"double-{number}", entrypoint=Entrypoint.from_callable(double, args=(number,)))
            if number == 0:
                assert await (await scope.launch(request)).wait() == 0
                await trio.sleep(SETTLE_S)
                continue
            with trace.running():
                assert await (await scope.launch(request)).wait() == 2


async def trace_call(trace: Trace) -> None:
    """Trace ``await counter.add(5)``."""
    async with fray.open_cluster("local") as cluster, cluster.open_scope("trace") as scope:
        counter = await scope.create_actor(Counter, name="counter")
        for _ in range(3):
            await counter.add(5)
        await trio.sleep(SETTLE_S)
        with trace.running():
            await counter.add(5)


async def trace_log(trace: Trace) -> None:
    """Trace from ``print`` in a job to the terminal of the driver."""
    written = trio.Event()

    class Terminal:
        """Stands for the terminal, and notices the traced line."""

        def write(self, text: str) -> int:
            if "hello from the job" in text:
                written.set()
            return real.write(text)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = sys.stdout
    sys.stdout = Terminal()  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as directory:
            pipe = Path(directory, "ask")
            os.mkfifo(pipe)
            # A program: the prints of a Python function in `local` go to the terminal of this process directly.
            entrypoint = Entrypoint.from_binary("sh", ["-c", f"read line < {pipe}; echo $line; exec sleep 1000"])
            async with fray.open_cluster("local") as cluster, cluster.open_scope("trace") as scope:
                job = await scope.launch(JobRequest(name="speaker", entrypoint=entrypoint))
                await trio.sleep(3 * SETTLE_S)
                with trace.running():
                    await trio.Path(pipe).write_text("hello from the job\n")
                    with trio.fail_after(10):
                        await written.wait()
                await job.terminate()
    finally:
        sys.stdout = real


WAYS: dict[str, Callable[[Trace], Any]] = {"launch": trace_launch, "call": trace_call, "log": trace_log}


def main(arguments: list[str] | None = None) -> None:
    """Trace one way and print it."""
    parser = argparse.ArgumentParser(description="List the files that a launch, a call or a printed line runs through.")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--json", action="store_true", help="print the figures alone")
    parser.add_argument("--moves", action="store_true", help="print each move from file to file, too")
    options = parser.parse_args(arguments)
    trace = Trace()
    trace.install()
    trio.run(WAYS[options.way], trace)
    if options.json:
        print(json.dumps(trace.figures()))
        return
    for path, calls in trace.files.items():
        print(f"{calls:5}  fray/{path}")
    if options.moves:
        print(*(f"{before} -> {after}" for before, after in trace.moves), sep="\n")
    print(", ".join(f"{amount} {name}" for name, amount in trace.figures().items()))


if __name__ == "__main__":
    main()
