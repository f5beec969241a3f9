"""Container engine of this machine, and the command line that is a job's process in a container.

The engine's client is the job's main process: it runs in the foreground, passes on output and SIGTERM, and ends with
the container's exit code, so termination, logs and exit codes are as everywhere. Invariants: a container has the name
of its attempt, and the last to know the attempt (its shim, else its node, else the next run of that node) removes the
container of that name.

The attempt's directory is mounted and has what the process needs: the attempt spec in a file, outcome and control in
named pipes. Besides it, a container sees Fray's library and sockets. Variables are named on the command line, and their
values are the client's own: ``ps`` shows none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from fray.model.messages.tunnels import RunCommand
from fray.model.specs import AttemptSpec, EntryKind
from fray.node.prepare import PreparedEnvironment

PING_S = 1.0
LIBRARY = "/opt/fray"
"""Path of Fray and its dependencies in a container, behind the image's own packages."""
LABEL = "fray.node"
TICKET, OUTCOME, CONTROL = "attempt.json", "outcome", "control"


@frozen
class ContainerEngine:
    """Container engine on this machine."""

    kind: str
    """Name: ``docker`` or ``podman``."""
    program: str


def find_engine(environ: Mapping[str, str]) -> ContainerEngine | None:
    """Return Docker if its daemon answers, else podman, which needs none; None without either. Takes a millisecond
    then."""
    path = environ.get("PATH", os.defpath)
    docker, podman = shutil.which("docker", path=path), shutil.which("podman", path=path)
    if docker is not None and _daemon_answers(_daemon(environ)):
        return ContainerEngine("docker", docker)
    return ContainerEngine("podman", podman) if podman is not None else None


def _daemon(environ: Mapping[str, str]) -> str:
    host = environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    return host.removeprefix("unix://")


def _daemon_answers(path: str) -> bool:
    """Return whether the daemon answers: many machines have a client without one."""
    try:
        with socket.socket(socket.AF_UNIX) as ping:
            ping.settimeout(PING_S)
            ping.connect(path)
            # By its socket: starting the client would take far longer, and this is asked for each container.
            ping.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b"200" in ping.recv(100)
    except OSError:
        return False


# The command ---------------------------------------------------------------------------------------------------------


def container_name(attempt_id: str) -> str:
    """Return the name of an attempt's container."""
    return f"fray-{hashlib.sha256(attempt_id.encode()).hexdigest()[:20]}"


def node_label(state_dir: str) -> str:
    return f"{LABEL}={hashlib.sha256(state_dir.encode()).hexdigest()[:20]}"


def run_command(
    attempt_spec: AttemptSpec,
    prepared: PreparedEnvironment,
    *,
    entry: str,
    cwd: str,
    variables: Iterable[str],
    user: str,
    variables_file: str = "",
) -> list[str]:
    """Return the command line of the client for one attempt. It contains no secrets.

    Args:
        variables: names of those that the container gets of the client's own.
        variables_file: file with further ones, which the client does not have itself.
    """
    spec = attempt_spec.spec
    # --init: a process that is pid 1 without handlers would ignore SIGTERM, and orphans would stay as zombies.
    flags = ["--rm", "--init", "--name", container_name(attempt_spec.attempt_id), "--label", prepared.label]
    # The machine's network and shared memory, so that actors in it are reached, and large buffers shared, as elsewhere.
    # Its own user, so that what it writes can be removed.
    flags += ["--network", "host", "--ipc", "host", "--user", user, "--workdir", cwd]
    flags += [f"--volume={path}:{path}{':ro' if read_only else ''}" for path, read_only in _mounts(attempt_spec)]
    flags += [f"--volume={path}:{LIBRARY}/{name}:ro" for name, path in sorted(prepared.library.items())]
    cpus, memory = spec.demand.cpu_milli / 1000, spec.memory_limit_bytes
    flags += limit_flags(cpus, memory, attempt_spec.devices, podman=os.path.basename(prepared.engine) == "podman")
    # Names only: the client takes the values from its own environment, which `ps` does not show.
    flags += [word for name in sorted(variables) for word in ("--env", name)]
    flags += ["--env-file", variables_file] if variables_file else []
    # A set-uid program of the image would be root, with the machine's shared memory and the sockets of all accounts.
    flags += ["--security-opt=no-new-privileges"] if attempt_spec.account is not None else []
    command = (
        spec.argv if spec.entry is EntryKind.BINARY else python_command(spec.environment.python, entry, attempt_spec)
    )
    return [prepared.engine, "run", *flags, prepared.image, *command]


