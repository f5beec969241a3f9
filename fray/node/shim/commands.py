"""Plug-in that runs commands of people in the environment of the job (``fray exec``).

Each command has a process of the shim's above it, which carries its frames (`fray.model.messages.command_frames`)
between a socket of the node and a terminal or three pipes. That process has the account, the control group and the
namespaces of the job before it looks at anything. What the command leaves behind ends with it; all of it ends with the
socket, and with the job. Of a job in a container the command is the engine's client, which runs the words in there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import selectors
import shutil
import signal
import socket
import struct
import termios
import time
import traceback
from typing import NoReturn

from attrs import evolve

from fray.errors import ProtocolMismatch
from fray.model.messages.command_frames import FrameKind, FrameReader, data_frame, number_frame, number_of, size_of
from fray.model.messages.tunnels import ARGV_LIMIT_BYTES, RunCommand
from fray.net.codec import from_json
from fray.node.accounts.switch import become, set_environ
from fray.node.job_process.bootstrap import job_variables, working_directory
from fray.node.linux.cgroups import Cgroup
from fray.node.linux.process_tree import become_subreaper, descendants, die_with, end_descendants, set_title
from fray.node.resources.allocation import Allocation
from fray.node.shim.plugin import ShimPlugin
from fray.node.shim.spawn import ShimConfig, close_all_but, reset_signals
from fray.node.shim.stack_capture import ShimContext

CANNOT_RUN = 126
"""Exit code of a command that was not started, as in a shell."""
COMMANDS_LIMIT = 16
"""Commands that run at the same time in one attempt; as many more are refused with words."""
HANG_UP_S = 1.0
"""Seconds from SIGHUP to SIGKILL when the connection is lost."""
GOODBYE_S = 5.0
"""Seconds that the other side has to receive the exit code."""
READ_BYTES = 64 * 1024
INPUT_LIMIT_BYTES = 256 * 1024
"""Input that the command has not read, from which on no more is received."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that may be sent to a command without a terminal."""


# In the shim ---------------------------------------------------------------------------------------------------------


