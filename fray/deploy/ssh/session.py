"""One ``ssh`` to one host, with requests to the program that it runs there.

The host's name is the only argument of ``ssh`` that comes from outside, after ``--``; what else the host needs goes
through standard input. One connection a host is all that is opened; it ends with the block that opened it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import trio
from attrs import define, field

from fray.deploy.ssh import remote_program
from fray.deploy.ssh.hosts_file import SYSTEMD, HostsFile, SshHost
from fray.errors import ConnectionFailed, FrayError, InvalidRequest

TOO_OLD = "fray-needs-python "
# One line without quotes, so that any login shell passes it on as it is.
BOOTSTRAP = (
    "import sys; i = sys.stdin.buffer; "
    f'sys.version_info >= (3, 11) or sys.exit("{TOO_OLD}" + sys.version.split()[0]); '
    'exec(compile(i.read(int(i.readline())), "fray", "exec"), {"__name__": "__main__"})'
)
PROGRAM = Path(remote_program.__file__).read_bytes()
LINE_LIMIT = 1 << 20
GOODBYE_S = 5.0
SHOWN_BYTES = 2000
"""Bytes of the standard error of ``ssh`` that count for an error."""
REASONS = (
    (
        r"host key verification failed|host identification has changed",
        "its host key is unknown or has changed; connect "
        "once with `ssh {host}` and compare the key, or put it into known_hosts",
    ),
    (r"permission denied", "it accepts none of your keys"),
    (r"could not resolve|name or service not known", "it is unreachable: its name is unknown"),
    (r"connection refused|timed out|no route|unreachable|connection (reset|closed)", "it is unreachable"),
)
"""Pattern in the standard error of ``ssh``, and what it means."""


class HostFailed(FrayError):
    """A host cannot be reached, or does not do what is requested."""


@define(eq=False)
class HostSession:
    """Requests to a host. Made by `open_session`."""

    host: SshHost
    _process: trio.Process
    _errors: BinaryIO
    _read: bytes = field(default=b"", init=False)

    async def request(self, do: str, limit_s: float, *, body: bytes | None = None, **parameters: Any) -> Any:
        """Return the answer of the program on the host.

        Args:
            do: method of `fray.deploy.ssh.remote_program.Place`, with its parameters.
            limit_s: seconds within which the answer has to come.
            body: content of a file, which follows the request.

        Raises:
            HostFailed: it is refused there, the connection was lost, or there is no answer in time.
        """
        size = None if body is None else len(body)
        line = json.dumps({"do": do, "with": parameters, "size": size}).encode() + b"\n"
        return await self._ask(line + (body or b""), limit_s, f"it has not answered within {limit_s:g} s ({do})")

    async def _ask(self, data: bytes, limit_s: float, late: str) -> Any:
        assert self._process.stdin is not None
        with trio.move_on_after(limit_s):
            try:
                await self._process.stdin.send_all(data)
            except trio.BrokenResourceError:
                raise await self._lost() from None
            answer = json.loads(await self._answer())
            if "error" in answer:
                raise HostFailed(answer["error"])
            return answer["ok"]
        raise HostFailed(late)

    async def _answer(self) -> bytes:
        assert self._process.stdout is not None
        prefix = remote_program.ANSWER.encode()
        while True:
            line, end, rest = self._read.partition(b"\n")
            if end:
                self._read = rest
                if line.startswith(prefix):
                    return line.removeprefix(prefix)
            elif len(self._read) > LINE_LIMIT:
                raise HostFailed("it answers something else")
            else:
                chunk = await self._process.stdout.receive_some()
                if not chunk:
                    raise await self._lost()
                self._read += chunk

    async def _lost(self) -> HostFailed:
        code = await self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-SHOWN_BYTES:].decode(errors="replace").strip()
        return HostFailed(explain(code, said, self.host))


def explain(code: int, said: str, host: SshHost) -> str:
    """Return why a host gave no answer: by the exit code of ``ssh``, and what it has printed."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "no message")
    if TOO_OLD in said:
        version = said.partition(TOO_OLD)[2].split()[0]
        return f"{host.installation.python} is Python {version} there; Fray needs 3.11: name another one, python = …"
    if code in (126, 127):
        return f"it has no {host.installation.python}: name a Python of 3.11 or later, python = … ({last})"
    if code == 255:
        for pattern, reason in REASONS:
            if re.search(pattern, said, re.IGNORECASE):
                return f"{reason.format(host=host.ssh)} ({last})"
    return f"the connection was lost (exit code {code} of ssh: {last})"


@asynccontextmanager
async def open_session(file: HostsFile, host: SshHost, daemon: str) -> AsyncIterator[HostSession]:
    """Connect to a host, and start the program there; it ends with the block.

    Args:
        daemon: ``node`` or ``controller``, whose directory on the host is held meanwhile.

    Raises:
        HostFailed: it cannot be reached, does not let this account in, or has no Python of 3.11 or later.
        ConnectionFailed: there is no ``ssh`` on this machine.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = await trio.lowlevel.open_process(
                _command(file, host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C ends it through this process
            )
        except OSError as error:
            raise ConnectionFailed(f"ssh cannot be started: {error.strerror or error}") from None
        try:
            session = HostSession(host, process, errors)
            late = f"it is unreachable: no answer within {file.connect_s:g} s"
            await session._ask(b"%d\n%s" % (len(PROGRAM), PROGRAM), file.connect_s, late)
            unit = f"fray-{daemon}{f'-{host.name}' if daemon == 'node' else ''}.service"
            await session.request(
                "open",
                file.connect_s,
                directory=host.installation.directory,
                daemon=daemon,
                name=host.name,
                unit=unit if host.installation.service == SYSTEMD else "",
            )
            yield session
            with trio.move_on_after(GOODBYE_S):
                # In order: the next command finds the directory free.
                if process.stdin is not None:
                    await process.stdin.aclose()
                await process.wait()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):  # it was killed
                await process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        await stream.aclose()


def _command(file: HostsFile, host: SshHost) -> list[str]:
    config = ["-F", file.ssh_config] if file.ssh_config else []
    seconds = max(1, round(file.connect_s))
    options = (
        *("BatchMode=yes", f"ConnectTimeout={seconds}", "ServerAliveInterval=10", "ServerAliveCountMax=3"),
        *("ClearAllForwardings=yes", "RequestTTY=no"),
    )
    named = [part for option in options for part in ("-o", option)]
    return [
        "ssh",
        *config,
        *named,
        "--",
        host.ssh,
        f"exec {_word(host.installation.python)} -c {shlex.quote(BOOTSTRAP)}",
    ]


def _word(text: str) -> str:
    """Return a word for the shell of the host, where ``~/`` stays the home directory. Raises InvalidRequest."""
    if not text.isprintable():
        raise InvalidRequest(f"python = {text!r} has characters that are not printable")
    return f"~/{shlex.quote(text[2:])}" if text.startswith("~/") else shlex.quote(text)
