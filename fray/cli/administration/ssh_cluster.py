"""``fray up --ssh``, ``fray down --ssh`` and ``fray status --ssh``: daemons on the hosts of a file."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fray.api.cluster import Cluster
from fray.cli.formatting import span, table
from fray.cli.nodes import state_of
from fray.cli.output import can_ask, confirmed, note, say, say_json, width
from fray.cli.target import open_target
from fray.deploy.daemons import state_directory
from fray.deploy.ssh.hosts_file import HostsFile, SshHost, read_hosts_file
from fray.deploy.ssh.own_wheel import make_own_wheel
from fray.deploy.ssh.rollout import HostOutcome, JoinedNodes, Rollout, since
from fray.errors import FrayError, InvalidRequest
from fray.net.atomic_file import write_atomically


async def up(options: argparse.Namespace) -> int:
    """Run ``fray up --ssh``."""
    _refuse_others(options, "directory", "port", "policy", "cpu", "memory", "gpus")
    file = read_hosts_file(options.ssh)
    everywhere = [*file.hosts, *([file.controller.host] if file.controller.host is not None else [])]
    wheel = make_own_wheel() if any(not host.installation.package for host in everywhere) else None
    rollout = Rollout(file, wheel, _report)
    if file.controller.host is not None:
        try:
            _, token = await rollout.up_controller(file.controller)
        except FrayError as error:
            _report(file.controller.host, f"failed: {error}")
            note("without its controller no node can join: nothing was done on the other hosts")
            return 1
        place = _token_file(file)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(place, token.encode())
    async with _open(file, options) as cluster:
        nodes = JoinedNodes(cluster)
        outcomes = await rollout.on_all(file.hosts, lambda session: rollout.up_node(session, nodes))
    variables = f"export FRAY_CLUSTER_SPEC={shlex.quote(file.controller.spec)}"
    if token_file := _known_token_file(file):
        variables += f" FRAY_TOKEN_FILE={shlex.quote(token_file)}"
    if options.json:
        say_json({"spec": file.controller.spec, "token_file": token_file, "hosts": _plain(outcomes)})
    else:
        say([variables])
    return _code(outcomes)


async def down(options: argparse.Namespace) -> int:
    """Run ``fray down --ssh``: end the nodes with their jobs, then the controller, if it is one of the file."""
    _refuse_others(options, "directory", "remove")
    file = read_hosts_file(options.ssh)
    if not (options.yes or not can_ask() or await _may_end(file, options)):
        return 1
    rollout = Rollout(file, None, _report)
    outcomes = await rollout.on_all(file.hosts, rollout.down)
    outcomes += await rollout.on_controller(rollout.down)
    if options.json:
        say_json({"hosts": _plain(outcomes)})
    return _code(outcomes)


async def status(options: argparse.Namespace) -> int:
    """Run ``fray status --ssh``: what runs on the hosts, and what the cluster says of their nodes."""
    file = read_hosts_file(options.ssh)
    rollout = Rollout(file, None, lambda host, text: None)
    outcomes = [*await rollout.on_controller(rollout.look), *await rollout.on_all(file.hosts, rollout.look)]
    states: dict[str, str] = {}
    problem = ""
    try:
        async with _open(file, options) as cluster:
            states = {node.name: state_of(node) for node in await cluster.nodes()}
    except FrayError as error:
        problem = str(error)
    if options.json:
        shown = zip(_plain(outcomes), outcomes, strict=True)
        hosts = [{**each, "state": _state(one.host, file, states, problem)} for each, one in shown]
        say_json({"spec": file.controller.spec, "problem": problem, "hosts": hosts})
        return _code(outcomes) or int(bool(problem))
    rows = [
        [
            one.host.name,
            one.host.ssh,
            one.result,
            _state(one.host, file, states, problem),
            str(one.process["pid"]) if one.process else "",
            span(since(one.process)) if one.process else "",
            one.process["release"] if one.process else "",
            one.error.partition("\n")[0],
        ]
        for one in outcomes
    ]
    heads = ["NAME", "SSH", "DAEMON", "IN THE CLUSTER", "PID", "SINCE", "RELEASE", "REASON"]
    say(table(heads, rows, width(), optional=("RELEASE", "PID", "SINCE", "SSH")))
    if problem:
        note(f"the cluster says nothing: {problem}")
    return _code(outcomes) or int(bool(problem))


def _refuse_others(options: argparse.Namespace, *names: str) -> None:
    """Raise InvalidRequest for options that are about a cluster of this machine: the file has those of hosts."""
    if given := [name for name in names if getattr(options, name) not in (None, False)]:
        raise InvalidRequest(f"--{given[0]} is for a cluster of this machine; with --ssh the file says it")


def _state(host: SshHost, file: HostsFile, states: Mapping[str, str], problem: str) -> str:
    """Return what the cluster says of the node of a host."""
    if host is file.controller.host:
        return "does not answer" if problem else "answers"
    return states.get(host.name, "unknown" if problem else "not joined")


def _report(host: SshHost, text: str) -> None:
    note(f"{host.name}: {text}")


def _plain(outcomes: Sequence[HostOutcome]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.host.name,
            "ssh": one.host.ssh,
            "result": one.result,
            "error": one.error,
            "pid": one.process["pid"] if one.process else None,
            "release": one.process["release"] if one.process else "",
        }
        for one in outcomes
    ]


def _code(outcomes: Sequence[HostOutcome]) -> int:
    failed = [one for one in outcomes if one.result == "failed"]
    if failed:
        note(f"{len(failed)} of {len(outcomes)} hosts failed: {', '.join(one.host.name for one in failed)}")
    return int(bool(failed))


async def _may_end(file: HostsFile, options: argparse.Namespace) -> bool:
    names = {host.name for host in file.hosts}
    try:
        async with _open(file, options) as cluster:
            running = await cluster.list_jobs("*", states=["running"])
    except FrayError as error:
        return await confirmed(f"the cluster does not say what runs there: {error}\nEnd its nodes? [y/N]")
    there = [info for info in running if any(run.node in names for run in info.members)]
    return not there or await confirmed(
        f"{len(there)} jobs are running on these hosts; they would end, and restart elsewhere.\nEnd the nodes? [y/N]"
    )


def _token_file(file: HostsFile) -> Path:
    """Return where this machine keeps the token of a controller that it has started on a host."""
    # One for each controller; the address has characters that names of files have not.
    return state_directory() / "ssh" / hashlib.sha256(file.controller.spec.encode()).hexdigest()[:12] / "token"


def _known_token_file(file: HostsFile) -> str:
    return str(_token_file(file)) if file.controller.host is not None else file.controller.token_file


@asynccontextmanager
async def _open(file: HostsFile, options: argparse.Namespace) -> AsyncIterator[Cluster]:
    """Connect to the controller of the file. Raises as `open_target`."""
    chosen = {"cluster": file.controller.spec, "token_file": options.token_file or _known_token_file(file) or None}
    async with open_target(argparse.Namespace(**{**vars(options), **chosen})) as cluster:
        yield cluster
