"""``fray doctor``: one line for each thing that is wrong here or on the way to the cluster, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import trio
from attrs import frozen

from fray.cli.formatting import wrapped
from fray.cli.output import say, say_json, width
from fray.cli.target import has_token, spec_of, token_of
from fray.deploy import daemons, stored_keys
from fray.deploy.cluster_spec import DEFAULT_PORT
from fray.deploy.remote import open_remote
from fray.errors import FrayError, InvalidRequest, Unauthorized
from fray.model.messages.client import ControllerHello, ListNodes, NodeInfo, Role
from fray.model.messages.node import CLOCK_OFFSET
from fray.model.messages.session import VERSION
from fray.model.resources import PortRange
from fray.model.text import byte_size_text, duration_text
from fray.net.controller_address import INSECURE_VARIABLE, is_elsewhere
from fray.net.file_limits import limit
from fray.node.accounts.switch import closed_parent
from fray.node.accounts.table import FILE as ACCOUNTS_FILE
from fray.node.accounts.uid_range import EXAMPLE, account_conflict, parse_uids, subordinate_conflict
from fray.node.linux.cgroups import find_cgroup_manager
from fray.node.ports import OFFERED, claim_ports, find_ports, parse_ports, ports_in_use
from fray.runtime.open import local_user

ANSWER_S = 5.0
"""Seconds that a name server, a port and the controller have to answer."""
CLOCK_WARNING_S = 5.0
"""Difference of two clocks from which on times in logs mislead."""
NODE_CLOCK_WARNING_S = 30.0
"""The same for nodes, of which there may be many."""
CLOCK_LIMIT_S = 600.0
"""Difference of two clocks that certificates tolerate."""
KEY_WARNING_S = 3 * 86_400.0
"""Rest of the life of a person's key from which on another one is due."""
DISK_WARNING_BYTES = 5 * 1000**3
DISK_LIMIT_BYTES = 500 * 1000**2
DESCRIPTORS_WANTED = 4_096
PORTS_SHOWN = 3
INDENT = 22
"""Column in which the text of a line begins."""


