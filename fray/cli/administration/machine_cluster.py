"""``fray up``, ``fray down`` and ``fray status``: a cluster of this machine, and how a cluster stands."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import trio
from attrs import define, evolve

from fray.api.cluster import cluster_of
from fray.cli.administration import ssh_cluster
from fray.cli.formatting import fields
from fray.cli.nodes import state_of
from fray.cli.output import can_ask, confirmed, note, say, say_json
from fray.cli.queue import totals
from fray.cli.target import open_target, spec_of
from fray.deploy.cluster_spec import DEFAULT_PORT, parse_spec, spec_text
from fray.deploy.daemons import (
    CONTROLLER,
    NODE,
    Daemon,
    MachineCluster,
    default_directory,
    only_command,
    read_cluster,
    start_daemon,
    write_cluster,
)
from fray.deploy.remote import open_remote
from fray.errors import ConnectionFailed, FrayError
from fray.model.messages.client import Role
from fray.net.cluster_token import read_token_file
from fray.net.process_identity import wait_process_exited
from fray.runtime.runtime import Runtime

START_S = 60.0
"""Seconds within which a daemon has to be ready."""
END_S = 30.0
"""Seconds that a daemon has to end after SIGTERM; then it is killed."""
LOOK_S = 0.05


async def up(options: argparse.Namespace) -> int:
    """Run ``fray up``: start what does not run yet, wait until the node has joined, print the variables of drivers."""
    if options.ssh is not None:
        return await ssh_cluster.up(options)
    directory = _directory(options)
    with only_command(directory):
        known = read_cluster(directory)
        living = known.living if known is not None else []
        if known is not None and (living or options.port is None):
            spec = known.spec  # drivers of before find it again
        else:
            spec = f"fray://127.0.0.1:{options.port or _free_port()}"
        start = _Start(MachineCluster(directory, spec, tuple(living)), options)
        try:
            await start.run()
        except BaseException:
            with trio.CancelScope(shield=True):  # bounded by END_S for each
                await _end(start.cluster, [one for one in start.cluster.daemons if one not in living])
            raise
    cluster = start.cluster
    if options.json:
        say_json({"spec": cluster.spec, "token_file": str(cluster.token_file), "directory": str(directory)})
        return 0
    has_begun = len(cluster.daemons) > len(living)
    note(f"a cluster of this machine {'is up' if has_begun else 'was up already'}, with logs in {directory}")
    note("`fray status` shows it, and `fray down` ends it; drivers take these variables:")
    say([f"export FRAY_CLUSTER_SPEC={cluster.spec} FRAY_TOKEN_FILE={shlex.quote(str(cluster.token_file))}"])
    return 0


def _free_port() -> int:
    """Return the usual port, or any if that is in use."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as server, suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            return int(server.getsockname()[1])
    raise ConnectionFailed("this machine has no free port")


def _directory(options: argparse.Namespace) -> Path:
    given: Path | None = options.directory
    return default_directory() if given is None else given.expanduser().absolute()


def _open(cluster: MachineCluster) -> AbstractAsyncContextManager[Runtime]:
    tokens, _ = read_token_file(str(cluster.token_file))
    address = parse_spec(cluster.spec).address
    return open_remote(address, namespace=None, token=tokens[0], on_log=None, role=Role.TOOL)


