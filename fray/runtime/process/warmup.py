"""Warm-up of a zygote: runs one dummy actor through its whole lifecycle before the first real one is forked.

Code that runs for the first time is slow and takes memory: the interpreter specializes code in place, converters are
compiled, caches are filled, optional modules are found to be missing. After a warm-up all of that exists before the
fork and is shared by all children. Invariant: nothing else remains: no thread, no descriptor, no file.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from typing import Any

import trio

from fray.errors import FrayError
from fray.model.ids import attempt_id, mint
from fray.model.messages.client import ActorEndpoint, ControllerHello, Done, Register
from fray.model.specs import ActorConfig, AttemptSpec, EntryKind, JobSpec
from fray.net.channel.channel import HandlerFactory, NullHandler
from fray.net.channel.public import Acceptor, Channel
from fray.net.codec import Bytes, Kind, decode_message, encode_message
from fray.net.transport import PeerIdentity
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.calls.caller import Caller
from fray.runtime.process.attempt import ExistingThreadRunner, open_attempt_runtime, run_actor
from fray.runtime.serialization import pickling
from fray.runtime.threads.executor import InlineExecutor

CALLS = 20
"""Number of calls: the interpreter specializes code that has run a dozen times."""
WITHIN_S = 5.0
"""Seconds after which the warm-up is abandoned; the zygote works without it."""


class _Actor:
    def echo(self, value: Any) -> Any:
        return value


class _FakeController(NullHandler):
    """Minimal controller: answers every request with `Done` and stores the registered endpoint."""

    def __init__(self) -> None:
        self.registered = trio.Event()
        self.endpoint: ActorEndpoint | None = None
        self._channel: Channel | None = None

    def on_greeting(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        decode_message(greeting)
        return encode_message(ControllerHello(cluster_id="warm-up", epoch=1)), self._handler

    def _handler(self, channel: Channel) -> _FakeController:
        self._channel = channel
        return self

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        message, _ = decode_message(body)
        if isinstance(message, Register):
            self.endpoint = message.endpoint
            self.registered.set()
        if kind == Kind.REQUEST and self._channel is not None:
            self._channel.reply(ref, Done())


def warm_up(below: str | None = None) -> None:
    """Run the warm-up, in a process without a loop. Errors are ignored: the first real attempt will report them.

    Args:
        below: directory for its temporary sockets; default: the system's.
    """
    with suppress(OSError, FrayError, ExceptionGroup), tempfile.TemporaryDirectory(dir=below) as directory:
        trio.run(run_dummy_actor, directory)


async def run_dummy_actor(directory: str) -> list[int]:
    """Run the dummy actor and return its answers; an empty list if it took too long."""
    rng = random.SystemRandom()
    network, controller, key = WebSocketNetwork(), _FakeController(), mint(rng)
    acceptor = Acceptor("controller", controller.on_greeting, rng=rng)
    address = f"unix:{directory}/controller.sock"
    with trio.move_on_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            # A Unix socket and not the memory network: the code of real connections is what has to be warm.
            await nursery.start(network.listen, address, lambda key_id: key, acceptor.handle)
            attempt_spec = _attempt_spec(address, key, directory)
            async with open_attempt_runtime(attempt_spec, network, rng) as runtime:
                work = pickling.loads(pickling.dumps((_Actor, (), {})))
                # Without threads: a fork in a process with threads may inherit locked locks.
                nursery.start_soon(run_actor, attempt_spec, work, runtime, ExistingThreadRunner(InlineExecutor()))
                await controller.registered.wait()
                assert controller.endpoint is not None
                answers = await _call(runtime.caller, controller.endpoint)
            # After the runtime was closed, so that its end has run once, too.
            nursery.cancel_scope.cancel()
            return answers
    return []


async def _call(caller: Caller, endpoint: ActorEndpoint) -> list[int]:
    route = caller.route_to(endpoint)
    return [await route.call("echo", (number,)) for number in range(CALLS)]


def _attempt_spec(controller: str, key: str, directory: str) -> AttemptSpec:
    spec = JobSpec(job_id="warm-up", name="warm-up", namespace="", entry=EntryKind.ACTOR, actor=ActorConfig())
    return AttemptSpec(
        attempt_id=attempt_id("warm-up", 0, 0), spec=spec, controller=controller, key=key, directory=directory
    )
