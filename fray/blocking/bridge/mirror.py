"""Methods of the blocking API made from the async methods of the same name.

``queue = make_blocking(native.Cluster.queue)``, in a class whose objects have ``_portal`` and ``_native``, has the
parameters and the docstring of the async method, also for type checkers. Methods are written out where they take
objects of the blocking API, have a timeout or do more after the call, and where the async method is overloaded: type
checkers lose overloads here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

from fray.blocking.bridge.portal import Portal

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


@overload
def make_blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]: ...
@overload
def make_blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], wrap: Callable[[Portal, T], U]
) -> Callable[Concatenate[Any, P], U]: ...
def make_blocking(method: Any, wrap: Callable[[Portal, Any], Any] | None = None) -> Any:
    """Return a method that waits for the async ``method``.

    The method is looked up by its name in ``self._native``, which may be of another class with the same method.

    Args:
        wrap: makes an object of the blocking API of the result, on the calling thread. Default: the result as it is.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: the native object may be replaced, as that of a handle by name is.
        native = getattr(self._native, name)
        result = self._portal.call(lambda: native(*args, **kwargs))
        return result if wrap is None else wrap(self._portal, result)

    return call


def make_threadsafe(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the sync ``method`` in the loop, whose objects only the loop's thread may use."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        native = getattr(self._native, name)
        return self._portal.run(lambda: native(*args, **kwargs))

    return cast("Callable[Concatenate[Any, P], T]", call)
