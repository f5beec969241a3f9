"""Format of calls on the wire: flags, kinds of frames, limits and encodings. Pure.

The unanswered calls are recorded by `fray.runtime.calls.host_connection` on the client, and by
`fray.runtime.calls.dedup` on the host.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import TypeAlias

from fray.errors import NoSuchMethod
from fray.model.messages.calls import CallMeta

Bytes: TypeAlias = bytes | bytearray | memoryview

# Flags of frames (bits above those of `fray.net.codec`) ---------------------------------------------------------------

AGAIN = 4
"""CALL: it was sent before and may have arrived."""
KEYWORDS = 8
"""CALL: the pickle holds (args, kwargs), not args alone."""
STREAM = 16
"""CALL: answer with items, then a result. The credit for the items precedes the pickle."""
TWO_WAY = 32
"""CALL, with STREAM: items come from the caller, too."""
# The same bit has another meaning for each kind of frame.
END = 4
"""INPUT without a body: the caller is done sending."""
BUFFERS = 64
"""CALL, RESULT, ITEM: the body starts with a table of buffers (`fray.runtime.serialization.buffer_transfer`)."""
NOT_RUN = 4
"""FAULT: the host says that the call has not been run and will not be."""
CANCELLED = 8
"""FAULT without a body: the call has been cancelled (or, if it runs in a thread, requested to stop)."""
INTERRUPTED = 16
"""FAULT: the actor ends, and has ended the call under way, which may have taken effect; the body says why."""
ONLY = 4
"""SETTLED: the body lists the calls that are *not* settled, among all below the watermark."""

FAULT = 34
"""Kind of frame, host to caller: the error that answers a call."""
ITEM = 37
"""Kind of frame, host to caller: one item of a stream."""
CREDIT = 38
"""Kind of frame, both ways: number of further items that may be sent (u32)."""
INPUT = 39
"""Kind of frame, caller to host: one item for a method that takes a stream."""
TRACE = 44
"""Kind of frame, caller to host, in front of a CALL of the same number: the ``traceparent`` of the caller's span."""
TRACES = "traces"
"""Capability of hosts that know this kind of frame."""
CALLER_KEY_ID = "caller"
"""Key id under which a caller proves that it has the key of an endpoint."""
HOST_LEFT = "the host has shut down"
"""Reason of the goodbye of a host whose process ends in order."""

# Bounds --------------------------------------------------------------------------------------------------------------

OPEN_CALLS_LIMIT = 16_384
"""Most unanswered calls of one caller at one host; a host refuses more."""
OPEN_BYTES_LIMIT = 256 * 1024 * 1024
"""Most bytes of arguments one caller holds for one host."""
# Less than the arguments that a caller may hold: a host stores this for each of its callers.
KEPT_BYTES_LIMIT = 64 * 1024 * 1024
"""Most bytes of unsettled answers a host keeps for one caller; beyond, it starts none of that caller's calls."""
KEPT_BULK_LIMIT_BYTES = 1024 * 1024 * 1024
"""The same for the large buffers of answers."""
# Of either, so that neither many small answers nor few large ones pile up at the host.
SETTLE_EVERY_CALLS = 64
SETTLE_EVERY_BYTES = 64 * 1024

# A call on the wire --------------------------------------------------------------------------------------------------

# Names are usually few, but `getattr` on a handle accepts any.
_HEADS_LIMIT = 10_000
_META = struct.Struct("<dH")
_CHAIN_LIMIT = 256
# The length is a u16. Cycles are found at the end of the chain, so its beginning is cut, maybe within a character.
_CHAIN_LIMIT_BYTES = 65_000


@lru_cache(_HEADS_LIMIT)
def call_head(method: str) -> bytes:
    """Return what precedes the pickled arguments: the length of the method's name, and the name.

    Raises:
        NoSuchMethod: the name has over 255 bytes.
    """
    name = method.encode()
    # Its length is one byte. Names come from `getattr` on a handle, which may not know the methods.
    if len(name) > 255:
        raise NoSuchMethod(f"{method[:60]!r}... cannot be a method: its name has {len(name)} bytes; the limit is 255")
    return bytes((len(name),)) + name


def split_call(body: Bytes) -> tuple[str, memoryview]:
    """Return the name of the method and the pickle; inverse of ``call_head(method) + pickle``."""
    view = memoryview(body)
    end = 1 + view[0]
    return str(view[1:end], "utf-8"), view[end:]


def pack_meta(meta: CallMeta) -> bytes:
    """Encode the options of one call; they precede its `call_head` in a frame flagged META."""
    chain = "\0".join(meta.chain[-_CHAIN_LIMIT:]).encode()[-_CHAIN_LIMIT_BYTES:]
    # NaN stands for "no deadline", so the header has a fixed size.
    return _META.pack(math.nan if meta.deadline_s is None else meta.deadline_s, len(chain)) + chain


def split_meta(body: Bytes) -> tuple[CallMeta, memoryview]:
    """Return the options and the rest of the body; inverse of `pack_meta`."""
    view = memoryview(body)
    deadline_s, length = _META.unpack_from(view)
    end = _META.size + length
    chain = tuple(str(view[_META.size : end], "utf-8", "replace").split("\0")) if length else ()
    return CallMeta(deadline_s=None if math.isnan(deadline_s) else deadline_s, chain=chain), view[end:]
