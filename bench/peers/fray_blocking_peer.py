"""Adapter for `fray.blocking`: sync code, with the loop in a thread of the driver."""

from peers import Peer, increment

from bench.peers.bodies import LoopEcho
from fray.blocking import WorkerPool, open_cluster


class FrayBlocking(Peer):
    name = "fray_blocking"
    packages = ("trio",)
    body = LoopEcho

    async def start(self):
        self.cluster = open_cluster("machine?nodes=1&cpu=8", logs=False)
        self.pool = self.light = None

    async def stop(self):
        if self.pool is not None:
            self.pool.shutdown()
        self.cluster.close()

    async def first(self):
        actor = (await self.spawn(1))[0]
        actor.echo(0)
        self.host = self.cluster.create_host()
        return actor

    async def spawn(self, n):
        return self.cluster.create_actor_group(self.body, count=n).handles

    async def spawn_light(self, n):
        self.light = self.host.create_actors(self.body, count=n)
        return self.light.handles

    async def spawn_restarting(self):
        return self.cluster.create_actor(self.body, max_restarts=-1)

    async def drop(self, actors):
        if self.light is not None and actors == self.light.handles:
            self.light.shutdown()
            return
        jobs = {actor._native._actor_id for actor in actors} & {job.job_id for job in self.cluster.list_jobs()}
        self.cluster.terminate(sorted(jobs))

    async def call(self, actor, value):
        return actor.echo(value)

    async def call_after_kill(self, actor, value):
        return actor.echo.options(idempotent=True)(value)

    async def flood(self, actors, n):
        k = len(actors)
        futures = [actors[i % k].echo.remote(i) for i in range(n)]
        return [future.result() for future in futures]

    async def pid(self, actor):
        return actor.pid()

    async def map_tiny(self, n):
        if self.pool is None:
            self.pool = WorkerPool(self.cluster, 4)
        return [future.result() for future in self.pool.map(increment, range(n))]


PEER = FrayBlocking
