"""Connection to a running controller (``fray://``)."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache

from fray.deploy import stored_keys
from fray.deploy.cluster_spec import spec_text
from fray.deploy.run_directory import open_run_directory, remove_abandoned
from fray.errors import InvalidRequest
from fray.model.ids import Namespace
from fray.model.join_tokens import split_tokens
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.net.cluster_token import CLUSTER_KEY, TOKEN_FILE_VARIABLE, ClusterToken, read_token_file
from fray.net.controller_address import INSECURE_VARIABLE, controller_address, is_elsewhere
from fray.net.process_identity import process_mark
from fray.net.transport import Credential, CredentialSource
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.runtime import Runtime

OWN_ADDRESS = "tcp:127.0.0.1:0"
"""Address on which a driver of a controller of its own machine serves actors, exported futures and pools."""


@asynccontextmanager
async def open_remote(
    address: str,
    *,
    namespace: Namespace | None,
    token: str | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    grace_s: float | None = None,
    role: Role = Role.DRIVER,
) -> AsyncIterator[Runtime]:
    """Connect to a running controller as a driver, or as a tool, which owns nothing.

    Raises:
        InvalidRequest: no token, or no fingerprint of the certificate authority of another machine.
        Unreachable, Unauthorized, ProtocolMismatch.
    """
    key, pins = _find_credential(address, token)
    controller = secure_address(address, pins)
    networked = is_elsewhere(controller)
    with _own_directory() as directory:
        async with open_runtime(
            WebSocketNetwork(),
            [controller],
            key,
            RuntimeConfig(
                role=role,
                namespace=namespace,
                grace_s=grace_s,
                process=process_mark(),  # a controller on this machine detects the end of this process without grace
                # Not loopback, which is another machine for jobs of another machine.
                host_directory=directory if networked else lambda: OWN_ADDRESS,
                # Behind NAT it has no address for others: they call through the relay, without trying one first.
                networked=networked,
                finds_address=True,
            ),
            rng=random.SystemRandom(),
            on_log=on_log,
        ) as runtime:
            yield runtime


@contextmanager
def _own_directory() -> Iterator[Callable[[], str]]:
    """Yield a function that makes a directory for sockets with its first call; it is removed on exit."""
    with ExitStack() as stack:

        @cache
        def make() -> str:
            remove_abandoned()
            return stack.enter_context(open_run_directory()).path

        yield make


def secure_address(address: str, token_pins: Sequence[str]) -> str:
    """Return the address of a controller, with TLS if it is another machine. Raises InvalidRequest."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return address
    place, _, pins = rest.partition("#")
    host, _, port = place.rpartition(":")
    insecure = os.environ.get(INSECURE_VARIABLE, "") == "1"
    written = f"fray://{place}"
    return controller_address(host.strip("[]"), int(port), written, pins, os.environ, token_pins, insecure=insecure)


def _find_credential(address: str, token: str | None) -> tuple[Credential | CredentialSource, Sequence[str]]:
    """Return the cluster's token if it is given, else this person's key; and the fingerprints that came with it.

    Raises:
        InvalidRequest: neither is there, or a file cannot be read.
    """
    secret = token if token is not None else os.environ.get("FRAY_TOKEN", "")
    if secret:
        # Tokens often come from files, with a newline at the end, and may contain fingerprints. Of two, the first is
        # the present one.
        tokens, pins = split_tokens(secret)
        return Credential(CLUSTER_KEY, tokens[0] if tokens else ""), pins
    if file := os.environ.get(TOKEN_FILE_VARIABLE, ""):
        # Read again for each dial, so that a driver of weeks survives the replacement of the token.
        tokens, pins = read_token_file(file)
        return ClusterToken(tokens, os.path.abspath(os.path.expanduser(file))), pins
    found = stored_keys.find_key(address)
    if found is None:
        raise InvalidRequest(
            f"authentication required: `fray login {spec_text(address)}` with an invitation, set FRAY_TOKEN or "
            "FRAY_TOKEN_FILE, or pass open_cluster(token=...); fray-controller prints at its start where its token is"
        )
    return found.credential, found.pins