class Result(StrEnum):
    """Result of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@frozen
class Finding:
    """One line of the report."""

    check: str
    result: Result
    text: str
    """Finding in one line."""
    advice: str = ""
    """Advice in one line; empty if there is nothing to do."""

    def line(self) -> str:
        """Return it as text."""
        return f"{self.result.value:8} {self.check:12} {self.text}" + (f": {self.advice}" if self.advice else "")


def ok(check: str, text: str) -> Finding:
    return Finding(check, Result.OK, text)


def warning(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Result.WARNING, text, advice)


def failed(check: str, text: str, advice: str) -> Finding:
    return Finding(check, Result.FAILED, text, advice)


def skipped(check: str, text: str) -> Finding:
    return Finding(check, Result.SKIPPED, text)


async def doctor(options: argparse.Namespace) -> int:
    """Run ``fray doctor``; return 1 if a check has failed, else 0."""
    directories = [Path(each) for each in options.directory]
    ranges = [options.job_uids] if options.job_uids else _configured_ranges(directories)
    accounts = [finding for text in ranges for finding in check_job_uids(text)]
    found = [*check_machine(directories, options.ports), *accounts, *await check_cluster(options)]
    if options.json:
        say_json(found)
    else:
        say(part for finding in found for part in wrapped(finding.line(), width(), INDENT))
    return int(any(finding.result is Result.FAILED for finding in found))


# This machine --------------------------------------------------------------------------------------------------------


def check_machine(directories: Sequence[Path] = (), ports: str | None = None) -> Iterator[Finding]:
    """Yield the findings that need no cluster.

    Args:
        directories: also checked for space: the store of a controller, the state of a node.
        ports: of ``fray-node --ports``. Default: what a node chooses.
    """
    yield ok("version", f"fray {VERSION}, Python {platform.python_version()}, Linux {platform.release()}")
    yield _check_account()
    yield _check_cgroups()
    yield _check_descriptors()
    yield _check_own_name()
    yield _check_port()
    yield check_node_ports(ports)
    for directory in (*directories, Path(tempfile.gettempdir()), _cache_directory()):
        yield check_disk(directory)


def _check_account() -> Finding:
    name = local_user()
    if not name:
        return warning("account", f"the user {os.geteuid()} has no name", "set FRAY_USER, by which shares are counted")
    if not name.isprintable():
        return failed("account", f"the name {name!a} is not printable", "set FRAY_USER to one that is")
    if os.geteuid() == 0:
        return warning(
            "account",
            "this is root: jobs of a fray-node started here run as root",
            "give fray-node an account, or --job-uids FIRST-LAST",
        )
    return ok("account", f"user {os.geteuid()}, counted as {name!r}")


def _configured_ranges(directories: Iterable[Path]) -> list[str]:
    """Return the ranges of the nodes whose state is in these directories."""
    found = []
    for directory in directories:
        # Only root may read it, or there is no node with accounts.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append(str(json.loads((directory / ACCOUNTS_FILE).read_text())["uids"]))
    return found


def check_job_uids(text: str) -> Iterator[Finding]:
    """Yield a line for each condition of ``fray-node --job-uids`` on this machine."""
    check = "job uids"
    try:
        uids = parse_uids(text)
    except InvalidRequest as error:
        yield failed(check, str(error).partition(";")[0], f"write --job-uids {EXAMPLE}, for example")
        return
    if os.geteuid() == 0:
        yield ok(check, "this is root, which may change the accounts of jobs")
    else:
        yield failed(check, "this is not root, which alone may change the accounts of jobs", "start fray-node as root")
    conflict = account_conflict(uids)
    if conflict:
        yield failed(check, conflict, "choose a range that no account has")
    else:
        yield ok(check, f"no account and no group of this machine is in {uids}")
    conflict = subordinate_conflict(uids)
    if conflict:
        yield failed(check, conflict, "choose a range outside of it: rootless containers run under these ids")
    else:
        yield ok(check, f"no subordinate ids of this machine are in {uids}")
    closed = closed_parent(Path(sys.executable).resolve())
    if closed is not None:
        advice = "install Python and Fray where all accounts may read them"
        yield failed(check, f"other accounts cannot enter {closed}, above the interpreter", advice)
    else:
        yield ok(check, f"other accounts can reach {sys.executable}")


def _check_cgroups() -> Finding:
    manager = find_cgroup_manager("doctor")
    if manager is not None:
        return ok("cgroups", f"version {manager.version}, below {manager.base}")
    return warning(
        "cgroups",
        "none may be made here, so that memory limits of jobs are enforced by sampling",
        "start fray-node as a systemd service with Delegate=yes, or as root",
    )


def _check_descriptors() -> Finding:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_WANTED:
        return warning(
            "open files",
            f"at most {hard:,} for a process; a node needs five for each attempt",
            f"raise the limit to {DESCRIPTORS_WANTED:,} or more (LimitNOFILE=, ulimit -n)",
        )
    return ok("open files", f"{limit():,}, and daemons raise that")


def _check_own_name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return warning(
            "own name",
            f"{name!r} has no address ({error.strerror or error})",
            "start fray-node with --advertise ADDRESS if other machines are to reach it",
        )
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return warning(
            "own name",
            f"{name!r} is {', '.join(sorted(addresses))}, which other machines cannot reach",
            "correct /etc/hosts, or start fray-node with --advertise ADDRESS",
        )
    return ok("own name", f"{name!r} is {', '.join(sorted(addresses))}")


def _check_port() -> Finding:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            # Mostly a controller, as it should be.
            return ok("port", f"{DEFAULT_PORT}, that of controllers, is in use on this machine ({error.strerror})")
    return ok("port", f"{DEFAULT_PORT}, that of controllers, is free on this machine")


def check_node_ports(text: str | None = None) -> Finding:
    """Check the ports that a ``fray-node`` started here would offer to jobs.

    Args:
        text: of ``--ports``. Default: what a node chooses.
    """
    check = "node ports"
    try:
        wanted = PortRange(0, OFFERED) if text is None else parse_ports(text)
    except InvalidRequest as error:
        return failed(check, str(error).partition(", such as")[0], "write --ports 20000-20511, for example, or none")
    if not wanted.count:
        return skipped(check, "none are offered to jobs")
    try:
        # For this moment only: they are free again at once.
        with claim_ports(wanted) if wanted.first else find_ports(wanted.count, random.SystemRandom()) as claim:
            ports = claim.ports
    except InvalidRequest as error:
        advice = "choose others with --ports, unless that is the node you have in mind"
        return warning(check, str(error).partition(". Ports")[0], advice)
    if ports.count < wanted.count:
        advice = "start fray-node with --ports FIRST-LAST, outside of what the others have"
        return warning(check, f"other nodes of this machine leave {ports.count} ports to another one", advice)
    used = ports_in_use(range(ports.first, ports.first + ports.count))
    if used:
        shown = ", ".join(map(str, used[:PORTS_SHOWN])) + (", …" if used[PORTS_SHOWN:] else "")
        text = f"other programs listen on {len(used)} of {ports} ({shown})"
        return warning(check, text, "end them, or choose others with --ports: jobs that get them are placed again")
    return ok(check, f"{ports} are free for jobs on this machine")


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def check_disk(directory: Path) -> Finding:
    """Check that a directory, or the one in which it would be made, is writable and has space."""
    place = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    if not os.access(place, os.W_OK):
        return failed("disk", f"{place} is not writable for this user", "change its owner, or pass another directory")
    free_bytes = shutil.disk_usage(place).free
    text = f"{byte_size_text(free_bytes)} free for {directory}"
    if free_bytes < DISK_LIMIT_BYTES:
        return failed("disk", text, "free space there: stores, logs and workspaces cannot be written")
    if free_bytes < DISK_WARNING_BYTES:
        return warning("disk", text, "free space there soon")
    return ok("disk", text)


# The cluster ---------------------------------------------------------------------------------------------------------


async def check_cluster(options: argparse.Namespace) -> list[Finding]:
    """Return the findings about the way to the cluster of the options, and about it."""
    try:
        named = options.cluster or os.environ.get("FRAY_CLUSTER_SPEC") or stored_keys.default_spec()
        if not named and daemons.find_running() is None:
            return [skipped("cluster", "none given (--cluster, FRAY_CLUSTER_SPEC, `fray login`, `fray up`)")]
        address = spec_of(options).address
    except InvalidRequest as error:
        return [failed("cluster", str(error), "correct the command, or the variable FRAY_CLUSTER_SPEC")]
    try:
        token = token_of(options)
        key = None if token or has_token() else stored_keys.find_key(address)
    except InvalidRequest as error:
        # It says itself what to do.
        return [Finding("identity", Result.FAILED, str(error))]
    found = [_check_token_file(options.token_file)] if options.token_file else []
    if key is not None:
        found.append(_check_key(key, time.time()))
    kind, _, rest = address.partition(":")
    if kind in ("tcp", "tls"):
        host, _, port = rest.partition("#")[0].rpartition(":")
        found += await _check_way(host.strip("[]"), int(port))
        if found[-1].result is Result.FAILED:
            return found
    try:
        with trio.fail_after(2 * ANSWER_S):
            async with open_remote(address, namespace=None, token=token, on_log=None, role=Role.TOOL) as runtime:
                hello = await runtime.client.wait_ready(ANSWER_S)
                # A certificate that is not accepted is the error of the connection, with what to do.
                found.append(_check_encryption(runtime.address))
                found += check_controller(hello, time.time())
                nodes = await runtime.client.request(ListNodes())
                found += await _check_nodes(nodes.nodes)
    except Unauthorized as error:
        if error.details.get("impostor"):
            found.append(failed("certificates", str(error), "compare with `fray ca show` on the controller's machine"))
            return found
        found.append(failed("identity", str(error), "use the token whose file fray-controller names at its start"))
    except (FrayError, trio.TooSlowError) as error:
        text = str(error) or f"it did not answer within {2 * ANSWER_S:g} s"
        found.append(failed("controller", text, "see the log of fray-controller"))
    return found


def _check_token_file(file: str) -> Finding:
    if os.stat(file).st_mode & 0o077:
        return warning("identity", f"others may read {file}", f"chmod 600 {file}")
    return ok("identity", f"{file} is readable for this user only")


def _check_key(key: stored_keys.StoredKey, now: float) -> Finding:
    left_s = key.expires_at - now
    if left_s < KEY_WARNING_S:
        return warning(
            "identity",
            f"the key of {key.user} for {key.spec} expires in {duration_text(left_s)}",
            f"ask an admin for an invitation (`fray user add {key.user} --role {key.role}`), then "
            f"`fray login {key.spec}`",
        )
    return ok("identity", f"{key.user} ({key.role}), by the key of a login that is valid for {duration_text(left_s)}")


async def _check_way(host: str, port: int) -> list[Finding]:
    """Return whether the controller's name has an address and something answers there."""
    try:
        with trio.fail_after(ANSWER_S):
            infos = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, trio.TooSlowError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {ANSWER_S:g} s"
        advice = "check its spelling and /etc/resolv.conf, or use an IP address"
        return [failed("name", f"{host!r} cannot be resolved ({why})", advice)]
    found = [ok("name", f"{host!r} is {', '.join(sorted({str(info[4][0]) for info in infos}))}")]
    try:
        with trio.fail_after(ANSWER_S):
            await (await trio.open_tcp_stream(host, port)).aclose()
    except OSError as error:
        text = f"nothing accepts connections at {host}:{port} ({error.__cause__ or error})"
        found.append(failed("way", text, f"start fray-controller there, with --listen 0.0.0.0:{port}"))
    except trio.TooSlowError:
        text = f"no answer from {host}:{port} within {ANSWER_S:g} s"
        found.append(failed("way", text, "a firewall or a wrong route drops packets: open the port"))
    else:
        found.append(ok("way", f"{host}:{port} accepts connections"))
    return found


