"""Wire format: frames and control messages to bytes and back. Pure.

A transport message is a *batch*: the number of sequenced frames received so far (u64, the cumulative acknowledgement),
then frames back to back. A frame is `HEADER` (body length, kind, flags, spare, target, ref) and its body, all
little-endian. Calls, results and values are opaque pickles; only control messages are JSON, and the classes of
`fray.model.messages` are their schema.

A control body is ``u32 length, JSON, attachments``: the JSON names its class under ``"t"`` and the lengths of the
attachments under ``"b"``.

Peers may run a neighbouring release. Unknown fields are ignored, also those of peers of the same version: what is not
read has no effect, and a build of the same version may be a day newer. A field that may not be ignored needs a
capability (`fray.net.channel.versions`). Missing fields have their defaults. An unknown class, or an unknown value of
an enumeration, is `Unsupported`: it costs the request or notice, and not the channel.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, IntEnum, StrEnum
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, cast

import attrs
from cattrs import Converter, transform_error
from cattrs.gen import make_dict_unstructure_fn, override
from cattrs.preconf.json import make_converter

from fray.errors import FrayError, InvalidRequest, MessageTooLarge, ProtocolMismatch, Unsupported, from_wire, to_wire
from fray.model.messages import (
    bundles,
    calls,
    client,
    history,
    machine_groups,
    maintenance,
    node,
    people,
    session,
    tunnels,
    usage,
)

# Standard sizes without padding: 20 bytes on every machine.
HEADER = struct.Struct("<IBBHIQ")
HEADER_BYTES = HEADER.size
ACK = struct.Struct("<Q")
ACK_BYTES = ACK.size
_LENGTH = struct.Struct("<I")

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
"""Largest body of one frame (after reassembly)."""
# 64 bytes less than a power of two: room for the acknowledgement (8), the header (20) and a WebSocket head (up to 14).
FRAGMENT_BYTES = 256 * 1024 - 64
"""Longer bodies are split into several frames, so that one transport message stays near 256 KiB."""
VIEW_FROM_BYTES = 4096
"""Size from which bodies are passed as views of the message; smaller ones are copied (cheaper than a view)."""

Bytes: TypeAlias = bytes | bytearray | memoryview
Frame: TypeAlias = tuple[int, int, int, int, Bytes]
"""(kind, flags, target, ref, body)"""
T = TypeVar("T")


class Kind(IntEnum):
    """Kind of a frame. Kinds from `FIRST_SEQUENCED` on are numbered, acknowledged, and sent again after a resume."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    PING = 4
    PONG = 5
    GOODBYE = 6
    # From here on sequenced. Numbers are part of the wire format, so a new kind gets a new number.
    REQUEST = 16
    REPLY = 17
    ERROR = 18
    NOTICE = 19
    CALL = 32
    RESULT = 33
    FAULT = 34
    CANCEL = 35
    SETTLED = 36
    ITEM = 37
    CREDIT = 38
    INPUT = 39
    BULK = 40
    SHARE = 41
    LOAN_RETURNED = 42
    SEGMENTS_REMOVED = 43
    TRACE = 44
    # Without gaps: `TunnelMultiplexer.on_frame` tests the range.
    TUNNEL_OPEN = 48
    TUNNEL_DATA = 49
    TUNNEL_CREDIT = 50
    TUNNEL_CLOSE = 51


FIRST_SEQUENCED = 16
MORE = 1
"""Flag: the body continues in the next frame."""
META = 2
"""Flag: the body starts with a `CallMeta`."""


# Frames --------------------------------------------------------------------------------------------------------------


def encode_frame(kind: int, ref: int = 0, body: Bytes = b"", *, target: int = 0, flags: int = 0) -> bytes:
    """Return one whole frame. ``body`` is copied."""
    return HEADER.pack(len(body), kind, flags, 0, target, ref) + body


def read_ack(message: Bytes) -> int:
    """Return the acknowledgement in front of a batch.

    Raises:
        ProtocolMismatch: the message is shorter than one.
    """
    try:
        return cast(int, ACK.unpack_from(message)[0])
    except struct.error:
        size = len(message)
        raise ProtocolMismatch(
            f"malformed message of {size} bytes: the peer does not speak the Fray protocol"
        ) from None


