"""Pickling of user objects: arguments, results, functions. Errors are in `fray.runtime.serialization.errors`.

Plain pickle is tried first (0.6 µs for small arguments, against 3 µs with cloudpickle). cloudpickle takes over when
that fails, and when the bytes mention ``__main__``: plain pickle stores objects of a script by reference, and the other
process has another ``__main__``.
"""

from __future__ import annotations

import builtins
import copyreg
import hashlib
import io
import pickle
import sys
import threading
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer as PickleBuffer  # others box buffers with it
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]

from fray.errors import FrayError, InvalidRequest, NotPicklable
from fray.model.ids import BlobId
from fray.net.codec import blob_id
from fray.runtime.serialization.buffers import (
    BUFFERS_LIMIT,
    INLINE_UP_TO_BYTES,
    PickledObject,
    ReceivedObject,
    detach_buffers,
)
from fray.runtime.serialization.diagnose import find_unpicklable
from fray.runtime.serialization.tensors import reduce_tensor

Bytes: TypeAlias = bytes | bytearray | memoryview

PICKLE_PROTOCOL = 5
_PLAIN_NAMES = {
    *(("builtins", name) for name in ("set", "frozenset", "complex", "bytearray", "range", "slice")),
    *(("datetime", name) for name in ("datetime", "date", "time", "timedelta", "timezone")),
    ("collections", "OrderedDict"),
}
"""Classes that `plain_values_only` leaves, by module and name."""
_TORCH, _modules = "torch", sys.modules


def blob_name(data: bytes) -> BlobId:
    """Return the id by which messages refer to these bytes."""
    return blob_id(data)


def dumps(obj: Any, what: str = "the value") -> bytes:
    """Pickle ``obj``; functions and classes of ``__main__`` are pickled by value.

    Raises:
        NotPicklable: the message names ``what`` and the attribute that cannot.
    """
    try:
        data = pickle.dumps(obj, PICKLE_PROTOCOL)
    except Exception:  # noqa: BLE001 - reducers of user classes raise anything; cloudpickle decides
        return _dumps_by_value(obj, what)
    # A false hit (the text occurs in user data) costs a second pickling, never correctness.
    if b"__main__" in data:
        return _second_pass(_dumps_by_value, obj, what)
    return data


