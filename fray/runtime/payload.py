"""User objects to bytes and back: arguments, results, and errors with their remote traceback.

Plain pickle first (0.6 µs for small arguments). cloudpickle takes over when that fails, and when the bytes mention
``__main__``: plain pickle stores what lives in a script by reference, and the other side has another ``__main__``.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]

from fray.errors import MessageTooLarge, NotPicklable, RemoteError, RemoteTraceback
from fray.model.ids import BlobId
from fray.net.codec import blob_id
from fray.runtime.parcel import INLINE_UP_TO_BYTES, Parcel

Bytes: TypeAlias = bytes | bytearray | memoryview

PICKLE_PROTOCOL = 5
_WALK_DEPTH = 6
_WALK_LIMIT = 2_000
"""Objects looked at, at most, to name the one that cannot be pickled."""
_TORCH, _modules = "torch", sys.modules
_CHAIN_LIMIT = 50
"""Causes kept of one error."""


def name_of(data: bytes) -> BlobId:
    """What messages call these bytes."""
    return blob_id(data)


def dumps(obj: Any, what: str = "the value") -> bytes:
    """Pickle ``obj``; what lives in ``__main__`` travels by value.

    Raises:
        NotPicklable: it cannot travel; the message names ``what`` and the attribute that cannot.
    """
    try:
        data = pickle.dumps(obj, PICKLE_PROTOCOL)
    except Exception:  # noqa: BLE001 - reducers of user classes raise anything; cloudpickle has the last word
        return _dumps_by_value(obj, what)
    if b"__main__" in data:
        return _dumps_by_value(obj, what)
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
        return _cloudpickle(call)
    except Exception:  # noqa: BLE001 - see dumps
        return _dumps_arguments(method, args, kwargs, None)


def pack(obj: Any, what: str = "the value") -> bytes | Parcel:
    """`dumps`, with large buffers left outside the pickle: then a `Parcel`, whose buffers are still ``obj``'s.

    Raises:
        NotPicklable: it cannot travel; the message names ``what`` and the attribute that cannot.
    """
    if type(obj) in _PLAIN:
        data = dumps(obj, what)
        return data if len(data) < PICKLE_FROM_BYTES else _packed(data, [])
    found: list[PickleBuffer] = []
    if type(obj) in _BLOBS:
        obj = _as_blob(obj)
    try:
        if _TORCH in _modules:
            data = _by_pickler(pickle.Pickler, obj, found)
        else:
            data = pickle.dumps(obj, PICKLE_PROTOCOL, buffer_callback=found.append)
    except Exception:  # noqa: BLE001 - see dumps
        return _packed(_dumps_by_value(obj, what, found), found)
    if b"__main__" in data:
        data = _dumps_by_value(obj, what, found)
    return _packed(data, found) if found or len(data) >= PICKLE_FROM_BYTES else data


def pack_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | Parcel:
    """The arguments of one call, as `loads_call` takes them; as `pack` otherwise.

    Raises:
        NotPicklable: the message names the argument and the attribute in it.
    """
    plain, blobs = not kwargs, False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind not in _PLAIN:
            plain = False
            if kind in _BLOBS and len(value) > INLINE_UP_TO_BYTES:
                blobs = True
    if plain:
        data = pickle.dumps(args, PICKLE_PROTOCOL)
        return data if len(data) < PICKLE_FROM_BYTES else _packed(data, [])
    if blobs:
        args = tuple([_as_blob(value) for value in args])
        kwargs = {name: _as_blob(value) for name, value in kwargs.items()}
    call = (args, kwargs) if kwargs else args
    found: list[PickleBuffer] = []
    try:
        if _TORCH in _modules:
            data = _by_pickler(pickle.Pickler, call, found)
        else:
            data = pickle.dumps(call, PICKLE_PROTOCOL, buffer_callback=found.append)
        if b"__main__" in data:
            data = _cloudpickle(call, found)
    except Exception:  # noqa: BLE001 - see dumps
        data = _dumps_arguments(method, args, kwargs, found)
    return _packed(data, found) if found or len(data) >= PICKLE_FROM_BYTES else data


def too_large(what: str, size_bytes: int, limit_bytes: int) -> MessageTooLarge:
    """The error of a value that can be pickled and is too large to be sent."""
    text = f"{what} has {size_bytes} bytes pickled and the limit is {limit_bytes}: store it and send its path"
    return MessageTooLarge(text, size_bytes=size_bytes, limit_bytes=limit_bytes)


def loads(data: Bytes, buffers: Sequence[Bytes] = ()) -> Any:
    """Inverse of `dumps` and `pack`. Raises whatever the constructors of the pickled objects raise."""
    return pickle.loads(data, buffers=buffers) if buffers else pickle.loads(data)


def loads_call(data: Bytes, has_kwargs: bool, buffers: Sequence[Bytes] = ()) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Inverse of `pack_call`."""
    call = loads(data, buffers)
    return call if has_kwargs else (call, {})