def read_frames(message: Bytes) -> Iterator[Frame]:
    """Yield the frames of a batch, in order.

    Raises:
        ProtocolMismatch: the last frame is truncated. Frames before it have been yielded.
    """
    # A generator: frames in front of damage are dispatched and counted, and after the reconnection only the rest is
    # repeated.
    at, end, unpack = ACK_BYTES, len(message), HEADER.unpack_from
    while at < end:
        body_at = at + HEADER_BYTES
        if body_at > end:
            raise ProtocolMismatch(f"truncated frame header at byte {at} of {end}")
        size, kind, flags, _, target, ref = unpack(message, at)
        at = body_at + size
        if at > end:
            raise ProtocolMismatch(f"truncated frame of kind {kind}: {end - body_at} of {size} bytes")
        # A view also keeps the whole message in memory for as long as the body is kept.
        body = message[body_at:at] if size < VIEW_FROM_BYTES else memoryview(message)[body_at:at]
        yield kind, flags, target, ref, body


# Control messages ----------------------------------------------------------------------------------------------------

_converter = make_converter(detailed_validation=False)
"""Converter without detailed errors: its hooks are compiled in half the time, which counts at the start of every
process."""


def _is_empty(attribute: attrs.Attribute[Any]) -> bool:
    """Return whether the default is None, False, 0, or an empty string or collection."""
    default: Any = attribute.default
    return not (default.factory() if hasattr(default, "factory") else default)


def _compact_writer(cls: type) -> Callable[[Any], dict[str, Any]]:
    """Return a writer that omits fields with an empty default value: most of a record, and of the time to read it.

    The reader fills in the default. So an empty default must never be changed: add another field instead.
    """
    # The row of a job has some fifty empty fields. Without them a controller with 100,000 jobs restarts in 6 s instead
    # of 14.
    empty: Any = {each.name: override(omit_if_default=True) for each in attrs.fields(cls) if _is_empty(each)}
    return make_dict_unstructure_fn(cls, _converter, **empty)


_converter.register_unstructure_hook_factory(attrs.has, _compact_writer)

_to_text = json.JSONEncoder(separators=(",", ":")).encode
"""Encoder made once; `json.dumps` makes one for each call."""

_writers: dict[type, Callable[[Any], Any]] = {}
"""Hooks by class, cached here because cattrs drops its compiled hooks of a class whenever it compiles another."""
_readers: dict[type, Callable[[Any, Any], Any]] = {}


def _write(obj: object) -> Any:
    cls = type(obj)
    # In a forked process a compilation also copies the pages it touches, once per process; this cache is filled before
    # the fork.
    hook = _writers.get(cls)
    if hook is None:
        hook = _writers[cls] = _converter.get_unstructure_hook(cls)
    return hook(obj)


def _read(data: Any, cls: type[T]) -> T:
    hook = _readers.get(cls)
    if hook is None:
        hook = _readers[cls] = _converter.get_structure_hook(cls)
    return cast(T, hook(data, cls))


@cache
def _detailed_converter() -> Converter:
    """Return a converter with detailed errors, used only for messages that have failed with the fast one."""
    converter = make_converter()
    # Of the model's enumerations; a hook for all of `Enum` would count less than that of `str`.
    converter.register_structure_hook(StrEnum, _read_enumeration)
    return converter


def _classes(module: ModuleType) -> dict[str, type]:
    return {name: cls for name, cls in vars(module).items() if isinstance(cls, type) and attrs.has(cls)}


# Only these classes, and not any class of the model: a peer chooses what is instantiated here.
MESSAGES: dict[str, type] = {
    name: cls
    for module in (client, node, calls, tunnels, bundles, history, machine_groups, maintenance, usage, people, session)
    for name, cls in sorted(_classes(module).items())
}
"""Classes that may be the body of a control frame, by name."""


