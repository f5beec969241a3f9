"""The first words of a machine that has a join token instead of the cluster's: they get it a key of its own.

Law. The key is state in the node's directory (mode 600), so that a node that starts again needs no second token. Before
the token is shown for the first time, a claim is made up and state there too: if the answer is lost, or this process
dies, the same claim says that it is the same machine.
"""

from __future__ import annotations

import json
import logging
import os
import random
from contextlib import suppress
from pathlib import Path

import trio
from attrs import evolve, field, frozen

from fray.errors import FrayError, InvalidRequest, ProtocolMismatch
from fray.model.ids import mint
from fray.model.join_tokens import (
    MACHINE_ATTRIBUTE,
    WORKER_ATTRIBUTE,
    JoinKey,
    read_token,
)
from fray.model.messages.node import JoinGrant, JoinRequest
from fray.net.channel.public import RedialPolicy, run_dialed
from fray.net.codec import decode_message, encode_message
from fray.net.transport import Bytes, Credential, Network
from fray.node.config import NodeConfig

FILE = "machine-key.json"
CLAIM_LENGTH = 32

log = logging.getLogger("fray.node")


@frozen
class JoinState:
    """What a node remembers of its joining.

    Args:
        token: the key id of the token it is about; no secret.
    """

    token: str
    claim: str = field(repr=False)
    key_id: str = ""
    key: str = field(default="", repr=False)


def with_machine_attribute(config: NodeConfig) -> NodeConfig:
    """The config of a node that says which machine it is, as its join token has it.

    Raises:
        InvalidRequest: it is no join token, or the operator names another machine.
    """
    token, _ = read_token(config.join_token)
    given = config.capacity.attributes.get(MACHINE_ATTRIBUTE, token.unit)
    if given != token.unit:
        raise InvalidRequest(f"the join token is for machine {token.unit!r}, and this node says machine={given}")
    attributes = {**config.capacity.attributes, MACHINE_ATTRIBUTE: token.unit}
    return evolve(config, capacity=evolve(config.capacity, attributes=attributes))


async def find_credential(config: NodeConfig, network: Network, rng: random.Random) -> Credential:
    """The key of this machine's own: state, or asked for now.

    Raises:
        InvalidRequest: the token is none, or the number of this host among those of its machine is missing.
        Unauthorized: the token has expired or is spent.
        OSError: the key cannot be state.
    """
    token, key = read_token(config.join_token)
    state = _read(config)
    if state is None or state.token != token.key_id:
        state = JoinState(token.key_id, mint(rng, CLAIM_LENGTH))
        _write(config, state)
    if not state.key:
        asked = JoinRequest(node=config.name, worker=_worker(config, token), claim=state.claim)
        given = await _request_join(config, network, Credential(token.key_id, key), asked, rng)
        state = evolve(state, key_id=given.key_id, key=given.key)
        _write(config, state)
        log.info("joined the cluster as a host of machine %s", token.unit, extra={"worker": asked.worker})
    return Credential(state.key_id, state.key)


def _worker(config: NodeConfig, token: JoinKey) -> int:
    given = config.capacity.attributes.get(WORKER_ATTRIBUTE, "" if token.hosts > 1 else "0")
    if not given.isdecimal():
        raise InvalidRequest(
            f"machine {token.unit!r} has {token.hosts} hosts: which of them is this? Set the attribute "
            f"{WORKER_ATTRIBUTE} to its number, from 0 (it is {given!r})"
        )
    return int(given)


async def _request_join(
    config: NodeConfig, network: Network, credential: Credential, asked: JoinRequest, rng: random.Random
) -> JoinGrant:
    handler = _GreetingHandler()
    async with trio.open_nursery() as nursery:

        async def dial() -> None:
            try:
                await run_dialed(
                    network,
                    [config.controller],
                    credential,
                    greeting=lambda: encode_message(asked),
                    handler=handler,
                    incarnation=mint(rng),
                    policy=RedialPolicy(refused_is_final=False, give_up_s=None),
                    rng=rng,
                )
            except FrayError as error:
                handler.on_end(error)

        nursery.start_soon(dial)
        await handler.greeted.wait()
        nursery.cancel_scope.cancel()
    if isinstance(handler.answer, FrayError):
        raise handler.answer
    if not isinstance(handler.answer, JoinGrant):
        raise ProtocolMismatch(f"the controller answered a join token with {type(handler.answer).__name__}")
    return handler.answer


class _GreetingHandler:
    """Handler that keeps the controller's greeting, or why there is none."""

    def __init__(self) -> None:
        self.answer: object = None
        self.greeted = trio.Event()

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        pass

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self.answer, _ = decode_message(greeting)
        self.greeted.set()

    def on_suspended(self, why: str) -> None:
        pass

    def on_resumed(self) -> None:
        pass

    def on_end(self, error: FrayError) -> None:
        self.answer = self.answer or error
        self.greeted.set()


# On disk -------------------------------------------------------------------------------------------------------------


def _read(config: NodeConfig) -> JoinState | None:
    """None if there is nothing (that can be read): then the token is shown."""
    if not config.state_dir:
        return None
    try:
        return JoinState(**json.loads(Path(config.state_dir, FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(config: NodeConfig, state: JoinState) -> None:
    """Whole or not at all. A node without a directory (in simulation) keeps nothing."""
    if not config.state_dir:
        return
    directory = Path(config.state_dir)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{FILE}.new"
    with suppress(FileNotFoundError):
        path.unlink()
    given = {"token": state.token, "claim": state.claim, "key_id": state.key_id, "key": state.key}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(json.dumps(given))
        out.flush()
        os.fsync(out.fileno())
    path.rename(directory / FILE)
