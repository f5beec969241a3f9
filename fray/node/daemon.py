"""Node process between its configuration and its exit: real jobs, and signals that request the end."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from attrs import evolve

from fray.errors import FrayError
from fray.model.messages.session import VERSION
from fray.model.specs import AttemptSpec
from fray.net import file_limits
from fray.net.atomic_file import write_atomically
from fray.net.part_transfers import RequestController
from fray.net.process_identity import process_mark
from fray.net.service_manager import keep_watchdog, notify
from fray.net.transport import Bytes
from fray.net.transports.tls_dialer import TlsDialer
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.accounts.table import AccountTable
from fray.node.accounts.uid_range import EXAMPLE, parse_uids
from fray.node.attempts.process_launcher import ProcessLauncher
from fray.node.attempts.replacement import Replacement, close_connections
from fray.node.certificate import NodeCertificate
from fray.node.config import MemoryLimitMode, NodeConfig
from fray.node.containers.engine import node_label
from fray.node.environments.preparer import Environments
from fray.node.handover.state import NodeHandover
from fray.node.job_process.bootstrap import PRELOAD, WARM_AMONG_MACHINES
from fray.node.job_process.inherited_environ import node_environ
from fray.node.linux.cgroups import find_cgroup_manager
from fray.node.prepare import PreparedEnvironment, Preparer, Say
from fray.node.resources.allocator import ResourceAllocator
from fray.node.run import run_node
from fray.node.zygotes.zygote import ForkedZygote

if TYPE_CHECKING:
    from fray.node.workspaces.preparer import WorkspacePreparer

AS_ROOT = (
    "jobs run as root: they can read the cluster's token and all that is on this machine. Start fray-node with "
    f"--job-uids FIRST-LAST (such as {EXAMPLE}), or under an account of its own"
)

log = logging.getLogger("fray.node")


def state_id(directory: Path) -> str:
    """Return an id of a directory on this machine, the same after a reboot. Creates the file ``id`` there.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "id"
    if not file.exists():
        write_atomically(file, os.urandom(16).hex().encode(), durable=True)
    # With the machine's own id: a home directory on a file server may be that of several machines.
    try:
        machine = Path("/etc/machine-id").read_bytes()
    except OSError:
        machine = b""
    return hashlib.sha256(b"fray state " + machine + file.read_bytes()).hexdigest()[:32]


async def serve_daemon(
    config: NodeConfig, zygote: ForkedZygote | None = None, adopted: NodeHandover | None = None
) -> None:
    """Run a node until a signal requests its end; a second signal ends everything at once. SIGUSR2 replaces the program
    (`fray.node.attempts.replacement`).

    Args:
        zygote: the first one, if this process has forked it already.
        adopted: state of the program that ran in this process before.

    Raises:
        FrayError, OSError: the cluster does not accept it, or it cannot work on this machine.
    """
    # First of all; jobs get back the limit that this process was started with.
    inherited = file_limits.raise_limit()
    mark = process_mark()
    config = evolve(config, boot_id=mark.boot_id, process=mark, state_id=state_id(Path(config.state_dir)))
    offered = Counter(device.kind for device in config.capacity.devices)
    # Importing what checks certificates takes time, and connections on one machine do without it.
    warm = (*PRELOAD, *(WARM_AMONG_MACHINES if _is_among_machines(config) else ()))
    launcher = ProcessLauncher(
        config.state_dir,
        warm=warm,
        preload=config.preload,
        # This process starts nothing but the node's children, so every other child is an orphan to be killed.
        subreaper=True,
        offered=offered,
        zygote=zygote,
        pid_namespace=config.pid_namespace,
        allocator=_make_allocator(config),
        log_rules=config.logs,
        environments=_make_environments(config),
        descriptors=inherited,
        accounts=AccountTable(parse_uids(config.job_uids), Path(config.state_dir)) if config.job_uids else None,
        adopted=adopted.launcher if adopted is not None else None,
    )
    replacement = Replacement(config, launcher)
    store = cache_directory(config) / "workspaces"
    # In front of the environments, which read the workspace's pyproject.toml and uv.lock.

    async def request(message: object, blobs: Sequence[Bytes] = (), /) -> tuple[Any, Sequence[Bytes]]:
        return await launcher.request(message, blobs)  # looked up with each call: the node sets it later

    workspaces = _WithWorkspaces(store, request, mark.boot_id, launcher.preparer)
    launcher.preparer, launcher.before_removal = workspaces, workspaces.return_copy
    leave = trio.Event()
    refused: FrayError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_leave_on_signal, leave, nursery.cancel_scope)
        if config.parent_pid is None:
            nursery.start_soon(replacement.run)
            # Not when it has joined: it waits for a controller that is away.
            notify("READY=1\nSTATUS=waiting for the controller")
            nursery.start_soon(keep_watchdog)
        try:
            certificate = _load_certificate(config)
            network = WebSocketNetwork(tls_dialer=certificate.dialer if certificate is not None else None)
            rng = random.SystemRandom()
            await run_node(
                config,
                network,
                launcher,
                rng=rng,
                leave=leave,
                certificate=certificate,
                adopted=adopted,
                on_member=partial(setattr, replacement, "member"),
                task_status=_Joined(config, launcher, adopted),
            )
        except FrayError as error:
            # Raised outside of the nursery, which would wrap it in an ExceptionGroup.
            refused = error
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused


class _Joined:
    """Status of `run_node`: once it has joined, it warns if jobs have root's account, and closes what the program
    before has left open until then."""

    def __init__(self, config: NodeConfig, launcher: ProcessLauncher, adopted: NodeHandover | None) -> None:
        self._launcher, self._adopted, self._is_service = launcher, adopted, config.parent_pid is None
        self._is_unsafe = os.geteuid() == 0 and not config.job_uids and config.parent_pid is None

    def started(self, value: object = None) -> None:
        if self._is_service:
            notify("STATUS=has joined the cluster")
        if self._adopted is not None:
            close_connections(self._adopted)
            self._launcher.release_logs()
            attempts = len(self._adopted.launcher.attempts)
            log.info("fray %s runs in place of the program before: %d attempts continue", VERSION, attempts)
        elif self._is_unsafe:
            log.warning("%s", AS_ROOT)


def _load_certificate(config: NodeConfig) -> NodeCertificate | None:
    if not config.controller.startswith("tls:"):
        return None
    certificate = NodeCertificate(TlsDialer(), config.state_dir, config.controller)
    certificate.load()
    return certificate


class _WithWorkspaces:
    """Preparer that imports `fray.node.workspaces.preparer.WorkspacePreparer` (10 ms) for the first job with a
    workspace."""

    def __init__(self, store: Path, request: RequestController, boot_id: str, then: Preparer) -> None:
        self._store, self._request, self._boot_id, self.then = store, request, boot_id, then
        self._with: WorkspacePreparer | None = None

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        if attempt_spec.spec.environment.bundle is None:
            return await self.then.prepare(attempt_spec, say)
        if self._with is None:
            from fray.node.workspaces.preparer import WorkspacePreparer, Workspaces

            self._with = WorkspacePreparer(Workspaces(self._store, self._request, self._boot_id), self.then)
        return await self._with.prepare(attempt_spec, say)

    def return_copy(self, attempt_spec: AttemptSpec) -> None:
        if self._with is not None:
            self._with.return_copy(attempt_spec)


def _make_environments(config: NodeConfig) -> Environments:
    environ = node_environ(os.environ, os.path.abspath(config.state_dir))
    label = node_label(os.path.abspath(config.state_dir))
    return Environments(
        cache_directory(config) / "environments",
        config.environments,
        environ,
        label=label,
        makes_identities=_is_among_machines(config),
    )


def _is_among_machines(config: NodeConfig) -> bool:
    """Return whether connections may be TCP."""
    return config.networked or config.controller.startswith(("tcp:", "tls:"))


def cache_directory(config: NodeConfig) -> Path:
    """Return the directory of what this machine can fetch or build again."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()  # processes below it have other working directories
    # expanduser returns its argument where there is no home directory, as for some service users.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home if os.path.isabs(home) else config.state_dir, "fray")


def _make_allocator(config: NodeConfig) -> ResourceAllocator:
    """Return the allocator, with control groups where this node may create them."""
    # An embedded node runs in its driver's control group, which is not its own to divide.
    embedded = config.parent_pid is not None
    may_have_groups = not embedded and config.memory_limit is MemoryLimitMode.AUTO
    # By the id and not by the path: nodes in containers of one machine may share the control groups, and all have the
    # same path, so that each would take the groups of the others for leftovers of its own.
    groups = find_cgroup_manager(config.state_id) if may_have_groups else None
    return ResourceAllocator(groups, enforce=config.memory_limit is not MemoryLimitMode.OFF)


async def _leave_on_signal(leave: trio.Event, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            # The second signal: the operator does not want to wait for the termination of jobs.
            if leave.is_set():
                scope.cancel()
            log.info("shutdown requested by %s", signal.Signals(number).name)
            leave.set()
