"""Reservations of the async and the blocking API, in ``local``, where possible on a virtual clock."""

from __future__ import annotations

import pytest
import trio

import fray
import fray.blocking
from fray import (
    DeadlineExceeded,
    Entrypoint,
    InvalidRequest,
    JobRequest,
    JobStopped,
    NeverSchedulable,
    NoSuchReservation,
    ReservationConfig,
    ReservationEventKind,
    ReservationState,
    ResourceConfig,
)
from fray.api.reservation import ReservationEvents
from fray.model.resources import Demand
from fray.runtime.controller_client.reservations import ReservationRecord

ONE = ResourceConfig(cpu=1, memory="1MB")


def several(count: int) -> ResourceConfig:
    return ResourceConfig(cpu=1, memory="1MB", replicas=count)


async def give(value: int) -> int:
    await trio.lowlevel.checkpoint()
    return value


async def stay() -> None:
    await trio.sleep_forever()


def work(fn: object, *args: object, name: str = "work", resources: ResourceConfig = ONE, **more: object) -> JobRequest:
    return JobRequest(name, resources, Entrypoint.from_callable(fn, args), **more)  # type: ignore[arg-type]


# What is asked --------------------------------------------------------------------------------------------------------


def test_minimum_and_maximum_are_counted_in_one_unit() -> None:
    for config, units in [
        (ReservationConfig(several(2), several(4)), (2, 4)),
        (ReservationConfig(several(2)), (2, 2)),
        (ReservationConfig(max_resources=several(3)), (0, 3)),
        (ReservationConfig(several(0), several(3)), (0, 3)),
        (ReservationConfig(ResourceConfig(cpu=4), ResourceConfig(cpu=16)), (1, 4)),
        (
            ReservationConfig(ResourceConfig(cpu=4, memory="2GB"), ResourceConfig(cpu=8, memory="4GB", replicas=3)),
            (1, 6),
        ),
        (
            ReservationConfig(ResourceConfig.with_tpu("v5litepod-16", 2), ResourceConfig.with_tpu("v5litepod-16", 4)),
            (2, 4),
        ),
        (ReservationConfig(ResourceConfig.with_gpu("h100", 8), ResourceConfig.with_gpu("h100", 8, replicas=2)), (1, 2)),
    ]:
        assert config.unit()[1:] == units


def test_an_impossible_reservation_is_refused() -> None:
    gpu = ResourceConfig.with_gpu("h100", 1)
    for config, expected in [
        (lambda: ReservationConfig().unit(), "needs min_resources=, max_resources="),
        (
            lambda: ReservationConfig(several(4), several(2)).unit(),
            r"min_resources \(4 units\) is more than max_resources \(2\)",
        ),
        (lambda: ReservationConfig(ResourceConfig(cpu=4), ResourceConfig(cpu=10)).unit(), "not a whole multiple"),
        (lambda: ReservationConfig(gpu, ResourceConfig.with_gpu("h100", 8)).unit(), "devices 1 and 8.*replicas="),
        (lambda: ReservationConfig(ONE, gpu).unit(), "differ in their devices"),
        (lambda: ReservationConfig(several(0), several(0)).unit(), "empty reservation"),
        (lambda: ReservationConfig(several(1), several(20_000)).unit(), "at most 10000 units"),
        (lambda: ReservationConfig(2).unit(), "must be a ResourceConfig"),  # type: ignore[arg-type]
        (lambda: ReservationConfig(ONE, band="produktion").checked_band(), "did you mean 'production'"),
    ]:
        with pytest.raises(InvalidRequest, match=expected):
            config()


def test_invalid_times_names_and_ids_are_refused() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            for config, expected in [
                (ReservationConfig(ONE, ttl_seconds=0), "ttl_seconds=0 must be more than 0"),
                (ReservationConfig(ONE, notice_s=-1), "notice_s=-1 must be 0 to 3600"),
                (ReservationConfig(ONE, name="a b"), "cannot be the name of a reservation"),
                (ReservationConfig(ONE, priority=1.5), "priority=1.5 must be a whole number"),  # type: ignore[arg-type]
                (ReservationConfig(ResourceConfig(cpu=0, memory=0)), "is empty: request CPUs"),
                (several(1), "needs a ReservationConfig"),
            ]:
                with pytest.raises(InvalidRequest, match=expected):
                    await cluster.create_reservation(config)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="the reservation's name, a dash"):
                await cluster.create_reservation(ReservationConfig(ONE), reservation_id="mine")
            with pytest.raises(NeverSchedulable, match="10000 times 1 CPU"):
                await cluster.create_reservation(ReservationConfig(several(10_000)))
            with pytest.raises(NoSuchReservation, match="no reservation 'nothing'"):
                await cluster.get_reservation("nothing")
            with pytest.raises(InvalidRequest, match="neither a reservation nor"):
                await cluster.launch(work(stay), reservation_id=5)  # type: ignore[call-overload]

    trio.run(main)


# The seed's interface -------------------------------------------------------------------------------------------------


