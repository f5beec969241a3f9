"""Machines of provider ``tpu``: TPU VMs of Google Cloud, created directly or through queued resources.

A unit is one node of Google's (a VM, or a slice of several) and, where it is queued, the queued resource of the same
name. This cluster's units are found by their labels. Nothing is remembered but operations that have not ended, and how
they failed, until the unit is deleted: a create that was accepted and fails a minute later is listed as FAILED.

Google's client blocks, and its asynchronous variant needs asyncio. So each call runs in a thread, with a deadline that
the client enforces; a cancelled caller returns at once, and the thread ends with the deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import trio
from attrs import define, field, frozen

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.controller.providers.tpu_api import (
    Client,
    TpuZone,
    delete,
    is_installed,
    list_units,
    make_node,
    make_queued,
    open_client,
    poll,
    translated,
    without,
)
from fray.controller.providers.tpu_options import TpuOptions, check_unit, read_options
from fray.controller.providers.tpu_states import failed, seen_unit
from fray.errors import InvalidRequest
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)

A = TypeVar("A")
T = TypeVar("T")

CALL_S = 30.0
"""Seconds Google may take to answer one call (a page of a list is one)."""
THREADS = 16


@frozen
class PendingCreate:
    """Unit whose creation was accepted."""

    place: TpuZone
    operation: str
    seen: SeenMachine


@define(eq=False)
class TpuProvider:
    """Provider of all groups of kind ``tpu``.

    Args:
        cluster_id: label (``fray-cluster``) of the machines of this cluster.
        groups: of the policy; those of other providers are ignored.
        call_s: timeout of one call.

    Raises:
        InvalidRequest: an option is invalid, or google-cloud-tpu is not installed.
    """

    cluster_id: str
    groups: Sequence[GroupConfig]
    call_s: float = CALL_S
    _options: dict[str, TpuOptions] = field(factory=dict, init=False)
    _places: dict[TpuZone, None] = field(factory=dict, init=False)
    _clients: dict[str, Client] = field(factory=dict, init=False)
    _begun: dict[str, PendingCreate] = field(factory=dict, init=False)
    _failed: dict[str, SeenMachine] = field(factory=dict, init=False)
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(THREADS), init=False)
    _opening: trio.Lock = field(factory=trio.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        if not is_installed():
            raise InvalidRequest("groups of provider tpu need Google's client library: pip install 'fray[tpu]'")
        self.update_groups(self.groups)

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        """Apply a changed policy. Zones of groups that are gone are still listed: their machines must be deleted.

        Raises:
            InvalidRequest: an option is invalid; nothing is changed.
        """
        read = {group.name: (group, read_options(group)) for group in groups if group.provider == "tpu"}
        self.groups = groups
        for name, (group, options) in read.items():
            self._options[name] = options
            for zone in group.zones:
                self._places.setdefault(TpuZone(options.endpoint, options.project, zone))

    # Interface of a provider

    async def create(self, request: MachineRequest) -> None:
        try:
            options = read_options(request.group)
            check_unit(request.name)
        except InvalidRequest as error:
            raise ProviderError(ErrorKind.INVALID, str(error)) from None
        place = TpuZone(options.endpoint, options.project, request.zone)
        self._places.setdefault(place)
        client = await self._client(place)
        make = make_queued if options.queued else make_node
        try:
            operation = await self._call(make, client, place, request, options, self.cluster_id, self.call_s)
        except ProviderError as error:
            raise without(error, request.join.token) from None
        if operation:
            seen = SeenMachine(request.name, request.group.name, request.zone, MachineState.CREATING, 0)
            self._begun[request.name] = PendingCreate(place, operation, seen)

    async def delete(self, name: str, zone: str, group: str) -> None:
        self._begun.pop(name, None)
        # Also of a group that has left the policy, as long as this controller lives.
        places = self._places_of(zone, group)
        if not places:
            raise ProviderError(
                ErrorKind.INVALID,
                f"the project of {name} is unknown: restore the group {group!r} in the policy, with max = 0",
            )
        for place in places:
            client = await self._client(place)
            await self._call(delete, client, place, name, self.call_s)
        # Last: a unit whose deletion failed is still listed as FAILED.
        self._failed.pop(name, None)

    def _places_of(self, zone: str, group: str) -> list[TpuZone]:
        """Return the places of units of this group; for a group that is unknown by now, all zones of that name."""
        in_zone = [place for place in self._places if place.zone == zone]
        options = self._options.get(group)
        return [
            place
            for place in in_zone
            if options is None or (place.endpoint, place.project) == (options.endpoint, options.project)
        ]

    async def aclose(self) -> None:
        clients = list(self._clients.values())
        self._clients.clear()
        for client in clients:
            await self._call(client.transport.close)

    # Lists

    async def _list_place(self, place: TpuZone) -> Iterable[SeenMachine]:
        client = await self._client(place)
        nodes, queued = await self._call(list_units, client, place, self.cluster_id, self.call_s)
        names = {**dict.fromkeys(nodes), **dict.fromkeys(queued)}
        return [seen_unit(nodes.get(name), queued.get(name)) for name in names]

    async def _ask_operations(self) -> None:
        """Ask how accepted creations have ended."""
        begun = list(self._begun.items())
        answers = await self._at_once(self._ask_operation, [one for _, one in begun])
        for (name, one), (done, status, message) in zip(begun, answers, strict=True):
            # Deleted, or created again, while the question was on its way.
            if self._begun.get(name) is not one or not done:
                continue
            del self._begun[name]
            if status:
                self._failed[name] = failed(one.seen, status, message)

    async def _ask_operation(self, begun: PendingCreate) -> tuple[bool, str, str]:
        client = await self._client(begun.place)
        return await self._call(poll, client, begun.operation, self.call_s)

    async def _at_once(self, ask: Callable[[A], Awaitable[T]], about: Sequence[A]) -> Sequence[T]:
        """Return all answers in order, or raise the first error."""
        answers: dict[int, T] = {}
        refused: list[ProviderError] = []
        async with trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                try:
                    answers[index] = await ask(about[index])
                except ProviderError as error:
                    # One error is enough: a partial list would declare machines dead.
                    refused.append(error)
                    nursery.cancel_scope.cancel()

            for index in range(len(about)):
                nursery.start_soon(one, index)
        if refused:
            raise refused[0]
        return [answers[index] for index in range(len(about))]

    # Threads

    async def _client(self, place: TpuZone) -> Client:
        # One client for each endpoint. The lock keeps concurrent first calls from importing and connecting twice.
        async with self._opening:
            if place.endpoint not in self._clients:
                self._clients[place.endpoint] = await self._call(open_client, place.endpoint)
            return self._clients[place.endpoint]

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in a thread.

        Raises:
            ProviderError: Google, or the way there, reports an error.
        """
        # Abandoned and not waited for on cancellation: Google's client cannot be interrupted, but each call has its
        # deadline.
        return await trio.to_thread.run_sync(
            partial(translated, function, *args), abandon_on_cancel=True, limiter=self._limiter
        )

    # Last, as it hides the type of this name

    async def list(self) -> Sequence[SeenMachine]:
        found: dict[str, SeenMachine] = {}
        await self._ask_operations()
        listed = await self._at_once(self._list_place, list(self._places))
        for machines in listed:
            found.update((machine.name, machine) for machine in machines)
        found.update(self._failed)
        return tuple(found.values())
