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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import trio
from attrs import evolve

import fray
from bench.faults import bodies
from bench.faults.lab import PACKAGE, TOKEN, VERSIONS
from bench.histories.clients import MEMBERS, Client, gang_member
from bench.histories.files import Recorder
from bench.histories.records import Kind, Outcome
from fray import ActorConfig, Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig

AT_A_TIME = 4
NAMESPACE = "faults"
COUNTERS = ("left", "right")
"""Names for which the drivers compete all the time, each with as many tasks."""
RETRIES = 1_000
SMALL = ResourceConfig.with_cpu(cpu=0.5, memory="64MB")

Activity: TypeAlias = Callable[[fray.Cluster], Awaitable[None]]


class Driver:
    def __init__(self, ledger: str, name: str, seed: int) -> None:
        self.ledger, self.name, self.rng = ledger, name, random.Random(seed)
        self.number = 0
        self.draining = False
        self.changed = trio.Event()
        self.busy = 0
        self.recorder = Recorder(Path(ledger), name)
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

    def kinds(self) -> tuple[Activity, ...]:
        """Return kinds of work of which each is done as often as the others."""
        return (
            *(self.counts, self.has_family, self.runs_program, self.is_gang),
            *(self.calls_actor, self.is_detached, self.listens, self.imports),
        )

    async def work(self, cluster: fray.Cluster, kinds: Sequence[Activity]) -> None:
        """Do one piece of work after another, until this driver ends."""
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
            variables = EnvironmentConfig.create(env_vars={"BUSY_S": str(busy_s)})
        else:
            owner = "" if more.get("detached") else self.name
            entry = Entrypoint.from_callable(fn, (self.ledger, owner, self.number, busy_s))
            variables = EnvironmentConfig()
        return JobRequest(
            name=f"{self.name}-{kind}-{self.number}",
            entrypoint=entry,
            environment=variables,
            resources=SMALL,
            max_retries_failure=RETRIES,
            max_retries_preemption=RETRIES,
            **more,
        )

    async def follow(self, cluster: fray.Cluster, request: JobRequest, *, has_signs: bool = True) -> None:
        number = self.recorder.begin(Kind.LAUNCH, request.name) if has_signs else 0
        job = await cluster.launch(request)
        self.say(accepted=job.id, detached=request.detached, members=request.members())
        try:
            value = await job.wait()
        except fray.FrayError as error:
            value = repr(error)
        else:
            if has_signs:
                self.recorder.end(number, Outcome.VALUE, request.members(), key=job.id)
        self.say(ended=job.id, state=job.info.state.value, value=value, attempts=len(job.info.attempts))

    async def counts(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("count", bodies.count))

    async def has_family(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("family", bodies.family))

    async def runs_program(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("program", None), has_signs=False)

    async def is_gang(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("gang", gang_member, replicas=MEMBERS))

    async def is_detached(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("detached", bodies.count, detached=True))

    async def listens(self, cluster: fray.Cluster) -> None:
        await self.follow(cluster, self.request("listens", bodies.serves, ports=["http"]))

    async def imports(self, cluster: fray.Cluster) -> None:
        made = EnvironmentConfig.create(pip_packages=[f"{PACKAGE}=={self.rng.randrange(VERSIONS)}"])
        await self.follow(cluster, evolve(self.request("imports", bodies.imports), environment=made))

    async def competes(self, cluster: fray.Cluster) -> None:
        await Client(cluster, self.recorder).compete(self.rng.choice(COUNTERS))

    async def calls_actor(self, cluster: fray.Cluster) -> None:
        self.number += 1
        name, client = f"{self.name}-teller-{self.number}", Client(cluster, self.recorder)
        async with cluster.open_scope("actor") as scope:
            config = ActorConfig(max_restarts=-1)
            actor = await scope.create_actor(
                bodies.Echo, self.ledger, self.name, name=name, actor_config=config, resources=SMALL
            )
            twice = actor.twice.options(idempotent=True)
            for number in range(20):
                token = f"{name} {number}"
                value = await client.record(Kind.REPEATABLE_CALL, token, partial(twice, number, token))
                assert value == 2 * number
                await trio.sleep(0.02)
        self.say(actor=self.number)


def listen(driver: Driver, token: trio.lowlevel.TrioToken, scope: trio.CancelScope) -> None:
    for line in sys.stdin:
        token.run_sync_soon(driver.hear, line.strip())
    token.run_sync_soon(scope.cancel)


async def main(spec: str, ledger: str, name: str, seed: str) -> None:
    driver = Driver(ledger, name, int(seed))
    async with fray.open_cluster(spec, namespace=NAMESPACE, token=TOKEN, logs=False) as cluster:
        driver.say(open=cluster.namespace)
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(driver.work, cluster, driver.kinds())
            for _ in COUNTERS:
                nursery.start_soon(driver.work, cluster, [driver.competes])
            token = trio.lowlevel.current_trio_token()
            threading.Thread(target=listen, args=(driver, token, nursery.cancel_scope), daemon=True).start()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:5])
