"""Serialization of errors of user code, with the same type where it can be rebuilt, and the remote traceback as text.

One error is sent as an `_Node`; its cause and the members of a group are nodes, too. The text of the whole chain is
sent once, beside the outermost node.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from fray.errors import SCOPE_MESSAGE, JobFailed, NotPicklable, RemoteError, RemoteTraceback, failures_in
from fray.model.text import list_text
from fray.net.codec import Bytes
from fray.runtime.serialization import pickling
from fray.runtime.serialization.asyncio_note import add_asyncio_note
from fray.runtime.serialization.frames import FrameRow, dump_frames, load_frames
from fray.tracebacks import line_number, traceback_entries, traceback_text

_PICKLED, _PARTS, _GROUP, _TEXT = range(4)
_CHAIN_LIMIT = 50
"""Maximum depth of causes and groups sent with one error."""


class _Node(NamedTuple):
    """One error as it is sent; in the message it is a plain tuple."""

    kind: int
    recipe: Any
    """Pickles and nodes it is built from, in the form of its ``kind``."""
    notes: list[str]
    cause: tuple[Any, ...] | None
    """Node of its cause, or of its context if it has none."""
    name: str
    message: str
    frames: list[FrameRow]
    remote: tuple[str, tuple[str, ...]] | None
    """``where`` and ``path`` of the `RemoteTraceback` that it has as its cause."""
    is_context: bool
    """Flag: ``cause`` is its context."""


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
    return pickling.dumps_plain((tuple(_node(error, 0, {})), text))


def dump_truncated_error(data: bytes, limit_chars: int, why: str) -> bytes:
    """Shorten a dumped error that is too large to a `RemoteError` with its type and the ends of its text."""
    node, text = pickling.loads(data)
    name, message = _Node(*node).name, _Node(*node).message
    half = limit_chars // 2
    cut = text if len(text) <= limit_chars else f"{text[:half]}\n[...]\n{text[-half:]}"
    error = RemoteError(f"the callee raised {name}: {message[:half]} ({why})", type=name, traceback=cut)
    error.__cause__ = RemoteTraceback(cut)
    return dump_error(error)


def describe_error(data: Bytes) -> tuple[str, str]:
    """Return the type and the message of a dumped error, without making it."""
    node = _Node(*pickling.loads(data)[0])
    return node.name, node.message


def load_error(data: Bytes) -> BaseException:
    """Inverse of `dump_error`: the same type where it can be built here, else `RemoteError`; never SystemExit and kin.

    Its frames continue the traceback of the code that raises it here. ``__cause__`` is the original's, and the chain
    ends with a `RemoteTraceback` that has the whole text; in the error of a scope, those of its members do.
    """
    sent, text = pickling.loads(data)
    node = _Node(*sent)
    error: BaseException = _build(node, text, {})
    # A callee's SystemExit or KeyboardInterrupt must not end its caller.
    if not isinstance(error, Exception):
        error = RemoteError(f"the callee raised {node.name}: {node.message}", type=node.name, traceback=text)
    for each in failures_in(error):
        _attach_remote_traceback(each, text)
    return error


def scope_error(scope: str, members: Sequence[BaseException]) -> BaseExceptionGroup[BaseException]:
    """Return the error that a scope raises: its message names the scope and the jobs that have failed."""
    jobs = [job for job in dict.fromkeys(map(_failed_job, members)) if job]
    failed = f": job{'s' if len(jobs) > 1 else ''} {list_text(jobs, 3)} failed" if jobs else ""
    return BaseExceptionGroup(f"{SCOPE_MESSAGE}{scope!r}{failed}", members)


def _failed_job(error: BaseException) -> str:
    remote = remote_traceback_of(error)
    if remote is not None and len(remote.path) > 1:
        return remote.path[1].partition(" ")[0]
    return str(error.details.get("name", "")) if isinstance(error, JobFailed) else ""


def remote_traceback_of(error: BaseException) -> RemoteTraceback | None:
    """Return the `RemoteTraceback` at the end of the chain of causes."""
    end = _end_of_chain(error).__cause__
    return end if isinstance(end, RemoteTraceback) else None


def _attach_remote_traceback(error: BaseException, text: str) -> None:
    end = _end_of_chain(error)
    if end.__cause__ is None:
        context = end.__context__
        end.__cause__ = RemoteTraceback(text, _where(error))
        # The cause hides the context, so that it is printed before this one.
        end.__cause__.__context__ = context


def _where(error: BaseException) -> str:
    entries = traceback_entries(error)
    if not entries:
        return ""
    code, lineno = entries[-1].tb_frame.f_code, line_number(entries[-1])
    line = linecache.getline(code.co_filename, lineno).strip()
    return f'File "{code.co_filename}", line {lineno}, in {code.co_name}{": " if line else ""}{line}'


def _end_of_chain(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error.__cause__, RemoteTraceback):
        error = error.__cause__
    return error


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _node(error: BaseException, depth: int, numbers: dict[FrameType, int]) -> _Node:
    kind, recipe = _recipe(error, depth, numbers)
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    before, is_context = error.__cause__, False
    remote = None
    if isinstance(before, RemoteTraceback):
        # Its text is in the one that is sent once, beside the outermost error.
        remote = before.where, before.path
        before, is_context = before.__context__, True
    elif before is None and not error.__suppress_context__:
        before, is_context = error.__context__, True
    cause = None if before is None or depth >= _CHAIN_LIMIT else tuple(_node(before, depth + 1, numbers))
    frames = dump_frames(error, numbers)
    return _Node(kind, recipe, notes, cause, _name(type(error)), _safe_text(error), frames, remote, is_context)


def _recipe(error: BaseException, depth: int, numbers: dict[FrameType, int]) -> tuple[int, Any]:
    if isinstance(error, BaseExceptionGroup) and depth < _CHAIN_LIMIT:
        members = [tuple(_node(member, depth + 1, numbers)) for member in error.exceptions]
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


def _build(node: _Node, text: str, frames: dict[int, FrameType]) -> BaseException:
    error = _build_alone(node, text, frames) or RemoteError(
        f"{node.name}: {node.message}", type=node.name, traceback=text
    )
    error.__dict__.pop("__notes__", None)
    for note in node.notes:
        error.add_note(note)
    error.__traceback__ = load_frames(node.frames, frames)
    before = None if node.cause is None else _build(_Node(*node.cause), text, frames)
    if node.is_context:
        error.__context__ = before
    else:
        error.__cause__ = before
    if node.remote is not None:
        error.__cause__ = RemoteTraceback(text, *node.remote)
        error.__cause__.__context__ = before
    return error


def _build_alone(node: _Node, text: str, frames: dict[int, FrameType]) -> BaseException | None:
    try:
        if node.kind == _GROUP:
            cls, message, members = node.recipe
            return _build_group(cls, message, [_build(_Node(*member), text, frames) for member in members])
        if node.kind == _TEXT:
            return None
        loaded = pickling.loads(node.recipe)
        error = loaded if node.kind == _PICKLED else _from_parts(*loaded)
    except Exception:  # noqa: BLE001 - the class is not importable here, or refuses
        return None
    return error if isinstance(error, BaseException) else None


def _from_parts(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    # Without `__init__`, whose parameters are not known.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _build_group(cls: bytes | None, message: str, errors: list[BaseException]) -> BaseException:
    try:
        group = pickling.loads(cls)(message, errors) if cls is not None else None
        if isinstance(group, BaseExceptionGroup):
            return group
    except Exception:  # noqa: BLE001 - the group's class is not importable here, or refuses
        pass
    return BaseExceptionGroup(message, errors)
