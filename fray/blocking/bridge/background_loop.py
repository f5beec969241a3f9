"""Choice of the loop for sync code.

The loop is that of the job's process, that of an async driver, or a loop of its own in a thread of a sync driver.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

import trio

from fray.blocking.bridge.portal import Portal, portals
from fray.errors import ChannelClosed, FrayError
from fray.model.service_key import ServiceKey
from fray.runtime.runtime import Runtime, current, find
from fray.runtime.threads.executor import shorten_switch_interval
from fray.runtime.threads.loop_thread import LoopThread

log = logging.getLogger("fray.blocking")

CLOSE_WITHIN_S = 10.0
"""Seconds that the loop may take to end everything when the interpreter exits."""

_lock = threading.Lock()


PORTAL: ServiceKey[Portal] = ServiceKey("portal")


def portal_of(runtime: Runtime) -> Portal:
    """Return the portal into the loop of a runtime."""
    portal = runtime.services.get(PORTAL)
    # Double-checked: two portals of one runtime would be two queues, and requests of one thread could change their
    # order.
    if portal is None:
        with _lock:
            portal = runtime.services.get_or_make(PORTAL, lambda: Portal(runtime.token, runtime.nursery, runtime))
    return portal


opened: list[Runtime] = []
"""Runtimes of the clusters that sync code of this process has open, in order of opening."""


opening = threading.RLock()
"""Lock for `opened`; `current_cluster` holds it while it opens a cluster, so that threads share one."""


def forget(runtime: Runtime) -> None:
    """Remove a runtime that is being closed from `opened`."""
    with opening:
        if runtime in opened:
            opened.remove(runtime)


def is_in_process(runtime: Runtime | None) -> bool:
    """Return whether the cluster is a `local` one: its jobs are threads of this process."""
    if runtime is None:
        return False
    controller = runtime.client.controller
    if controller is None:  # a job, which does not wait for the controller's first message
        return runtime.address.startswith("memory:")
    return controller.in_place


def current_runtime() -> Runtime:
    """Return the runtime of the running code: of its job, or of the cluster that this process opened last.

    Raises:
        FrayError: there is none.
    """
    found = find()
    # Nested `with open_cluster()`: the innermost one counts.
    return found if found is not None else opened[-1] if opened else current()


def runtime_here() -> Runtime | None:
    """Return the runtime of the running code as `current_runtime`; None if there is none."""
    found = find()
    return found if found is not None else opened[-1] if opened else None


class _OwnLoop:
    """Loop beside a sync driver: one thread, started with the first cluster, ended with the interpreter."""

    def __init__(self) -> None:
        self._portal: Portal | None = None
        self._thread = LoopThread(self._hold, self._on_end)

    def start(self) -> Portal:
        self._thread.start()
        assert self._portal is not None
        # After the start: a loop that failed to start needs no end.
        atexit.register(self.close)
        return self._portal

    def close(self) -> None:
        """Cancel everything in the loop, within `CLOSE_WITHIN_S`."""
        if self._portal is None or self._portal.is_broken:
            return  # forked: the loop is not in this process
        # At exit, daemon threads that wait in a call get an error; nothing reads their tracebacks any more.
        threading.excepthook = _without_daemon_threads(threading.excepthook)
        try:
            self._portal.send(self._portal.nursery.cancel_scope.cancel)
        except ChannelClosed:
            return
        # Bounded: an exit that hangs because of a cluster out of reach is worse than an unfinished goodbye.
        if not self._thread.join(CLOSE_WITHIN_S):
            log.warning("the loop has not ended within %g s of the interpreter's exit", CLOSE_WITHIN_S)

    def _on_end(self, error: BaseException | None) -> None:
        if error is not None and self._portal is not None:
            log.error("the loop of this process crashed", exc_info=error)

    async def _hold(self) -> None:
        shorten_switch_interval()
        async with trio.open_nursery() as nursery:
            self._portal = Portal(trio.lowlevel.current_trio_token(), nursery)
            self._thread.set_ready()
            await trio.sleep_forever()


def _without_daemon_threads(
    previous: Callable[[threading.ExceptHookArgs], object],
) -> Callable[[threading.ExceptHookArgs], object]:
    """Return an excepthook that ignores Fray's errors of daemon threads: at exit, those that wait in a call get one."""

    def report(args: threading.ExceptHookArgs) -> None:
        if not (threading.current_thread().daemon and isinstance(args.exc_value, FrayError)):
            previous(args)

    return report


_own: Portal | None = None


def own_portal() -> Portal:
    """Return the portal of this process's own loop; start the loop if there is none."""
    global _own
    with _lock:
        if _own is None:
            _own = _OwnLoop().start()
        return _own


def _after_fork() -> None:
    """Mark all portals as broken: the loop's thread is not in the child. A cluster opened in the child gets a loop of
    its own.
    """
    global _own, _lock, opening
    # New locks: the parent's may have been held by a thread that does not exist here.
    _own, _lock, opening = None, threading.Lock(), threading.RLock()
    opened.clear()
    for portal in list(portals):
        portal.break_off(
            f"this process ({os.getpid()}) was forked from one that had the cluster open, and threads do not survive "
            "a fork: open a cluster here, or start processes with the 'spawn' method"
        )
    portals.clear()


os.register_at_fork(after_in_child=_after_fork)


def job_runtime() -> Runtime | None:
    """Return the runtime of the job (or async driver) to which the running code belongs; None if it belongs to none."""
    return find()
