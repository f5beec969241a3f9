"""Functions as a context sends them to its workers, and the treatment of their results there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fray.blocking.bridge.background_loop import runtime_here
from fray.blocking.bridge.objects import (
    ObjectOwner,
    closed_function,
    is_async_function,
    opened,
    sending,
)
from fray.blocking.bridge.remote_generators import ItemSender
from fray.errors import InvalidRequest
from fray.job.default_context import stored_context

_cache: dict[bytes, Any] = {}
"""Unpickled functions of this process, by their pickles."""
# As many as a worker keeps of a pool's functions.
CACHE_LIMIT = 256


class ShippedFunction:
    """Function that is sent to workers: pickled again only if its closure changes, unpickled once in each worker."""

    def __init__(self, data: bytes, name: str, is_cacheable: bool = True) -> None:
        self._data, self._is_cacheable = data, is_cacheable
        self.__name__ = name

    @classmethod
    def of(cls, fn: Any) -> ShippedFunction:
        """Return the function in the form that is sent. Raises InvalidRequest (not callable), NotPicklable."""
        if not callable(fn):
            raise InvalidRequest(f"run() needs a callable, not {fn!r}")
        name = getattr(fn, "__name__", None) or type(fn).__name__
        kind = AsyncFunction if is_async_function(fn) and cls is ShippedFunction else cls
        with sending() as refs:
            data = closed_function(fn, f"function {name!r}")
        return kind(data, name, not refs)  # a cached function would hold the objects to which it refers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._data, self.__name__, self._is_cacheable)

    def _opened(self) -> Any:
        fn = _cache.get(self._data)
        if fn is None:
            fn = opened(self._data)
            # Only plain functions: a callable object may have state that must not pass from one task to the next.
            if self._is_cacheable and hasattr(fn, "__code__") and not hasattr(fn, "__self__"):
                if len(_cache) >= CACHE_LIMIT:
                    _cache.clear()
                _cache[self._data] = fn
        return fn

    def _objects(self) -> ObjectOwner:
        runtime = runtime_here()
        assert runtime is not None, "a shipped function runs in a worker, which has a runtime"
        owner: ObjectOwner = stored_context(runtime.services)._objects
        return owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on a worker."""
        return self._objects().carry(self._opened()(*args, **kwargs), f"the result of {self.__name__!r}")


class AsyncFunction(ShippedFunction):
    """Async function, which runs in the worker's loop."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on a worker."""
        value = await self._opened()(*args, **kwargs)
        return await self._objects().carry_here(value, f"the result of {self.__name__!r}")


class ItemMaker(ShippedFunction):
    """Generator function, whose items are sent one by one."""

    def __call__(self, sink: ItemSender, *args: Any, **kwargs: Any) -> None:
        """Run the generator on a worker, and send its items to ``sink``."""
        carry: Callable[[Any, str], Any] = self._objects().carry
        what = f"an item of {self.__name__!r}"
        generator = self._opened()(*args, **kwargs)
        try:
            for item in generator:
                if not sink.send(carry(item, what), what):
                    return
        # Also when the reader has left: the generator's `finally` blocks run on the worker.
        finally:
            generator.close()
            sink.flush()
