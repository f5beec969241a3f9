"""The daemons of ``fray up``: a controller and a node of this machine, which live on without the command.

Invariants: a daemon is known by the mark of its process, so that a pid that was used again, also after a reboot, is not
mistaken for one; the record is written before a daemon is waited for, so that what a failed start has begun can be
ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import asdict, frozen

from fray.errors import InvalidRequest
from fray.model.messages.client import ProcessMark
from fray.net.atomic_file import write_atomically
from fray.net.process_identity import is_living, process_mark

RECORD, LOCK = "cluster.json", "lock"
CONTROLLER, NODE = "controller", "node"
LAST_LINES = 8
"""Lines of the log of a daemon that has ended which an error shows."""


@frozen
class Daemon:
    """One process of the cluster."""

    name: str
    mark: ProcessMark

    @property
    def is_alive(self) -> bool:
        """True while the process lives."""
        return is_living(self.mark)


@frozen
class MachineCluster:
    """A cluster of this machine that ``fray up`` has started.

    Attributes:
        directory: with the record, the logs, the controller's store and the node's state.
        spec: cluster spec of its controller.
        daemons: in the order in which they were started.
    """

    directory: Path
    spec: str
    daemons: tuple[Daemon, ...] = ()

    @property
    def store(self) -> Path:
        """Store of the controller."""
        return self.directory / "store"

    @property
    def token_file(self) -> Path:
        """File with the cluster's token; the controller makes it."""
        return self.store / "token"

    @property
    def living(self) -> list[Daemon]:
        """The daemons that live."""
        return [one for one in self.daemons if one.is_alive]

    def log_file(self, name: str) -> Path:
        """Return the file to which a daemon logs."""
        return self.directory / f"{name}.log"

    def last_lines(self, name: str) -> str:
        """Return the end of the log of a daemon."""
        lines = self.log_file(name).read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LAST_LINES:])


def state_directory() -> Path:
    """Return ``~/.local/state/fray`` (``XDG_STATE_HOME`` counts)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute() / "fray"


def default_directory() -> Path:
    """Return the directory of the cluster of this machine, ``up`` in `state_directory`."""
    return state_directory() / "up"


def read_cluster(directory: Path) -> MachineCluster | None:
    """Return the cluster of a directory; None if ``fray up`` has not started one there. Raises InvalidRequest."""
    try:
        record = json.loads((directory / RECORD).read_text())
        daemons = tuple(Daemon(each["name"], ProcessMark(**each["mark"])) for each in record["daemons"])
        return MachineCluster(directory, record["spec"], daemons)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{directory / RECORD} cannot be read: {error}") from None


def write_cluster(cluster: MachineCluster) -> None:
    """Write the record of a cluster. Raises OSError."""
    record = {"spec": cluster.spec, "daemons": [asdict(each) for each in cluster.daemons]}
    write_atomically(cluster.directory / RECORD, json.dumps(record, indent=1).encode(), durable=True)


def find_running() -> MachineCluster | None:
    """Return the cluster of the default directory, if its controller lives and this process belongs to no job."""
    if "FRAY_ATTEMPT_ID" in os.environ:
        return None
    cluster = read_cluster(default_directory())
    is_running = cluster is not None and any(one.name == CONTROLLER for one in cluster.living)
    return cluster if is_running else None


@contextmanager
def only_command(directory: Path) -> Iterator[None]:
    """Make the directory, and hold its lock: one command at a time starts and ends daemons. Raises InvalidRequest."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (directory / LOCK).open("a")
    except OSError as error:
        raise InvalidRequest(f"{directory} cannot be used: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"another `fray up` or `fray down` is at work in {directory}") from None
        yield


def start_daemon(cluster: MachineCluster, name: str, module: str, arguments: Sequence[str]) -> Daemon:
    """Start a daemon in a session of its own, with its log in the directory. Raises OSError."""
    # A token of the environment would be that of another cluster.
    environ = {key: value for key, value in os.environ.items() if key not in ("FRAY_TOKEN", "FRAY_TOKEN_FILE")}
    with cluster.log_file(name).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cluster.directory,
            env=environ,
            start_new_session=True,
        )
    process.returncode = 0  # it outlives this command: no warning that it still runs
    return Daemon(name, process_mark(process.pid))