@define
class _Start:
    """Start of what does not run of a cluster; ``cluster`` has the daemons that run or were started."""

    cluster: MachineCluster
    options: argparse.Namespace

    async def run(self) -> None:
        """Start controller and node, each if it is not there, and wait for it.

        Raises:
            ConnectionFailed: one has ended, or is not ready within `START_S`.
        """
        if not self._has(CONTROLLER):
            await self._start(CONTROLLER, "fray.controller.main", self._of_controller())
        if not self._has(NODE):
            await self._start(NODE, "fray.node", self._of_node())

    def _has(self, name: str) -> bool:
        return any(one.name == name for one in self.cluster.daemons)

    def _of_controller(self) -> list[str]:
        listen = parse_spec(self.cluster.spec).address.removeprefix("tcp:")
        policy = [] if self.options.policy is None else ["--policy", str(self.options.policy.absolute())]
        return ["--listen", listen, "--store", str(self.cluster.store), *policy]

    def _of_node(self) -> list[str]:
        given = [(name, getattr(self.options, name)) for name in ("cpu", "memory", "gpus")]
        sizes = [part for name, value in given if value is not None for part in (f"--{name}", str(value))]
        state = str(self.cluster.directory / NODE)
        token = str(self.cluster.token_file)
        return ["--controller", self.cluster.spec, "--token-file", token, "--state-dir", state, *sizes]

    async def _start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        daemon = start_daemon(self.cluster, name, module, arguments)
        self.cluster = evolve(self.cluster, daemons=(*self.cluster.daemons, daemon))
        write_cluster(self.cluster)
        problem = f"is not ready after {START_S:g} s"
        with trio.move_on_after(START_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_ended, daemon, nursery.cancel_scope)
                await (self._wait_for_controller() if name == CONTROLLER else self._wait_for_node())
                nursery.cancel_scope.cancel()
                return
            problem = "has ended"
        log = self.cluster.log_file(name)
        raise ConnectionFailed(f"the {name} {problem}; the end of its log, {log}:\n{self.cluster.last_lines(name)}")

    async def _cancel_when_ended(self, daemon: Daemon, scope: trio.CancelScope) -> None:
        await wait_process_exited(daemon.mark)
        scope.cancel()

    async def _wait_for_controller(self) -> None:
        # Something else may answer at its port: then it ends, and nothing with this token does.
        while True:
            is_ready = self.cluster.token_file.exists()
            try:
                if is_ready:
                    async with _open(self.cluster):
                        pass
            except* FrayError:
                is_ready = False
            if is_ready:
                return
            await trio.sleep(LOOK_S)

    async def _wait_for_node(self) -> None:
        async with _open(self.cluster) as runtime:
            await cluster_of(runtime).wait_for_nodes(1, timeout=math.inf)


async def down(options: argparse.Namespace) -> int:
    """Run ``fray down``: end the node with its jobs, then the controller."""
    if options.ssh is not None:
        return await ssh_cluster.down(options)
    directory = _directory(options)
    with only_command(directory):
        cluster = read_cluster(directory)
        living = cluster.living if cluster is not None else []
        if cluster is not None and not (options.yes or not can_ask() or await _may_end(cluster, living)):
            return 1
        if cluster is not None:
            await _end(cluster, living[::-1])
        if options.remove:
            shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        say_json({"ended": [one.name for one in living], "removed": options.remove})
    else:
        ended = " and ".join(f"the {one.name}" for one in living[::-1])
        note(f"ended {ended}" if living else f"no cluster of {directory} is up")
        if options.remove:
            note(f"removed {directory}")
    return 0


async def _may_end(cluster: MachineCluster, living: Sequence[Daemon]) -> bool:
    if not any(one.name == CONTROLLER for one in living):
        return True
    async with _open(cluster) as runtime:
        running = await cluster_of(runtime).list_jobs("*", states=["running"])
    return not running or await confirmed(f"{len(running)} jobs are running, and would end.\nEnd the cluster? [y/N]")


async def _end(cluster: MachineCluster, daemons: Sequence[Daemon]) -> None:
    """End daemons, one after the other: a node ends its jobs, and reports it to the controller."""
    for daemon in daemons:
        _signal(daemon, signal.SIGTERM)
        with trio.move_on_after(END_S) as patience:
            await wait_process_exited(daemon.mark)
        if patience.cancelled_caught:
            log = cluster.log_file(daemon.name)
            note(f"the {daemon.name} did not end within {END_S:g} s and is killed; its log is {log}")
            _signal(daemon, signal.SIGKILL)
    write_cluster(evolve(cluster, daemons=tuple(cluster.living)))


def _signal(daemon: Daemon, number: signal.Signals) -> None:
    if daemon.is_alive:
        os.kill(daemon.mark.pid, number)


async def status(options: argparse.Namespace) -> int:
    """Run ``fray status``."""
    if options.ssh is not None:
        return await ssh_cluster.status(options)
    spec = spec_text(spec_of(options).address)
    async with open_target(options) as cluster:
        usage, nodes = await cluster.usage(), await cluster.nodes()
        queue, running = await cluster.queue(limit=1), await cluster.list_jobs("*", states=["running"])
    states = Counter(map(state_of, nodes))
    machines = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"
    if options.json:
        found = {"running": len(running), "waiting": queue.total, "nodes": dict(states), "usage": usage}
        say_json({"cluster": spec, **found})
        return 0
    lines = [("cluster", spec), ("machines", machines)]
    lines += [*totals(usage), ("jobs", f"{len(running)} running, {queue.total} waiting")]
    say(fields(lines))
    if not any(one.alive for one in nodes):
        note("no machine is alive: see docs/daemons.md for how one joins, and `fray nodes --all` for those that left")
    return 0
