"""Futures and pools of this face that were pickled: how they are asked for at home, and made where they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio.lowlevel

from fray.api.futures import Future
from fray.blocking.bridge.background_loop import current_runtime, portal_of
from fray.blocking.bridge.portal import Portal
from fray.model.ids import ActorId
from fray.runtime.objects import imported_future
from fray.runtime.objects.exports import exports_of

T = TypeVar("T")


def in_loop(portal: Portal, fn: Callable[[], T]) -> T:
    """Call it in the loop; just so where this is the loop: pickling happens on both sides."""
    return fn() if trio.lowlevel.in_trio_run() else portal.run(fn)


def unpickle_in_loop(make: Callable[[Portal], T]) -> T:
    """Make something, in the loop of the cluster that the running code belongs to. Raises FrayError: there is none."""
    portal = portal_of(current_runtime())
    return in_loop(portal, lambda: make(portal))


def export(portal: Portal, future: Future) -> tuple[ActorId, int]:
    """In the loop: let other processes ask for it; where they do. Raises ChannelFull."""
    assert portal.runtime is not None
    shelf = exports_of(portal.runtime)
    return shelf.actor_id, shelf.export(future)


def future_of(owner: ActorId, number: int, what: str) -> Future:
    """In the loop: what was kept there, or one that comes to the same."""
    future: Future = imported_future.import_future(owner, number, what)
    return future
