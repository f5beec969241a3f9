"""Pickling of futures and pools of the blocking API: exported by their own process, made again where they arrive."""

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
    """Call ``fn`` in the loop: directly if this is the loop's thread (pickling happens in both)."""
    # A portal would refuse to wait in the loop's own thread.
    return fn() if trio.lowlevel.in_trio_run() else portal.run(fn)


def unpickle_in_loop(make: Callable[[Portal], T]) -> T:
    """Return ``make(portal)``, called in the loop of the cluster of the running code. Raises FrayError: there is
    none.
    """
    portal = portal_of(current_runtime())
    return in_loop(portal, lambda: make(portal))


def export(portal: Portal, future: Future) -> tuple[ActorId, int]:
    """Let other processes wait for the future; return its owner and number. In the loop. Raises ChannelFull."""
    assert portal.runtime is not None
    exports = exports_of(portal.runtime)
    return exports.actor_id, exports.export(future)


def future_of(owner: ActorId, number: int, what: str) -> Future:
    """Return the exported future in its own process, elsewhere a future with the same outcome. In the loop."""
    future: Future = imported_future.import_future(owner, number, what)
    return future
