"""Fuzzer of a living controller: changed messages of authenticated drivers and nodes must not end it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

import trio

from fray.errors import FrayError
from fray.model.messages.client import ClientHello, ListJobs, Role
from fray.model.messages.node import NodeHello
from fray.model.resources import Capacity
from fray.net.channel.public import RedialPolicy, run_dialed
from fray.net.codec import Kind, encode_message
from fray.net.transport import Credential
from tests.fuzz.corpus_file import read_examples
from tests.fuzz.mutation import mutate_json
from tests.fuzz.samples import sample_messages
from tests.fuzz.targets import control_body
from tests.support.controller import ADDRESS, GB, TOKEN, Client, Peer, Stage, stage

BATCH = 40
"""Messages of one peer, after which the controller must answer another."""
ANSWER_S = 10.0


def fuzz_controller(seconds: float, seed: int) -> tuple[int, dict[bytes, str]]:
    """Return how many messages were tried, and the messages that ended the controller, or kept it from answering."""
    rng, tried = random.Random(seed), 0
    pool = [*sample_messages(), *read_examples("messages")]
    broken: dict[bytes, str] = {}
    logging.getLogger("fray").setLevel(logging.CRITICAL)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        batches: list[tuple[bool, list[bytes]]] = []
        why = trio.run(_attack, pool, rng, until, batches)
        tried += sum(len(batch) for _, batch in batches)
        if why:
            is_node, last = batches[-1]
            guilty = [text for text in last if trio.run(_replay, is_node, [text])]
            broken |= dict.fromkeys(guilty[:1] or [b"\n".join(last)], why)
            break
    return tried, broken


async def _attack(
    pool: Sequence[bytes], rng: random.Random, until: float, batches: list[tuple[bool, list[bytes]]]
) -> str:
    """Send batches to one controller; return what went wrong, or an empty text when the time is up."""
    try:
        async with stage() as cluster:
            witness = await cluster.client(host="witness")
            while time.monotonic() < until:
                batches.append((rng.random() < 0.3, [mutate_json(rng.choice(pool), pool, rng) for _ in range(BATCH)]))
                await _send_batch(cluster, *batches[-1], rng)
                with trio.fail_after(ANSWER_S):
                    await witness.ask(ListJobs())
    except Exception as error:  # noqa: BLE001 - whatever ends the controller is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""


async def _replay(is_node: bool, texts: Sequence[bytes]) -> str:
    try:
        async with stage() as cluster:
            witness = await cluster.client(host="witness")
            await _send_batch(cluster, is_node, texts, random.Random(1))
            with trio.fail_after(ANSWER_S):
                await witness.ask(ListJobs())
    except Exception as error:  # noqa: BLE001 - as above
        return repr(error)
    return ""


async def _send_batch(cluster: Stage, is_node: bool, texts: Sequence[bytes], rng: random.Random) -> None:
    """Send messages as requests and notices of a peer of its own, which leaves then."""
    name = f"peer-{rng.randrange(10**9)}"

    def greeting() -> object:
        if is_node:
            capacity = Capacity(cpu_milli=4000, memory_bytes=16 * GB, disk_bytes=GB)
            return NodeHello(node=name, incarnation=name, boot_id="boot", capacity=capacity)
        return ClientHello(session=name, role=Role.DRIVER)

    peer = _QuietPeer(greeting)
    with trio.move_on_after(ANSWER_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hold, cluster, peer, name, rng)
            await peer.until(lambda: peer.welcomes or peer.ended)
            channel = peer.channel
            if channel is not None:
                for number, text in enumerate(texts):
                    if peer.ended is not None:
                        break
                    kind = Kind.NOTICE if rng.random() < 0.2 else Kind.REQUEST
                    try:
                        channel.send_nowait(kind, number + 1, control_body(text))
                    except FrayError:
                        break
                    if rng.random() < 0.1:
                        await trio.lowlevel.checkpoint()
                # Answered after all that was sent before, if the connection still stands.
                with trio.move_on_after(1.0):
                    try:
                        await peer.ask(ListJobs())
                    except FrayError:
                        pass
            nursery.cancel_scope.cancel()


class _QuietPeer(Client):
    """A peer that leaves all that it hears unread."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: object) -> None:
        assert self.requests is not None
        self.requests.on_frame(kind, flags, target, ref, body)  # type: ignore[arg-type]


async def _hold(cluster: Stage, peer: Peer, host: str, rng: random.Random) -> None:
    try:
        await run_dialed(
            cluster.network.at(host),
            [ADDRESS],
            Credential("cluster", TOKEN),
            greeting=lambda: encode_message(peer.greeting()),
            handler=peer.make,
            incarnation=host,
            policy=RedialPolicy(refused_is_final=True, give_up_s=1.0),
            rng=rng,
            session=None,
        )
    except FrayError as error:
        peer.on_end(error) if peer.requests is not None else None