def encode_message(message: object, blobs: Sequence[Bytes] = ()) -> bytes:
    """Return the control body of ``message`` with its attachments.

    Raises:
        MessageTooLarge: over `MESSAGE_LIMIT_BYTES`.
    """
    # No field of a message may be called "t" or "b", which it would overwrite.
    data = {"t": type(message).__name__, "b": [len(blob) for blob in blobs], **_write(message)}
    text = _to_text(data).encode()
    size = _LENGTH.size + len(text) + sum(data["b"])
    # Before the parts are joined: a message that is too large is not even copied.
    check_size(size, type(message).__name__)
    return b"".join((_LENGTH.pack(len(text)), text, *blobs))


def decode_message(body: Bytes) -> tuple[Any, list[memoryview]]:
    """Return the message in a control body and its attachments (views of ``body``).

    Raises:
        Unsupported: an unknown class, or an unknown value of an enumeration: the peer runs a later release.
        ProtocolMismatch: a malformed body, or invalid fields.
    """
    data, rest = _read_json(body)
    cls = _message_class(data)
    return _structure(cls, data, cls.__name__), _blobs(data.get("b", []), rest, cls.__name__)


def _message_class(data: dict[str, Any]) -> type:
    cls = MESSAGES.get(str(data.get("t")))
    if cls is None:
        raise Unsupported(f"unknown message type {_short(data.get('t'))}")
    return cls


class TextRule(Enum):
    """Treatment of text that is not valid Unicode: half a surrogate pair, which UTF-8 cannot encode."""

    REFUSE = "refuse"
    ESCAPE = "escape"
    """Written as ``\\udcf6``: for reports, which must arrive whatever user code has printed or raised."""


def decode_checked(body: Bytes, rule: TextRule) -> tuple[Any, list[memoryview]]:
    """Return what `decode_message` does, of a peer whose text and numbers end up in files, keys and calculations.

    Raises:
        ProtocolMismatch: as `decode_message`.
        InvalidRequest: a text is not valid Unicode (unless it is escaped), or an integer has more than 64 bits; the
            message names the field.
    """
    data, rest = _read_json(body)
    # Nothing else can be wrong: the bytes were decoded as UTF-8, and Python's decoder accepts escaped halves of pairs.
    # One search of the bytes costs a hundredth of decoding them.
    if _SUSPICIOUS.search(memoryview(body)[: len(body) - len(rest)]):
        data = {key: _check_value(value, rule, key) for key, value in data.items()}
    cls = _message_class(data)
    return _structure(cls, data, cls.__name__), _blobs(data.get("b", []), rest, cls.__name__)


_SUSPICIOUS = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}")
"""Bytes of each JSON text that `_check_value` could refuse."""
_INTEGER_LIMIT = 2**63


def _check_value(value: Any, rule: TextRule, where: str) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            if rule is TextRule.ESCAPE:
                return value.encode("utf-8", "backslashreplace").decode()
            raise InvalidRequest(
                f"{where}: {_short(value)} is not valid Unicode text: {_short(value[error.start])} at character "
                f"{error.start} is half a surrogate pair. Bytes in another encoding than UTF-8 (a file name, a "
                "variable) have to be decoded with it first"
            ) from None
    elif isinstance(value, dict):
        return {_check_value(key, rule, where): _check_value(of, rule, f"{where}.{key}") for key, of in value.items()}
    elif isinstance(value, list):
        return [_check_value(each, rule, f"{where}[{index}]") for index, each in enumerate(value)]
    elif isinstance(value, int) and not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise InvalidRequest(f"{where}: the number {_short(value)} has more than 64 bits")
    return value


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text)} characters)"


