"""Ports that a node offers to jobs, and checks that they are free.

Several nodes may be on one machine, of one cluster or of several, and none of them knows the others. So each claims
what it offers by names that the kernel keeps: an abstract Unix socket for every `GRAIN` ports. Such names belong to the
network namespace, as ports do, and are free as soon as their process has ended, for whatever reason.

The scheduler assigns ports with the placement, and the node tries each before the attempt starts: a port that a process
outside Fray uses ends the attempt as `PORT_TAKEN`, which costs no retry budget.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable, Iterator

from fray.errors import InvalidRequest
from fray.model.resources import PortRange
from fray.model.specs import AttemptSpec, EndReason, Outcome

GRAIN = 64
LOWEST, HIGHEST = 20_032, 32_767
"""Range in which nodes look for ports: above what services use, below the ephemeral range."""
OFFERED = 512
"""Ports offered by a machine's node by default."""
OFFERED_EMBEDDED = 128
"""Ports offered by each node of an embedded cluster."""


class PortClaim:
    """Ports that no other node of this machine offers, until `close` or the end of this process."""

    def __init__(self, ports: PortRange, names: list[socket.socket]) -> None:
        self.ports = ports
        self._names = names

    def __repr__(self) -> str:
        return f"<PortClaim {self.ports}>"

    def close(self) -> None:
        for name in self._names:
            name.close()

    def __enter__(self) -> PortClaim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def claim_ports(wanted: PortRange) -> PortClaim:
    """Claim exactly these ports.

    Raises:
        InvalidRequest: another process of this machine has claimed some of them, or of the blocks they belong to.
    """
    grains = _grains_of(wanted)
    try:
        return PortClaim(wanted, _bind_names(grains))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InvalidRequest(f"ports {wanted} cannot be claimed: {error.strerror}") from error
    # Two ranges that touch in a block have no port in common: "some of these ports are taken" would be wrong.
    taken = next((grain for grain in grains if not _is_free([grain])), grains[0])
    block = PortRange(taken * GRAIN, GRAIN)
    firsts = range((grains[-1] + 1) * GRAIN, 65_537 - wanted.count, GRAIN)
    others = (PortRange(first, wanted.count) for first in firsts)
    free = next((ports for ports in others if _is_free(_grains_of(ports))), None)
    raise InvalidRequest(
        f"ports {wanted} cannot be claimed: another process of this machine, probably a fray-node, has claimed "
        f"{block}. Ports are claimed in whole blocks of {GRAIN}; "
        + (f"free ones are --ports {free}" if free is not None else "choose others with --ports")
    )


def find_ports(count: int, rng: random.Random) -> PortClaim:
    """Claim ``count`` ports that no other node has claimed, or half of that, and so on; none if there are none."""
    # Fewer ports are better than none: several nodes and clusters may share the machine.
    while count >= GRAIN:
        for ports in _candidates(count, rng):
            try:
                return PortClaim(ports, _bind_names(_grains_of(ports)))
            except OSError:
                continue
        count //= 2
    return PortClaim(PortRange(), [])


def parse_ports(text: str) -> PortRange:
    """Return the ports of ``20000-20511``, or none of ``none``.

    Raises:
        InvalidRequest: it is neither.
    """
    if text == "none":
        return PortRange()
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise InvalidRequest(
            f"ports {text!r}: expected FIRST-LAST between 1024 and 65535, such as 20000-20511, or none"
        )
    return PortRange(int(first), int(last) - int(first) + 1)


def ports_taken_outcome(attempt_spec: AttemptSpec, taken: Iterable[int]) -> Outcome:
    """Return the outcome of an attempt that is not started because other processes use its ports."""
    held = [
        f"{name!r} ({attempt_spec.ports[name]})" for name in attempt_spec.ports if attempt_spec.ports[name] in taken
    ]
    message = f"a process outside Fray listens on node {attempt_spec.node} on the port assigned as {', '.join(held)}"
    return Outcome(cause=EndReason.PORT_TAKEN, message=message)


def ports_in_use(ports: Iterable[int]) -> list[int]:
    """Return the ports that cannot be listened on, because another process does."""
    return [port for port in ports if not _can_listen(port)]


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what is closing does not count
        try:
            # On all addresses: fails if any program listens on one of them.
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _grains_of(ports: PortRange) -> range:
    return range(ports.first // GRAIN, (ports.first + ports.count - 1) // GRAIN + 1) if ports.count else range(0)


def _is_free(grains: Iterable[int]) -> bool:
    """Return whether no process has claimed these blocks."""
    try:
        PortClaim(PortRange(), _bind_names(grains)).close()
    except OSError:
        return False
    return True


def _bind_names(grains: Iterable[int]) -> list[socket.socket]:
    """Bind all of these names, or none of them. Raises OSError."""
    held: list[socket.socket] = []
    for grain in grains:
        name = socket.socket(socket.AF_UNIX)
        held.append(name)
        try:
            # Abstract (a leading zero byte): no file remains, and the kernel frees the name with its process.
            name.bind(f"\0fray-ports-{grain * GRAIN}")
        except OSError:
            for one in held:
                one.close()
            raise
    return held


def _candidates(count: int, rng: random.Random) -> Iterator[PortRange]:
    """Return ranges in random order, so that the ports one cluster has just released are seldom the next one's."""
    firsts = list(range(LOWEST, HIGHEST + 2 - count, count))
    rng.shuffle(firsts)
    low, high = _ephemeral_range()
    # Outside of the ephemeral range, else an outgoing connection of any program may take an assigned port.
    apart = [first for first in firsts if high < first or first + count <= low]
    return (PortRange(first, count) for first in apart or firsts)


def _ephemeral_range() -> tuple[int, int]:
    """Return the range that the kernel uses for outgoing connections."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return 32_768, 60_999
    return low, high
