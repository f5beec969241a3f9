"""What of this process others may wait for or use, though it is no actor: futures and pools that were pickled here.

A pickled future is a number on its author's shelf. Whoever unpickles it asks the author's process, as one asks an
actor: so it ends with the author (P1), and nobody waits for one that is gone (P3). Results are relayed unopened.

The shelf is an actor of its own, registered when something is first put on it. A future stays until it is settled and
`SETTLED_LIMIT` others were settled after it; awaiting a forgotten one raises `FutureExpired`. At most
`PENDING_LIMIT` stand there unsettled.
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
from fray.model.messages.client import ActorEndpoint, Register
from fray.model.service_key import ServiceKey
from fray.runtime.actors.server import host_of
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import Route
from fray.runtime.runtime import Runtime

log = logging.getLogger("fray.future")

PENDING_LIMIT = 100_000
SETTLED_LIMIT = 10_000
KNOWN_WITHIN_S = 10.0
"""How long after a future has arrived its author's shelf may be unknown to the registry."""


class ExportableFuture(Protocol):
    """A future that can be put on a shelf."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def encoded_outcome(self) -> tuple[bool, bytes]:
        """Of a settled one: whether it is a result, and the pickled result, or the error as `dump_error` packs it."""

    def cancel(self) -> None: ...


class Exports:
    """The futures of one runtime that have been pickled; `put` may be called from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.actor_id: ActorId = f"{INTERNAL_PREFIX}shelf-{mint(runtime.rng)}"
        self.service = ExportService(self)
        self._numbers = count(1)
        self._number_of: dict[int, int] = {}
        self._pending: dict[int, ExportableFuture] = {}
        self._settled: OrderedDict[int, ExportableFuture] = OrderedDict()
        self._objects: dict[int, Any] = {}
        self._is_open = False

    def export(self, future: ExportableFuture) -> int:
        """Its number here, the same each time."""
        number = self._number_of.get(id(future))
        if number is not None:
            return number
        if len(self._pending) >= PENDING_LIMIT:
            raise ChannelFull(f"{PENDING_LIMIT} futures that this process has sent away are not settled: await some")
        number = next(self._numbers)
        self._number_of[id(future)] = number
        self._pending[number] = future
        self._runtime.token.run_sync_soon(self._watch, number)
        return number

    def _watch(self, number: int) -> None:
        """In the loop: be there for whoever asks."""
        self._open()
        self._pending[number].add_done_callback(lambda _: self._on_settled(number))

    def _on_settled(self, number: int) -> None:
        self._settled[number] = self._pending.pop(number)
        while len(self._settled) > SETTLED_LIMIT:
            _, forgotten = self._settled.popitem(last=False)
            self._number_of.pop(id(forgotten), None)

    def export_object(self, tool: Any) -> int:
        """The number of an object whose methods others may call through the door; kept as long as this process."""
        number = next((number for number, known in self._objects.items() if known is tool), None)
        if number is None:
            number = next(self._numbers)
            self._objects[number] = tool
            self._runtime.token.run_sync_soon(self._open)
        return number

    def find(self, number: int) -> ExportableFuture | None:
        """The future of this number, if it is kept."""
        return self._pending.get(number) or self._settled.get(number)

    def exported_object(self, number: int) -> Any:
        """The object of this number."""
        return self._objects[number]

    def open(self) -> None:
        """In the loop: be known to the cluster for as long as this process is part of it."""
        self._open()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._runtime.nursery.start_soon(self._register)

    async def _register(self) -> None:
        runtime = self._runtime
        host, name = host_of(runtime), f"{INTERNAL_PREFIX}shelf"
        try:
            await host.listen()
        except (FrayError, OSError) as error:
            log.warning("futures given away by this process cannot be asked for: it cannot listen (%s)", error)
            return
        number = host.register(self.service, name, actor_id=self.actor_id)
        endpoint = ActorEndpoint(
            actor_id=self.actor_id,
            name=name,
            job_id=runtime.job_id or "",
            namespace=runtime.namespace,
            incarnation=runtime.session,
            number=number,
            addresses=tuple(host.addresses),
            key=host.key,
        )
        try:
            await runtime.link.request(Register(endpoint=endpoint))
        except FrayError:
            pass  # the conversation with the controller has ended, and with it all this process has given away


class ExportService:
    """What other processes may call."""

    def __init__(self, shelf: Exports) -> None:
        self._shelf = shelf

    async def wait(self, number: int) -> tuple[bool, bytes]:
        """What the future came to, unopened. Raises FutureExpired."""
        future = self._shelf.find(number)
        if future is None:
            raise FutureExpired(
                f"future {number} of this process is not kept any more: {SETTLED_LIMIT} others were settled after it"
            )
        if not future.done():
            settled = trio.Event()
            future.add_done_callback(lambda _: settled.set())
            await settled.wait()
        return future.encoded_outcome()

    async def cancel(self, number: int) -> None:
        """Ask for its end."""
        future = self._shelf.find(number)
        if future is not None:
            future.cancel()

    async def use(self, number: int, method: str, *args: Any) -> Any:
        """Call a method of something that was offered."""
        return await getattr(self._shelf.exported_object(number), method)(*args)


EXPORTS: ServiceKey[Exports] = ServiceKey("exports")


def exports_of(runtime: Runtime) -> Exports:
    """The shelf of a runtime, made when first asked for."""
    return runtime.services.get_or_make(EXPORTS, lambda: Exports(runtime))


def call_export(runtime: Runtime, owner: ActorId, method: str, *args: Any) -> CallFuture:
    """Call another process's shelf; at once. A shelf that nobody knows within `KNOWN_WITHIN_S` is taken for gone."""
    route = runtime.caller.route(f"actor:{owner}", "the process that made it")
    call = route.start(method, args)
    if route.binding is None and not call.done():
        runtime.caller.spawn(_fail_if_unresolved, route, call)
    return call


async def _fail_if_unresolved(route: Route, call: CallFuture) -> None:
    with trio.move_on_after(KNOWN_WITHIN_S):
        while route.binding is None and not call.done():
            await route.changed.wait()
    if route.binding is None and not call.done():
        call.fail(ActorDied("the process that made this is not known to the cluster (any more)"))