def check_size(size_bytes: int, what: str, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
    """Check the size of a body.

    Raises:
        MessageTooLarge: over the limit.
    """
    if size_bytes > limit_bytes:
        raise MessageTooLarge(
            f"{what} has {size_bytes} bytes and the limit is {limit_bytes}: send a path or smaller parts",
            size_bytes=size_bytes,
            limit_bytes=limit_bytes,
        )


def encode_error(error: FrayError) -> bytes:
    """Return the body of an ERROR frame. Details that JSON cannot represent are sent as their ``repr``."""
    return json.dumps(to_wire(error), separators=(",", ":"), default=repr).encode()


def decode_error(body: Bytes) -> FrayError:
    """Inverse of `encode_error`.

    Raises:
        ProtocolMismatch: malformed body.
    """
    try:
        data = json.loads(bytes(body))
    except ValueError as error:
        raise ProtocolMismatch(f"malformed error frame: {error}") from None
    return error_from_dict(data)


def error_to_dict(error: FrayError) -> dict[str, Any]:
    """Return an error as a field of a message (`Refuse`, `Goodbye`). Inverse: `error_from_dict`."""
    return cast(dict[str, Any], json.loads(encode_error(error)))


def error_from_dict(data: object) -> FrayError:
    """Inverse of `error_to_dict`.

    Raises:
        ProtocolMismatch: not an error.
    """
    try:
        return from_wire(cast(dict[str, Any], data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolMismatch(f"malformed error from the peer: {error!r}") from None


def _constant(word: str) -> float:
    """Accept infinity, which is a valid amount in places, and reject NaN, which passes every range check."""
    if word == "NaN":
        raise ValueError("NaN is not a valid number")
    return float(word)


_decoder = json.JSONDecoder(parse_constant=_constant)


def _read_json(body: Bytes) -> tuple[dict[str, Any], memoryview]:
    try:
        (size,) = _LENGTH.unpack_from(body)
        view = memoryview(body)[_LENGTH.size :]
        if size > len(view):
            raise ValueError(f"{size} bytes of JSON announced, {len(view)} received")
        data = _decoder.decode(str(view[:size], "utf-8"))
        if not isinstance(data, dict):
            raise ValueError("the JSON is not an object")
        return data, view[size:]
    # RecursionError: JSON of a peer that is nested a thousand times.
    except (struct.error, ValueError, RecursionError) as error:
        raise ProtocolMismatch(f"malformed control message: {error}") from None


def _blobs(lengths: object, rest: memoryview, name: str) -> list[memoryview]:
    # The exact type: True is an int as well.
    sound = isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths)
    if not isinstance(lengths, list) or not sound or sum(lengths) != len(rest):
        raise ProtocolMismatch(f"{name}: attachments of {lengths} bytes announced, {len(rest)} bytes received")
    blobs, at = [], 0
    for length in lengths:
        blobs.append(rest[at : at + length])
        at += length
    return blobs


def _structure(cls: type[T], data: Any, name: str) -> T:
    try:
        return _read(data, cls)
    # The hooks of cattrs raise whatever the data makes them meet: KeyError, TypeError, errors of validators.
    except Exception as error:
        raise _mismatch(cls, data, name) from error


def _mismatch(cls: type, data: Any, name: str) -> ProtocolMismatch:
    try:
        _detailed_converter().structure(data, cls)
    except Exception as error:  # noqa: BLE001 - hooks raise anything
        text = "; ".join(transform_error(error, path=name))
        # Unless anything else is wrong, too: damage is not the mark of a later release.
        if all(isinstance(leaf, _UnknownValue) for leaf in _leaves(error)):
            return Unsupported("; ".join(transform_error(error, name, format_exception=lambda leaf, _: str(leaf))))
        return ProtocolMismatch(f"invalid message: {text}")
    # The detailed converter accepts what the fast one has refused: rare, but then there is nothing to quote.
    return ProtocolMismatch(f"invalid message: {name} has an unexpected form")


class _UnknownValue(ValueError):
    """Text that is not a value of an enumeration here, as a later release may send it."""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _read_enumeration(value: Any, cls: type[StrEnum]) -> StrEnum:
    try:
        return cls(value)
    except ValueError as error:
        # Text alone: a number or a list in its place is damage.
        raise (_UnknownValue(str(error)) if isinstance(value, str) else error) from None


# Single objects (store, attempt specs) -------------------------------------------------------------------------------


def to_json(obj: object) -> str:
    """Return any object of the model as JSON text."""
    return _to_text(_write(obj))


def from_json(cls: type[T], text: str | bytes) -> T:
    """Inverse of `to_json`; unknown fields are ignored.

    Raises:
        ProtocolMismatch: not the JSON of such an object.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ProtocolMismatch(f"not the JSON of a {cls.__name__}: {error}") from None
    return _structure(cls, data, cls.__name__)


def blob_id(data: Bytes) -> str:
    """Return the name of an attachment: the SHA-256 of its content, hexadecimal."""
    return hashlib.sha256(data).hexdigest()