class CommandRunner(ShimPlugin):
    """Starts commands, and ends them with the job."""

    def __init__(self, shim: ShimContext, main_pid: int, config: ShimConfig, allocation: Allocation) -> None:
        self._shim, self._main_pid, self._config, self._allocation = shim, main_pid, config, allocation
        self._processes: dict[int, int] = {}
        """Descriptor of each process that carries a command, and its pid."""
        self._recorders: set[int] = set()
        """Pids of those that record stacks."""

    def recorder_pids(self) -> list[int]:
        """Return the pids of what records stacks: its memory is not the job's."""
        return [each for pid in self._recorders for each in (pid, *descendants(pid))]

    def start(self, connection: int, py_spy: str = "") -> None:
        """Run the command that the first line on this socket names.

        Args:
            py_spy: program that records stacks in place of it.
        """
        if connection < 0:
            return
        shim = os.getpid()
        try:
            running = len(self._processes)
            if running >= 2 * COMMANDS_LIMIT:
                return
            pid = os.fork()
            if pid == 0:
                # The refusal needs a process, too: this one must not wait until it is received.
                is_allowed = running < COMMANDS_LIMIT
                # What records stacks is not in the job's control group, whose limit it might exceed.
                allocation = self._allocation if not py_spy else evolve(self._allocation, group="")
                recorder = (py_spy, self._main_pid) if py_spy else None
                _carry_command(shim, connection, self._config, allocation, is_allowed, recorder)
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # the other side reads the end of the stream
        finally:
            os.close(connection)
        self._processes[descriptor] = pid
        if py_spy:
            self._recorders.add(pid)
        self._shim.add_reader(descriptor, lambda: self._on_ended(descriptor))

    def _on_ended(self, descriptor: int) -> None:
        self._shim.remove_reader(descriptor)
        os.close(descriptor)
        pid = self._processes.pop(descriptor)
        self._recorders.discard(pid)
        os.waitpid(pid, 0)

    def on_exit(self) -> None:
        """End all commands: they are not the job's, and must not be counted as left behind by it."""
        for descriptor, pid in list(self._processes.items()):
            for each in (*descendants(pid), pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            self._on_ended(descriptor)


# In the process that carries a command -------------------------------------------------------------------------------


def _carry_command(
    shim: int,
    descriptor: int,
    config: ShimConfig,
    allocation: Allocation,
    is_allowed: bool,
    recorder: tuple[str, int] | None,
) -> NoReturn:
    try:
        die_with(shim)
        set_title("fray-exec")
        os.setsid()
        reset_signals()
        close_all_but((descriptor,))
        become_subreaper()
        if allocation.group:
            with contextlib.suppress(OSError):  # as for the job: the shim's limit holds without one, too
                Cgroup(allocation.group, allocation.group_version).add_process(os.getpid())
        variables = job_variables(config.attempt_spec, config.offered, config.prepared, config.cpus)
        if config.cpus:
            os.sched_setaffinity(0, config.cpus)
        directory = "/"
        # The engine's client gets no account and no variables of the job: those are the container's.
        if not config.prepared.image:
            if (account := config.attempt_spec.account) is not None:
                become(account)
                set_environ(os.environ, account)
                die_with(shim)
            os.environ.update(variables)
            directory = working_directory(config.attempt_spec, config.prepared.cwd)
        with socket.socket(fileno=descriptor) as connection:
            command = _receive_command(connection)
            if config.prepared.image:
                from fray.node.containers.engine import exec_command

                argv = exec_command(config.prepared.engine, config.attempt_spec.attempt_id, command)
                command = evolve(command, argv=tuple(argv))
            if recorder is not None:
                command = evolve(command, argv=_record_argv(*recorder, command.record_s))
            carrier = _Carrier(connection, command, directory)
            if is_allowed:
                carrier.run()
            else:
                carrier.refuse(f"{COMMANDS_LIMIT} commands run in this attempt, the limit")
    except BaseException:  # noqa: BLE001 - the shim's own code must never continue in the child
        traceback.print_exc()
    finally:
        end_descendants()
        os._exit(0)


def _record_argv(py_spy: str, pid: int, seconds: int) -> tuple[str, ...]:
    """Return the command that records all processes of a job. Its output is the file, its errors what py-spy says."""
    options = ("--native", "--idle", "--threads", "--subprocesses", "--format", "speedscope", "--rate", "100")
    command = (py_spy, "record", *options, "--duration", str(seconds), "--output", "/dev/fd/3", "--pid", str(pid))
    return "sh", "-c", 'exec "$@" 3>&1 1>&2', "sh", *command


def _receive_command(connection: socket.socket) -> RunCommand:
    line = b""
    # By bytes: what follows the line belongs to the frames.
    while not line.endswith(b"\n") and len(line) < 8 * ARGV_LIMIT_BYTES and (byte := connection.recv(1)):
        line += byte
    return from_json(RunCommand, line.decode())


class _Lost(Exception):
    """The connection has ended."""


class _Carrier:
    """Carries the frames of one command."""

    def __init__(self, connection: socket.socket, command: RunCommand, directory: str) -> None:
        self._connection, self._command, self._directory = connection, command, directory
        self._selector, self._reader = selectors.DefaultSelector(), FrameReader()
        self._input = bytearray()
        self._input_ended = False
        self._pid, self._pidfd, self._input_fd = -1, -1, -1
        self._outputs: dict[int, FrameKind] = {}

    def run(self) -> None:
        """Start the command, carry its frames until it has ended, and send how."""
        (self._start_on_terminal if self._command.terminal else self._start_on_pipes)()
        self._pidfd = os.pidfd_open(self._pid)
        os.set_blocking(self._input_fd, False)
        for descriptor in (self._pidfd, *self._outputs):
            self._selector.register(descriptor, selectors.EVENT_READ)
        try:
            while not self._step():
                pass
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._drain()
            self._send(number_frame(FrameKind.EXIT, code if code >= 0 else 128 - code))
            self._wait_received()
        except (_Lost, ProtocolMismatch):
            self._hang_up()

    def refuse(self, reason: str) -> None:
        """Send the reason in place of what the command would have written."""
        with contextlib.suppress(_Lost):
            self._send(data_frame(FrameKind.ERROR, f"fray: {reason}\r\n".encode()))
            self._send(number_frame(FrameKind.EXIT, CANNOT_RUN))
            self._wait_received()

    def _step(self) -> bool:
        """Handle what is ready; return True once the command has ended."""
        self._watch(self._connection.fileno(), selectors.EVENT_READ, len(self._input) < INPUT_LIMIT_BYTES)
        self._watch(self._input_fd, selectors.EVENT_WRITE, bool(self._input))
        for key, _ in self._selector.select():
            if key.fd == self._pidfd:
                return True
            if key.fd == self._connection.fileno():
                self._receive()
            elif key.fd == self._input_fd:
                self._write_input()
            elif key.fd in self._outputs:  # not the input that was closed by what was received just before
                self._read_output(key.fd)
        return False

    def _watch(self, descriptor: int, event: int, is_wanted: bool) -> None:
        if descriptor >= 0 and is_wanted != (descriptor in self._selector.get_map()):
            if is_wanted:
                self._selector.register(descriptor, event)
            else:
                self._selector.unregister(descriptor)

    def _receive(self) -> None:
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise _Lost
        for kind, content in self._reader.feed(data):
            if kind is FrameKind.INPUT and not self._input_ended:
                self._input += content
                self._input_ended = not content
                self._write_input()
            elif kind is FrameKind.SIZE and self._command.terminal:
                _set_size(self._input_fd, *size_of(content))
            elif kind is FrameKind.SIGNAL and (number := number_of(content)) in SIGNALS:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pid, number)

    def _write_input(self) -> None:
        if self._input_fd < 0:
            return
        try:
            while self._input:
                del self._input[: os.write(self._input_fd, self._input[:READ_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # the command has closed its input
            self._input.clear()
            self._input_ended = True
        if self._input_ended and not self._command.terminal:
            self._watch(self._input_fd, selectors.EVENT_WRITE, False)
            os.close(self._input_fd)
            self._input_fd = -1

    def _read_output(self, descriptor: int) -> bool:
        """Read once and send it; return whether there may be more."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal that no process has open
            data = b""
        if data:
            self._send(data_frame(self._outputs[descriptor], data))
            return True
        self._selector.unregister(descriptor)
        del self._outputs[descriptor]
        return False

    def _drain(self) -> None:
        """Send what the command has written last. Others that it has started may still hold its output."""
        for descriptor in list(self._outputs):
            os.set_blocking(descriptor, False)
            while self._read_output(descriptor):
                pass

    def _send(self, frame: bytes) -> None:
        # Waits for a slow reader: so does the command then, and nothing is kept here.
        try:
            self._connection.sendall(frame)
        except OSError:
            raise _Lost from None

    def _wait_received(self) -> None:
        """Wait until the other side has closed: what it sends meanwhile, unread, would reset the connection."""
        deadline = time.monotonic() + GOODBYE_S
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while (left_s := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left_s)
                if not self._connection.recv(READ_BYTES):
                    return

    def _hang_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGHUP)
        with selectors.DefaultSelector() as patience:
            patience.register(self._pidfd, selectors.EVENT_READ)
            patience.select(HANG_UP_S)

    # Starting it

    def _start_on_terminal(self) -> None:
        near, far = pty.openpty()
        _set_size(near, self._command.rows, self._command.columns)
        self._pid = os.fork()
        if self._pid == 0:
            self._execute(far, far, far)
        os.close(far)
        self._input_fd, self._outputs = os.dup(near), {near: FrameKind.OUTPUT}

    def _start_on_pipes(self) -> None:
        source, out, err = os.pipe(), os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._execute(source[0], out[1], err[1])
        for descriptor in (source[0], out[1], err[1]):
            os.close(descriptor)
        self._input_fd, self._outputs = source[1], {out[0]: FrameKind.OUTPUT, err[0]: FrameKind.ERROR}

    def _execute(self, source: int, out: int, err: int) -> NoReturn:
        """Become the command, in the forked process."""
        try:
            os.setsid()
            if self._command.terminal:
                fcntl.ioctl(source, termios.TIOCSCTTY, 0)
                os.environ["TERM"] = self._command.term or "dumb"
            for descriptor, target in ((source, 0), (out, 1), (err, 2)):
                os.dup2(descriptor, target)
            close_all_but(())
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self._directory)
            program = self._command.argv[0]
            os.execve(shutil.which(program) or program, list(self._command.argv), os.environ)
        except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
            reason = error.strerror if isinstance(error, OSError) else error
            os.write(2, f"fray: cannot run {self._command.argv[0]!r}: {reason}\r\n".encode())
        finally:
            os._exit(127)


def _set_size(terminal: int, rows: int, columns: int) -> None:
    if rows and columns:
        with contextlib.suppress(OSError):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
