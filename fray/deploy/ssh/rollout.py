"""Work on hosts: install Fray, start a daemon or replace it, wait until it has joined, end it, look.

Invariants: what runs with the same release and the same configuration is left alone, so a command may be repeated. A
token is sent as the content of a file, only to a node that needs one, and is valid once.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio
from attrs import define, field, frozen

import fray
from fray.deploy.ssh.hosts_file import ControllerPlace, HostsFile, Installation, SshHost, toml_text
from fray.deploy.ssh.own_wheel import OwnWheel
from fray.deploy.ssh.session import HostFailed, HostSession, open_session
from fray.errors import FrayError
from fray.model.ids import mint_name
from fray.model.messages.client import NodeInfo

LOOK_S = 0.3
ANSWER_S = 30.0
"""Seconds for a request that only looks or writes a file."""
REPLACE_S = 60.0
MORE_S = 15.0
"""Seconds that an answer may take beyond the limit that the host itself keeps."""

Report = Callable[[SshHost, str], None]
"""Reports progress on a host."""


class ClusterSeen(Protocol):
    """The part of `fray.api.cluster.Cluster` that is used here."""

    async def nodes(self) -> Sequence[NodeInfo]: ...

    async def join_token(self, machine: str, *, hosts: int = 1, life_s: float = 3600.0) -> str: ...


@frozen
class HostOutcome:
    """Result of the work on a host, or why it failed."""

    host: SshHost
    result: str
    """``started``, ``replaced``, ``unchanged``, ``ended``, ``was not running`` or ``failed``."""
    error: str = ""
    process: dict[str, Any] | None = None
    """Record of its daemon: ``pid``, ``release``, ``started`` (seconds since the epoch)."""


@define(eq=False)
class JoinedNodes:
    """The machines of a cluster, asked for once for all that wait for one at the same time."""

    _cluster: ClusterSeen
    _found: dict[str, NodeInfo] = field(factory=dict, init=False)
    _at: float = field(default=float("-inf"), init=False)
    _lock: trio.Lock = field(factory=trio.Lock, init=False)

    async def find(self, name: str) -> NodeInfo | None:
        """Return the living machine of this name, as of the last `LOOK_S`. Raises FrayError."""
        async with self._lock:
            if trio.current_time() >= self._at + LOOK_S:
                self._found = {node.name: node for node in await self._cluster.nodes() if node.alive}
                self._at = trio.current_time()
        return self._found.get(name)

    async def mint_token(self, node: str) -> str:
        """Return a join token for a machine. Raises FrayError."""
        # A name of its own each time: that of a machine which was installed again has been used.
        machine = mint_name(node, random.SystemRandom())
        return await self._cluster.join_token(machine)


@define(eq=False)
class Rollout:
    """Work on the hosts of one file.

    Args:
        wheel: what hosts without a ``package`` install.
        report: gets one line of progress.
    """

    file: HostsFile
    wheel: OwnWheel | None
    report: Report

    async def on_all(
        self, hosts: Sequence[SshHost], work: Callable[[HostSession], Awaitable[HostOutcome]]
    ) -> list[HostOutcome]:
        """Do the same on hosts, some at a time; return the outcomes in their order. A failure stops no other host."""
        limit, outcomes = trio.CapacityLimiter(self.file.parallel), dict[str, HostOutcome]()

        async def one(host: SshHost) -> None:
            async with limit:
                outcomes[host.name] = await self._on(host, "node", work)

        async with trio.open_nursery() as nursery:
            for host in hosts:
                nursery.start_soon(one, host)
        return [outcomes[host.name] for host in hosts]

    async def on_controller(self, work: Callable[[HostSession], Awaitable[HostOutcome]]) -> list[HostOutcome]:
        """Do it on the host of the controller; nothing if the file starts none."""
        host = self.file.controller.host
        return [] if host is None else [await self._on(host, "controller", work)]

    async def _on(
        self, host: SshHost, daemon: str, work: Callable[[HostSession], Awaitable[HostOutcome]]
    ) -> HostOutcome:
        try:
            async with open_session(self.file, host, daemon) as session:
                outcome = await work(session)
        except FrayError as error:
            outcome = HostOutcome(host, "failed", str(error))
        self.report(host, f"{outcome.result}{f': {outcome.error}' if outcome.error else ''}")
        return outcome

    # Up --------------------------------------------------------------------------------------------------------------

    async def up_node(self, session: HostSession, nodes: JoinedNodes) -> HostOutcome:
        """Have a node of this file run on a host, and join.

        Raises:
            HostFailed: it cannot be installed, does not start, is not replaced, or does not join in time.
        """
        host, seen = session.host, await session.request("look", ANSWER_S)
        directory, process, release = seen["directory"], seen["process"], self._release(session.host, seen)
        config = toml_text(
            {
                **host.node,
                "controller": self.file.controller.spec,
                "name": host.name,
                "state_dir": f"{directory}/state",
                "join_token_file": f"{directory}/token",
            }
        )
        digest = hashlib.sha256(config.encode()).hexdigest()[:12]
        result = "unchanged"
        if process is None or (process["release"], process["digest"]) != (release, digest):
            await self._install(session, release, seen["python"])
            if not seen["has_key"] and process is None:
                token = await nodes.mint_token(host.name)
                await session.request("write", ANSWER_S, name="token", body=f"{token}\n".encode())
            await session.request("write", ANSWER_S, name="node.toml", body=config.encode())
            if process is not None:
                process, result = await self._replace(session, release, digest), "replaced"
            else:
                self.report(host, "starting fray-node")
                arguments = ["--config", f"{directory}/node.toml", *_logging(directory, "node")]
                process, result = await self._start(session, release, digest, arguments), "started"
        await self._wait_joined(session, nodes, process)
        return HostOutcome(host, result, process=process)

    async def up_controller(self, place: ControllerPlace) -> tuple[HostOutcome, str]:
        """Have the controller of this file run on its host; return its token, too.

        Raises:
            HostFailed: as `up_node`.
        """
        assert place.host is not None
        async with open_session(self.file, place.host, "controller") as session:
            seen = await session.request("look", ANSWER_S)
            directory, process, release = seen["directory"], seen["process"], self._release(place.host, seen)
            advertised = place.spec.partition("#")[0].removeprefix("fray://")
            arguments = ["--listen", place.listen, "--advertise", advertised, "--store", f"{directory}/store"]
            arguments += [*_logging(directory, "controller"), *place.options]
            digest = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:12]
            result = "unchanged"
            if process is None or (process["release"], process["digest"]) != (release, digest):
                await self._install(session, release, seen["python"])
                result = "started" if process is None else "replaced"
                if process is not None:
                    # Jobs continue without it.
                    limit_s = self.file.end_s
                    await session.request("end", limit_s + MORE_S, seconds=limit_s)
                self.report(place.host, "starting fray-controller")
                process = await self._start(session, release, digest, arguments)
            token = await self._wait_token(session)
            self.report(place.host, result)
            return HostOutcome(place.host, result, process=process), token

    def _release(self, host: SshHost, seen: dict[str, Any]) -> str:
        """Return the name of the release that the file wants on a host."""
        how = host.installation
        what = how.package or (self.wheel.digest if self.wheel is not None else "")
        text = "\0".join([what, *how.extras, "", *how.pip_options, how.python, seen["python"]])
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{'package' if how.package else fray.__version__}-{digest}-{seen['platform']}"

    async def _install(self, session: HostSession, release: str, python: str) -> None:
        how = session.host.installation
        body, package = _package(how, self.wheel)
        self.report(session.host, f"installing {how.package or f'fray {fray.__version__}'} with Python {python}")
        limit_s = self.file.install_s
        try:
            await session.request(
                "install",
                limit_s + MORE_S,
                release=release,
                package=package,
                pip_options=list(how.pip_options),
                seconds=limit_s,
                body=body,
            )
        except HostFailed as error:
            raise HostFailed(f"the installation failed: {error}") from None

    async def _start(self, session: HostSession, release: str, digest: str, arguments: list[str]) -> dict[str, Any]:
        started: dict[str, Any] = await session.request(
            "start", 2 * ANSWER_S + MORE_S, release=release, digest=digest, arguments=arguments
        )
        return started

    async def _replace(self, session: HostSession, release: str, digest: str) -> dict[str, Any]:
        self.report(session.host, "replacing fray-node; its jobs continue")
        try:
            replaced: dict[str, Any] = await session.request("replace", REPLACE_S, release=release, digest=digest)
            return replaced
        except HostFailed as error:
            raise HostFailed(
                f"its node was not replaced: {error}\n    It continues with the release of before. To restart it: "
                f"`fray drain {session.host.name} --wait`, `fray down --ssh` with this host alone, and this again"
            ) from None

    async def _wait_joined(self, session: HostSession, nodes: JoinedNodes, process: dict[str, Any]) -> None:
        with trio.move_on_after(self.file.join_s):
            while True:
                found = await nodes.find(session.host.name)
                if found is not None and found.pid in (None, process["pid"]):
                    return
                seen = await session.request("check", ANSWER_S)
                if not seen["alive"]:
                    raise HostFailed(f"its fray-node has ended; the end of its log:\n{seen['lines']}")
                await trio.sleep(LOOK_S)
        lines = await session.request("last_lines", ANSWER_S)
        raise HostFailed(
            f"its node has not joined {self.file.controller.spec} within {self.file.join_s:g} s, and tries on; the "
            f"end of its log:\n{lines}"
        )

    async def _wait_token(self, session: HostSession) -> str:
        with trio.move_on_after(self.file.join_s):
            while True:
                if token := await session.request("read_token", ANSWER_S):
                    return str(token)
                seen = await session.request("check", ANSWER_S)
                if not seen["alive"]:
                    raise HostFailed(f"its fray-controller has ended; the end of its log:\n{seen['lines']}")
                await trio.sleep(LOOK_S)
        raise HostFailed(f"its fray-controller has made no token within {self.file.join_s:g} s")

    # Down and status -------------------------------------------------------------------------------------------------

    async def down(self, session: HostSession) -> HostOutcome:
        """End the daemon of a host. Raises HostFailed."""
        limit_s = self.file.end_s + float(session.host.node.get("drain_s", 0.0))
        found = await session.request("end", limit_s + MORE_S, seconds=limit_s)
        late = f"it did not end within {limit_s:g} s, and was killed" if found["killed"] else ""
        return HostOutcome(session.host, "ended" if found["ended"] else "was not running", late)

    async def look(self, session: HostSession) -> HostOutcome:
        """Return what runs on a host. Raises HostFailed."""
        process = (await session.request("look", ANSWER_S))["process"]
        return HostOutcome(session.host, "running" if process else "not running", process=process)


def _logging(directory: str, daemon: str) -> list[str]:
    return ["--log-file", f"{directory}/{daemon}.log", "--quiet"]


def _package(how: Installation, wheel: OwnWheel | None) -> tuple[bytes, str]:
    """Return the wheel to send, and the requirement."""
    if how.package:
        return b"", how.package
    assert wheel is not None
    extras = f"[{','.join(how.extras)}]" if how.extras else ""
    return wheel.content, f"{wheel.name}{extras}"


def since(process: dict[str, Any]) -> float:
    """Return the seconds that a daemon has been running."""
    return max(0.0, time.time() - float(process["started"]))
