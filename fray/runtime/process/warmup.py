"""One actor's whole life, played in a zygote before it forks the first real one.

What runs for the first time is slow and takes memory: the interpreter specializes code in place, converters are
compiled, tables are filled, modules are found to be missing. Played once before the fork, all of it is there and
shared. Law: nothing of it remains but that; no thread, no descriptor, no file.
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
"""The interpreter specializes what has run a dozen times."""
WITHIN_S = 5.0
"""A rehearsal that takes longer is given up: the show goes on without."""


class _Actor:
    def echo(self, value: Any) -> Any:
        return value


class _FakeController(NullHandler):
    """Plays the controller: every request is done, and the endpoint that is registered is remembered."""

    def __init__(self) -> None:
        self.registered = trio.Event()
        self.endpoint: ActorEndpoint | None = None
        self._channel: Channel | None = None

    def on_greeting(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        decode_message(greeting)
        return encode_message(ControllerHello(cluster_id="rehearsal", epoch=1)), self._seat

    def _seat(self, channel: Channel) -> _FakeController:
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
    """Play it. For a process without a loop. Where nothing can be played, the first real attempt will tell why.

    Args:
        below: where its sockets go for a moment; default the temporary directory.
    """
    with suppress(OSError, FrayError, ExceptionGroup), tempfile.TemporaryDirectory(dir=below) as directory:
        trio.run(run_dummy_actor, directory)


async def run_dummy_actor(directory: str) -> list[int]:
    """The play itself; returns what the actor answered, nothing if it took too long."""
    rng = random.SystemRandom()
    network, understudy, key = WebSocketNetwork(), _FakeController(), mint(rng)
    acceptor = Acceptor("controller", understudy.on_greeting, rng=rng)
    address = f"unix:{directory}/controller.sock"
    with trio.move_on_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(network.listen, address, lambda key_id: key, acceptor.handle)
            ticket = _ticket(address, key, directory)
            async with open_attempt_runtime(ticket, network, rng) as runtime:
                work = pickling.loads(pickling.dumps((_Actor, (), {})))
                nursery.start_soon(run_actor, ticket, work, runtime, ExistingThreadRunner(InlineExecutor()))
                await understudy.registered.wait()
                assert understudy.endpoint is not None
                answers = await _call(runtime.caller, understudy.endpoint)
            nursery.cancel_scope.cancel()
            return answers
    return []


async def _call(caller: Caller, endpoint: ActorEndpoint) -> list[int]:
    route = caller.route_to(endpoint)
    return [await route.call("echo", (number,)) for number in range(CALLS)]


def _ticket(controller: str, key: str, directory: str) -> AttemptSpec:
    spec = JobSpec(job_id="rehearsal", name="rehearsal", namespace="", entry=EntryKind.ACTOR, actor=ActorConfig())
    return AttemptSpec(
        attempt_id=attempt_id("rehearsal", 0, 0), spec=spec, controller=controller, key=key, directory=directory
    )
