"""Segments of another process of this host, mapped here: what it lends, and only to who proves to be on its host."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen

from fray.errors import ProtocolMismatch
from fray.net.buffers.segment_directories import (
    BASES,
    NAME_BYTES,
    NONCE,
    prefix,
)
from fray.net.buffers.shared_memory import export


@frozen
class SharedMemoryOffer:
    """What a lender says of itself: where its segments are, and what stands in the nonce file there."""

    directory: str
    nonce: str


@define(eq=False)
class _Mapped:
    mapping: mmap.mmap
    size: int


@define(eq=False)
class MappedSegments:
    """The segments of one lender, mapped here once each. Made by `open`."""

    _fd: int
    _mapped: dict[int, _Mapped] = field(factory=dict)
    _loans: dict[int, weakref.ref[Any]] = field(factory=dict)
    ended: deque[int] = field(factory=deque)
    """Loans of which no view is left here; `on_ended` is called when one comes in."""
    on_ended: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, offer: SharedMemoryOffer, bases: tuple[str, ...] = BASES) -> MappedSegments | None:
        """Prove that the lender is on this host, of this user, and says the truth about its directory; else None."""
        base, name = os.path.split(offer.directory)
        if base not in bases or not name.startswith(prefix()) or len(name) != len(prefix()) + 2 * NAME_BYTES:
            return None
        try:
            fd = os.open(offer.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if _is_private(os.fstat(fd), stat.S_ISDIR) and _read(fd, NONCE) == offer.nonce and offer.nonce:
                fd, kept = -1, fd
                return cls(kept)
        except (OSError, UnicodeDecodeError):
            pass
        finally:
            if fd >= 0:
                os.close(fd)
        return None

    def lease(self, loan: int, number: int, size: int) -> memoryview:
        """The first ``size`` bytes of a segment, writable. When the last view of them is gone, the loan is `ended`.

        Raises:
            ProtocolMismatch: there is no such segment, or it is smaller.
        """
        mapped = self._mapped.get(number)
        if mapped is None or mapped.size < size:
            mapped = self._mapped[number] = self._map(number, size)
        exporter = export(mapped.mapping, 0, size)

        def gone(_: object) -> None:
            if self._loans.pop(loan, None) is not None:
                self.ended.append(loan)
                self.on_ended()

        self._loans[loan] = weakref.ref(exporter, gone)
        return memoryview(exporter).cast("B")

    def find(self, exporter: object) -> int | None:
        """The loan that this exporter belongs to."""
        return next((loan for loan, known in list(self._loans.items()) if known() is exporter), None)

    def give_up(self, loan: int) -> None:
        """The loan goes back with its content: its end is told in another way."""
        self._loans.pop(loan, None)

    def forget(self, numbers: list[int]) -> None:
        """The lender has thrown these away."""
        for number in numbers:
            self._mapped.pop(number, None)

    def close(self) -> None:
        """Views that are left stay readable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._mapped.clear()
        self._loans.clear()

    def _map(self, number: int, size: int) -> _Mapped:
        try:
            fd = os.open(str(number), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            raise ProtocolMismatch(f"the peer lends segment {number}, which cannot be opened: {error}") from None
        try:
            found = os.fstat(fd)
            if not _is_private(found, stat.S_ISREG) or found.st_size < size:
                raise ProtocolMismatch(f"the peer lends {size} bytes of segment {number}, which has {found.st_size}")
            return _Mapped(mmap.mmap(fd, found.st_size), found.st_size)
        finally:
            os.close(fd)


def _is_private(found: os.stat_result, kind: Callable[[int], bool]) -> bool:
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _read(directory_fd: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        return os.read(fd, 4 * NAME_BYTES).decode()
    finally:
        os.close(fd)
