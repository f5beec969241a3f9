"""Program on a host to which a daemon belongs: answers requests, one JSON line each, until its input ends.

It is sent by `fray.deploy.ssh.session`, and runs before Fray is installed there: it uses the standard library alone.
Secrets come as content of files, and never in a command line.

Files of a host, in its directory for Fray:

    releases/KEY/           a virtual environment; the file ``complete`` in it is written last
    nodes/NAME/ (controller/)
        current             link to the release, by which the daemon was started and finds its next one
        node.json           its process: pid, start time and boot, release, digest of its configuration
        node.toml, token    configuration, and the join token, of mode 0600
        node.log, node.out  its log, which is rotated, and what it has printed beside that
        state/, store/      of the daemon
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

ANSWER = "fray-answer "
"""Prefix of answers; start-up files of a shell may print lines, too."""
LAST_LINES = 8
LOOK_S = 0.05
LOCK_S = 3.0
"""Seconds that a command has to end: its program here notices that its connection is gone."""
RELOAD_S = 45.0
"""Seconds that a node has to say whether another release continues its jobs: more than it gives itself."""

children: dict[int, subprocess.Popen[bytes]] = {}
"""Daemons that this program has started, by pid: their ends are collected."""


class ImpossibleHere(Exception):
    """A request cannot be fulfilled on this host; the message says why."""


class Place:
    """The directory of one daemon on this host.

    Args:
        directory: that of Fray.
        daemon: ``node`` or ``controller``.
        name: of the node.
        unit: name of its systemd unit; empty: it runs in the background, without one.
    """

    def __init__(self, directory: str, daemon: str, name: str, unit: str) -> None:
        self.root = Path(directory).expanduser().absolute()
        self.daemon, self.unit = daemon, unit
        self.own = self.root / "nodes" / name if daemon == "node" else self.root / daemon
        self.own.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Until this program ends: two commands must not start the same daemon.
        self.lock = (self.own / "lock").open("a")
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ImpossibleHere(f"another `fray … --ssh` is at work in {self.own}") from None
                time.sleep(LOOK_S)

    def file(self, suffix: str) -> Path:
        return self.own / f"{self.daemon}.{suffix}"

    # Requests --------------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Return what is here."""
        record = self.record()
        return {
            "python": platform.python_version(),
            "platform": f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}",
            "directory": str(self.own),
            "process": record if record and is_alive(record) else None,
            "has_key": self.has_key(),
        }

    def has_key(self) -> bool:
        """Return whether the node has the key that it got for its join token, and needs no other token."""
        try:
            return bool(json.loads((self.own / "state" / "machine-key.json").read_text())["key"])
        except (OSError, ValueError, KeyError):
            return False

    def install(self, release: str, package: str, pip_options: list[str], seconds: float, body: bytes) -> bool:
        """Make a virtual environment with Fray, unless it is there; return whether it was made.

        Args:
            package: requirement for pip; of the wheel in ``body`` its file's name, with extras.
        """
        home = self.root / "releases" / release
        home.parent.mkdir(mode=0o700, exist_ok=True)
        with (home.parent / f"{release}.lock").open("a") as lock:
            # Another host with the same home directory may make it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (home / "complete").exists():
                return False
            shutil.rmtree(home, ignore_errors=True)
            try:
                run([sys.executable, "-m", "venv", str(home)], seconds)
                if body:
                    name, bracket, extras = package.partition("[")
                    (home / name).write_bytes(body)
                    package = f"{home / name}{bracket}{extras}"
                run([str(home / "bin" / "python"), "-m", "pip", "install", "-q", *pip_options, package], seconds)
            except ImpossibleHere:
                shutil.rmtree(home, ignore_errors=True)
                raise
            (home / "complete").touch()
            return True

    def write(self, name: str, body: bytes) -> None:
        """Write a file that only this account can read."""
        draft = self.own / f"{name}.new"
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(body)
        draft.rename(self.own / name)

    def start(self, release: str, digest: str, arguments: list[str]) -> dict[str, Any]:
        """Start the daemon; return its record."""
        self.point_to(release)
        command = [str(self.own / "current" / "bin" / f"fray-{self.daemon}"), *arguments]
        if self.unit:
            self.start_unit(command)
            pid = self.unit_pid()
        else:
            # Variables of this login, such as a token of another cluster, are not the daemon's.
            environ = {key: value for key, value in os.environ.items() if not key.startswith("FRAY_")}
            with open(os.open(self.file("out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=self.own,
                    env=environ,
                    start_new_session=True,
                )
            children[process.pid] = process
            pid = process.pid
        record = {**mark_of(pid), "release": release, "digest": digest, "started": time.time()}
        self.write(f"{self.daemon}.json", json.dumps(record).encode())
        return record

    def point_to(self, release: str) -> None:
        link = self.own / "current.new"
        link.unlink(missing_ok=True)
        link.symlink_to(self.root / "releases" / release)
        link.replace(self.own / "current")

    def replace(self, release: str, digest: str) -> dict[str, Any]:
        """Have the running node execute another release, or the same one with another configuration; its jobs
        continue. Raises ImpossibleHere: it has not.
        """
        record = self.record()
        if record is None or not is_alive(record):
            raise ImpossibleHere("it has ended meanwhile")
        before = os.readlink(self.own / "current")
        seen = self.file("log").stat().st_size if self.file("log").exists() else 0
        self.point_to(release)
        os.kill(record["pid"], signal.SIGUSR2)
        end = time.monotonic() + RELOAD_S
        while time.monotonic() < end and is_alive(record):
            said = self.log_since(seen)
            if any("runs in place of the program before" in text for text in said):
                record |= {"release": release, "digest": digest}
                self.write(f"{self.daemon}.json", json.dumps(record).encode())
                return record
            refusals = [text for text in said if "was not replaced and continues" in text]
            if refusals:
                self.point_to(os.path.basename(before))
                raise ImpossibleHere(refusals[-1])
            time.sleep(LOOK_S)
        raise ImpossibleHere(f"it has not continued with this release within {RELOAD_S:g} s:\n{self.last_lines()}")

    def log_since(self, position: int) -> list[str]:
        try:
            with self.file("log").open("rb") as log:
                # A log that was rotated meanwhile is shorter.
                log.seek(position if position <= os.fstat(log.fileno()).st_size else 0)
                return [text_of(line) for line in log.read().decode(errors="replace").splitlines()]
        except OSError:
            return []

    def check(self) -> dict[str, Any]:
        """Return whether the daemon lives, and if not, the end of what it has said."""
        record = self.record()
        alive = record is not None and is_alive(record)
        return {"alive": alive, "lines": "" if alive else self.last_lines()}

    def last_lines(self) -> str:
        """Return the end of its output and of its log."""
        found = []
        for suffix in ("log", "out"):
            try:
                lines = self.file(suffix).read_text(errors="replace").splitlines()
            except OSError:
                continue
            found += [text_of(line) for line in lines[-LAST_LINES:]]
        return "\n".join(f"    {line}" for line in found) or "    (it has said nothing)"

    def read_token(self) -> str:
        """Return the token that the controller has made; empty: it has not yet."""
        try:
            return (self.own / "store" / "token").read_text()
        except OSError:
            return ""

    def end(self, seconds: float) -> dict[str, Any]:
        """End the daemon: by SIGTERM, and when these have passed by SIGKILL."""
        record = self.record()
        was_alive = record is not None and is_alive(record)
        if self.unit and self.unit_file().exists():
            run(["systemctl", "--user", "disable", "--now", self.unit], seconds)
            self.unit_file().unlink()
        elif record is not None and was_alive:
            os.kill(record["pid"], signal.SIGTERM)
        killed = record is not None and not ends_within(record, seconds)
        if record is not None and killed:
            os.kill(record["pid"], signal.SIGKILL)
            ends_within(record, 5.0)
        self.file("json").unlink(missing_ok=True)
        return {"ended": was_alive, "killed": killed}

    # Processes -------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(self.file("json").read_text())
        except (OSError, ValueError):
            return None
        if self.unit and (pid := self.unit_pid()):
            # The service manager starts it again when it was killed, and when the machine has started.
            record |= mark_of(pid)
        return record

    def unit_file(self) -> Path:
        return Path.home() / ".config" / "systemd" / "user" / self.unit

    def unit_pid(self) -> int:
        found = run(["systemctl", "--user", "show", "-p", "MainPID", "--value", self.unit], 30.0)
        return int(found.strip() or 0)

    def start_unit(self, command: list[str]) -> None:
        """Write the unit, and start it now and whenever the machine starts. Raises ImpossibleHere."""
        quoted = " ".join(
            '"' + each.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"' for each in command
        )
        # Not the journal, which users of many machines cannot read.
        out = str(self.file("out")).replace("%", "%%")
        self.unit_file().parent.mkdir(parents=True, exist_ok=True)
        self.unit_file().write_text(
            f"[Unit]\nDescription=Fray {self.daemon}\nStartLimitIntervalSec=0\n\n"
            f"[Service]\nType=notify\nExecStart={quoted.replace('$', '$$')}\n"
            "ExecReload=/bin/kill -USR2 $MAINPID\nRestart=always\nRestartSec=1\nKillMode=mixed\nTimeoutStopSec=120\n"
            f"Delegate=yes\nStandardOutput=append:{out}\nStandardError=inherit\n\n[Install]\nWantedBy=default.target\n"
        )
        run(["loginctl", "enable-linger"], 30.0)  # or its user's services end with the last login
        run(["systemctl", "--user", "daemon-reload"], 30.0)
        run(["systemctl", "--user", "enable", self.unit], 30.0)
        try:
            run(["systemctl", "--user", "restart", self.unit], 120.0)
        except ImpossibleHere as error:
            raise ImpossibleHere(f"{error}\n{self.last_lines()}") from None


def run(command: list[str], limit_s: float) -> str:
    """Run a program and return its output. Raises ImpossibleHere: it fails, or takes too long."""
    environ = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
    shown = " ".join(command)
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        raise ImpossibleHere(f"{shown}: not done within {limit_s:g} s") from None
    except OSError as error:
        raise ImpossibleHere(f"{shown}: {error.strerror or error}") from None
    output = ended.stdout.decode(errors="replace")
    if ended.returncode:
        lines = "\n".join(f"    {line}" for line in output.strip().splitlines()[-LAST_LINES:])
        raise ImpossibleHere(f"{shown}: exit code {ended.returncode}\n{lines}")
    return output


def text_of(line: str) -> str:
    """Return the text of a line of a log in JSON; any other line as it is."""
    try:
        entry = json.loads(line)
        return f"{entry['text']}  {entry['error']}" if "error" in entry else str(entry["text"])
    except (ValueError, TypeError, KeyError):
        return line


def mark_of(pid: int) -> dict[str, Any]:
    """Return what tells a process from another one with its pid. Raises ImpossibleHere: it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        raise ImpossibleHere("it has ended at once") from None
    return {"pid": pid, "start": stat[19], "boot": boot}


def is_alive(record: dict[str, Any]) -> bool:
    """Return whether the process of a record lives."""
    child = children.get(record["pid"])
    if child is not None and child.poll() is not None:
        return False
    try:
        mark = mark_of(record["pid"])
    except ImpossibleHere:
        return False
    return all(mark[key] == record[key] for key in mark)


def ends_within(record: dict[str, Any], limit_s: float) -> bool:
    """Wait for the end of a process; return whether it came."""
    end = time.monotonic() + limit_s
    while is_alive(record):
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)
    return True


def answer(value: dict[str, Any]) -> None:
    sys.stdout.write(f"{ANSWER}{json.dumps(value)}\n")
    sys.stdout.flush()


def serve(requests: BinaryIO) -> None:
    """Answer requests: the first makes the `Place`, the others call its methods."""
    place = None
    answer({"ok": None})
    for line in requests:
        request = json.loads(line)
        name, parameters, size = request["do"], request["with"], request["size"]
        if size is not None:
            parameters["body"] = requests.read(size)
        try:
            if place is None:
                place = Place(**parameters)
                answer({"ok": None})
            else:
                answer({"ok": getattr(place, name)(**parameters)})
        except (ImpossibleHere, OSError) as error:
            answer({"error": str(error)})


if __name__ == "__main__":
    os.umask(0o077)
    serve(sys.stdin.buffer)
