"""Adapter for `fray`: the driver runs under Trio, one process per actor."""

from contextlib import AsyncExitStack
from typing import ClassVar

import trio
from peers import Peer, increment

import fray
from bench.peers.bodies import LoopEcho


class Fray(Peer):
    name = "fray"
    packages = ("trio",)
    notes: ClassVar = {
        "fault": "max_restarts=-1; the caller marks its call as idempotent, as ray's max_task_retries does"
    }
    body = LoopEcho

    def run(self, main):
        return trio.run(main)

    async def start(self):
        self.stack = AsyncExitStack()
        enter = self.stack.enter_async_context
        self.cluster = await enter(fray.open_cluster("machine?nodes=1&cpu=8", logs=False))
        self.scope = await enter(self.cluster.open_scope("bench"))
        self.pool = self.light = None

    async def stop(self):
        await self.stack.aclose()

    async def first(self):
        actor = (await self.spawn(1))[0]
        await actor.echo(0)
        self.host = await self.scope.create_host()  # as xoscar's pool has a process for light actors
        return actor

    async def spawn(self, n):
        return (await self.scope.create_actor_group(self.body, count=n, on_failure="absorb")).handles

    async def spawn_light(self, n):
        self.light = await self.host.create_actors(self.body, count=n)
        return self.light.handles

    async def spawn_restarting(self):
        return await self.scope.create_actor(self.body, max_restarts=-1, on_failure="absorb")

    async def drop(self, actors):
        if self.light is not None and actors == self.light.handles:
            await self.light.shutdown()
            return
        jobs = {actor._actor_id for actor in actors} & {job.job_id for job in await self.cluster.list_jobs()}
        await self.cluster.terminate(sorted(jobs))

    async def call(self, actor, value):
        return await actor.echo(value)

    async def call_after_kill(self, actor, value):
        return await actor.echo.options(idempotent=True)(value)

    async def flood(self, actors, n):
        k = len(actors)
        futures = [actors[i % k].echo.start(i) for i in range(n)]
        return [await future for future in futures]

    async def pid(self, actor):
        return await actor.pid()

    async def map_tiny(self, n):
        if self.pool is None:
            self.pool = await self.stack.enter_async_context(fray.WorkerPool(self.cluster, 4))
        return [await future for future in self.pool.map(increment, range(n))]


PEER = Fray
