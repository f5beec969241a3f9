"""Actors of all-sync classes in processes of their own: many blocked callers, and methods that will not hear."""

from __future__ import annotations

import os
import threading
import time

import pytest
import trio

import fray


class BarrierActor:
    """Actor of Fray-Zero's elastic example."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.arrived: dict[int, set[str]] = {}
        self.changed = threading.Condition()

    def wait_for_barrier(self, ctx: fray.ActorContext, slice_id: str, step: int) -> int:
        with self.changed:
            here = self.arrived.setdefault(step, set())
            here.add(slice_id)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(here) == self.slices, timeout=20)
        return step


class Deaf:
    def pid(self) -> int:
        return os.getpid()

    def hold(self) -> None:
        """Neither cancellation nor KeyboardInterrupt ends it."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                time.sleep(1)
            except KeyboardInterrupt:
                pass


async def test_four_callers_meet_in_a_sync_barrier_and_a_deaf_method_costs_its_process_the_life() -> None:
    with trio.fail_after(60):
        async with fray.open_cluster("machine?nodes=1", logs=False) as cluster, cluster.open_scope("s") as scope:
            config = fray.ActorConfig(max_concurrency=4)
            barrier = await scope.create_actor(BarrierActor, 4, actor_config=config)
            for step in range(3):
                made = [barrier.wait_for_barrier.start(f"slice-{n}", step) for n in range(4)]
                assert [await call for call in made] == [step] * 4

            config = fray.ActorConfig(kill_after_s=0.2, max_restarts=1)
            deaf = await scope.create_actor(Deaf, name="deaf", actor_config=config, on_failure="absorb")
            first = await deaf.pid()
            with trio.move_on_after(0.1):
                await deaf.hold()
            second = await deaf.pid.options(idempotent=True)()
            assert second != first
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)
            with trio.move_on_after(0.1):
                await deaf.hold()
            with pytest.raises(fray.ActorDied, match="kill_after_s"):
                while True:
                    await deaf.pid.options(idempotent=True)()
            (record,) = [info for info in await cluster.list_jobs() if info.name == "deaf"]
            assert "hold() was cancelled and did not end within kill_after_s=0.2" in (record.error_message or "")
