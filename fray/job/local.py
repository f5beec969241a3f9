"""Contexts of this process: `SyncContext` runs functions at once, `ThreadContext` on threads. Nothing is copied."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from fray.blocking.bridge.remote_generators import WINDOW, ItemBuffer, RemoteGenerator
from fray.errors import ActorDied, InvalidRequest, NameInUse, NoSuchActor
from fray.job.context import JobContext, Lifetime, Ref, is_generator_function, is_ref, value_of
from fray.job.default_context import default_context
from fray.model.actors import ActorStatus
from fray.threads import BoundedThreads

# Values --------------------------------------------------------------------------------------------------------------


class LocalRef(Ref):
    """Reference to a value of this process, or to an error in its place."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def result(self, timeout: float | None = None) -> Any:
        """Return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None."""
        return self._error

    def done(self) -> bool:
        """Return True."""
        return True

    def cancel(self) -> bool:
        """Return False: nothing is running."""
        return False

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` at once."""
        callback(self)

    def __repr__(self) -> str:
        return f"<LocalRef {'failed' if self._error is not None else type(self._value).__name__}>"


def _result_of(fn: Callable[[], Any]) -> LocalRef:
    try:
        return LocalRef(fn())
    except Exception as error:  # noqa: BLE001 (the caller of `result` raises it)
        return LocalRef(error=error)


def _refuse_async(fn: Any) -> None:
    if inspect.iscoroutinefunction(fn):
        raise InvalidRequest(f"{fn!r} is async: async functions run on a cluster only, with FrayContext")


# Actors --------------------------------------------------------------------------------------------------------------


class LocalActor:
    """Actor of this process: ``handle.method.remote(...)`` returns a future, ``handle.method(...)`` waits."""

    def __init__(self, name: str, instance: Any, call: Callable[[Callable[[], Any]], Any]) -> None:
        self._name, self._instance, self._call = name, instance, call
        self._ended = False

    def __getattr__(self, name: str) -> LocalMethod:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: only public methods of an actor can be called")
        if self._ended:
            return LocalMethod(self, name, partial(_raise_deleted, self._name))
        method = getattr(self._instance, name)
        # Refused at access: a coroutine that no loop runs would pass for a result.
        _refuse_async(method)
        if not callable(method):
            raise AttributeError(f"{name!r} of actor {self._name!r} is not a method: only methods can be called")
        return LocalMethod(self, name, method)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"


def _raise_deleted(name: str, *args: Any, **kwargs: Any) -> None:
    raise ActorDied(f"actor {name!r} was deleted")


class LocalMethod:
    """Method of an actor of this process."""

    def __init__(self, actor: LocalActor, name: str, method: Callable[..., Any]) -> None:
        self._actor, self._name, self._method = actor, name, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and wait for its value."""
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start a call; return a future of its value. References among the arguments are replaced by their values."""
        return self._actor._call(partial(self._run, args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._actor._ended:
            _raise_deleted(self._actor._name)
        return self._method(*map(value_of, args), **{name: value_of(value) for name, value in kwargs.items()})

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._actor!r}>"


class LocalContext(JobContext):
    """Base of both contexts of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._actors: dict[str, LocalActor] = {}
        self._making = threading.RLock()

    def put(self, obj: Any) -> LocalRef:
        """Return a reference to the object itself."""
        return LocalRef(obj)

    def _inside(self) -> Context:
        """Return a copy of the current `contextvars.Context` in which this context is the default."""
        context = copy_context()
        context.run(default_context.set, self)
        return context

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str | None = None,
        get_if_exists: bool = False,
        lifetime: Lifetime = "non_detached",
        preemptible: bool = True,
        num_cpus: float | None = None,
        **kwargs: Any,
    ) -> LocalActor:
        """Make the actor in this thread. ``lifetime``, ``preemptible`` and ``num_cpus`` have no effect here. See
        `JobContext.create_actor`."""
        with self._making:
            # Under the lock: of two threads with the same name, one makes the actor.
            existing = self._actors.get(name) if name is not None else None
            if existing is not None and get_if_exists:
                return existing
            if existing is not None:
                raise NameInUse(f"an actor named {name!r} lives already: pass get_if_exists=True to get that actor")
            values = [value_of(arg) for arg in args], {key: value_of(value) for key, value in kwargs.items()}
            # In a context where this is the default context, as on a cluster.
            instance = self._inside().run(actor_class, *values[0], **values[1])
            label = name or f"{actor_class.__name__.lower()}-{id(instance):x}"
            actor = self._actors[label] = LocalActor(label, instance, self._caller())
            return actor

    def _caller(self) -> Callable[[Callable[[], Any]], Any]:
        """Return the function that makes the calls of an actor."""
        raise NotImplementedError

    def delete_actor(self, actor: LocalActor | str) -> None:
        """Free the actor's name; its running calls continue. Raises NoSuchActor: no living actor has this name."""
        found = actor if isinstance(actor, LocalActor) else self._actors.get(actor)
        if found is None:
            raise NoSuchActor(f"no living actor is named {actor!r}")
        with self._making:
            found._ended = True
            if self._actors.get(found._name) is found:
                del self._actors[found._name]

    def actor_status(self, actor: LocalActor | str) -> ActorStatus:
        """Return READY, or ENDED after `delete_actor`. Raises NoSuchActor: no living actor has this name."""
        found = actor if isinstance(actor, LocalActor) else self._actors.get(actor)
        if found is None:
            raise NoSuchActor(f"no living actor is named {actor!r}")
        return ActorStatus.ENDED if found._ended else ActorStatus.READY

    def shutdown(self) -> None:
        """Delete all actors of this context."""
        for actor in list(self._actors.values()):
            self.delete_actor(actor)


# Kinds of contexts ---------------------------------------------------------------------------------------------------


class SyncContext(LocalContext):
    """Runs everything at once, in the calling thread. Generators run as they are read."""

    def run(self, fn: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Call the function at once. See `JobContext.run`."""
        _refuse_async(fn)
        context = self._inside()
        if is_generator_function(fn):
            values = [value_of(arg) for arg in args], {key: value_of(value) for key, value in kwargs.items()}
            return _LazyGenerator(context, fn(*values[0], **values[1]), name or _label(fn))
        return _result_of(
            lambda: context.run(fn, *map(value_of, args), **{key: value_of(value) for key, value in kwargs.items()})
        )

    def _caller(self) -> Callable[[Callable[[], Any]], Any]:
        return lambda call: _result_of(lambda: self._inside().run(call))

    def __repr__(self) -> str:
        return "<SyncContext>"


def _label(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


class _LazyGenerator(RemoteGenerator):
    """Generator that makes each item when it is read, and so is always ready."""

    def __init__(self, context: Context, generator: Any, what: str) -> None:
        super().__init__(ItemBuffer(), what)
        self._context, self._generator = context, generator

    def __next__(self) -> Any:
        return self._context.run(next, self._generator)

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)

    def close(self) -> None:
        self._generator.close()


class ThreadContext(LocalContext):
    """Runs functions on threads of this process, and each actor on its own thread. Nothing is copied.

    While a function waits for others with methods of this context, another may run in its place.

    Args:
        max_workers: functions that run concurrently. Default: the number of CPUs and four more, at most 32.

    Raises:
        InvalidRequest: ``max_workers`` below 1.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        super().__init__()
        if max_workers is not None and max_workers < 1:
            raise InvalidRequest(f"max_workers={max_workers!r} must be 1 or more")
        # As `concurrent.futures.ThreadPoolExecutor`: four more than CPUs, since functions also wait.
        self.max_workers = max_workers or min(32, (os.cpu_count() or 1) + 4)
        self._threads = BoundedThreads(self.max_workers, "this ThreadContext was shut down: make another")

    def run(self, fn: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Call the function on a thread once one is free. See `JobContext.run`."""
        _refuse_async(fn)
        label = name or _label(fn)
        if is_generator_function(fn):
            items = _ThreadItems(self._threads)
            self._threads.submit(self._inside(), lambda: items.make(fn, self._values(args, kwargs)), label)
            return RemoteGenerator(items, label)
        return self._threads.submit(self._inside(), lambda: self._call(fn, args, kwargs), label)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, named = self._values(args, kwargs)()
        return fn(*values, **named)

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
        def value(arg: Any) -> Any:
            return self._value(arg, None) if is_ref(arg) else arg

        return lambda: ([value(arg) for arg in args], {key: value(arg) for key, arg in kwargs.items()})

    def _wait_for(self, ref: Any, timeout: float | None) -> Any:
        # Otherwise functions that wait for functions could occupy all threads.
        with self._threads.aside():
            return ref.result(timeout)

    def _wait_until(self, refs: list[Any], num_returns: int, timeout: float | None) -> None:
        with self._threads.aside():
            super()._wait_until(refs, num_returns, timeout)

    def _caller(self) -> Callable[[Callable[[], Any]], Future[Any]]:
        # A thread for each actor, so its calls run one by one, in order.
        own = BoundedThreads(1, "this actor was deleted")
        return lambda call: own.submit(self._inside(), call, "fray-actor")

    def shutdown(self) -> None:
        """Cancel queued functions; running ones continue."""
        super().shutdown()
        self._threads.close(cancel=True)

    def __repr__(self) -> str:
        return f"<ThreadContext of {self.max_workers}>"


class _ThreadItems(ItemBuffer):
    """Items of a generator on a thread, which runs at most `WINDOW` items ahead of its reader."""

    def __init__(self, threads: BoundedThreads) -> None:
        super().__init__()
        self._threads = threads

    def about_to_wait(self) -> AbstractContextManager[object]:
        return self._threads.aside()

    def has_room(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def make(self, fn: Callable[..., Any], values: Callable[[], tuple[list[Any], dict[str, Any]]]) -> None:
        """Make all items, on the generator's thread."""
        try:
            args, kwargs = values()
            for item in fn(*args, **kwargs):
                self.offer([item])
                if len(self) >= WINDOW:
                    # The generator waits for its reader, which may be another function of the same pool.
                    with self._threads.aside(), self._changed:
                        self._changed.wait_for(lambda: len(self) < WINDOW or self.is_closed)
                if self.is_closed:
                    return
        except BaseException as error:  # noqa: BLE001 (the reader raises it)
            self.end(error)
        else:
            self.end(None)