def _cloudpickle(obj: Any, found: list[PickleBuffer] | None = None) -> bytes:
    if found is None:
        data: bytes = cloudpickle.dumps(obj, PICKLE_PROTOCOL)
        return data
    found.clear()
    if _TORCH in _modules:
        return _by_pickler(cloudpickle.Pickler, obj, found)
    data = cloudpickle.dumps(obj, PICKLE_PROTOCOL, buffer_callback=found.append)
    return data


def _dumps_by_value(obj: Any, what: str, found: list[PickleBuffer] | None = None) -> bytes:
    try:
        return _cloudpickle(obj, found)
    except Exception as error:
        path, leaf = _culprit(obj, error)
        raise NotPicklable(f"{what} cannot be sent: {path}{_said(leaf)}", what=what, path=path) from error


def _dumps_arguments(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any], found: list[PickleBuffer] | None
) -> bytes:
    for position, value in enumerate(args, 1):
        _dumps_by_value(value, f"argument {position} of {method}()")
    for name, value in kwargs.items():
        _dumps_by_value(value, f"argument {name!r} of {method}()")
    return _dumps_by_value((args, kwargs) if kwargs else args, f"the arguments of {method}()", found)


# Buffers that stay outside the pickle --------------------------------------------------------------------------------

_PLAIN = frozenset({type(None), bool, int, float, str})
"""What holds no buffer."""
_BLOBS = frozenset({bytes, bytearray})
PICKLE_FROM_BYTES = 256 * 1024
"""A pickle of this size is a buffer itself."""


class _Blob:
    """Bytes that leave the pickle, and come out of it as what they were."""

    __slots__ = ("value",)

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return bytes if type(self.value) is bytes else _bytearray_of, (PickleBuffer(self.value),)


def _as_blob(value: Any) -> Any:
    return _Blob(value) if type(value) in _BLOBS and len(value) > INLINE_UP_TO_BYTES else value


def _bytearray_of(buffer: Any) -> bytearray:
    """What was received as a bytearray is one already."""
    return buffer if type(buffer) is bytearray else bytearray(buffer)


def _packed(data: bytes, found: list[PickleBuffer]) -> bytes | Parcel:
    if not found and len(data) < PICKLE_FROM_BYTES:
        return data
    views = [_flat(buffer) for buffer in found]
    found.clear()
    if len(data) >= PICKLE_FROM_BYTES:
        return Parcel(b"", [memoryview(data), *views], pickled_first=True)
    return Parcel(data, [*views])


def _flat(buffer: PickleBuffer) -> memoryview:
    """The bytes of a buffer; one that has gaps is copied."""
    try:
        return buffer.raw()
    except BufferError:
        return memoryview(memoryview(buffer).tobytes())


# PyTorch pickles the memory of a tensor into the stream. A process that has imported it gets a pickler that knows
# better for dense tensors on the CPU; Fray itself never imports it.


def _by_pickler(cls: Any, obj: Any, found: list[PickleBuffer]) -> bytes:
    file = io.BytesIO()
    pickler = cls(file, PICKLE_PROTOCOL, buffer_callback=found.append)
    tensor = getattr(_modules[_TORCH], "Tensor", None)
    if tensor is not None:
        table = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        # Through the descriptor: a subclass with a table of its own would hide an attribute of the instance.
        pickle.Pickler.dispatch_table.__set__(pickler, ChainMap({tensor: _reduce_tensor}, table))  # type: ignore[attr-defined]
    pickler.dump(obj)
    return file.getvalue()