def test_a_reservation_is_created_read_used_renewed_and_released() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            reserved = await cluster.create_reservation(ReservationConfig(several(1), several(2), name="r"))
            info = await cluster.get_reservation(reserved)
            assert info.reservation_id == reserved
            assert (info.allocated_resources, info.pending_resources) == (several_bytes(2), several_bytes(0))
            assert info.state is ReservationState.HELD
            job = await cluster.launch(work(stay), reservation_id=reserved)
            actor = await cluster.create_actor(Counter, reservation_id=reserved, resources=ONE)
            assert await actor.add(2) == 2
            info = await cluster.get_reservation(reserved)
            assert info.jobs[0] == job.id
            assert info.jobs[1].startswith("Counter-")
            assert (await cluster.renew_reservation(reserved, 7200)).expires_at > info.expires_at + 3000
            assert [one.reservation_id for one in await cluster.list_reservations()] == [reserved]
            assert "holds 2 of 1 to 2 units" in await cluster.explain(reserved)
            await cluster.release_reservation(reserved)
            with pytest.raises(JobStopped, match=r"its reservation r-.* ended: released"):
                await job.wait()
            assert [event.what for event in await cluster.events(reserved)][:2] == ["created", "held"]
            reservation = await cluster.follow_reservation(reserved)
            assert (await reservation.wait_ended()).state is ReservationState.ENDED
            assert await cluster.list_reservations() == []
            assert len(await cluster.list_reservations(ended=True)) == 1

    trio.run(main)


def several_bytes(count: int) -> ResourceConfig:
    return ResourceConfig(cpu=1, memory=1024**2, replicas=count)


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


def test_an_open_reservation_is_held_renewed_and_released_with_its_block() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            config = ReservationConfig(several(2), name="r", ttl_seconds=0.6)
            async with cluster.open_reservation(config) as reservation:
                until = reservation.expires_at
                assert (await reservation.wait_units(2)).held_units == 2
                job = await reservation.launch(work(stay))
                while reservation.expires_at < until + 1.0:
                    await reservation._record.changed.wait()
            assert reservation.info.state is ReservationState.ENDED
            assert job.done()
            with pytest.raises(InvalidRequest, match="at most 2 units, never 3"):
                await reservation.wait_units(3)

    trio.run(main)


def test_a_minimum_that_is_late_leaves_no_reservation() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            (node,) = await cluster.nodes()
            everything = ResourceConfig(cpu=node.cpu_milli / 1000, memory="1MB")
            await cluster.launch(work(stay, resources=everything))
            late = r"has not had its minimum of 1 units within 0\.1 s: holds 0 of 1"
            with pytest.raises(DeadlineExceeded, match=late):
                async with cluster.open_reservation(ReservationConfig(ONE), wait_limit_s=0.1):
                    pass
            assert await cluster.list_reservations() == []
            await cluster.terminate(prefix="work")

    trio.run(main)


def test_every_reader_gets_each_event_once_and_in_order() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            (node,) = await cluster.nodes()
            unit = ResourceConfig(cpu=node.cpu_milli / 2000, memory="1MB")
            config = ReservationConfig(None, fray.ResourceConfig(cpu=unit.cpu, memory="1MB", replicas=2), notice_s=0.05)
            async with cluster.open_reservation(config) as reservation:
                await reservation.wait_units(2)
                jobs = await reservation.keep(work(stay, resources=unit))
                for job in jobs:
                    await job.wait_running()
                changes = reservation.changes()
                rival = await cluster.launch(work(stay, name="rival", resources=unit))
                shrinking, shrunk = await anext(changes), await anext(changes)
                assert (shrinking.kind, shrunk.kind) == (ReservationEventKind.SHRINKING, ReservationEventKind.SHRUNK)
                (left,) = [job for job in jobs if job.id in shrinking.jobs]
                assert shrinking.notice_s == 0.05
                await rival.wait_running()
                assert left.info.retries == {"preempted": 1}
                await rival.terminate()
                assert (await anext(changes)).kind is ReservationEventKind.GROWN
                await left.wait_running()
                again = [
                    change.kind async for change in _until(reservation.changes(since=0), ReservationEventKind.GROWN, 3)
                ]
                assert again == ["grown", "grown", "shrinking", "shrunk", "grown"]

    trio.run(main)


async def _until(changes, kind, times):  # type: ignore[no-untyped-def]
    async for change in changes:
        times -= change.kind is kind
        yield change
        if not times:
            return


def test_a_reader_that_was_disconnected_for_too_long_gets_a_missed_event() -> None:
    async def main() -> None:
        late = fray.ReservationEvent(number=9, kind=ReservationEventKind.GROWN, time=0.0)
        info = fray.ReservationInfo(
            reservation_id="r", demand=Demand(), jobs=(), expires_at=0.0, state=ReservationState.HELD, events=(late,)
        )
        changes = ReservationEvents(ReservationRecord(info), 2)
        assert [(await anext(changes)).kind, (await anext(changes)).kind] == ["missed", "grown"]

    trio.run(main)


def test_the_same_for_sync_code() -> None:
    with fray.blocking.open_cluster("local") as cluster:
        reserved = cluster.create_reservation(
            fray.blocking.ReservationConfig(min_resources=ONE, max_resources=several(2))
        )
        assert cluster.get_reservation(reserved).allocated_resources.replicas == 2
        job = cluster.launch(work(give, 5), reservation_id=reserved)
        assert job.wait() == 5
        assert cluster.renew_reservation(reserved).reservation_id == reserved
        assert [info.reservation_id for info in cluster.list_reservations()] == [reserved]
        reservation = cluster.follow_reservation(reserved)
        cluster.release_reservation(reservation)
        assert reservation.wait_ended().state is ReservationState.ENDED
        with cluster.open_reservation(ReservationConfig(ONE, several(3))) as reservation:
            assert [job.wait() for job in reservation.keep(work(give, 4))] == [4, 4, 4]
            assert reservation.launch(work(give, 1, name="one")).wait() == 1
            kinds = [next(iter(reservation.changes(since=0))).kind]
        assert kinds == [ReservationEventKind.HELD]
        assert [change.kind for change in reservation.changes(since=0)][-1] == ReservationEventKind.ENDED
