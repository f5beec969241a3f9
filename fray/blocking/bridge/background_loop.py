"""Whose loop: that of the job's process, of a native driver, or one of our own beside a driver that is sync."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable

import trio

from fray.blocking.bridge.portal import Portal, portals
from fray.errors import ChannelClosed, FrayError
from fray.model.service_key import ServiceKey
from fray.runtime.runtime import Runtime, current, find
from fray.runtime.threads.executor import SWITCH_INTERVAL_S

log = logging.getLogger("fray.blocking")

CLOSE_WITHIN_S = 10.0
"""How long the loop may take to end everything when the interpreter exits."""

_lock = threading.Lock()


PORTAL: ServiceKey[Portal] = ServiceKey("portal")


def portal_of(runtime: Runtime) -> Portal:
    """The portal into the loop of a runtime: the loop of a job's process, of a native driver, or our own."""
    portal = runtime.services.get(PORTAL)
    if portal is None:
        with _lock:
            portal = runtime.services.get_or_make(PORTAL, lambda: Portal(runtime.token, runtime.nursery, runtime))
    return portal


opened: list[Runtime] = []
"""Of the clusters that sync code of this process has open, in the order in which it opened them."""


opening = threading.RLock()
"""Held by whoever looks at `opened`, and by `current_cluster` while it opens one: one for all threads."""


def forget(runtime: Runtime) -> None:
    """It is being closed: it is no longer the one that was opened last."""
    with opening:
        if runtime in opened:
            opened.remove(runtime)


def is_in_process(runtime: Runtime | None) -> bool:
    """Whether the jobs of its cluster are threads of this process: a `local` one."""
    if runtime is None:
        return False
    controller = runtime.link.controller
    if controller is None:  # a job, which does not wait for its welcome
        return runtime.address.startswith("memory:")
    return controller.in_place


def current_runtime() -> Runtime:
    """The runtime of the running code: of its job, or of the cluster that this process opened last.

    Raises:
        FrayError: there is none.
    """
    found = find()
    return found if found is not None else opened[-1] if opened else current()


def runtime_here() -> Runtime | None:
    """As `here`; None where there is none."""
    found = find()
    return found if found is not None else opened[-1] if opened else None


class _OwnLoop:
    """The loop beside a driver that is sync: one thread, begun with the first cluster, ended with the interpreter."""

    def __init__(self) -> None:
        self._up = threading.Event()
        self._portal: Portal | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="fray-loop", daemon=True)

    def start(self) -> Portal:
        self._thread.start()
        self._up.wait()
        if self._portal is None:
            raise FrayError(f"the loop could not start: {self._error!r}") from self._error
        atexit.register(self.close)
        return self._portal

    def close(self) -> None:
        """End all that lives in it, within `CLOSE_WITHIN_S`."""
        if self._portal is None or self._portal.is_broken:
            return  # forked: the loop is not here
        threading.excepthook = _not_of_daemons(threading.excepthook)
        try:
            self._portal.send(self._portal.nursery.cancel_scope.cancel)
        except ChannelClosed:
            return
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            log.warning("the loop has not ended within %g s of the interpreter's exit", CLOSE_WITHIN_S)

    def _main(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        try:
            trio.run(self._hold)
        except BaseException as error:
            self._error = error
            if self._up.is_set():
                log.exception("the loop of this process broke")
        finally:
            self._up.set()

    async def _hold(self) -> None:
        async with trio.open_nursery() as nursery:
            self._portal = Portal(trio.lowlevel.current_trio_token(), nursery)
            self._up.set()
            await trio.sleep_forever()


def _not_of_daemons(said: Callable[[threading.ExceptHookArgs], object]) -> Callable[[threading.ExceptHookArgs], object]:
    """Daemon threads end with the interpreter without a word. Those that wait in a call of ours do, too."""

    def say(what: threading.ExceptHookArgs) -> None:
        if not (threading.current_thread().daemon and isinstance(what.exc_value, FrayError)):
            said(what)

    return say


_own: Portal | None = None


def own_portal() -> Portal:
    """The portal of this process's own loop, begun if there is none yet."""
    global _own
    with _lock:
        if _own is None:
            _own = _OwnLoop().start()
        return _own


def _after_fork() -> None:
    """The loop's thread is not in the child. Handles say so; a cluster opened from here on gets a loop of its own."""
    global _own, _lock, opening
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
    """The runtime of the job (or native driver) that the running code is part of, if it is part of one."""
    return find()
