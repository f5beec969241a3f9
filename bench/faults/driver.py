"""Driver of the campaign: launches work of every kind until it reads ``drain``, and records the outcomes.

``python -m bench.faults.driver SPEC LEDGER NAME SEED``; reads ``drain`` and ``resume`` from standard
input, and ends with it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

import fray
from bench.faults import bodies
from bench.faults.lab import PACKAGE, TOKEN, VERSIONS
from fray import ActorConfig, Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig

AT_A_TIME = 4
RETRIES = 1_000
SMALL = ResourceConfig.with_cpu(cpu=0.5, memory="64MB")


class Driver:
    def __init__(self, ledger: str, name: str, seed: int) -> None:
        self.ledger, self.name, self.rng = ledger, name, random.Random(seed)
        self.number = 0
        self.draining = False
        self.changed = trio.Event()
        self.busy = 0
        self.book = os.open(Path(ledger) / f"{name}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def say(self, **words: Any) -> None:
        os.write(self.book, json.dumps(words).encode() + b"\n")

    def hear(self, word: str) -> None:
        self.draining = word == "drain"
        self.changed.set()
        self.changed = trio.Event()
        self.say_if_quiet()

    def say_if_quiet(self) -> None:
        if self.draining and not self.busy:
            self.say(quiet=self.number)

    async def work(self, cluster: fray.Cluster) -> None:
        """Launch one job after another, until this driver ends."""
        kinds: tuple[Callable[[fray.Cluster], Awaitable[None]], ...] = (
            *(self.counts, self.has_family, self.runs_program, self.is_gang),
            *(self.calls_actor, self.is_detached, self.listens, self.imports),
        )
        while True:
            while self.draining:
                await self.changed.wait()
            self.busy += 1
            try:
                await self.rng.choice(kinds)(cluster)
            finally:
                self.busy -= 1
                self.say_if_quiet()

    def request(self, kind: str, fn: Callable[..., int] | None, **more: Any) -> JobRequest:
        self.number += 1
        busy_s = round(self.rng.uniform(*bodies.BUSY_S), 3)
        if fn is None:
            entry = Entrypoint.from_binary("sh", ["-c", bodies.PROGRAM])
            variables = EnvironmentConfig.create(env_vars={"LEDGER": self.ledger, "BUSY_S": str(busy_s)})
        else:
            entry, variables = Entrypoint.from_callable(fn, (self.ledger, self.number, busy_s)), EnvironmentConfig()
        return JobRequest(
            name=f"{self.name}-{kind}-{self.number}",
            entrypoint=entry,
            environment=variables,
            resources=SMALL,
            max_retries_failure=RETRIES,
            max_retries_preemption=RETRIES,
            **more,
        )

    async def follow(self, cluster: fray.Cluster, request: JobRequest) -> None:
        job = await cluster.launch(request)
        self.say(accepted=job.id, detached=request.detached, members=request.members())
        try:
            value = await job.wait()
        except fray.FrayError as error:
            value = repr(error)
        self.say(ended=job.id, state=job.info.state.value, value=value, attempts=len(job.info.attempts))

    async def counts(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("count", bodies.count))

    async def has_family(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("family", bodies.family))

    async def runs_program(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("program", None))

    async def is_gang(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("gang", bodies.count, replicas=2))

    async def is_detached(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("detached", bodies.count, detached=True))

    async def listens(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("listens", bodies.serves, ports=["http"]))

    async def imports(self, cluster: fray.Cluster) -> None:
        made = EnvironmentConfig.create(pip_packages=[f"{PACKAGE}=={self.rng.randrange(VERSIONS)}"])
        await self.follow(cluster, evolve(self.request("imports", bodies.imports), environment=made))

    async def calls_actor(self, cluster: fray.Cluster) -> None:
        self.number += 1
        async with cluster.open_scope("actor") as scope:
            config = ActorConfig(max_restarts=-1)
            actor = await scope.create_actor(
                bodies.Echo, name=f"{self.name}-teller-{self.number}", actor_config=config, resources=SMALL
            )
            twice = actor.twice.options(idempotent=True)
            for number in range(20):
                assert await twice(number) == 2 * number
                await trio.sleep(0.02)
        self.say(actor=self.number)


def listen(driver: Driver, token: trio.lowlevel.TrioToken, scope: trio.CancelScope) -> None:
    for line in sys.stdin:
        token.run_sync_soon(driver.hear, line.strip())
    token.run_sync_soon(scope.cancel)


async def main(spec: str, ledger: str, name: str, seed: str) -> None:
    driver = Driver(ledger, name, int(seed))
    async with fray.open_cluster(spec, token=TOKEN, logs=False) as cluster:
        driver.say(open=cluster.namespace)
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(driver.work, cluster)
            token = trio.lowlevel.current_trio_token()
            threading.Thread(target=listen, args=(driver, token, nursery.cancel_scope), daemon=True).start()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:5])
