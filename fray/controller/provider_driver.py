"""Driver of the machine providers: carries out the autoscaler's orders and polls what machines there are.

Invariants: orders are read from the saved state (`State.fleet.orders`), never from a message, so a restart or a lost
wake-up loses nothing. Each call runs in a task of its own with a timeout; its result goes into the inbox as an event.
Only that task waits for the call, so a provider that hangs delays no decision. At most one order of a unit is in a
call; one that has become obsolete is cancelled before the next one starts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import define, field, frozen

from fray.controller.context import ControllerContext
from fray.controller.providers.base import Join, MachineRequest, Provider, ProviderError
from fray.errors import FrayError, InvalidRequest
from fray.model.join_tokens import JOIN_LIFE_LIMIT_S, JOIN_LIFE_S
from fray.model.policy.machine_groups import ErrorKind, GroupConfig
from fray.scheduler.effects import (
    Effect,
    Event,
    EventRefused,
    FleetChanged,
    MachineAnswered,
    MachinesListed,
    PolicyChanged,
)
from fray.scheduler.state.unit_rows import CloudUnit, UnitPhase

CALL_S = 120.0
"""Seconds a provider may take to create or delete a unit, or to accept that it will."""
LIST_S = 60.0
CALLS_LIMIT = 16
"""Orders of one provider in calls at a time."""

_log = logging.getLogger("fray.controller.provider_driver")


@frozen
class ProviderConfig:
    """Arguments of a provider."""

    cluster_id: str
    groups: Sequence[GroupConfig]
    directory: Path
    """Place for files of a provider on this machine."""


ProviderFactory: TypeAlias = Callable[[ProviderConfig], Provider]


@frozen
class PollIntervals:
    """Seconds between lists of a provider: while a unit is being created or deleted, and otherwise."""

    fast_s: float = 5.0
    slow_s: float = 60.0


# Local processes cost nothing to list, a fixed list changes only with the policy, and a list of a cloud counts against
# the project's quota of requests.
POLL_INTERVALS: Mapping[str, PollIntervals] = {"process": PollIntervals(0.5, 5.0), "fixed": PollIntervals(30.0, 300.0)}


def _open_fixed(config: ProviderConfig) -> Provider:
    # Imported when a policy names the kind: most clusters have no providers.
    from fray.controller.providers.fixed import FixedProvider

    return FixedProvider(config.groups)


def _open_command(config: ProviderConfig) -> Provider:
    from fray.controller.providers.command import CommandProvider

    return CommandProvider(config.cluster_id, config.groups)


def _open_process(config: ProviderConfig) -> Provider:
    from fray.controller.providers.process import ProcessProvider

    return ProcessProvider(config.directory, config.groups)


def _open_tpu(config: ProviderConfig) -> Provider:
    from fray.controller.providers.tpu import TpuProvider

    return TpuProvider(config.cluster_id, config.groups)


PROVIDER_FACTORIES: Mapping[str, ProviderFactory] = {
    "fixed": _open_fixed,
    "command": _open_command,
    "process": _open_process,
    "tpu": _open_tpu,
}


@define(eq=False)
class ProviderState:
    """A provider and its calls."""

    kind: str
    provider: Provider
    intervals: PollIntervals
    calls: dict[str, ProviderCall] = field(factory=dict)
    """Calls by unit."""
    wake: trio.Event = field(factory=trio.Event)
    """Wakes the task that polls it."""


@define(eq=False)
class ProviderCall:
    """An order that a provider is carrying out, or whose result the scheduler has not processed yet."""

    is_create: bool
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class ProviderDriver:
    """Driver of all providers of one run of the controller; `run` is its task.

    Args:
        address: how the nodes of new machines reach this controller, unless their group says it.
        provider_factories: makers of providers, by kind; default `PROVIDER_FACTORIES`.
    """

    CONCERNS = (MachineAnswered, PolicyChanged, FleetChanged, EventRefused)
    """Classes of events and effects that `carry_out` acts on."""

    def __init__(
        self,
        context: ControllerContext,
        address: str,
        directory: Path,
        *,
        provider_factories: Mapping[str, ProviderFactory] | None = None,
    ) -> None:
        self._context = context
        self._address = address
        self._directory = directory
        self._makers = PROVIDER_FACTORIES if provider_factories is None else provider_factories
        self._providers: dict[str, ProviderState] = {}
        self._nursery: trio.Nursery | None = None
        self._wake = trio.Event()
        for kind in self._kinds_to_open():
            self._open(kind)

    def __repr__(self) -> str:
        calls = {state.kind: len(state.calls) for state in self._providers.values()}
        return f"<ProviderDriver, calls under way: {calls}>"

    # Called by the loop

    def carry_out(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Take note of a saved batch, without waiting."""
        for event in events:
            if isinstance(event, MachineAnswered):
                self._on_answered(event.name)
            elif isinstance(event, PolicyChanged):
                self._update_groups()
        for effect in effects:
            if isinstance(effect, FleetChanged):
                self._wake_all()
            elif isinstance(effect, EventRefused) and isinstance(effect.event, MachineAnswered) and self._nursery:
                self._nursery.start_soon(self._give_again, effect.event.name)

    def _on_answered(self, unit: str) -> None:
        """Allow the next order of a unit: the scheduler has processed the result of the last one."""
        for state in self._providers.values():
            # Only now and not when the call returned: until the scheduler has processed the result, the saved state
            # still has the order, and it would be given a second time.
            if state.calls.pop(unit, None) is not None:
                self._wake_all()

    async def _give_again(self, unit: str) -> None:
        """Allow an order again whose result could not be handled, as late as one that timed out."""
        await trio.sleep(CALL_S)
        self._on_answered(unit)

    def _wake_all(self) -> None:
        self._wake.set()
        for state in self._providers.values():
            state.wake.set()

    # Providers

    def _kinds_to_open(self) -> list[str]:
        """Return the kinds of all groups and units whose provider is not open."""
        cluster = self._context.state
        kinds = dict.fromkeys(group.provider for group in cluster.policy.groups)
        # Also of units whose group has left the policy: they still have to be listed and deleted.
        kinds |= dict.fromkeys(unit.provider for unit in cluster.fleet.units.values())
        return [kind for kind in kinds if kind not in self._providers and kind in self._makers]

    def _open(self, kind: str) -> None:
        """Open a provider.

        Raises:
            InvalidRequest: invalid options.
        """
        provider = self._makers[kind](self._config())
        self._providers[kind] = ProviderState(kind, provider, POLL_INTERVALS.get(kind, PollIntervals()))

    def _config(self) -> ProviderConfig:
        return ProviderConfig(self._context.cluster_id, self._context.state.policy.groups, self._directory)

    def _update_groups(self) -> None:
        """Apply a changed policy. Invalid options are logged; most were refused with the policy."""
        known = list(self._providers)
        # Each by itself: one with invalid options keeps none of the others from the new policy.
        for kind in (*known, *self._kinds_to_open()):
            try:
                if kind in known:
                    self._providers[kind].provider.update_groups(self._context.state.policy.groups)
                else:
                    self._open(kind)
            except InvalidRequest as error:
                # Not fatal: the policy is in force in the scheduler already, and running machines must stay listed.
                text = "new configuration of provider %s rejected; it keeps the previous one, if it has one: %s"
                _log.error(text, kind, error, extra={"provider": kind, "reason": str(error)})
        if self._nursery is not None:
            for kind in self._providers.keys() - set(known):
                self._nursery.start_soon(self._list_periodically, self._providers[kind])
        self._wake_all()

    # Tasks

    async def run(self) -> None:
        """Run until cancelled, then close the providers."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for state in self._providers.values():
                    nursery.start_soon(self._list_periodically, state)
                while True:
                    # Before the orders are read, so that one that is added later wakes the wait at the end.
                    self._wake = trio.Event()
                    await self._start_orders(nursery)
        finally:
            self._nursery = None
            await self._close()

    async def _close(self) -> None:
        # Shielded: providers close on cancellation, and that of local processes has to end its nodes.
        with trio.move_on_after(CALL_S, shield=True):
            for state in self._providers.values():
                await state.provider.aclose()

    async def _start_orders(self, nursery: trio.Nursery) -> None:
        """Start the orders that can be started, then wait until that may have changed."""
        fleet, now = self._context.state.fleet, self._context.inbox.current_time()
        later = [math.inf]
        # Of the saved state and not of an event's content: an order that was decided just before a crash is read again
        # by the next controller, under the same name of the unit.
        for name in list(fleet.pending_orders):
            unit = fleet.units[name]
            state = self._providers.get(unit.provider)
            if state is None:
                continue  # no such provider is known; `fray machines` shows it
            call = state.calls.get(name)
            if call is not None:
                self._cancel_unwanted_create(call, unit)
            elif unit.order_not_before > now:
                # Its back-off after a failed call. There is no event when it ends, so the wait below ends by itself
                # then.
                later.append(unit.order_not_before - now)
            elif len(state.calls) < CALLS_LIMIT:
                call = state.calls[name] = ProviderCall(unit.phase is UnitPhase.WANTED)
                nursery.start_soon(self._call, state, call, name)
        with trio.move_on_after(min(later)):
            await self._wake.wait()

    def _cancel_unwanted_create(self, call: ProviderCall, unit: CloudUnit) -> None:
        """Cancel a create call whose unit is to be deleted: the order to delete it follows that call."""
        # The create may have taken effect or not: the delete that follows, and the next list, settle that.
        if call.is_create and unit.phase is UnitPhase.DELETING:
            call.scope.cancel()

    async def _call(self, state: ProviderState, call: ProviderCall, name: str) -> None:
        unit = self._context.state.fleet.units[name]
        work = self._create if call.is_create else self._delete
        with call.scope:
            error = await self._call_with_timeout(state, work, unit)
            result = error or (None, "")
            self._context.inbox.post(
                MachineAnswered(name=name, is_delete=not call.is_create, error=result[0], message=result[1])
            )
        # No event was posted for this call, so no answer of the scheduler will remove it.
        if call.scope.cancelled_caught:
            self._on_answered(name)
        # List soon: it shows what has become of the call.
        state.wake.set()

    async def _call_with_timeout(
        self, state: ProviderState, work: Callable[[ProviderState, CloudUnit], Awaitable[None]], unit: CloudUnit
    ) -> tuple[ErrorKind, str] | None:
        """Return what went wrong, or None."""
        try:
            with trio.fail_after(CALL_S):
                await work(state, unit)
        except ProviderError as error:
            return error.kind, str(error)
        except trio.TooSlowError:
            return ErrorKind.TRANSIENT, f"provider {state.kind} did not answer within {CALL_S:g} s"
        except FrayError as error:
            # INVALID stops the group until the policy is read again: the same arguments would fail in the same way.
            return ErrorKind.INVALID, str(error)
        except Exception as error:  # noqa: BLE001 - a bug in a provider must not end the controller
            _log.exception("provider %s failed", state.kind)
            return ErrorKind.TRANSIENT, f"provider {state.kind} failed: {error!r}"
        return None

    async def _create(self, state: ProviderState, unit: CloudUnit) -> None:
        group = self._context.state.fleet.group(unit.group)
        # The group has left the policy since the order was saved.
        if group is None:
            raise ProviderError(ErrorKind.INVALID, f"group {unit.group!r} is no longer in the policy")
        # At each call and not with the order: no token is stored, and its lifetime begins now. A create that is
        # repeated gives the unit a second token, but not more hosts, since uses are counted by unit.
        token = self._context.join_tokens.mint(
            unit.name, unit.hosts, self._context.inbox.current_time(), _join_life_s(group)
        )
        join = Join(group.controller or self._address, token)
        await state.provider.create(MachineRequest(unit.name, group, unit.zone, group.spot, join))

    async def _delete(self, state: ProviderState, unit: CloudUnit) -> None:
        group = self._context.state.fleet.group(unit.group)
        life_s = JOIN_LIFE_LIMIT_S if group is None else _join_life_s(group)
        # Before the machine is deleted: one that boots meanwhile must not join with a token that is still valid.
        self._context.join_tokens.revoke(unit.name, self._context.inbox.current_time(), life_s)
        await state.provider.delete(unit.name, unit.zone, unit.group)

    # Lists

    async def _list_periodically(self, state: ProviderState) -> None:
        """List the provider's machines again and again."""
        while True:
            # Before the list is requested: a call that ends during it may be missing in it, and another list follows at
            # once.
            state.wake = trio.Event()
            begun = self._context.inbox.current_time()
            # With the time of the request: the scheduler must not take a unit for gone that was created after the list
            # was made.
            self._context.inbox.post(await self._list_machines(state, begun))
            # Also when woken: orders of a burst share one list, as each request counts against a quota.
            await trio.sleep(state.intervals.fast_s)
            with trio.move_on_after(0 if self._is_busy(state) else state.intervals.slow_s - state.intervals.fast_s):
                await state.wake.wait()

    async def _list_machines(self, state: ProviderState, begun: float) -> MachinesListed:
        try:
            with trio.fail_after(LIST_S):
                machines = tuple(await state.provider.list())
        except ProviderError as error:
            return MachinesListed(provider=state.kind, asked_at=begun, error=f"{error.kind.value}: {error}")
        except trio.TooSlowError:
            return MachinesListed(provider=state.kind, asked_at=begun, error=f"no answer within {LIST_S:g} s")
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("provider %s failed to list its machines", state.kind)
            return MachinesListed(provider=state.kind, asked_at=begun, error=f"it failed: {error!r}")
        return MachinesListed(provider=state.kind, machines=machines, asked_at=begun)

    def _is_busy(self, state: ProviderState) -> bool:
        """Return whether a unit is being created or deleted."""
        units = self._context.state.fleet.units.values()
        settled = (UnitPhase.JOINED, UnitPhase.GONE)
        return any(unit.provider == state.kind and unit.phase not in settled for unit in units)


def _join_life_s(group: GroupConfig) -> float:
    """Return a lifetime longer than the scheduler waits for a unit of the group."""
    return min(JOIN_LIFE_LIMIT_S, max(JOIN_LIFE_S, 2 * group.boot_timeout_s))


def node_address(bound: Sequence[str]) -> str:
    """Return the address that nodes dial: the first that they can reach of those that the controller listens on.

    For an address that listens everywhere the name of this machine is used. In-process addresses are passed over.
    """
    import socket

    for address in bound:
        kind, _, rest = address.partition(":")
        if kind == "unix":
            return f"fray+unix://{rest}"
        if kind in ("tcp", "tls"):
            # What follows the port are the fingerprints of the certificate authority.
            host, _, port = rest.rpartition(":")
            everywhere = host.strip("[]") in ("0.0.0.0", "::", "")
            return f"fray://{socket.gethostname() if everywhere else host}:{port}"
    return ""
