"""Frames between a command that runs in a job's environment and the person who has started it. Pure.

A frame is a byte for its kind, four for the length of its data (big-endian), and the data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from fray.errors import ProtocolMismatch

_HEAD = struct.Struct(">BI")
_SIZE, _NUMBER = struct.Struct(">HH"), struct.Struct(">i")
DATA_LIMIT_BYTES = 256 * 1024


class FrameKind(IntEnum):
    """Kind of a frame."""

    INPUT = 0
    """Standard input of the command; without data: its end."""
    SIZE = 1
    """Rows and columns of the terminal of the person."""
    SIGNAL = 2
    """Number of a signal for the command."""
    OUTPUT = 3
    """Standard output, or what a terminal shows."""
    ERROR = 4
    """Standard error."""
    EXIT = 5
    """The last one: exit code, or 128 and the signal that has ended it."""


def data_frame(kind: FrameKind, data: bytes = b"") -> bytes:
    """Return a frame."""
    return _HEAD.pack(kind, len(data)) + data


def size_frame(rows: int, columns: int) -> bytes:
    """Return a frame with a size of a terminal."""
    return data_frame(FrameKind.SIZE, _SIZE.pack(min(rows, 0xFFFF), min(columns, 0xFFFF)))


def number_frame(kind: FrameKind, number: int) -> bytes:
    """Return a frame of a signal or of an exit."""
    return data_frame(kind, _NUMBER.pack(number))


def size_of(data: bytes) -> tuple[int, int]:
    """Return rows and columns. Raises ProtocolMismatch."""
    rows, columns = _unpack(_SIZE, data)
    return rows, columns


def number_of(data: bytes) -> int:
    """Return the number of a signal or of an exit. Raises ProtocolMismatch."""
    (number,) = _unpack(_NUMBER, data)
    return number


def _unpack(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) != form.size:
        raise ProtocolMismatch("the peer has sent an invalid frame of a command")
    return form.unpack(data)


class FrameReader:
    """Cuts what was received into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames that are complete now.

        Raises:
            ProtocolMismatch: an unknown kind, or more data than a frame may have.
        """
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest)
            if kind not in set(FrameKind) or length > DATA_LIMIT_BYTES:
                raise ProtocolMismatch("the peer has sent an invalid frame of a command")
            end = _HEAD.size + length
            if len(self._rest) < end:
                return
            found, self._rest = self._rest[_HEAD.size : end], self._rest[end:]
            yield FrameKind(kind), found
