"""Driver program of the laboratory: it does what lines on its standard input say, several at once.

Each line is a JSON object with ``id``, ``do`` (the name of a function below) and arguments; each answer has ``id``,
``value`` or ``error``, and the seconds from ``began`` to ``ended`` on the clock that all hosts share.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

import fray
from bench.histories.clients import Client
from bench.histories.files import Recorder
from bench.histories.records import Outcome
from tests.network import actors
from tests.network.actors import AGAIN, ANSWERS, HISTORY
from tests.network.host import SHARED

STREAM_ITEMS = 100
ARRAY_BYTES = 300_000
LOAD_PAUSE_S = 0.01
UNKNOWN_PAUSE_S = 0.2
"""Pause after a call to an actor that was lost: those to a silent machine fail at once."""


@define(eq=False)
class Console:
    """State that the lines are about: a cluster, a scope, actors and jobs by name."""

    cluster: fray.Cluster
    scope: fray.Scope
    nursery: trio.Nursery
    server: fray.ActorServer
    handles: dict[str, Any] = field(factory=dict)
    jobs: dict[str, Any] = field(factory=dict)
    stopping: bool = False
    """Set when loads shall end."""

    async def create(self, name: str, kind: str = "Ledger", on: str = "", **config: Any) -> str:
        """Create an actor, on a named node if ``on`` is given, and return where it runs."""
        constraints = [f"host == {on}"] if on else []
        resources = fray.ResourceConfig.with_cpu(cpu=0.1, memory="100MB", constraints=constraints)
        args = (name,) if kind == "Ledger" else ()
        actor: Any = await self.scope.create_actor(
            getattr(actors, kind),
            *args,
            name=name,
            resources=resources,
            actor_config=fray.ActorConfig(**config),
            on_failure="absorb",
        )
        self.handles[name] = actor
        return str(await actor.where()) if kind == "Ledger" else ""

    async def serve(self, name: str) -> None:
        """Serve an actor in this process."""
        await self.server.register(name, actors.Ledger(name))

    async def call(self, name: str, method: str, *args: Any, idempotent: bool = False) -> Any:
        """Call once."""
        return await getattr(self.handles[name], method).options(idempotent=idempotent)(*args)

    async def calls(self, name: str, prefix: str, seconds: float, pause_s: float = 0.05) -> list[list[Any]]:
        """Call `Ledger.add` again and again; return of each when it began, how long it took, and its error or ""."""
        made = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began, error = time.monotonic(), ""
            try:
                await self.handles[name].add(f"{prefix}-{len(made)}")
            except fray.FrayError as caught:
                error = f"{type(caught).__name__}: {caught}"
            made.append([began, time.monotonic() - began, error])
            await trio.sleep(pause_s)
        return made

    async def load(self, name: str, prefix: str, workers: int) -> dict[str, Any]:
        """Call, many at once, until `stop_load`; write each outcome to a file of `ANSWERS`, and return sums.

        A tenth of the calls may be repeated; their keys end with `AGAIN`. Others may end as `OutcomeUnknown` or
        `MachineLost`: each is in ``unknown``, with its time.
        """
        done: dict[str, Any] = {"calls": 0, "items": 0, "arrays": 0, "longest_s": 0.0, "unknown": [], "errors": []}
        file = Path(SHARED) / ANSWERS / f"{name} {prefix}"
        file.parent.mkdir(exist_ok=True)
        answers = file.open("a")

        async def work(worker: int) -> None:
            number = 0
            while not self.stopping:
                number += 1
                await trio.sleep(LOAD_PAUSE_S)
                may_repeat = number % 10 == 0 and number % 100 != 0
                key, began = f"{prefix}-{worker}-{number}{AGAIN if may_repeat else ''}", time.monotonic()
                items, outcome = STREAM_ITEMS if number % 100 == 0 else 0, Outcome.UNKNOWN
                try:
                    if items:
                        if not await self.exchange(name, key, items):
                            done["errors"].append(f"{key}: items came back in another order")
                        done["items"] += items
                    elif number % 250 == 1:
                        if not await self.send_array(name, key, ARRAY_BYTES):
                            done["errors"].append(f"{key}: the array was changed")
                        done["arrays"] += 1
                    else:
                        await self.call(name, "add", key, idempotent=may_repeat)
                        done["calls"] += 1
                except (fray.FrayError, ExceptionGroup) as error:
                    text = f"{key} after {time.monotonic() - began:.1f} s: {error_text(error)}"
                    if not may_repeat and (": OutcomeUnknown: " in text or ": MachineLost: " in text):
                        done["unknown"].append([time.monotonic(), text])
                        await trio.sleep(UNKNOWN_PAUSE_S)
                    else:
                        done["errors"].append(text)
                else:
                    outcome = Outcome.VALUE
                    done["longest_s"] = max(done["longest_s"], time.monotonic() - began)
                answers.write(f"{began:.6f} {time.monotonic():.6f} {outcome} {items} {key}\n")

        with answers:
            async with trio.open_nursery() as nursery:
                for worker in range(workers):
                    nursery.start_soon(work, worker)
        return done

    async def compete(self, client: str, names: list[str]) -> None:
        """Compete with other drivers for names, whose actors count, until `stop_load`; see `bench.histories`."""
        competitor = Client(self.cluster, Recorder(Path(SHARED) / HISTORY, client))
        while not self.stopping:
            await competitor.compete(random.choice(names))

    async def run_gangs(self, client: str) -> None:
        """Run one gang after another until `stop_load`. Raises FrayError: one has failed."""
        launcher = Client(self.cluster, Recorder(Path(SHARED) / HISTORY, f"{client}-gangs"))
        number = 0
        while not self.stopping:
            number += 1
            await launcher.run_gang(f"{client}-gang-{number}", number)

    async def stop_load(self) -> None:
        """End all loads after their calls under way."""
        self.stopping = True

    async def stream(self, name: str, count: int) -> list[Any]:
        """Read a stream of numbers; return whether all came once and in order, and the items each second."""
        began = time.monotonic()
        async with self.handles[name].numbers.stream(count) as numbers:
            right = [number async for number in numbers] == list(range(count))
        return [right, count / (time.monotonic() - began)]

    async def exchange(self, name: str, key: str, count: int) -> bool:
        """Send items through a two-way stream, and return whether each came back once and in order."""
        back = []
        async with self.handles[name].collect.open(key) as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(count):
                    await stream.send(number)
                await stream.done_sending()

            nursery.start_soon(send)
            back = [item async for item in stream]
        return back == list(range(count))

    async def send_array(self, name: str, key: str, size_bytes: int) -> bool:
        """Send a large argument, and return whether it arrived as it is."""
        array = random.randbytes(size_bytes)
        found = await self.handles[name].digest(key, array)
        return bool(found == hashlib.sha256(array).hexdigest())

    async def launch(self, name: str, seconds: float) -> str:
        """Launch a job that lasts, without waiting for it; return its id."""
        request = fray.JobRequest(
            name=name,
            entrypoint=fray.Entrypoint.from_callable(time.sleep, (seconds,)),
            resources=fray.ResourceConfig.with_cpu(cpu=0.1, memory="50MB"),
        )
        self.jobs[name] = await self.scope.launch(request)
        return str(self.jobs[name].id)

    async def wait(self, name: str) -> None:
        """Wait for a job."""
        await self.jobs[name].wait()

    async def ask_job(self, server: str, key: str) -> Any:
        """Let a job call an actor that some process serves under a name."""
        resources = fray.ResourceConfig.with_cpu(cpu=0.1, memory="100MB")
        return await self.scope.run(actors.call_by_name, server, "add", key, resources=resources)

    async def nodes(self) -> dict[str, str]:
        """Return of each node whether the controller hears from it: ``alive`` or ``silent``."""
        return {node.name: "alive" if node.alive else "silent" for node in await self.cluster.nodes()}

    async def living(self, name: str) -> bool:
        """Return whether an actor of this name lives."""
        return any(actor.name == name for actor in await self.cluster.list_actors(name))

    async def find(self, name: str) -> None:
        """Get a handle of an actor that another process has created or serves."""
        self.handles[name] = await self.cluster.get_actor(name)

    async def serve_line(self, line: bytes) -> None:
        """Do one line, and print its answer."""
        asked = json.loads(line)
        answer: dict[str, Any] = {"id": asked["id"], "began": time.monotonic()}
        try:
            answer["value"] = await getattr(self, asked["do"])(*asked["args"], **asked["options"])
        except BaseException as error:
            answer["error"] = error_text(error)
            # The test judges errors of calls; a cancellation is an answer too, and passes on.
            if not isinstance(error, Exception):
                raise
        finally:
            answer["ended"] = time.monotonic()
            print(json.dumps(answer), flush=True)


def error_text(error: BaseException) -> str:
    """Return type and text of an error; of a group, those of its errors besides cancellations."""
    if isinstance(error, BaseExceptionGroup):
        _, others = error.split(trio.Cancelled)
        return "; ".join(error_text(each) for each in (others or error).exceptions)
    return f"{type(error).__name__}: {error}"


async def main() -> None:
    """Serve until standard input ends; what this driver owns ends then."""
    async with (
        fray.open_cluster(namespace="laboratory", logs=False) as cluster,
        fray.ActorServer(cluster) as server,
        cluster.open_scope("laboratory") as scope,
        trio.open_nursery() as nursery,
    ):
        console = Console(cluster, scope, nursery, server)
        print(json.dumps({"id": 0, "value": os.getpid(), "began": 0.0, "ended": 0.0}), flush=True)
        lines = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
        rest = b""
        async for data in lines:
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                nursery.start_soon(console.serve_line, line)
        nursery.cancel_scope.cancel()
        scope.cancel()


if __name__ == "__main__":
    trio.run(main)
