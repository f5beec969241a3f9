"""Joining with a join token: exchanges the token for a key of this machine.

Invariants: the key is stored in the node's directory (mode 600), so that a restarted node needs no second token. Before
the token is presented for the first time, a random claim is stored there too: if the reply is lost, or this process
dies, the controller recognizes the machine by the same claim and accepts the one-time token once more.
"""

from __future__ import annotations

import json
import logging
import random
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
from fray.net.atomic_file import write_atomically
from fray.net.channel.public import RedialPolicy, run_dialed
from fray.net.codec import decode_message, encode_message
from fray.net.transport import Bytes, Credential, Network
from fray.node.config import NodeConfig

FILE = "machine-key.json"
CLAIM_LENGTH = 32

log = logging.getLogger("fray.node")


@frozen
class JoinState:
    """The stored state of joining.

    Args:
        token: key id of the join token, which is not secret.
    """

    token: str
    claim: str = field(repr=False)
    key_id: str = ""
    key: str = field(default="", repr=False)


def with_machine_attribute(config: NodeConfig) -> NodeConfig:
    """Return the config with the machine attribute from its join token.

    Raises:
        InvalidRequest: the join token is invalid, or the configured machine attribute differs.
    """
    token, _ = read_token(config.join_token)
    # The scheduler finds the unit that it has requested by this attribute, so the token decides.
    given = config.capacity.attributes.get(MACHINE_ATTRIBUTE, token.unit)
    if given != token.unit:
        raise InvalidRequest(f"the join token is for machine {token.unit!r}, but this node has machine={given}")
    attributes = {**config.capacity.attributes, MACHINE_ATTRIBUTE: token.unit}
    return evolve(config, capacity=evolve(config.capacity, attributes=attributes))


async def find_credential(config: NodeConfig, network: Network, rng: random.Random) -> Credential:
    """Return this machine's own key: from its state directory, or requested from the controller.

    Raises:
        InvalidRequest: the token is invalid, or the number of this host among those of its machine is missing.
        Unauthorized: the token has expired or was used.
        OSError: the key cannot be stored.
    """
    token, key = read_token(config.join_token)
    state = _read(config)
    # A claim belongs to one token. With another one, as when its unit was made again, the machine joins again.
    if state is None or state.token != token.key_id:
        state = JoinState(token.key_id, mint(rng, CLAIM_LENGTH))
        # Before the token is presented: the claim is what makes a second try with a spent token acceptable.
        _write(config, state)
    if not state.key:
        join_request = JoinRequest(node=config.name, worker=_worker(config, token), claim=state.claim)
        given = await _request_join(config, network, Credential(token.key_id, key), join_request, rng)
        # The machine's own key travels once, over the proven channel: it must not follow from the token, which others
        # may have seen.
        state = evolve(state, key_id=given.key_id, key=given.key)
        _write(config, state)
        log.info("joined the cluster as a host of machine %s", token.unit, extra={"worker": join_request.worker})
    return Credential(state.key_id, state.key)


def _worker(config: NodeConfig, token: JoinKey) -> int:
    # A single host needs no number. Several could present the same token, so each has to name its own.
    given = config.capacity.attributes.get(WORKER_ATTRIBUTE, "" if token.hosts > 1 else "0")
    if not given.isdecimal():
        raise InvalidRequest(
            f"machine {token.unit!r} has {token.hosts} hosts: set the attribute {WORKER_ATTRIBUTE} to the number of "
            f"this one, from 0 (it is {given!r})"
        )
    return int(given)


async def _request_join(
    config: NodeConfig, network: Network, credential: Credential, join_request: JoinRequest, rng: random.Random
) -> JoinGrant:
    # For ever: a machine may be up before the controller can be reached.
    policy = RedialPolicy(refused_is_final=False, give_up_s=None)
    answer = await ask_by_greeting(network, config.controller, credential, join_request, policy, rng)
    if isinstance(answer, FrayError):
        raise answer
    if not isinstance(answer, JoinGrant):
        raise ProtocolMismatch(f"the controller answered a join token with {type(answer).__name__}")
    return answer


async def ask_by_greeting(
    network: Network, address: str, credential: Credential, request: object, policy: RedialPolicy, rng: random.Random
) -> object:
    """Dial the controller with ``request`` as the greeting and hang up; return its greeting, or the error."""
    handler = GreetingHandler()
    async with trio.open_nursery() as nursery:

        async def dial() -> None:
            try:
                await run_dialed(
                    network,
                    [address],
                    credential,
                    greeting=lambda: encode_message(request),
                    handler=handler,
                    # An incarnation of its own: this channel is neither a driver's session nor a node's membership.
                    incarnation=mint(rng),
                    policy=policy,
                    rng=rng,
                )
            except FrayError as error:
                # Kept and raised outside of the nursery, which would wrap it in an ExceptionGroup.
                handler.on_end(error)

        nursery.start_soon(dial)
        await handler.greeted.wait()
        nursery.cancel_scope.cancel()
    return handler.answer


class GreetingHandler:
    """Channel handler that keeps the controller's greeting, or the error."""

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
        # The controller closes the channel after its greeting, so an end may follow the answer.
        self.answer = self.answer or error
        self.greeted.set()


# On disk -------------------------------------------------------------------------------------------------------------


def _read(config: NodeConfig) -> JoinState | None:
    """Return the stored state; None if there is none that can be read: then the token is presented."""
    if not config.state_dir:
        return None
    try:
        return JoinState(**json.loads(Path(config.state_dir, FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(config: NodeConfig, state: JoinState) -> None:
    """Store the state atomically. A node without a state directory (in simulation) stores nothing."""
    if not config.state_dir:
        return
    directory = Path(config.state_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {"token": state.token, "claim": state.claim, "key_id": state.key_id, "key": state.key}
    # Durable: after a power failure an empty file would cost the machine its key, and the token is spent.
    write_atomically(directory / FILE, json.dumps(fields).encode(), durable=True)
