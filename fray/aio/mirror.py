"""Classes for asyncio made from the classes of `fray`: the same methods, whose calls cross to Fray's loop.

`mirror` makes the class. Async methods are awaited across; the others run in Fray's loop while this thread waits, which
takes microseconds, as they do not wait themselves. What they return is wrapped by its class, and arguments unwrapped.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from types import FunctionType, GenericAlias
from typing import Any, cast

import trio

from fray.aio.crossing import Block, call
from fray.api.actors.group import ActorGroup
from fray.api.actors.handle import ActorHandle
from fray.api.async_block import AsyncBlock
from fray.api.futures import Future
from fray.api.jobs.job import Job
from fray.blocking import actors, groups, jobs
from fray.blocking.bridge.background_loop import current_runtime, portal_of
from fray.blocking.bridge.portal import Portal
from fray.blocking.futures import ActorFuture
from fray.runtime.calls.futures import CallFuture
from fray.runtime.objects.imported_future import ImportedFuture

_FUTURES = (CallFuture, Future, ImportedFuture)
"""Classes, not their subclasses: a stream is a call, too."""


class Mirror:
    """Object of `fray` for asyncio code. ``cls(*args)`` makes the object of `fray` from the same arguments."""

    _native_class: type
    _native: Any
    _bound_portal: Portal | None

    __class_getitem__: Any = classmethod(GenericAlias)
    """``ActorHandle[Counter]``, in annotations."""

    def __init_subclass__(cls) -> None:
        _wrappers[cls._native_class] = cls.of

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        portal = next((arg._portal for arg in (*args, *kwargs.values()) if isinstance(arg, Mirror)), None)
        self._bound_portal = portal or portal_of(current_runtime())
        self._native = self._portal.run(lambda: self._native_class(*map(unwrap, args), **_unwrapped(kwargs)))

    @classmethod
    def of(cls, portal: Portal | None, native: Any) -> Any:
        """Return the mirror of an object; ``portal``: default that of the code that uses it."""
        self = cls.__new__(cls)
        self._bound_portal, self._native = portal, native
        return self

    @property
    def _portal(self) -> Portal:
        if self._bound_portal is None:
            self._bound_portal = portal_of(current_runtime())
        return self._bound_portal

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as the object of `fray`, or of `fray.blocking` where sync code unpickles it."""
        return _arrived, (self._native,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirror) and bool(other._native == self._native)

    def __hash__(self) -> int:
        return hash(self._native)

    def __repr__(self) -> str:
        return repr(self._native)

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows; None: the `repr`."""
        show = getattr(self._native, "_repr_html_", None)
        return None if show is None else str(show())


def _arrived(native: Any) -> Any:
    if not trio.lowlevel.in_trio_run():
        for kind, make in _BLOCKING.items():
            if type(native) is kind:
                return make(native)
    return native


_BLOCKING: dict[type, Callable[[Any], Any]] = {
    Job: lambda job: jobs.Job(None, job),
    ActorHandle: actors.ActorHandle,
    ActorGroup: groups.ActorGroup,
}

# Values that cross ---------------------------------------------------------------------------------------------------


def _asyncio_future(future: ActorFuture[Any]) -> asyncio.Future[Any]:
    """Return the same for asyncio code. An error that is not read is not reported, as in `fray`: of many calls that
    fail for one reason, mostly only the first is awaited."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiting


_wrappers: dict[type, Callable[[Portal, Any], Any]] = {
    AsyncBlock: lambda portal, block: Block(lambda: portal, block, lambda value: wrap(portal, value)),
    ActorFuture: lambda portal, future: _asyncio_future(future),
}


def wrap(portal: Portal, value: Any) -> Any:
    """Return a result for asyncio code: a mirror, an `asyncio.Future`, a block; lists of them; or the value itself."""
    if type(value) in (list, tuple):
        return type(value)(wrap(portal, each) for each in value) if _has_any(value, _wrappers) else value
    wrapper = _wrappers.get(type(value))
    return value if wrapper is None else wrapper(portal, value)


def _has_any(values: Any, kinds: Any) -> bool:
    return any(type(each) in kinds for each in values)


def unwrap(value: Any) -> Any:
    """Return an argument for `fray`."""
    if isinstance(value, Mirror):
        return value._native
    if type(value) in (list, tuple) and any(isinstance(each, Mirror) for each in value):
        return type(value)(map(unwrap, value))
    return value