def dumps_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the arguments of one call, as `loads_call` takes them.

    Raises:
        NotPicklable: the message names the argument and the attribute in it.
    """
    call = (args, kwargs) if kwargs else args
    try:
        data = pickle.dumps(call, PICKLE_PROTOCOL)
        if b"__main__" not in data:
            return data
        return _second_pass(_cloudpickle, call)
    except Exception:  # noqa: BLE001 - see dumps
        return _dumps_arguments(f"{method}()", args, kwargs, None)


def pack_work(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> bytes | PickledObject:
    """Pickle a callable or class with its arguments, ``(fn, args, kwargs)``, as `pack`. Raises as `dumps_arguments`."""
    try:
        return pack((fn, args, kwargs), what)
    except NotPicklable as error:
        whole = error
    call = f"{getattr(fn, '__name__', type(fn).__name__)}() in {what}"
    _dumps_by_value(fn, call)
    _dumps_arguments(call, args, kwargs, None)
    raise whole  # each part can be pickled alone


def dumps_arguments(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> bytes:
    """Pickle the arguments of a callable or class: ``(args, kwargs)``.

    Raises:
        NotPicklable: the message names the argument and the attribute in it, and ``what``, as ``"job 'a'"``.
    """
    try:
        return dumps((args, kwargs), what)
    except NotPicklable as error:
        whole = error
    call = f"{getattr(fn, '__name__', type(fn).__name__)}() in {what}"
    _dumps_arguments(call, args, kwargs, None)
    raise whole  # each part can be pickled alone


def pack(obj: Any, what: str = "the value") -> bytes | PickledObject:
    """Pickle ``obj``, with large buffers outside the pickle: then a `PickledObject` whose buffers are still ``obj``'s.

    Raises:
        NotPicklable: the message names ``what`` and the attribute that cannot.
    """
    # Most arguments and results; they have no buffers, so the search for them is saved.
    if type(obj) in _PLAIN:
        data = dumps(obj, what)
        return data if len(data) < PICKLE_FROM_BYTES else _with_buffers(data, [])
    found: list[PickleBuffer] = []
    if type(obj) in _BLOBS:
        obj = _wrap_blob(obj)
    try:
        # Fray never imports PyTorch; without it there can be no tensors.
        if _TORCH in _modules:
            data = _dump_with_tensors(pickle.Pickler, obj, found)
        else:
            data = pickle.dumps(obj, PICKLE_PROTOCOL, buffer_callback=found.append)
    except Exception:  # noqa: BLE001 - see dumps
        return _with_buffers(_dumps_by_value(obj, what, found), found)
    if b"__main__" in data:
        data = _second_pass(_dumps_by_value, obj, what, found)
    # Thousands of small arrays: one transfer each would cost more than copying them into the pickle.
    if len(found) > BUFFERS_LIMIT:
        return _with_buffers(dumps(obj, what), [])
    return _with_buffers(data, found) if found or len(data) >= PICKLE_FROM_BYTES else data


def pack_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | PickledObject:
    """Pickle the arguments of one call, as `loads_call` takes them, with large buffers outside as in `pack`.

    Raises:
        NotPicklable: the message names the argument and the attribute in it.
    """
    # One pass over the types: for plain arguments it replaces the pickler's callback and its set-up.
    plain, blobs = not kwargs, False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind not in _PLAIN:
            plain = False
            if kind in _BLOBS and len(value) > INLINE_UP_TO_BYTES:
                blobs = True
    if plain:
        data = pickle.dumps(args, PICKLE_PROTOCOL)
        return data if len(data) < PICKLE_FROM_BYTES else _with_buffers(data, [])
    if blobs:
        args = tuple([_wrap_blob(value) for value in args])
        kwargs = {name: _wrap_blob(value) for name, value in kwargs.items()}
    call = (args, kwargs) if kwargs else args
    found: list[PickleBuffer] = []
    try:
        if _TORCH in _modules:
            data = _dump_with_tensors(pickle.Pickler, call, found)
        else:
            data = pickle.dumps(call, PICKLE_PROTOCOL, buffer_callback=found.append)
        if b"__main__" in data:
            data = _second_pass(_cloudpickle, call, found)
    except Exception:  # noqa: BLE001 - see dumps
        data = _dumps_arguments(f"{method}()", args, kwargs, found)
    if len(found) > BUFFERS_LIMIT:
        return _with_buffers(dumps_call(method, args, kwargs), [])
    return _with_buffers(data, found) if found or len(data) >= PICKLE_FROM_BYTES else data


class PicklePass(threading.local):
    """State of the current thread's pickling, for objects that count how often they are pickled."""

    second = False
    """Flag: the object was pickled before, that pickle was dropped, and it is being pickled again."""
    compares = False
    """Flag: the pickle is only compared, and never sent."""


passes = PicklePass()


def digest_to_compare(obj: Any) -> str:
    """Return a hash of the pickle and its buffers: equal for equal arguments."""
    # A reference that is pickled registers a token with its owner; a comparison must not.
    passes.compares = True
    try:
        packed = pack(obj, "the arguments")
    finally:
        passes.compares = False
    if isinstance(packed, bytes):
        return blob_name(packed)
    digest = hashlib.sha256(packed.pickle)
    for source in packed.sources:
        if isinstance(source, memoryview):
            digest.update(source)
    return digest.hexdigest()


def _second_pass(dump: Callable[..., bytes], *args: Any) -> bytes:
    # The first pickle is thrown away, so a reference must not count its token twice.
    passes.second = True
    try:
        return dump(*args)
    finally:
        passes.second = False