def _mounts(attempt_spec: AttemptSpec) -> list[tuple[str, bool]]:
    """Return what to mount, and whether it is read-only: the attempt's directory, and sockets without any other files.

    Connecting to a socket needs no write access to its directory.
    """
    found = [(attempt_spec.directory, False)]
    if attempt_spec.sockets:
        # Of all attempts here, so that they reach one another; each is its account's, and asks for a key.
        found += [(os.path.dirname(attempt_spec.sockets), True), (attempt_spec.sockets, False)]
    if attempt_spec.controller.startswith("unix:"):
        found.append((_controller_mount(attempt_spec.controller.removeprefix("unix:")), True))
    return found


def _controller_mount(path: str) -> str:
    """Return the directory of the controller's socket if there is nothing but sockets in it, else the socket itself.

    A controller that is restarted makes another socket, which shows in a mounted directory only.
    """
    directory = os.path.dirname(path)
    try:
        with os.scandir(directory) as entries:
            bare = all(stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) for entry in entries)
    except OSError:
        bare = False
    return directory if bare else path


def limit_flags(cpus: float, memory_bytes: int, devices: Sequence[str], *, podman: bool) -> list[str]:
    """Return flags for the CPUs, memory and devices that the job requested."""
    flags = [f"--cpus={cpus:g}"] if cpus else []
    flags += [f"--memory={memory_bytes}"] if memory_bytes else []
    gpus = [device.removeprefix("gpu-") for device in devices if device.startswith("gpu-")]
    if gpus and podman:
        flags += [f"--device=nvidia.com/gpu={number}" for number in gpus]
    elif gpus:
        flags.append(f'--gpus="device={",".join(gpus)}"')
    if any(device.startswith("tpu-") for device in devices):
        flags.append("--privileged")  # libtpu maps the chips' registers
    return flags


def python_command(python: str, entry: str, attempt_spec: AttemptSpec) -> list[str]:
    return ["python3", "-P", "-c", _BOOTSTRAP, python, entry, attempt_spec.directory]


_BOOTSTRAP = f"""
import sys, traceback
python, entry, directory = sys.argv[1:]
here = "%d.%d" % sys.version_info[:2]
try:
    if python not in ("", here):
        raise SystemExit(f"the job was submitted from Python {{python}} and the image has {{here}}: their pickles are "
                         "not compatible")
    sys.path.append({LIBRARY!r})
    from fray.node.job_process.bootstrap import enter_from
except BaseException as error:
    import json
    why = str(error) if isinstance(error, SystemExit) else traceback.format_exc(limit=-8)
    with open(directory + "/{OUTCOME}", "w") as record:
        record.write(json.dumps({{"cause": "environment", "message": "in the container: " + why}}) + "\\n")
    sys.exit(1)
enter_from(directory, entry)
"""


def exec_command(engine: str, attempt_id: str, command: RunCommand) -> list[str]:
    """Return a command line of the client that runs a command in the container of an attempt: with its variables,
    directory and user.
    """
    terminal = ["--tty", "--env", f"TERM={command.term or 'dumb'}"] if command.terminal else []
    return [engine, "exec", "--interactive", *terminal, container_name(attempt_id), *command.argv]


# Removal -------------------------------------------------------------------------------------------------------------


def remove_command(engine: str, names: Sequence[str]) -> list[str]:
    return [engine, "rm", "--force", *names]


def list_command(engine: str, label: str) -> list[str]:
    """Return a command that prints an id per line: containers that an earlier run of this node has left."""
    return [engine, "ps", "--all", "--quiet", "--filter", f"label={label}"]
