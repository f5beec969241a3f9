"""Replacement of a running `fray-node` by the release that is installed now, in the same process, on SIGUSR2.

Shims and zygotes do not notice: the pid stays, their sockets stay open, and the next program continues the membership
under its incarnation. Invariant: at every moment either this program or the next one holds the attempts, and the end of
the process is their end. What cannot be passed on refuses the replacement, and nothing changes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator
from typing import Any

import trio

from fray.errors import FrayError
from fray.model.specs import Phase
from fray.net.codec import to_json
from fray.node.attempts.process_launcher import STATE_FORMAT, ProcessLauncher
from fray.node.config import JOIN_VARIABLE, NodeConfig
from fray.node.handover.process import own_command, replace_process
from fray.node.handover.state import FORMAT, LauncherHandover, NodeHandover
from fray.node.membership import ClusterMembership

OPTION = "--print-handover"
"""Option of `fray-node` that prints `describe` of the configuration instead of running."""
CHECK_S = 30.0
"""Seconds that the next program has to say that it can continue."""
QUIET_S = 10.0
"""Seconds within which attempts that are being started or are ending have to be running or reported."""
LOOK_EVERY_S = 0.05
OUTPUT_LIMIT_BYTES = 64 * 1024

log = logging.getLogger("fray.node")


class NotReplaced(FrayError):
    """The program cannot be replaced now; it continues."""


def describe(config: NodeConfig) -> dict[str, Any]:
    """Return what two programs must have in common for the second one to continue what the first one holds."""
    return {
        "handover": FORMAT,
        "state": STATE_FORMAT,
        "name": config.name,
        "state_dir": config.state_dir,
        "job_uids": config.job_uids,
    }


class Replacement:
    """Replaces this program when a signal requests it."""

    def __init__(self, config: NodeConfig, launcher: ProcessLauncher) -> None:
        self.member: ClusterMembership | None = None
        """Present membership, once there is one."""
        self._config, self._launcher = config, launcher

    async def run(self) -> None:
        """Replace this program on SIGUSR2, until cancelled."""
        with trio.open_signal_receiver(signal.SIGUSR2) as signals:
            async for _ in signals:
                log.info("replacement requested by SIGUSR2")
                try:
                    await self.replace()
                except (NotReplaced, OSError) as error:
                    log.error("fray-node was not replaced and continues: %s", error)

    async def replace(self) -> None:
        """Execute the installed release in this process.

        Raises:
            NotReplaced: it cannot continue what runs here, or something cannot be passed on now.
            OSError: it cannot be executed.
        """
        command, arguments = own_command()
        environ = dict(os.environ)
        if self._config.join_token:
            environ[JOIN_VARIABLE] = self._config.join_token
        await self._check(command, arguments, environ)
        member = self.member
        if member is None or member.channel is None or not member.channel.connected:
            # The lease runs: the next program must not begin with less of it than it needs to connect.
            raise NotReplaced("there is no connection to the controller now; try again when there is one")
        member.is_replaced = True
        try:
            launcher = await self._wait_quiet(member)
            silent_s = trio.current_time() - member.channel.heard_at
            used = launcher.descriptors
            handover = NodeHandover(
                incarnation=member.incarnation,
                heard_at=time.monotonic() - silent_s,
                ports=self._config.capacity.ports,
                failures=member.failures,
                launcher=launcher,
                # The controller takes the end of a connection for the end of the node.
                connections=tuple(_connections(used)),
            )
            log.info("passing %d attempts on to %s", len(launcher.attempts), command[0])
            # Without a checkpoint from the state above to here: nothing is handled that it does not contain.
            state = to_json(handover).encode()
            replace_process([*command, *arguments], environ, state, [*used, *handover.connections])
        finally:
            member.is_replaced = False
            member.reconcile_soon()

    async def _check(self, command: list[str], arguments: list[str], environ: dict[str, str]) -> None:
        """Have the next program read its configuration. Raises NotReplaced: it cannot continue."""
        text = " ".join(command)
        output, code = b"", None
        with trio.move_on_after(CHECK_S):
            output, code = await self._run([*command, OPTION, *arguments], environ)
        lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
        if code is None:
            raise NotReplaced(f"{text} {OPTION} did not end within {CHECK_S:g} s")
        try:
            found = json.loads(lines[-1])
        except ValueError:
            found = None
        if code or not isinstance(found, dict):
            raise NotReplaced(
                f"{text} cannot continue its attempts (exit code {code}: {lines[-1]}); correct it, or drain the node "
                "and restart it (docs/upgrade.md)"
            )
        own = describe(self._config)
        different = [name for name in own if found.get(name) != own[name]]
        if different:
            name = different[0]
            raise NotReplaced(
                f"{text} has {name} {found.get(name)!r}, and this fray-node {own[name]!r}: drain the node and restart "
                "it (docs/upgrade.md)"
            )

    async def _run(self, command: list[str], environ: dict[str, str]) -> tuple[bytes, int]:
        """Return the output and the exit code of a program."""
        process = await trio.lowlevel.open_process(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        # Not an orphan of an attempt, which would be killed.
        self._launcher.own_children.add(process.pid)
        try:
            output = b""
            async for chunk in process.stdout:
                output = (output + chunk)[-OUTPUT_LIMIT_BYTES:]
            return output, await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
            await process.stdout.aclose()
            self._launcher.own_children.discard(process.pid)

    async def _wait_quiet(self, member: ClusterMembership) -> LauncherHandover:
        """Wait until everything that the launcher has can be passed on, and return it."""
        with trio.move_on_after(QUIET_S):
            while True:
                ended = any(observed.phase is Phase.ENDED for observed in member.held.values())
                # What is in the socket arrives also after the replacement.
                unsent = member.channel is None or bool(member.channel.outbox.unsent)
                found = None if ended or unsent else self._launcher.hand_over()
                if found is not None:
                    return found
                # Ends of attempts are reported meanwhile, and starts complete.
                await trio.sleep(LOOK_EVERY_S)
        raise NotReplaced(f"attempts were starting or ending for {QUIET_S:g} s; try again")


def _connections(used: Collection[int]) -> Iterator[int]:
    """Yield the descriptors of connected stream sockets, besides those in ``used``."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in used and _is_connection(descriptor):
            yield descriptor


def _is_connection(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.getpeername()
            return sock.type == socket.SOCK_STREAM
    except OSError:  # closed meanwhile, no socket, or without a peer
        return False


def close_connections(handover: NodeHandover) -> None:
    """Close the connections of the program before."""
    for descriptor in handover.connections:
        os.close(descriptor)
