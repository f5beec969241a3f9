"""The hands that carry out what the law wants of providers: orders, and lists of what is there.

Law. What is to be done is read from the saved state (`Books.orders`), never from a message, so a restart or a lost wake
costs nothing. Every call runs in a task of its own with a bound; what came of it goes into the inbox like anything else
that the house observes. Nobody waits for a call but its own task: a provider that hangs delays no decision. Of one
unit at most one order is in a call; one that is not wanted any more is cancelled before the next one begins.
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
from fray.scheduler.effects import Effect, Event, FleetChanged, MachineAnswered, MachinesListed, PolicyChanged
from fray.scheduler.state.unit_rows import CloudUnit, UnitPhase

CALL_S = 120.0
"""How long a provider may take to make or delete a unit (or to say that it has begun to)."""
LIST_S = 60.0
CALLS_LIMIT = 16
"""Orders of one provider that are in calls at a time."""

_log = logging.getLogger("fray.controller.provider_driver")


@frozen
class ProviderConfig:
    """What a provider is made from."""

    cluster_id: str
    groups: Sequence[GroupConfig]
    directory: Path
    """For what a provider keeps on this machine."""


Maker: TypeAlias = Callable[[ProviderConfig], Provider]


@frozen
class PollIntervals:
    """How often a provider is asked what it has, in seconds: while something is on its way, and else."""

    fast_s: float = 5.0
    slow_s: float = 60.0


PACES: Mapping[str, PollIntervals] = {"process": PollIntervals(0.5, 5.0), "fixed": PollIntervals(30.0, 300.0)}


def _fixed(setting: ProviderConfig) -> Provider:
    from fray.controller.providers.fixed import FixedProvider

    return FixedProvider(setting.groups)


def _command(setting: ProviderConfig) -> Provider:
    from fray.controller.providers.command import CommandProvider

    return CommandProvider(setting.cluster_id, setting.groups)


def _process(setting: ProviderConfig) -> Provider:
    from fray.controller.providers.process import ProcessProvider

    return ProcessProvider(setting.directory, setting.groups)


def _tpu(setting: ProviderConfig) -> Provider:
    from fray.controller.providers.tpu import TpuProvider

    return TpuProvider(setting.cluster_id, setting.groups)


MAKERS: Mapping[str, Maker] = {"fixed": _fixed, "command": _command, "process": _process, "tpu": _tpu}


@define(eq=False)
class ProviderState:
    """One provider, and what is being asked of it."""

    kind: str
    provider: Provider
    pace: PollIntervals
    calls: dict[str, ProviderCall] = field(factory=dict)
    """By unit."""
    wake: trio.Event = field(factory=trio.Event)
    """Of its lister."""


@define(eq=False)
class ProviderCall:
    """An order that is with a provider, or whose answer the law has not heard yet."""

    making: bool
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class ProviderDriver:
    """Made once per life of the controller; `run` is its task.

    Args:
        address: how the nodes of new machines reach this controller, unless their group says it.
        makers: of providers, by kind; default `MAKERS`.
    """

    def __init__(
        self, house: ControllerContext, address: str, directory: Path, *, makers: Mapping[str, Maker] | None = None
    ) -> None:
        self._house = house
        self._address = address
        self._directory = directory
        self._makers = MAKERS if makers is None else makers
        self._hands: dict[str, ProviderState] = {}
        self._nursery: trio.Nursery | None = None
        self._wake = trio.Event()
        self._open_all()

    def __repr__(self) -> str:
        calls = {hand.kind: len(hand.calls) for hand in self._hands.values()}
        return f"<Scaler, calls under way: {calls}>"

    # What the loop tells

    def carry_out(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """After each save. Nothing here waits."""
        for event in events:
            if isinstance(event, MachineAnswered):
                self._heard(event.name)
            elif isinstance(event, PolicyChanged):
                self._regroup()
        if any(isinstance(effect, FleetChanged) for effect in effects):
            self._poke()

    def _heard(self, unit: str) -> None:
        """The law knows what came of it: the next order may be given."""
        for hand in self._hands.values():
            if hand.calls.pop(unit, None) is not None:
                self._poke()

    def _poke(self) -> None:
        self._wake.set()
        for hand in self._hands.values():
            hand.wake.set()

    # Providers

    def _open_all(self) -> None:
        """Those that groups or units are of. Raises InvalidRequest: options that cannot be."""
        state = self._house.state
        kinds = dict.fromkeys(group.provider for group in state.policy.groups)
        kinds |= dict.fromkeys(unit.provider for unit in state.fleet.units.values())
        for kind in kinds:
            if kind not in self._hands and kind in self._makers:
                provider = self._makers[kind](self._setting())
                self._hands[kind] = ProviderState(kind, provider, PACES.get(kind, PollIntervals()))

    def _setting(self) -> ProviderConfig:
        return ProviderConfig(self._house.cluster_id, self._house.state.policy.groups, self._directory)

    def _regroup(self) -> None:
        """The policy has changed; what cannot be is said in the log, and was refused before if it could be."""
        known = list(self._hands)
        try:
            self._open_all()
            for kind in known:
                self._hands[kind].provider.regroup(self._house.state.policy.groups)
        except InvalidRequest as error:
            _log.error("providers go by the old policy", extra={"why": str(error)})
        if self._nursery is not None:
            for kind in self._hands.keys() - set(known):
                self._nursery.start_soon(self._list_on, self._hands[kind])
        self._poke()

    # Tasks

    async def run(self) -> None:
        """Until cancelled; providers are closed then."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for hand in self._hands.values():
                    nursery.start_soon(self._list_on, hand)
                while True:
                    self._wake = trio.Event()
                    await self._give_orders(nursery)
        finally:
            self._nursery = None
            await self._close()

    async def _close(self) -> None:
        with trio.move_on_after(CALL_S, shield=True):
            for hand in self._hands.values():
                await hand.provider.aclose()

    async def _give_orders(self, nursery: trio.Nursery) -> None:
        """Begin what can be begun, then wait until something may have changed."""
        books, now = self._house.state.fleet, self._house.inbox.time()
        later = [math.inf]
        for name in list(books.orders):
            unit = books.units[name]
            hand = self._hands.get(unit.provider)
            if hand is None:
                continue  # nobody knows how; `fray machines` shows it
            call = hand.calls.get(name)
            if call is not None:
                self._overtake(call, unit)
            elif unit.order_at > now:
                later.append(unit.order_at - now)
            elif len(hand.calls) < CALLS_LIMIT:
                call = hand.calls[name] = ProviderCall(unit.phase is UnitPhase.WANTED)
                nursery.start_soon(self._call, hand, call, name)
        with trio.move_on_after(min(later)):
            await self._wake.wait()

    def _overtake(self, call: ProviderCall, unit: CloudUnit) -> None:
        """It is not wanted any more while it is being made: the order to delete it comes after that call."""
        if call.making and unit.phase is UnitPhase.DELETING:
            call.scope.cancel()

    async def _call(self, hand: ProviderState, call: ProviderCall, name: str) -> None:
        unit = self._house.state.fleet.units[name]
        work = self._make if call.making else self._delete
        with call.scope:
            error = await self._bounded(hand, work, unit)
            said = error or (None, "")
            self._house.inbox.tell(MachineAnswered(name=name, deleted=not call.making, error=said[0], message=said[1]))
        if call.scope.cancelled_caught:
            self._heard(name)
        hand.wake.set()

    async def _bounded(
        self, hand: ProviderState, work: Callable[[ProviderState, CloudUnit], Awaitable[None]], unit: CloudUnit
    ) -> tuple[ErrorKind, str] | None:
        """What went wrong, if anything did."""
        try:
            with trio.fail_after(CALL_S):
                await work(hand, unit)
        except ProviderError as error:
            return error.kind, str(error)
        except trio.TooSlowError:
            return ErrorKind.TRANSIENT, f"provider {hand.kind} has not answered within {CALL_S:g} s"
        except FrayError as error:
            return ErrorKind.INVALID, str(error)
        except Exception as error:  # noqa: BLE001 - a provider's mistake must not end the controller
            _log.exception("provider %s has failed", hand.kind)
            return ErrorKind.TRANSIENT, f"provider {hand.kind} has failed: {error!r}"
        return None

    async def _make(self, hand: ProviderState, unit: CloudUnit) -> None:
        group = self._house.state.fleet.group(unit.group)
        if group is None:
            raise ProviderError(ErrorKind.INVALID, f"group {unit.group!r} is not in the policy any more")
        token = self._house.joins.mint(unit.name, unit.hosts, self._house.inbox.time(), _join_life_s(group))
        join = Join(group.controller or self._address, token)
        await hand.provider.create(MachineRequest(unit.name, group, unit.zone, group.spot, join))

    async def _delete(self, hand: ProviderState, unit: CloudUnit) -> None:
        group = self._house.state.fleet.group(unit.group)
        life_s = JOIN_LIFE_LIMIT_S if group is None else _join_life_s(group)
        self._house.joins.give_up(unit.name, self._house.inbox.time(), life_s)
        await hand.provider.delete(unit.name, unit.zone, unit.group)

    # Lists

    async def _list_on(self, hand: ProviderState) -> None:
        """Ask what is there, again and again."""
        while True:
            hand.wake = trio.Event()
            begun = self._house.inbox.time()
            self._house.inbox.tell(await self._listed(hand, begun))
            await trio.sleep(hand.pace.fast_s)
            with trio.move_on_after(0 if self._is_busy(hand) else hand.pace.slow_s - hand.pace.fast_s):
                await hand.wake.wait()

    async def _listed(self, hand: ProviderState, begun: float) -> MachinesListed:
        try:
            with trio.fail_after(LIST_S):
                machines = tuple(await hand.provider.list())
        except ProviderError as error:
            return MachinesListed(provider=hand.kind, begun=begun, error=f"{error.kind.value}: {error}")
        except trio.TooSlowError:
            return MachinesListed(provider=hand.kind, begun=begun, error=f"no answer within {LIST_S:g} s")
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("provider %s cannot list", hand.kind)
            return MachinesListed(provider=hand.kind, begun=begun, error=f"it has failed: {error!r}")
        return MachinesListed(provider=hand.kind, machines=machines, begun=begun)

    def _is_busy(self, hand: ProviderState) -> bool:
        """Something is on its way, there or away."""
        units = self._house.state.fleet.units.values()
        still = (UnitPhase.JOINED, UnitPhase.GONE)
        return any(unit.provider == hand.kind and unit.phase not in still for unit in units)


def _join_life_s(group: GroupConfig) -> float:
    """Longer than the law waits for a unit of the group."""
    return min(JOIN_LIFE_LIMIT_S, max(JOIN_LIFE_S, 2 * group.boot_timeout_s))


def node_address(bound: Sequence[str]) -> str:
    """Where nodes are told to dial, from the addresses that a controller listens at: the first that they can.

    Of one that listens everywhere the name of its machine is taken. In-process addresses are nobody else's.
    """
    import socket

    for address in bound:
        kind, _, rest = address.partition(":")
        if kind == "unix":
            return f"fray+unix://{rest}"
        if kind == "tcp":
            host, _, port = rest.rpartition(":")
            everywhere = host.strip("[]") in ("0.0.0.0", "::", "")
            return f"fray://{socket.gethostname() if everywhere else host}:{port}"
    return ""