def _check_encryption(address: str) -> Finding:
    if address.startswith("tls:"):
        return ok("certificates", "accepted: TLS 1.3")
    if is_elsewhere(address):
        return warning("certificates", f"{INSECURE_VARIABLE}=1: traffic is not encrypted", "unset it")
    return skipped("certificates", "none are used on one machine")


def check_controller(hello: ControllerHello, now: float) -> Iterator[Finding]:
    """Yield findings about the greeting of the controller.

    Args:
        now: time of this machine's clock, seconds since the epoch.
    """
    yield ok("controller", f"cluster {hello.cluster_id[:8]}, start {hello.epoch} of its controller")
    yield _check_version("controller", hello.version)
    if not hello.now:
        yield skipped("clock", "this controller does not send its time")
        return
    late_s = now - hello.now
    where = _offset_text(late_s)
    if abs(late_s) > CLOCK_LIMIT_S:
        yield failed("clock", f"this machine's clock is {where}", "synchronize both (timedatectl set-ntp true)")
    elif abs(late_s) > CLOCK_WARNING_S:
        yield warning("clock", f"this machine's clock is {where}", "synchronize both (timedatectl set-ntp true)")
    else:
        yield ok("clock", f"within {CLOCK_WARNING_S:g} s of the controller's")


def _check_version(whose: str, version: str) -> Finding:
    if version == VERSION:
        return ok("version", f"{whose}: fray {version}")
    return warning(
        "version",
        f"{whose}: fray {version or 'of an earlier version'}, here {VERSION}",
        "finish the upgrade: the controller first, then nodes, then drivers (docs/upgrade.md)",
    )