class DeferredConstruction:
    """Constructor argument whose unpickling would have blocked; ``make()`` makes it on the constructor's thread."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def construct_deferred(value: Any) -> Any:
    """Return the object of a `DeferredConstruction`; any other value unchanged."""
    return value.make() if type(value) is DeferredConstruction else value


Boxed: TypeAlias = tuple[bytes, Sequence[Any], bool]
"""An object that is not unpickled: its pickle, its out-of-band buffers, whether the first of these is the pickle."""


def box_object(
    pickled: bytes,
    views: Sequence[memoryview],
    sources: Sequence[Any],
    pickled_first: bool,
    wrap: Callable[[Boxed], Any] = lambda box: box,
) -> PickledObject:
    """Return a `PickledObject` that arrives as `Boxed`, for its receiver to open later by `unbox`.

    Args:
        sources: the same buffers as ``views``, as `PickledObject` takes them.
        wrap: returns the object that arrives, with the box in it.
    """
    box: Boxed = (pickled, [PickleBuffer(view) for view in views], pickled_first)
    found: list[PickleBuffer] = []
    data = pickle.dumps(wrap(box), PICKLE_PROTOCOL, buffer_callback=found.append)
    return PickledObject(data, list(sources))


def unbox(box: Boxed) -> Any:
    """Return the object in the box. It shares the buffers of the box, read-only, since other objects may do so, too.

    Raises any error of the constructors of the pickled objects.
    """
    pickled, buffers, pickled_first = box
    # Several objects and processes may share these buffers.
    views = [memoryview(buffer).toreadonly() for buffer in buffers]
    return loads(views[0], views[1:]) if pickled_first else loads(pickled, views)


def unbox_in_place(box: Boxed) -> Any:
    """Return the object in a box that has no other user: the object owns its buffers and may write to them."""
    pickled, buffers, pickled_first = box
    return loads(buffers[0], buffers[1:]) if pickled_first else loads(pickled, buffers)


Enclosed: TypeAlias = bytes | Boxed
"""A pickled object within another message that relays it: bytes, or with its large buffers beside them."""


def enclose(packed: bytes | PickledObject) -> Enclosed:
    """Return a packed object for another message. Its buffers are copied as far as other code may write to them."""
    if isinstance(packed, bytes):
        return packed
    detach_buffers(packed)
    views = [source for source in packed.sources if isinstance(source, memoryview)]
    return packed.pickle, [PickleBuffer(view) for view in views], packed.pickled_first


def enclose_again(data: Enclosed) -> Enclosed:
    """Return an object that has arrived enclosed, for the next message."""
    if isinstance(data, bytes):
        return data
    pickled, buffers, pickled_first = data
    return pickled, [PickleBuffer(buffer) for buffer in buffers], pickled_first


def open_enclosed(data: Enclosed) -> Any:
    """Return the object, which owns its buffers. Raises any error of the constructors of the pickled objects."""
    return loads(data) if isinstance(data, bytes) else unbox_in_place(data)


def size_of_enclosed(data: Enclosed) -> int:
    """Return the bytes of its pickle and all buffers."""
    return len(data) if isinstance(data, bytes) else len(data[0]) + sum(memoryview(each).nbytes for each in data[1])


def dumps_plain(obj: Any) -> bytes:
    """Pickle Fray's own data: strings, numbers and bytes in tuples and lists."""
    return pickle.dumps(obj, PICKLE_PROTOCOL)


def loads(data: Bytes, buffers: Sequence[Bytes] = ()) -> Any:
    """Return the inverse of `dumps` and `pack`. Raises any error of the constructors of the pickled objects."""
    return pickle.loads(data, buffers=buffers) if buffers else pickle.loads(data)


@contextmanager
def plain_values_only() -> Iterator[None]:
    """Refuse in this process, meanwhile, pickles that need code: for programs that show what others have returned.

    Left are None, booleans, numbers, strings, bytes, containers of these, dates, and Python's own exceptions.
    """
    global loads
    before = loads
    loads = _load_plain  # by its name in this module, also for those who have imported the module
    try:
        yield
    finally:
        loads = before


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that finds only classes of `_PLAIN_NAMES`, and Python's own exceptions."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(builtins, name, None) if module == "builtins" else None
        if (module, name) in _PLAIN_NAMES or (isinstance(found, type) and issubclass(found, BaseException)):
            return super().find_class(module, name)
        raise InvalidRequest(f"the value has a {module}.{name}: only plain values are shown, so that no code runs here")


def _load_plain(data: Bytes, buffers: Sequence[Bytes] = ()) -> Any:
    return _PlainUnpickler(io.BytesIO(data), buffers=buffers or None).load()


def unpack(body: Bytes | ReceivedObject) -> Any:
    """Return the object of an answer or item. Raises any error of the constructors of the pickled objects."""
    if type(body) is ReceivedObject:
        pickled, buffers = body.transfer.take(body.body)
        return loads(pickled, buffers)
    return loads(body)  # type: ignore[arg-type]


