"""Jobs of two users on one node: one has things, the other tries to reach them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fray
from fray.job import FrayContext, get_default_job_ctx
from fray.net.buffers import shared_memory
from fray.runtime.objects.store import object_store_of

MEGABYTE = 1_000_000


def attempt_directory() -> str:
    return os.path.dirname(os.environ["FRAY_PROGRESS"])


class Owner:
    """Actor of one user with one of everything."""

    def __init__(self) -> None:
        self.saved = 0
        Path(attempt_directory(), "mine.txt").write_text("in the attempt's directory")
        Path(os.environ["HOME"], "kept.txt").write_text("in the home directory")
        print("printed by the owner", flush=True)

    def places(self) -> dict[str, str]:
        """Places of its things."""
        pool = shared_memory.pool()
        assert pool is not None
        return {
            "pid": str(os.getpid()),
            "uid": str(os.getuid()),
            "home": os.environ["HOME"],
            "memory": pool.directory,
            "temporary": self._temporary(),
            "attempt": attempt_directory(),
        }

    def _temporary(self) -> str:
        path = f"/tmp/fray-test-{os.getpid()}"
        Path(path).write_text("in /tmp")
        return path

    def double(self, data: bytes) -> bytes:
        return data + data

    async def save(self) -> None:
        self.saved += 1
        await fray.current_actor().checkpoint()

    def __fray_checkpoint__(self) -> int:
        return self.saved

    def __fray_restore__(self, saved: int) -> None:
        self.saved = saved

    def count(self) -> int:
        return self.saved

    def end(self) -> None:
        os._exit(1)


def _read(path: str) -> object:
    if os.path.isdir(path):
        return os.listdir(path)
    with open(path, "rb") as file:
        return file.read(100_000)


def _write(path: str) -> object:
    if os.path.isdir(path):
        return Path(path, "theirs.txt").write_text("planted")
    return os.open(path, os.O_WRONLY)


def _connect(path: str) -> object:
    with socket.socket(socket.AF_UNIX) as dialed:
        dialed.connect(path)
        return dialed.recv(100)


def reach(paths: list[str], sockets: list[str], pids: list[int]) -> dict[str, str]:
    """Try to read each path, connect to each socket, and look into or signal each process; return what was got."""
    got: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            got[name] = repr(action())
        except PermissionError:
            pass
        except OSError as error:
            got[name] = f"not refused: {error}"

    for path in paths:
        attempt(path, lambda: _read(path))  # noqa: B023 - called at once
        attempt(f"write {path}", lambda: _write(path))  # noqa: B023
    for path in sockets:
        attempt(f"connect {path}", lambda: _connect(path))  # noqa: B023
    for pid in pids:
        for name in ("environ", "mem", "fd", "cwd", "maps"):
            path = f"/proc/{pid}/{name}"
            attempt(path, lambda: os.readlink(path) if name == "cwd" else _read(path))  # noqa: B023
        attempt(f"signal {pid}", lambda: os.kill(pid, 0))  # noqa: B023
    return got


def privileges() -> dict[str, Any]:
    """Identity of a process of a job, and what a set-uid program could make of it."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "uids": os.getresuid(),
        "gids": os.getresgid(),
        "groups": os.getgroups(),
        "capabilities": {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")},
        "no new privileges": status["NoNewPrivs"],
        "umask": status["Umask"],
        "user": (os.environ["USER"], os.environ["LOGNAME"]),
        "can look at itself": bool(Path("/proc/self/environ").read_bytes()),
        "stderr by name": bool(os.open("/dev/stderr", os.O_WRONLY)),
    }


def spill() -> tuple[int, set[int], int]:
    """Put more objects than fit; return uid and modes of the files that hold the rest, and of their directory."""
    ctx = get_default_job_ctx()
    assert isinstance(ctx, FrayContext)
    # The first one makes the store, in the loop.
    assert ctx.get(ctx.put(1)) == 1
    object_store_of(ctx.cluster._runtime).refcounts.limit_bytes = MEGABYTE
    references = [ctx.put(bytes([number]) * MEGABYTE) for number in range(3)]
    while not (found := list(Path("/tmp").glob(f"fray-{os.getuid()}-*/[0-9]*"))):
        time.sleep(0.01)
    assert [ctx.get(reference)[0] for reference in references] == [0, 1, 2]
    (uid,) = {path.stat().st_uid for path in found}
    return uid, {path.stat().st_mode & 0o777 for path in found}, found[0].parent.stat().st_mode & 0o777


def in_workspace() -> tuple[int, list[str]]:
    """Write into the workspace; return the uid of its files, and their names."""
    Path("made.txt").write_text("here")
    found = [path for path in Path().rglob("*") if path.is_file()]
    return {path.stat().st_uid for path in found}.pop(), sorted(map(str, found))


def wait_with_children(announce: str) -> None:
    """Leave a daemon behind, and wait."""
    daemon = "import time; time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
    print(announce, os.getpid(), child.pid, flush=True)
    child.wait()
