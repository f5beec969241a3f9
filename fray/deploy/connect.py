"""Connections by cluster specs such as ``machine?nodes=2`` or ``fray://host:port``."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from attrs import frozen

from fray.errors import InvalidRequest, UnknownClusterSpec
from fray.model.environment import EnvironmentConfig, plain_variables
from fray.model.ids import Namespace
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.net.process_identity import process_mark
from fray.net.transport import Credential
from fray.runtime.controller_client.log_lines import print_lines
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.runtime import Runtime

if TYPE_CHECKING:
    from fray.model.policy.policy import Policy

DEFAULT_PORT = 7421
OWN_ADDRESS = "tcp:127.0.0.1:0"
"""Address on which a driver serves exported futures and pools; other machines reach it through the relay."""


@frozen
class Spec:
    """Parsed cluster spec."""

    kind: str
    """``local``, ``machine`` or ``fray``."""
    address: str = ""
    """Address of a ``fray://`` controller, in the notation of `fray.net`."""
    nodes: int = 1
    cpu: float | None = None
    """CPUs of each node; None: its share of the machine's."""
    memory: str | None = None
    """Memory of each node; None: its share of the machine's."""
    pid_namespace: str = "auto"
    policy: str | None = None
    """Path of a policy file."""


def parse_spec(spec: str) -> Spec:
    """Parse ``local``, ``machine``, ``machine?nodes=2&cpu=4&memory=8GB``, ``fray://host:port`` or
    ``fray+unix:///path``.

    ``machine`` is one node with all of this machine; ``nodes=N`` divides it. The first two may have ``policy=FILE``
    among their options.

    Raises:
        UnknownClusterSpec: anything else.
    """
    url = urlsplit(spec)
    if url.path == "local" and not url.scheme:
        return _local_spec(spec, dict(parse_qsl(url.query, keep_blank_values=True)))
    if url.path == "machine" and not url.scheme:
        return _machine_spec(spec, dict(parse_qsl(url.query, keep_blank_values=True)))
    if url.scheme == "fray+unix" and url.path:
        return Spec("fray", address=f"unix:{url.path}")
    if url.scheme == "fray" and url.hostname and not url.path.strip("/"):
        return Spec("fray", address=f"tcp:{url.hostname}:{_port(url.netloc, spec)}")
    raise UnknownClusterSpec(
        f"invalid cluster spec {spec!r}; expected 'local', 'machine', 'machine?nodes=2&cpu=4' or 'fray://host:port' "
        "(as the argument of open_cluster or in FRAY_CLUSTER_SPEC)",
        spec=spec,
    )


def _port(netloc: str, spec: str) -> int:
    _, _, port = netloc.rpartition(":") if ":" in netloc else ("", "", str(DEFAULT_PORT))
    # Parsed here: `urlsplit(...).port` raises a ValueError without the spec in it.
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UnknownClusterSpec(f"{spec!r} has no valid port: write fray://host:{DEFAULT_PORT}", spec=spec)
    return int(port)


def _local_spec(spec: str, options: dict[str, str]) -> Spec:
    unknown = sorted(options.keys() - {"policy"})
    if unknown:
        raise UnknownClusterSpec(
            f"{spec!r}: unknown option {unknown[0]!r}; write 'local' or 'local?policy=FILE'", spec=spec
        )
    return Spec("local", policy=options.get("policy"))


def _machine_spec(spec: str, options: dict[str, str]) -> Spec:
    unknown = sorted(options.keys() - {"nodes", "cpu", "memory", "pid_namespace", "policy"})
    try:
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}")
        nodes, cpu = int(options.get("nodes", 1)), options.get("cpu")
        minimum = 0 if "policy" in options else 1  # its machine groups may provide all nodes
        if not minimum <= nodes <= 64 or (cpu is not None and float(cpu) <= 0):
            raise ValueError("nodes must be 1 to 64 (0 if a policy has machine groups), and cpu more than 0")
        if options.get("pid_namespace", "auto") not in ("auto", "on", "off"):
            raise ValueError("pid_namespace must be auto, on or off")
    except ValueError as error:
        raise UnknownClusterSpec(
            f"{spec!r}: {error}; write for example 'machine?nodes=2&cpu=4&memory=8GB'", spec=spec
        ) from None
    return Spec(
        "machine",
        nodes=nodes,
        cpu=None if cpu is None else float(cpu),
        memory=options.get("memory"),
        pid_namespace=options.get("pid_namespace", "auto"),
        policy=options.get("policy"),
    )


def open_by_spec(
    spec: Spec,
    *,
    namespace: Namespace | None,
    token: str | None,
    logs: bool,
    grace_s: float | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> AbstractAsyncContextManager[Runtime]:
    """Return the context manager of a driver's runtime in the cluster of the spec.

    Raises:
        InvalidRequest: the policy or an option is invalid.
    """
    on_log = print_lines if logs else None
    variables = plain_variables(EnvironmentConfig.create(env_vars=env_vars).env_vars)
    policy = _policy(spec.policy)
    if spec.kind == "local":
        # Imported when chosen: a driver of a running cluster needs neither node nor controller code.
        from fray.deploy.local import open_local

        if grace_s is not None and not 0 <= grace_s < float("inf"):
            raise InvalidRequest(f"grace_s={grace_s!r} must be 0 or more seconds")
        return open_local(namespace=namespace, on_log=on_log, env_vars=variables, policy=policy, grace_s=grace_s)
    if spec.kind == "machine":
        from fray.deploy.machine import open_machine

        size = spec.nodes, spec.cpu, spec.memory, spec.pid_namespace
        return open_machine(*size, namespace=namespace, on_log=on_log, env_vars=variables, policy=policy)
    if variables:
        raise InvalidRequest(
            "env_vars= of open_cluster are for clusters made here; a running one has its own: start its controller "
            "with fray-controller --env KEY=VALUE, or use open_scope(env_vars=...)"
        )
    return open_remote(spec.address, namespace=namespace, token=token, on_log=on_log, grace_s=grace_s)


def _policy(file: str | None) -> Policy | None:
    if file is None:
        return None
    from fray.controller.policy_file import read_policy_file

    return read_policy_file(file)


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
        InvalidRequest: no token.
        Unreachable, Unauthorized, ProtocolMismatch.
    """
    from fray.net.transports.websocket import (
        WebSocketNetwork,  # an embedded cluster starts its nodes before it needs this
    )

    secret = token if token is not None else os.environ.get("FRAY_TOKEN", "")
    if not secret:
        raise InvalidRequest(
            "authentication required: set FRAY_TOKEN, or pass open_cluster(token=...); "
            "fray-controller prints at its start where its token is"
        )
    async with open_runtime(
        WebSocketNetwork(),
        [address],
        # Tokens often come from files, with a newline at the end.
        Credential("cluster", secret.strip()),
        RuntimeConfig(
            role=role,
            namespace=namespace,
            grace_s=grace_s,
            process=process_mark(),  # a controller on this machine detects the end of this process without grace
            host_directory=lambda: OWN_ADDRESS,
        ),
        rng=random.SystemRandom(),
        on_log=on_log,
    ) as runtime:
        yield runtime
