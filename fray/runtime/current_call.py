"""Current actor call of the running code, for `fray.current_actor` and for the deadlines of nested calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from fray.errors import FrayError


class CurrentCall(Protocol):
    """One call under way in an actor, as the actor's own code may see it."""

    @property
    def actor_id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def deadline(self) -> float | None:
        """Return the deadline on Trio's clock, which calls made from here inherit."""

    @property
    def chain(self) -> tuple[str, ...]:
        """Return the actor ids of the calls this one is part of, outermost first, without this actor."""

    @property
    def links(self) -> tuple[str, ...]:
        """Return the same chain as links of `fray.runtime.deadlock`."""

    @property
    def waits(self) -> set[Any]:
        """Return the set of call futures that its code awaits now; the futures add and remove themselves."""

    @property
    def cancelled(self) -> bool:
        """Return whether the caller no longer waits; from any thread."""

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """Block until the call is cancelled; return False after ``timeout_s``. Only on threads."""


current_actor_var: ContextVar[CurrentCall | None] = ContextVar("fray_current_actor", default=None)


@contextmanager
def awaiting(future: Any) -> Iterator[None]:
    """Mark the current call, if any, as waiting for ``future``, while its thread waits inside the block."""
    inside = current_actor_var.get()
    if inside is None:
        yield
        return
    # `CallFuture._park` does the same in the loop; sync code waits elsewhere.
    inside.waits.add(future)
    try:
        yield
    finally:
        inside.waits.discard(future)


def current_actor() -> CurrentCall:
    """Return the call that the running code belongs to.

    Raises:
        FrayError: it does not run in a method of an actor.
    """
    call = current_actor_var.get()
    if call is None:
        raise FrayError("no actor here: current_actor() works inside a method that was called through a handle")
    return call
