"""Determinism of simulations: one seed decides the order of tasks, every generator, and properties of the process.

Everything that would differ between two runs of the same seed is fixed while a scenario runs: Trio's own shuffling is
seeded, the garbage collector is off (weak tables would otherwise shrink at arbitrary moments), and the properties that
jobs carry about their author (`sys.path`, directory, user) are the same everywhere.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import trio

import fray.api.jobs.job_spec

USER = "sim"
DIRECTORY = "/sim"


class Seed:
    """Source of all generators of one scenario. Streams of different names are independent."""

    def __init__(self, number: int) -> None:
        self.number = number

    def stream(self, name: str) -> random.Random:
        """Return the generator of this name: the same numbers for the same seed and name."""
        return random.Random(f"{self.number}/{name}")

    def __repr__(self) -> str:
        return f"<Seed {self.number}>"


class Trace:
    """Running hash over all events; two runs are identical exactly if they end with the same `digest`.

    With ``keep`` (to find the first difference) every entry is also stored as text.
    """

    def __init__(self, keep: bool = False) -> None:
        self.count = 0
        self.kept: list[str] | None = [] if keep else None
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, text: str, content: bytes = b"", *, detail: Sequence[object] = ()) -> None:
        """Add an entry, which must not depend on the run.

        Args:
            detail: what is stored with it, too, and not hashed: it follows from entries before.
        """
        self.count += 1
        self._hash.update(b"%b\0%b\0" % (text.encode(), content))
        if self.kept is not None:
            self.kept.append(" ".join((text, content.hex(), *map(str, detail))))

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def steady(seed: Seed) -> Iterator[None]:
    """Make everything that runs under Trio on this thread depend on ``seed`` alone while entered."""
    run: Any = trio._core._run
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        stack.enter_context(_fixed_author())
        stack.enter_context(mock.patch.object(run, "_r", _SeededOnThisThread(seed.stream("trio"), run._r)))
        stack.enter_context(_no_garbage_collection())
        yield


class _SeededOnThisThread:
    """Generator of Trio's shuffling: a seeded one for the thread that made it, another for all other threads.

    Trio has one generator for all its loops. A loop of another thread, such as that of an open `fray.blocking` cluster,
    would otherwise take numbers out of the seeded sequence at moments of its own.
    """

    def __init__(self, seeded: random.Random, of_others: random.Random) -> None:
        self._thread_id = threading.get_ident()
        self._seeded, self._of_others = seeded, of_others

    def shuffle(self, batch: list[Any]) -> None:
        # Called in each turn of the loop, nearly always with one task or none: no number is drawn for these.
        if len(batch) > 1:
            self.__getattr__("shuffle")(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seeded if threading.get_ident() == self._thread_id else self._of_others, name)


@contextmanager
def _fixed_author() -> Iterator[None]:
    """Fix the properties that a job records about the process that launched it."""
    words = (
        SimpleNamespace(path=[DIRECTORY], version_info=sys.version_info),
        SimpleNamespace(getcwd=lambda: DIRECTORY, path=os.path),
    )
    with (
        mock.patch.object(fray.api.jobs.job_spec, "sys", words[0]),
        mock.patch.object(fray.api.jobs.job_spec, "os", words[1]),
        mock.patch.dict(os.environ, {"USER": USER}),
    ):
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
