"""A process that hosts actors: ``calls_host.py DIRECTORY`` says its endpoints as JSON lines and ends with its stdin."""

from __future__ import annotations

import os
import random
import sys
import threading
import time

import trio

from fray.model.messages.client import ActorEndpoint
from fray.net.codec import to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.current_call import current_actor
from fray.runtime.threads.executor import ThreadExecutor


class InLoop:
    def __init__(self) -> None:
        self.n = 0
        self.cancelled = trio.Event()

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise LookupError("over there")

    def echo(self, data: bytes) -> bytes:
        return data

    async def sleep_forever(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()

    async def wait_cancelled(self) -> bool:
        await self.cancelled.wait()
        return True


class OnMainThread:
    def __init__(self) -> None:
        self.made_on = threading.current_thread().name
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def threads(self) -> tuple[str, str]:
        return self.made_on, threading.current_thread().name

    def spin(self, seconds: float) -> None:
        """Hold the interpreter with pure Python."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until and not current_actor().cancelled:
            pass


async def serve(directory: str, executor: ThreadExecutor) -> None:
    async with trio.open_nursery() as nursery:
        host = ActorHostServer(
            WebSocketNetwork(),
            incarnation=f"host-{os.getpid()}",
            rng=random.SystemRandom(),
            directory=lambda: directory,
        )
        await nursery.start(host.run)
        await host.listen()
        await host.listen_tcp()
        instance = await executor.run(OnMainThread)
        numbers = [host.register(InLoop(), "loop"), host.register(instance, "thread", executor=executor)]
        for number in numbers:
            endpoint = ActorEndpoint(
                actor_id=host.actors[number].actor_id,
                name=host.actors[number].name,
                job_id="",
                namespace="",
                incarnation=host.incarnation,
                number=number,
                addresses=host.addresses,
                key=host.key,
            )
            print(to_json(endpoint), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        await host.shutdown()
        executor.stop()
        nursery.cancel_scope.cancel()


def main() -> None:
    executor = ThreadExecutor()
    loop = threading.Thread(target=trio.run, args=(serve, sys.argv[1], executor), name="loop")
    loop.start()
    executor.run_on_this_thread()
    loop.join()


if __name__ == "__main__":
    main()
