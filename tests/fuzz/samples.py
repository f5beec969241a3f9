"""Valid messages of every class that may travel, made from the types of their fields."""

from __future__ import annotations

import collections.abc
import enum
import json
import types
import typing
from typing import Any

import attrs

from fray.net.codec import MESSAGES, decode_message

PLAIN = {str: "job-1", int: 1, float: 1.5, bool: True, bytes: "", type(None): None, object: 1, Any: 1}
DEPTH_LIMIT = 5


def sample_messages() -> list[bytes]:
    """Return the JSON of a full and of a minimal message of each class, as far as the class accepts them."""
    found = []
    for name, cls in MESSAGES.items():
        for full in (True, False):
            text = json.dumps({"t": name, "b": [], **_sample(cls, full, 0)}).encode()
            try:
                decode_message(len(text).to_bytes(4, "little") + text)
            except Exception:  # noqa: BLE001 - a class whose validators want more than types say
                continue
            found.append(text)
    return found


def _sample(kind: Any, full: bool, depth: int) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind)).value
    if isinstance(kind, type) and attrs.has(kind):
        hints = typing.get_type_hints(kind)
        wanted = [each for each in attrs.fields(kind) if each.init and (each.default is attrs.NOTHING or full)]
        return {each.name: _sample(hints[each.name], full and depth < DEPTH_LIMIT, depth + 1) for each in wanted}
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _sample(args[0], full, depth)
    if origin is typing.Literal:
        return args[0]
    if origin is typing.Annotated:
        return _sample(args[0], full, depth)
    if origin in (dict, collections.abc.Mapping):
        return {"key": _sample(args[1], full, depth + 1)}
    if origin is not None and args:
        return [_sample(each, full, depth + 1) for each in args if each is not Ellipsis]
    if hasattr(kind, "__supertype__"):
        return _sample(kind.__supertype__, full, depth)
    return PLAIN.get(kind, "x")