def _reduce_tensor(tensor: Any) -> Any:
    if not _is_dense(tensor):
        return tensor.__reduce_ex__(PICKLE_PROTOCOL)
    torch = _modules[_TORCH]
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return _tensor_of, (array, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _is_dense(tensor: Any) -> bool:
    """One block of plain numbers on the CPU, and all of it, so that nothing else shares its memory."""
    torch = _modules[_TORCH]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.grad_fn is not None or tensor.__dict__:
        return False
    size = tensor.numel() * tensor.element_size()
    return bool(size > INLINE_UP_TO_BYTES and tensor.untyped_storage().nbytes() == size)


def _tensor_of(array: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch  # type: ignore[import-not-found]  # a pickled tensor needs it whoever pickled it

    return torch.from_numpy(array).view(dtype).reshape(shape).requires_grad_(requires_grad)


# Naming what cannot travel -------------------------------------------------------------------------------------------


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _why_not(obj: Any) -> BaseException | None:
    try:
        _cloudpickle(obj)
    except Exception as error:  # noqa: BLE001 - see dumps
        return error
    return None


def _culprit(obj: Any, error: BaseException) -> tuple[str, BaseException]:
    """The path to the innermost part that cannot be pickled alone, and what pickle says of it."""
    path, seen = "", {id(obj)}
    for _ in range(_WALK_DEPTH):
        found = _broken_part(obj, seen)
        if found is None:
            break
        step, obj, error = found
        path += f"{step}: "
    return path, error


def _broken_part(obj: Any, seen: set[int]) -> tuple[str, Any, BaseException] | None:
    for step, part in _parts(obj):
        if id(part) in seen or len(seen) > _WALK_LIMIT:
            continue
        seen.add(id(part))
        error = _why_not(part)
        if error is not None:
            return step, part, error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What ``obj`` is made of, each with the words that name it."""
    if isinstance(obj, Mapping):
        yield from ((f"item {key!r}", value) for key, value in list(obj.items()))
        yield from ((f"key {key!r}", key) for key in list(obj))
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"item {index}", value) for index, value in enumerate(list(obj)))
    elif hasattr(obj, "__self__") and hasattr(obj, "__func__"):
        yield "its object", obj.__self__
    elif hasattr(obj, "__closure__") and hasattr(obj, "__code__"):
        yield from _parts_of_function(obj)
    else:
        kind = obj.__name__ if isinstance(obj, type) else type(obj).__name__
        yield from ((f"attribute {name!r} of {kind}", value) for name, value in _attributes(obj))


def _parts_of_function(function: Any) -> Iterator[tuple[str, Any]]:
    code, name = function.__code__, function.__name__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"variable {variable!r} of {name}()", cell.cell_contents
        except ValueError:
            pass  # an empty cell: not assigned yet
    for variable in code.co_names:
        if variable in function.__globals__:
            yield f"global {variable!r} of {name}()", function.__globals__[variable]


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(obj, "__dict__", {}).items())
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield name, getattr(obj, name)


# Errors --------------------------------------------------------------------------------------------------------------
#
# One error travels as a tuple (node): how to build it, its notes, its cause as a node, its name and its text. A group's
# members are nodes too. The text of the whole chain travels once, beside the outermost node.

_PICKLED, _PARTS, _GROUP, _TEXT = range(4)


def dump_error(error: BaseException) -> bytes:
    """Pickle an error of user code: type, arguments, attributes, notes, causes, and its traceback as text.

    Never raises: what cannot travel of it becomes text.
    """
    try:
        text = "".join(traceback.format_exception(error)).rstrip("\n")
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may raise
        text = f"{_name(type(error))} (its text cannot be made: {type(broken).__name__})"
    return pickle.dumps((_node(error, 0), text), PICKLE_PROTOCOL)


def dump_error_in_short(data: bytes, limit_chars: int, why: str) -> bytes:
    """What travels of a dumped error that is too large: a `RemoteError` with its type and the ends of its text."""
    (*_, name, said), text = pickle.loads(data)
    half = limit_chars // 2
    cut = text if len(text) <= limit_chars else f"{text[:half]}\n[...]\n{text[-half:]}"
    error = RemoteError(f"the callee raised {name}: {said[:half]} ({why})", type=name, traceback=cut)
    error.__cause__ = RemoteTraceback(cut)
    return dump_error(error)


def load_error(data: Bytes) -> BaseException:
    """Inverse of `dump_error`: the same type where it can be built here, else `RemoteError`; never SystemExit and kin.

    ``__cause__`` is the original's, and the chain ends with a `RemoteTraceback` that holds the whole text.
    """
    node, text = pickle.loads(data)
    error: BaseException = _build(node, text)
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
    if cause is None or isinstance(cause, RemoteTraceback) or depth >= _CHAIN_LIMIT:
        return kind, how, notes, None, _name(type(error)), _safe_text(error)
    return kind, how, notes, _node(cause, depth + 1), _name(type(error)), _safe_text(error)


def _recipe(error: BaseException, depth: int) -> tuple[int, Any]:
    if isinstance(error, BaseExceptionGroup) and depth < _CHAIN_LIMIT:
        members = [_node(member, depth + 1) for member in error.exceptions]
        return _GROUP, (_try(type(error)), error.message, members)
    data = _try(error)
    if data is not None and _rebuilds(data, type(error)):
        return _PICKLED, data
    for state in (error.__dict__, {}):
        data = _try((type(error), error.args, {k: v for k, v in state.items() if k != "__notes__"}))
        if data is not None:
            return _PARTS, data
    return _TEXT, None


def _try(obj: Any) -> bytes | None:
    try:
        return dumps(obj)
    except NotPicklable:
        return None


def _rebuilds(data: bytes, cls: type) -> bool:
    """Constructors with other arguments than ``args`` are common: such errors are built from their parts."""
    try:
        return type(pickle.loads(data)).__name__ == cls.__name__
    except Exception:  # noqa: BLE001 - constructors of user classes raise anything
        return False


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise
        return ""


def _build(node: tuple[Any, ...], text: str) -> BaseException:
    kind, how, notes, cause, name, said = node
    error = _build_alone(kind, how, text) or RemoteError(f"{name}: {said}", type=name, traceback=text)
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
        error = loads(how) if kind == _PICKLED else _from_parts(*loads(how))
    except Exception:  # noqa: BLE001 - the class is not importable here, or refuses
        return None
    return error if isinstance(error, BaseException) else None


def _from_parts(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _build_group(cls: bytes | None, message: str, members: list[tuple[Any, ...]], text: str) -> BaseException:
    errors = [_build(member, text) for member in members]
    try:
        group = loads(cls)(message, errors) if cls is not None else None
        if isinstance(group, BaseExceptionGroup):
            return group
    except Exception:  # noqa: BLE001 - the group's class is not importable here, or refuses
        pass
    return BaseExceptionGroup(message, errors)
