"""Linux namespaces, mounts and tun devices, by the calls of libc: what hosts of the laboratory are made of."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
MTU_BYTES = 9000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces of ``flags``; a new PID namespace is that of the next child. Raises OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    """Mount. Raises OSError."""
    given = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _check(_libc.mount(*given), f"mount at {target}")


def bind(source: str | Path, target: str | Path) -> None:
    """Show a file or folder at another path. Raises OSError."""
    mount(str(source), str(target), "", MS_BIND)


def needed_folders() -> list[Path]:
    """Return the folders that programs on a host need although they may lie in one that is private to a host."""
    import trio  # the environment may be made of several: that of the packages counts

    found = {Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), Path(trio.__file__).parents[1]}
    return sorted(folder.resolve() for folder in found)


def make_private_folders(keep: Sequence[tuple[Path, Path]]) -> None:
    """Replace temporary folders by empty ones, and show in them each ``(source, target)`` that would be hidden."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    # Opened before they are hidden.
    sources = [(os.open(source, os.O_PATH), target) for source, target in keep]
    for folder in PRIVATE_FOLDERS:
        if Path(folder).is_dir() and not Path(folder).is_symlink():
            mount("tmpfs", folder, "tmpfs")
    for descriptor, target in sources:
        if any(target.is_relative_to(folder) for folder in PRIVATE_FOLDERS):
            target.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", str(target), "", MS_BIND | MS_REC)
        os.close(descriptor)


def open_tun(name: str) -> int:
    """Make a network device whose packets this descriptor reads and writes. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def configure_network(device: str, address: str) -> None:
    """Give the network namespace of this process its loopback, an address, and a way to everything else."""
    ip(
        "link set lo up",
        f"link set {device} mtu {MTU_BYTES} txqueuelen 10000 up",
        f"addr add {address}/32 dev {device}",
        f"route add default dev {device}",
    )


def ip(*lines: str) -> None:
    """Run lines of ``ip`` in the network namespace of this process. Raises subprocess.CalledProcessError."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True)


@functools.cache
def reason_to_skip() -> str:
    """Return why this machine cannot run the laboratory; empty if it can."""
    if sys.platform != "linux":
        return "the network laboratory needs Linux"
    if os.geteuid() != 0:
        return "the network laboratory needs root, for namespaces and tun devices"
    if shutil.which("ip") is None:
        return "the network laboratory needs the command `ip` (package iproute2)"
    if not Path("/dev/net/tun").exists():
        return "the network laboratory needs /dev/net/tun"
    # In a process of its own, since there is no way back.
    probe = (
        "from tests.network.namespaces import *\n"
        "unshare(NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)\n"
        "mount('none', '/', '', MS_REC | MS_PRIVATE)\n"
        "open_tun('lan0')\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    return f"the network laboratory cannot make namespaces here: {lines[-1]}" if done.returncode else ""
