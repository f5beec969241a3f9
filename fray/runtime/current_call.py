"""Which call of which actor the running code belongs to; `fray.current_actor` and nested calls ask here."""

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
        """On Trio's clock, inherited by the calls made from here."""

    @property
    def chain(self) -> tuple[str, ...]:
        """Actor ids of the calls this one is part of, outermost first, without this actor."""

    @property
    def links(self) -> tuple[str, ...]:
        """The same as `fray.runtime.deadlock` has it."""

    @property
    def waits(self) -> set[Any]:
        """The futures of calls that its code awaits now; changed by them."""

    @property
    def cancelled(self) -> bool:
        """The caller no longer waits; may be read from any thread."""

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """On a thread: wait until that is so; False after ``timeout_s``."""


current_actor_var: ContextVar[CurrentCall | None] = ContextVar("fray_current_actor", default=None)


@contextmanager
def awaiting(future: Any) -> Iterator[None]:
    """While a thread waits for an answer: the call it runs in, if any, waits for it."""
    inside = current_actor_var.get()
    if inside is None:
        yield
        return
    inside.waits.add(future)
    try:
        yield
    finally:
        inside.waits.discard(future)


def current_actor() -> CurrentCall:
    """The call that the running code belongs to.

    Raises:
        FrayError: it does not run in a method of an actor.
    """
    call = current_actor_var.get()
    if call is None:
        raise FrayError("no actor here: current_actor() works inside a method that was called through a handle")
    return call
