"""Futures and pools of this process that were pickled, and that other processes may wait for or use.

A pickled future is the actor id of its author's exports and a number there. A process that unpickles it calls the
author's process as it would call an actor, so the future ends with its author (P1) and no waiter hangs on one whose
author is gone (P3). Results are relayed still pickled: only the process that awaits them unpickles them.

The exports are an internal actor, registered with the first future and listed nowhere. A future is retained until it
is settled and `SETTLED_LIMIT` others were settled after it; awaiting an expired one raises `FutureExpired`. At most
`PENDING_LIMIT` may be unsettled.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import trio

from fray.errors import ActorDied, ChannelFull, FrayError, FutureExpired
from fray.model.ids import INTERNAL_PREFIX, ActorId, mint
from fray.model.service_key import ServiceKey
from fray.runtime.actors.endpoints import make_endpoint, registrations_of
from fray.runtime.actors.server import host_of
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import Route
from fray.runtime.runtime import Runtime
from fray.runtime.serialization.pickling import Enclosed

log = logging.getLogger("fray.future")

# Pending futures cannot be dropped, as their readers would wait for ever; settled ones can, with an error.
PENDING_LIMIT = 100_000
SETTLED_LIMIT = 10_000
KNOWN_WITHIN_S = 10.0
"""Seconds after the arrival of a future for which its author's exports may be missing in the registry.

The author registers them when it pickles its first future, and that future may travel faster than the registration.
"""


class ExportableFuture(Protocol):
    """A future that can be exported."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def encoded_outcome(self) -> tuple[bool, Enclosed]:
        """Return, for a settled future, (True, the pickled result) or (False, the error as `dump_error` packs it)."""

    def cancel(self) -> None: ...


class Exports:
    """The futures of one runtime that have been pickled; `export` may be called from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.actor_id: ActorId = f"{INTERNAL_PREFIX}exports-{mint(runtime.rng)}"
        self.service = ExportService(self)
        self._numbers = count(1)
        # By `id`: futures need not be hashable by value, and as long as the entry exists the future is kept, so its id
        # is not reused.
        self._number_of: dict[int, int] = {}
        self._pending: dict[int, ExportableFuture] = {}
        self._settled: OrderedDict[int, ExportableFuture] = OrderedDict()
        self._objects: dict[int, Any] = {}
        self._is_open = False

    def export(self, future: ExportableFuture) -> int:
        """Return the number of ``future`` in these exports, the same each time. Raises ChannelFull."""
        # Pickled again, the same future has the same number, so readers share one entry.
        number = self._number_of.get(id(future))
        if number is not None:
            return number
        if len(self._pending) >= PENDING_LIMIT:
            raise ChannelFull(f"{PENDING_LIMIT} futures that this process has pickled are not settled: await some")
        number = next(self._numbers)
        self._number_of[id(future)] = number
        self._pending[number] = future
        # Callbacks may only be added in the loop, while pickling happens on any thread.
        self._runtime.token.run_sync_soon(self._watch, number)
        return number

    def _watch(self, number: int) -> None:
        self.open()
        self._pending[number].add_done_callback(lambda _: self._on_settled(number))

    def _on_settled(self, number: int) -> None:
        # Only from now on it can expire: readers of pending futures wait at most until they settle.
        self._settled[number] = self._pending.pop(number)
        while len(self._settled) > SETTLED_LIMIT:
            _, expired = self._settled.popitem(last=False)
            self._number_of.pop(id(expired), None)

    def export_object(self, target: Any) -> int:
        """Return the number by which other processes may call methods of ``target``, for the life of this process."""
        # By identity, over all: a process exports a few objects (stores, pools).
        number = next((number for number, known in self._objects.items() if known is target), None)
        if number is None:
            number = next(self._numbers)
            self._objects[number] = target
            self._runtime.token.run_sync_soon(self.open)
        return number

    def find(self, number: int) -> ExportableFuture | None:
        """Return the future of this number unless it has expired."""
        return self._pending.get(number) or self._settled.get(number)

    def exported_object(self, number: int) -> Any:
        """Return the object of this number. Raises KeyError."""
        return self._objects[number]

    def open(self) -> None:
        """Register the exports with the cluster, for as long as this process is part of it. Loop only."""
        if not self._is_open:
            self._is_open = True
            self._runtime.nursery.start_soon(self._register)

    async def _register(self) -> None:
        runtime = self._runtime
        host, name = host_of(runtime), f"{INTERNAL_PREFIX}exports"
        try:
            # Most processes never listen; exporting something is what requires it.
            await host.listen()
        except (FrayError, OSError) as error:
            log.warning("other processes cannot await futures of this process: it cannot listen (%s)", error)
            return
        number = host.register(self.service, name, actor_id=self.actor_id)
        endpoint = make_endpoint(runtime, self.actor_id, name, number)
        try:
            # After the actor is registered at the host, so that no caller finds an address without it.
            await registrations_of(runtime).add(endpoint)
        except FrayError:
            pass  # the session with the controller has ended, and with it everything this process has exported


class ExportService:
    """The methods of `Exports` that other processes call."""

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    async def wait(self, number: int) -> tuple[bool, Enclosed]:
        """Wait for a future and return its outcome, still pickled. Raises FutureExpired."""
        future = self._exports.find(number)
        if future is None:
            raise FutureExpired(
                f"future {number} of this process has expired: {SETTLED_LIMIT} others were settled after it"
            )
        if not future.done():
            await wait_settled(future)
        # Unopened: this process may not be able to unpickle it, and need not spend the time.
        return future.encoded_outcome()

    async def cancel(self, number: int) -> None:
        """Cancel a future."""
        future = self._exports.find(number)
        if future is not None:
            future.cancel()

    async def use(self, number: int, method: str, *args: Any) -> Any:
        """Call a method of an exported object."""
        return await getattr(self._exports.exported_object(number), method)(*args)


EXPORTS: ServiceKey[Exports] = ServiceKey("exports")


def exports_of(runtime: Runtime) -> Exports:
    """Return the exports of a runtime, made at the first call."""
    return runtime.services.get_or_make(EXPORTS, lambda: Exports(runtime))


async def wait_settled(future: ExportableFuture) -> None:
    """Wait until a future is settled; unlike one that awaits it, this wait may be cancelled without cancelling it."""
    settled = trio.Event()
    future.add_done_callback(lambda _: settled.set())
    await settled.wait()


def call_export(runtime: Runtime, owner: ActorId, method: str, *args: Any) -> CallFuture:
    """Start a call of another process's exports.

    It fails if the registry does not list them within `KNOWN_WITHIN_S`.
    """
    route = runtime.caller.route(f"actor:{owner}", "the process that made it")
    call = route.start(method, args)
    # A call to an actor waits until it is registered. Here a missing owner usually means that it has ended.
    if route.binding is None and not call.done():
        runtime.caller.spawn(_fail_if_unresolved, route, call)
    return call


async def _fail_if_unresolved(route: Route, call: CallFuture) -> None:
    with trio.move_on_after(KNOWN_WITHIN_S):
        while route.binding is None and not call.done():
            await route.changed.wait()
    if route.binding is None and not call.done():
        call.fail(ActorDied("the process that made this is not (or no longer) registered with the cluster"))
