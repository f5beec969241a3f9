"""Reservations: machines held for future jobs, and events about them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import trio
from attrs import evolve

from fray.api.async_block import async_block
from fray.api.jobs.job import Job
from fray.api.jobs.job_spec import ReservationRef, reservation_id_of
from fray.errors import ConnectionFailed, DeadlineExceeded, FrayError, InvalidRequest, NoSuchReservation
from fray.model.ids import Namespace, check_name, mint_job_id
from fray.model.messages.client import (
    ListReservations,
    ReleaseReservation,
    RenewReservation,
    Reservations,
    WatchReservation,
)
from fray.model.requests import JobRequest
from fray.model.reservations import (
    ReservationConfig,
    ReservationEvent,
    ReservationEventKind,
    ReservationId,
    ReservationInfo,
    ReservationSpec,
    ReservationState,
    check_reservation,
)
from fray.runtime.controller_client.reservations import ReservationRecord
from fray.runtime.runtime import Runtime

RELEASE_WITHIN_S = 30.0
"""Seconds that the end of an `open_reservation` waits for the end of all that ran in it."""
RENEWALS = 3
"""Number of renewals within each time to live."""

LaunchJob: TypeAlias = Callable[..., Awaitable[Any]]
"""`Cluster.launch` of the connection through which a reservation is followed."""


class Reservation:
    """Handle of one reservation. Made by `Cluster.open_reservation` and `Cluster.follow_reservation`."""

    def __init__(self, runtime: Runtime, record: ReservationRecord, launch: LaunchJob) -> None:
        self._runtime, self._record, self._launch = runtime, record, launch

    @property
    def id(self) -> ReservationId:
        """Id of the reservation: ``reservation_id=`` of a launch, here and in every other process."""
        return self._record.info.reservation_id

    @property
    def info(self) -> ReservationInfo:
        """Latest state known here."""
        return self._record.info

    @property
    def expires_at(self) -> float:
        """Time of its expiry, in seconds since the epoch."""
        return self.info.expires_at

    async def wait_held(self, timeout: float | None = None) -> ReservationInfo:
        """Wait until it holds its minimum.

        Args:
            timeout: seconds. Default: no limit.

        Raises:
            DeadlineExceeded: not within ``timeout``; the reservation keeps waiting.
            NoSuchReservation: it has ended meanwhile; the message says why.
            ConnectionFailed: the connection to the controller has ended.
        """
        return await self._wait(timeout, f"its minimum of {self.info.min_units} units", _is_held)

    async def wait_units(self, count: int, timeout: float | None = None) -> ReservationInfo:
        """Wait until it holds at least ``count`` units. Raises as `wait_held`."""
        if count > self.info.max_units:
            raise InvalidRequest(f"reservation {self.id} has at most {self.info.max_units} units, never {count}")
        return await self._wait(timeout, f"{count} units", lambda info: info.held_units >= count)

    async def wait_ended(self) -> ReservationInfo:
        """Wait until it holds nothing any more. Raises ConnectionFailed."""
        while self.info.state is not ReservationState.ENDED:
            self._check()
            await self._record.changed.wait()
        return self.info

    async def _wait(self, timeout: float | None, what: str, condition: Any) -> ReservationInfo:
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            while not condition(self.info):
                self._check()
                if self.info.state.finished:
                    raise NoSuchReservation(
                        f"reservation {self.id} has ended before it had {what}: {self.info.reason}",
                        reservation_id=self.id,
                    )
                await self._record.changed.wait()
            return self.info
        raise DeadlineExceeded(f"reservation {self.id} has not had {what} within {timeout:g} s: {self.info.reason}")

    def _check(self) -> None:
        if self._record.lost is not None:
            raise self._record.lost

    def changes(self, since: int | None = None) -> ReservationEvents:
        """Return its events, each once and in order, until it has ended: ``async for change in ...``.

        See `ReservationEventKind`: ``held``, ``grown``, ``shrinking`` (a unit is taken back in ``notice_s`` seconds,
        and ``jobs`` are ended for it), ``shrunk``, ``lost``, ``preempted``, ``expiring``, ``renewed``, ``closing``,
        ``ended``. A client that was disconnected for so long that some events have been dropped gets one ``missed`` in
        their place: ``info`` has the present state.

        Args:
            since: continue after the event of this number; 0: from the oldest that has not been dropped. Default: new
                events.
        """
        return ReservationEvents(self._record, last_change(self.info) if since is None else since)

    async def launch(self, /, request: JobRequest, **how: Any) -> Job:
        """Launch a job in this reservation, owned by this connection. As `Cluster.launch`."""
        job: Job = await self._launch(request, reservation_id=self.id, **how)
        return job

    async def keep(self, /, request: JobRequest, **how: Any) -> list[Job]:
        """Launch one job per unit: as many jobs of this request as the reservation may have units.

        Each starts when there is a unit for it, ends with notice when its unit is taken back, and then waits for the
        next unit; these preemptions are not counted. So members join and leave as the reservation grows and shrinks,
        across restarts of this process and of the controller. Each job has its number in ``FRAY_JOB_INDEX``.

        Args:
            request: requires all that a unit has, or so much that no two jobs fit into one unit.
            how: as for `Cluster.launch`: ``name``, ``on_failure``.

        Raises: as `Cluster.launch`.
        """
        endless = evolve(request, max_retries_preemption=-1)
        count = self.info.max_units
        jobs: list[Job] = await self._launch(endless, count=count, reservation_id=self.id, **how)
        return jobs

    async def renew(self, ttl_seconds: float | None = None) -> ReservationInfo:
        """Restart its time to live. As `Cluster.renew_reservation`."""
        return await renew(self._runtime, self.id, ttl_seconds)

    async def release(self, reason: str = "released") -> None:
        """Release it: what runs in it is ended. Returns when the controller has recorded the release."""
        await self._runtime.client.request(ReleaseReservation(reservation_id=self.id, reason=reason))

    def __repr__(self) -> str:
        return f"<Reservation {self.id} {self.info.state.value}: {self.info.reason}>"


class ReservationEvents:
    """Events of one reservation: see `Reservation.changes`. Any number of tasks may have an iterator each."""

    def __init__(self, record: ReservationRecord, seen: int) -> None:
        self._record, self._seen = record, seen

    def __aiter__(self) -> ReservationEvents:
        return self

    async def __anext__(self) -> ReservationEvent:
        """Return the next event. Raises ConnectionFailed if the connection to the controller has ended."""
        while True:
            changed, lost = self._record.changed, self._record.lost
            change = self._next()
            if change is not None:
                await trio.lowlevel.checkpoint()
                return change
            if self._record.info.state is ReservationState.ENDED:
                raise StopAsyncIteration
            if lost is not None:
                raise lost
            await changed.wait()

    def _next(self) -> ReservationEvent | None:
        change = next((each for each in self._record.info.events if each.number > self._seen), None)
        if change is not None and change.number > self._seen + 1:
            change = ReservationEvent(number=change.number - 1, kind=ReservationEventKind.MISSED, time=change.time)
        if change is not None:
            self._seen = change.number
        return change


def last_change(info: ReservationInfo) -> int:
    """Return the number of the latest event; 0 if there is none."""
    return max((change.number for change in info.events), default=0)


def _is_held(info: ReservationInfo) -> bool:
    return info.state is ReservationState.HELD


class ReservationApi:
    """Part of `fray.Cluster` about reservations."""

    _runtime: Runtime
    launch: LaunchJob

    async def create_reservation(
        self, config: ReservationConfig, *, reservation_id: ReservationId | None = None
    ) -> ReservationId:
        """Reserve machines for future jobs; returns at once: `get_reservation` shows what it holds so far.

        It belongs to this driver or job and ends with it, unless ``config.detached``; and after its ``ttl_seconds``,
        unless it is renewed.

        Args:
            reservation_id: a chosen id: the name, a dash, and letters or digits. Creating the same reservation again
                under it, from anywhere, returns the same reservation, even after its end, as long as the cluster
                remembers it.

        Raises:
            InvalidRequest: minimum above maximum, units of different kinds, an impossible amount or id.
            NeverSchedulable: the machines of this cluster could not hold the minimum even if they were empty.
            ConnectionFailed: the connection to the controller has ended.
        """
        spec = self._make_spec(config, reservation_id)
        await self._runtime.client.reservations.create(spec)
        return spec.reservation_id

    def _make_spec(self, config: ReservationConfig, reservation_id: ReservationId | None) -> ReservationSpec:
        if not isinstance(config, ReservationConfig):
            raise InvalidRequest(f"create_reservation needs a ReservationConfig, not {config!r}")
        name = check_name(config.name, "a reservation")
        unit, least, most = config.unit()
        spec = ReservationSpec(
            reservation_id=mint_job_id(name, self._runtime.rng) if reservation_id is None else reservation_id,
            name=name,
            demand=unit.demand(),
            alternatives=unit.alternatives(),
            hosts=unit.hosts_per_replica(),
            min_units=least,
            max_units=most,
            priority=config.priority,
            ttl_s=config.ttl_seconds,
            preemptible=config.preemptible,
            band=config.checked_band(),
            notice_s=config.notice_s,
            detached=config.detached,
            namespace=self._runtime.namespace,
            user=self._runtime.user,
        )
        check_reservation(spec)
        return spec

    async def get_reservation(self, reservation_id: ReservationRef) -> ReservationInfo:
        """Return its state: the units it holds, what it waits for, the jobs in it. Raises NoSuchReservation."""
        message = WatchReservation(reservation_id=reservation_id_of(reservation_id), follow=False)
        return _only(await self._runtime.client.request(message))

    async def follow_reservation(self, reservation_id: ReservationId) -> Reservation:
        """Return a handle of an existing reservation, to wait for it or to read its events.

        Raises:
            NoSuchReservation: the cluster does not know it, or has forgotten it.
        """
        record = await self._runtime.client.reservations.watch(reservation_id)
        return Reservation(self._runtime, record, self.launch)

    async def release_reservation(self, reservation_id: ReservationRef, reason: str = "released") -> None:
        """Release it: jobs in it end by their termination policies. Does nothing if it has ended.

        Raises:
            NoSuchReservation: the cluster does not know it, or has forgotten it.
        """
        message = ReleaseReservation(reservation_id=reservation_id_of(reservation_id), reason=reason)
        await self._runtime.client.request(message)

    async def renew_reservation(
        self, reservation_id: ReservationRef, ttl_seconds: float | None = None
    ) -> ReservationInfo:
        """Restart its time to live.

        Args:
            ttl_seconds: from now on. Default: as before.

        Raises:
            NoSuchReservation: it is unknown, or has ended.
            InvalidRequest: an impossible time.
        """
        return await renew(self._runtime, reservation_id_of(reservation_id), ttl_seconds)

    async def list_reservations(
        self, namespace: Namespace | None = None, *, ended: bool = False
    ) -> list[ReservationInfo]:
        """Return the reservations of the own namespace, oldest first.

        Args:
            namespace: of another one; ``"*"``: of all.
            ended: also those that have ended.
        """
        reply = await self._runtime.client.request(ListReservations(namespace=namespace, ended=ended))
        assert isinstance(reply, Reservations)
        return list(reply.reservations)

    @async_block("async with cluster.open_reservation(...) as reservation")
    @asynccontextmanager
    async def open_reservation(
        self, config: ReservationConfig, *, wait_limit_s: float | None = None
    ) -> AsyncIterator[Reservation]:
        """Open a reservation for a block: ``async with cluster.open_reservation(config) as reservation``. The block
        starts when the minimum is held; the reservation is renewed as long as the block lasts, and released at its end,
        with all that still runs in it.

        Args:
            wait_limit_s: seconds to wait for the minimum. Default: no limit.

        Raises:
            InvalidRequest, NeverSchedulable: as `create_reservation`.
            DeadlineExceeded: the minimum was not available within ``wait_limit_s``; nothing is held.
            NoSuchReservation: it was released, by another client, while it waited.
        """
        runtime = self._runtime
        record = await runtime.client.reservations.create(self._make_spec(config, None))
        reservation = Reservation(runtime, record, self.launch)
        renewing = trio.CancelScope()
        runtime.nursery.start_soon(_keep_renewed, reservation, renewing)
        try:
            await reservation.wait_held(wait_limit_s)
            yield reservation
        finally:
            renewing.cancel()
            with trio.move_on_after(RELEASE_WITHIN_S, shield=True):
                await _release(reservation)


async def _keep_renewed(reservation: Reservation, until: trio.CancelScope) -> None:
    """Renew it until its end. Failures are not raised here: waits for the reservation raise when it has ended."""
    with until:
        while not reservation.info.state.finished:
            await trio.sleep(reservation.info.ttl_s / RENEWALS)
            try:
                await reservation.renew()
            except (NoSuchReservation, ConnectionFailed):
                return
            except FrayError:
                pass  # the controller is overloaded or restarting: renewed again at the next turn


async def _release(reservation: Reservation) -> None:
    try:
        await reservation.release()
        await reservation.wait_ended()
    except FrayError:
        pass  # it has ended already, or ends with the connection to the controller


async def renew(runtime: Runtime, reservation_id: ReservationId, ttl_seconds: float | None) -> ReservationInfo:
    """Renew a reservation: see `Cluster.renew_reservation`."""
    return _only(await runtime.client.request(RenewReservation(reservation_id=reservation_id, ttl_s=ttl_seconds)))


def _only(reply: object) -> ReservationInfo:
    assert isinstance(reply, Reservations)
    return reply.reservations[0]