async def _check_nodes(nodes: Sequence[NodeInfo]) -> list[Finding]:
    if not nodes:
        return [warning("nodes", "none has joined", "start fray-node on each machine")]
    found = list(check_nodes(nodes))
    for host in {node.host for node in nodes if node.host}:
        try:
            with trio.fail_after(ANSWER_S):
                await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, trio.TooSlowError):
            advice = "start its fray-node with --advertise ADDRESS; until then calls to its actors are relayed"
            found.append(warning("name", f"{host!r}, of a node, cannot be resolved here", advice))
    return found


def check_nodes(nodes: Iterable[NodeInfo]) -> Iterator[Finding]:
    """Yield a line for each machine with something to do, and one for all others."""
    well = 0
    for node in nodes:
        version = _check_version(f"node {node.name}", node.details.get("fray", ""))
        clock = _check_offset(node)
        if clock is not None:
            yield clock
        if not node.alive:
            yield failed("nodes", f"{node.name} is silent", "look at its fray-node, and at the network between them")
        elif version.result is not Result.OK:
            yield version
        elif node.standing:
            yield warning("nodes", f"{node.name} is {node.standing} ({node.standing_reason})", "fray uncordon NAME")
        elif clock is None:
            well += 1
    yield ok("nodes", f"{well} in service")


def _check_offset(node: NodeInfo) -> Finding | None:
    """Return what is wrong with the clock of a node; None: it is near the controller's."""
    offset_s = float(node.details.get(CLOCK_OFFSET, "0 s").removesuffix(" s"))
    text = f"that of node {node.name} is {_offset_text(offset_s)}"
    if abs(offset_s) > CLOCK_LIMIT_S:
        return failed("clock", text, "synchronize both (timedatectl set-ntp true): its certificates are not accepted")
    if abs(offset_s) > NODE_CLOCK_WARNING_S:
        return warning("clock", text, "synchronize both (timedatectl set-ntp true)")
    return None


def _offset_text(offset_s: float) -> str:
    return f"{duration_text(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} the controller's"
