"""Elastic training on slices that come and go (use case 5 of the first design).

A reservation holds one slice for sure and grows to three while nobody else needs the machines. One worker runs on each
slice there is; the coordinator brings them together step by step, hears of a slice that is to leave before it leaves,
and goes on with the others. Training never stops.

    python examples/elastic_slices.py                       # three nodes on this machine
    python examples/elastic_slices.py fray://head:7777      # on a cluster; make `SLICE` a TPU type then
"""

from __future__ import annotations

import sys

import trio

import fray
from fray import ChangeKind, Entrypoint, JobRequest, ReservationConfig, ResourceConfig

SLICE = ResourceConfig.with_cpu(cpu=2, memory="64MB")  # for example ResourceConfig.with_tpu("v5litepod-16")
STEP_S = 0.02


class Coordinator:
    """Brings the members together: a step is over when all that are there have made it."""

    def __init__(self):
        self.step = 0
        self.weights = 0.0
        self.arrived = {}
        self.members = set()
        self.leaving = set()
        self.sizes = []  # how many members made each step
        self.next = trio.Event()

    async def follow(self, reservation_id):
        """Hear of slices that leave. (Those that come have members that call `join`.)"""
        reservation = await fray.current_cluster().follow_reservation(reservation_id)
        async for change in reservation.changes():
            if change.kind is ChangeKind.SHRINKING:
                self.leaving |= set(change.jobs)
            elif change.kind is ChangeKind.LOST:  # its machine is gone, and nobody there could say goodbye
                self.members -= set(change.jobs)
                self._close_step()

    async def join(self, member):
        """A member is there, perhaps again: which step is next, and with which weights it begins."""
        self.leaving.discard(member)
        self.members.add(member)
        return self.step, self.weights

    async def barrier(self, member, gradient):
        """Wait until all members have made this step. Returns the next one and the weights; None: your slice leaves."""
        if member in self.leaving or member not in self.members:
            self.members.discard(member)
            self._close_step()
            return None
        self.arrived[member] = gradient
        over = self.next
        self._close_step()
        await over.wait()
        return self.step, self.weights

    async def leave(self, member):
        """A member ends, with or without notice."""
        self.members.discard(member)
        self.arrived.pop(member, None)
        self._close_step()

    async def seen(self):
        return self.sizes

    def _close_step(self):
        if self.members and self.members <= set(self.arrived):
            self.weights += sum(self.arrived.values()) / len(self.arrived)
            self.sizes.append(len(self.arrived))
            self.step += 1
            self.arrived = {}
            self.next.set()
            self.next = trio.Event()


async def slice_worker():
    """One slice: joins, trains in step with the others, and puts itself away when its slice is to leave."""
    me = fray.current_job().id
    coordinator = await fray.current_cluster().get_actor("coordinator")
    at = await coordinator.join(me)
    try:
        while at is not None:
            await trio.sleep(STEP_S)  # train_step(weights, batch of this step)
            at = await coordinator.barrier(me, 1.0)
        await trio.sleep_forever()  # put away; it is ended soon, and begins anew when there is a slice for it again
    finally:
        with trio.move_on_after(1, shield=True):
            await coordinator.leave(me)


async def train(cluster: fray.Cluster, rounds: int) -> list[int]:
    """Train while a rival comes and goes; how many members made each step."""
    coordinator = await cluster.create_actor(Coordinator, name="coordinator")
    config = ReservationConfig(
        min_resources=SLICE,
        max_resources=ResourceConfig.with_cpu(cpu=2, memory="64MB", replicas=3),
        notice_s=0.3,
    )
    async with cluster.open_reservation(config) as reservation, trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.follow, reservation.id)
        await reservation.keep(JobRequest("slice", SLICE, Entrypoint.from_callable(slice_worker)))
        await until(coordinator, 3, rounds)
        rival = await cluster.launch(JobRequest("rival", SLICE, Entrypoint.from_callable(trio.sleep_forever)))
        await rival.wait_running()
        await until(coordinator, 2, rounds)
        await rival.terminate()
        await until(coordinator, 3, rounds)
        sizes = await coordinator.seen()
        nursery.cancel_scope.cancel()
    return list(sizes)


async def until(coordinator: fray.ActorHandle, members: int, rounds: int) -> None:
    """Until so many members have made so many steps, the last ones."""
    while (await coordinator.seen())[-rounds:] != [members] * rounds:  # noqa: ASYNC110  # the event is in another process
        await trio.sleep(STEP_S)


async def main(spec: str = "machine?nodes=3&cpu=2", rounds: int = 10) -> None:
    async with fray.open_cluster(spec) as cluster:
        sizes = await train(cluster, rounds)
    phases = [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]
    print(f"{len(sizes)} steps with {' then '.join(map(str, phases))} slices")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:2])