def _unwrapped(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: unwrap(value) for name, value in kwargs.items()}


def run(portal: Portal, fn: Callable[[], Any]) -> Any:
    """Call a sync function in Fray's loop, and wrap its result."""

    def in_loop() -> Any:
        value = fn()
        if type(value) in _FUTURES:
            return ActorFuture(value, portal)
        if type(value) is list and _has_any(value, _FUTURES):
            return [ActorFuture(each, portal) for each in value]
        return value

    return wrap(portal, portal.run(in_loop))


async def await_native(portal: Portal, fn: Callable[..., Any], *args: Any) -> Any:
    """Await an async function in Fray's loop, and wrap its result."""
    return wrap(portal, await call(portal, fn, *args))


# Classes -------------------------------------------------------------------------------------------------------------


def mirror(native: type, *, without: tuple[str, ...] = (), in_loop: tuple[str, ...] = ()) -> type[Mirror]:
    """Return the class for asyncio of a class of `fray`; from now on its objects are wrapped in it.

    Args:
        without: public members that it does not have.
        in_loop: properties that only Fray's loop may read.
    """
    members: dict[str, Any] = {"__doc__": native.__doc__, "__module__": "fray.aio", "_native_class": native}
    for name in dir(native):
        member = inspect.getattr_static(native, name)
        if name in _SPECIAL:
            members[name] = _SPECIAL[name]
        elif isinstance(member, property) and name[0] != "_":
            members[name] = property(_reader(name, name in in_loop), doc=member.__doc__)
        elif isinstance(member, FunctionType) and (name[0] != "_" or name == "__call__") and name not in without:
            members[name] = _method(name, member)
    return type(native.__name__.lstrip("_"), (Mirror,), members)


_TAKES_DATA = frozenset(
    {"__call__", "gather", "start", "stream", "open", "submit", "map", "imap", "send", "run", "create_actor"}
    | {"create_actor_group", "create_actors"}
)
"""Methods whose arguments are pickled: a mirror among them is not unwrapped, as its pickle is that of any face."""


def _method(name: str, member: FunctionType) -> Callable[..., Any]:
    def native(self: Mirror, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        method = getattr(self._native, name)
        if name not in _TAKES_DATA:
            args, kwargs = tuple(map(unwrap, args)), _unwrapped(kwargs)
        return lambda: method(*args, **kwargs)

    async def across(self: Mirror, /, *args: Any, **kwargs: Any) -> Any:
        return await await_native(self._portal, native(self, args, kwargs))

    def at_once(self: Mirror, /, *args: Any, **kwargs: Any) -> Any:
        return run(self._portal, native(self, args, kwargs))

    return functools.wraps(member)(across if inspect.iscoroutinefunction(member) else at_once)


def _reader(name: str, in_loop: bool) -> Callable[[Mirror], Any]:
    def read(self: Mirror) -> Any:
        if in_loop:
            return run(self._portal, lambda: getattr(self._native, name))
        return wrap(self._portal, getattr(self._native, name))

    return read


def _await(self: Any) -> Generator[Any, Any, Any]:
    return cast("Generator[Any, Any, Any]", self.wait().__await__())


async def _enter(self: Mirror) -> Mirror:
    await await_native(self._portal, self._native.__aenter__)
    return self


async def _exit(self: Mirror, *error: Any) -> None:
    await await_native(self._portal, self._native.__aexit__, *error)


async def _next(self: Mirror) -> Any:
    return await await_native(self._portal, self._native.__anext__)


def _get(self: Mirror, name: str) -> Any:
    if name.startswith("_"):  # of `fray`'s object, which belongs to its loop
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return wrap(self._portal, getattr(self._native, name))


def _iterate(self: Mirror) -> Iterator[Any]:
    return (wrap(self._portal, each) for each in self._native)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "__await__": _await,
    "__aenter__": _enter,
    "__aexit__": _exit,
    "__aiter__": lambda self: self,
    "__anext__": _next,
    "__getattr__": _get,
    "__getitem__": lambda self, index: wrap(self._portal, self._native[index]),
    "__iter__": _iterate,
    "__len__": lambda self: len(self._native),
}
"""Special methods of mirrors of classes that have them."""