def loads_call(data: Bytes, has_kwargs: bool, buffers: Sequence[Bytes] = ()) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the inverse of `pack_call`: (args, kwargs)."""
    call = loads(data, buffers)
    return call if has_kwargs else (call, {})


def _cloudpickle(obj: Any, found: list[PickleBuffer] | None = None) -> bytes:
    if found is None:
        data: bytes = cloudpickle.dumps(obj, PICKLE_PROTOCOL)
        return data
    # The buffers of the pickle that failed.
    found.clear()
    if _TORCH in _modules:
        return _dump_with_tensors(cloudpickle.Pickler, obj, found)
    data = cloudpickle.dumps(obj, PICKLE_PROTOCOL, buffer_callback=found.append)
    return data


def _dumps_by_value(obj: Any, what: str, found: list[PickleBuffer] | None = None) -> bytes:
    try:
        return _cloudpickle(obj, found)
    except Exception as error:  # noqa: BLE001 - see dumps
        path, leaf = find_unpicklable(obj, error, _pickling_error)
        reason = str(leaf) or type(leaf).__name__
        cause = leaf if _is_of_user_code(leaf) else None
        raise NotPicklable(f"{what} cannot be sent: {path}{reason}", what=what, path=path) from cause


def _is_of_user_code(error: BaseException) -> bool:
    """Return whether a reducer raised the error, and not the pickler: its traceback says more than its text."""
    # Of several failed attempts to pickle, one is shown.
    if error.__cause__ is None:
        error.__suppress_context__ = True
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = modules[-1].partition(".")[0] if modules else ""
    return not isinstance(error, FrayError) and raised_in not in ("fray", "pickle", "cloudpickle", "copyreg")


def _dumps_arguments(
    call: str, args: Sequence[Any], kwargs: Mapping[str, Any], found: list[PickleBuffer] | None
) -> bytes:
    # One by one, to name the argument that fails; only on the way to an error.
    for position, value in enumerate(args, 1):
        _dumps_by_value(value, f"argument {position} of {call}")
    for name, value in kwargs.items():
        _dumps_by_value(value, f"argument {name!r} of {call}")
    return _dumps_by_value((args, kwargs) if kwargs else args, f"the arguments of {call}", found)


def _pickling_error(obj: Any) -> BaseException | None:
    try:
        _cloudpickle(obj)
    except Exception as error:  # noqa: BLE001 - see dumps
        return error
    return None


# Out-of-band buffers -------------------------------------------------------------------------------------------------

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types without buffers."""
_BLOBS = frozenset({bytes, bytearray})
PICKLE_FROM_BYTES = 256 * 1024
"""Size from which a pickle is itself sent as a buffer."""


class _Blob:
    """Wrapper that pickles bytes out of band, and unpickles to their original type."""

    __slots__ = ("value",)

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return bytes if type(self.value) is bytes else _bytearray_of, (PickleBuffer(self.value),)


def _wrap_blob(value: Any) -> Any:
    return _Blob(value) if type(value) in _BLOBS and len(value) > INLINE_UP_TO_BYTES else value


def _bytearray_of(buffer: Any) -> bytearray:
    """Return ``buffer`` itself if it is a bytearray, as received buffers are."""
    return buffer if type(buffer) is bytearray else bytearray(buffer)


def _with_buffers(data: bytes, found: list[PickleBuffer]) -> bytes | PickledObject:
    if not found and len(data) < PICKLE_FROM_BYTES:
        return data
    views = [_flat_view(buffer) for buffer in found]
    found.clear()
    if len(data) >= PICKLE_FROM_BYTES:
        # A large pickle is bulk data like any other: it must not hold up the frames behind it.
        return PickledObject(b"", [memoryview(data), *views], pickled_first=True)
    return PickledObject(data, [*views])


def _flat_view(buffer: PickleBuffer) -> memoryview:
    """Return the bytes of a buffer; a buffer with gaps is copied."""
    try:
        return buffer.raw()
    except BufferError:
        return memoryview(memoryview(buffer).tobytes())


def _dump_with_tensors(cls: Any, obj: Any, found: list[PickleBuffer]) -> bytes:
    """Pickle with support for tensors if PyTorch is imported; see `fray.runtime.serialization.tensors`."""
    file = io.BytesIO()
    pickler = cls(file, PICKLE_PROTOCOL, buffer_callback=found.append)
    tensor = getattr(_modules[_TORCH], "Tensor", None)
    if tensor is not None:
        table = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        # Through the descriptor: a subclass with a table of its own would hide an attribute of the instance.
        pickle.Pickler.dispatch_table.__set__(pickler, ChainMap({tensor: reduce_tensor}, table))  # type: ignore[attr-defined]
    pickler.dump(obj)
    return file.getvalue()
