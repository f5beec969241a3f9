"""Serialization of errors of user code, with the same type where it can be rebuilt, and the remote traceback as text.

One error is sent as a tuple (node): (kind, recipe) to build it, its notes, its cause as a node, its name and its text.
The members of a group are nodes, too. The text of the whole chain is sent once, beside the outermost node.
"""

from __future__ import annotations

from typing import Any

from fray.errors import NotPicklable, RemoteError, RemoteTraceback
from fray.net.codec import Bytes
from fray.runtime.serialization import pickling
from fray.runtime.serialization.asyncio_note import add_asyncio_note
from fray.runtime.tracebacks import traceback_text

_PICKLED, _PARTS, _GROUP, _TEXT = range(4)
_CHAIN_LIMIT = 50
"""Maximum depth of causes and groups sent with one error."""


def dump_error(error: BaseException) -> bytes:
    """Pickle an error of user code: type, arguments, attributes, notes, causes, and its traceback as text.

    Never raises: parts that cannot be pickled become text.
    """
    add_asyncio_note(error)
    try:
        # The traceback's frames stay here, so the text is all that the other process can show.
        text = traceback_text(error).rstrip("\n")
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may raise
        text = f"{_name(type(error))} (its text cannot be made: {type(broken).__name__})"
    return pickling.dumps_plain((_node(error, 0), text))


def dump_truncated_error(data: bytes, limit_chars: int, why: str) -> bytes:
    """Shorten a dumped error that is too large to a `RemoteError` with its type and the ends of its text."""
    (*_, name, message), text = pickling.loads(data)
    half = limit_chars // 2
    cut = text if len(text) <= limit_chars else f"{text[:half]}\n[...]\n{text[-half:]}"
    error = RemoteError(f"the callee raised {name}: {message[:half]} ({why})", type=name, traceback=cut)
    error.__cause__ = RemoteTraceback(cut)
    return dump_error(error)


def load_error(data: Bytes) -> BaseException:
    """Inverse of `dump_error`: the same type where it can be built here, else `RemoteError`; never SystemExit and kin.

    ``__cause__`` is the original's, and the chain ends with a `RemoteTraceback` that holds the whole text.
    """
    node, text = pickling.loads(data)
    error: BaseException = _build(node, text)
    # A callee's SystemExit or KeyboardInterrupt must not end its caller.
    if not isinstance(error, Exception):
        error = RemoteError(f"the callee raised {node[4]}: {node[5]}", type=node[4], traceback=text)
    _end_of_chain(error).__cause__ = RemoteTraceback(text)
    return error


def _end_of_chain(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error.__cause__, RemoteTraceback):
        error = error.__cause__
    return error


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _node(error: BaseException, depth: int) -> tuple[Any, ...]:
    kind, how = _recipe(error, depth)
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    cause = error.__cause__
    # The text is sent once, beside the outermost error.
    if cause is None or isinstance(cause, RemoteTraceback) or depth >= _CHAIN_LIMIT:
        return kind, how, notes, None, _name(type(error)), _safe_text(error)
    return kind, how, notes, _node(cause, depth + 1), _name(type(error)), _safe_text(error)


def _recipe(error: BaseException, depth: int) -> tuple[int, Any]:
    if isinstance(error, BaseExceptionGroup) and depth < _CHAIN_LIMIT:
        members = [_node(member, depth + 1) for member in error.exceptions]
        return _GROUP, (_try_dumps(type(error)), error.message, members)
    data = _try_dumps(error)
    # Tried here, where a failure has an alternative; the receiver could only give up the type.
    if data is not None and _rebuilds(data, type(error)):
        return _PICKLED, data
    # The attributes may be what cannot be pickled: without them the type and the arguments survive.
    for state in (error.__dict__, {}):
        data = _try_dumps((type(error), error.args, {k: v for k, v in state.items() if k != "__notes__"}))
        if data is not None:
            return _PARTS, data
    return _TEXT, None


def _try_dumps(obj: Any) -> bytes | None:
    try:
        return pickling.dumps(obj)
    except NotPicklable:
        return None


def _rebuilds(data: bytes, cls: type) -> bool:
    """Return whether an error unpickles: often its constructor takes other arguments than ``args``."""
    try:
        return type(pickling.loads(data)).__name__ == cls.__name__
    except Exception:  # noqa: BLE001 - constructors of user classes raise anything
        return False


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise
        return ""


def _build(node: tuple[Any, ...], text: str) -> BaseException:
    kind, how, notes, cause, name, message = node
    error = _build_alone(kind, how, text) or RemoteError(f"{name}: {message}", type=name, traceback=text)
    error.__dict__.pop("__notes__", None)
    for note in notes:
        error.add_note(note)
    if cause is not None:
        error.__cause__ = _build(cause, text)
    return error


def _build_alone(kind: int, how: Any, text: str) -> BaseException | None:
    try:
        if kind == _GROUP:
            cls, message, members = how
            return _build_group(cls, message, members, text)
        if kind == _TEXT:
            return None
        error = pickling.loads(how) if kind == _PICKLED else _from_parts(*pickling.loads(how))
    except Exception:  # noqa: BLE001 - the class is not importable here, or refuses
        return None
    return error if isinstance(error, BaseException) else None


def _from_parts(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    # Without `__init__`, whose parameters are not known.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _build_group(cls: bytes | None, message: str, members: list[tuple[Any, ...]], text: str) -> BaseException:
    errors = [_build(member, text) for member in members]
    try:
        group = pickling.loads(cls)(message, errors) if cls is not None else None
        if isinstance(group, BaseExceptionGroup):
            return group
    except Exception:  # noqa: BLE001 - the group's class is not importable here, or refuses
        pass
    return BaseExceptionGroup(message, errors)
