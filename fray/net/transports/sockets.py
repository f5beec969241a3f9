"""Addresses to sockets: ``tcp:HOST:PORT`` and ``unix:/path``, dialed and bound without blocking the loop.

``tls:HOST:PORT#FINGERPRINT`` is TCP with TLS; the fingerprints (up to two, with a comma) are those of the listener's
certificate or of its authority. To listen they are left out.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, repeat
from typing import TypeAlias

import trio
from attrs import frozen

from fray.errors import ConnectionFailed, InvalidRequest, Refused, Unreachable
from fray.net.process_identity import peer_pid
from fray.net.tls.identity import PINS_LIMIT, check_fingerprint

# A restarted controller is dialed by its whole fleet at once. The kernel applies its own limit (net.core.somaxconn)
# too.
BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1
"""Pause of a listener that has run out of file descriptors."""
PUBLISH_TRIES = 10
"""Files of dead listeners that are removed for one `listening`; others may leave new ones meanwhile."""
UNIX_PATH_LIMIT_BYTES = 107
"""Limit of the kernel; longer paths are reached through a descriptor of their directory."""
UNIX_NAME_LIMIT_BYTES = 80
UNIX_BUFFER_BYTES = 512 * 1024
"""Send buffer for a whole chunk, so that one system call takes it (the default takes most of one)."""
CONNECT_EVERY_S = 1.0
"""Seconds after which a connection that is not established is tried beside the first one: after a cut the kernel would
wait for its next retransmission, up to as long as the cut has lasted."""
CONNECT_ATTEMPTS = 4
"""Most attempts at a time; the oldest is given up."""
USER_TIMEOUT_MS = 300_000
"""Milliseconds without an acknowledgement after which the kernel ends a connection; a channel drops it long before."""
_RTO_MAX_MS = 1_000
_TCP_RTO_MAX_MS = 44
"""Option of Linux 6.15 and later, which Python does not name."""
_GONE = {errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK}
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_TRANSIENT = {errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.EAGAIN}


_Started: TypeAlias = tuple[socket.socket, int, str]
"""A socket that connects, the error number so far, and the name of a Unix socket."""


@frozen
class Address:
    """A parsed address; ``path`` for Unix sockets, else ``host`` and ``port``; with TLS its fingerprints ``pins``."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    is_tls: bool = False
    pins: tuple[str, ...] = ()

    @property
    def host_header(self) -> str:
        """Value of the Host header."""
        return f"{self.host}:{self.port}" if not self.path else "localhost"


def parse(address: str) -> Address:
    """Parse an address.

    Raises:
        InvalidRequest: neither ``tcp:HOST:PORT`` nor ``unix:/path`` nor ``tls:HOST:PORT#FINGERPRINT``, or a file name
            that is too long.
        Unreachable: an address that is not reachable over a socket.
    """
    scheme, _, rest = address.partition(":")
    if scheme in ("memory", "relay"):
        raise Unreachable(f"{address} cannot be reached over a socket", address=address)
    place, _, pins = rest.partition("#") if scheme == "tls" else (rest, "", "")
    host, colon, port = place.rpartition(":")
    if scheme in ("tcp", "tls") and colon and port.isdecimal() and int(port) < 65536 and host:
        return Address(
            address, host=host.strip("[]"), port=int(port), is_tls=scheme == "tls", pins=_parse_pins(address, pins)
        )
    if scheme == "unix" and rest.startswith("/"):
        if len(os.fsencode(os.path.basename(rest))) > UNIX_NAME_LIMIT_BYTES:
            raise InvalidRequest(f"{address}: a Unix socket's name has at most {UNIX_NAME_LIMIT_BYTES} bytes")
        return Address(address, path=rest)
    raise InvalidRequest(f"invalid address {address!r}; expected tcp:HOST:PORT or unix:/path")


def _parse_pins(address: str, text: str) -> tuple[str, ...]:
    pins = tuple(text.split(",")) if text else ()
    if len(pins) > PINS_LIMIT:
        raise InvalidRequest(f"{address}: at most {PINS_LIMIT} fingerprints")
    return tuple(check_fingerprint(pin, address) for pin in pins)


def tcp_name(host: str, port: int) -> str:
    """Return the one spelling of a TCP address by which both ends of a connection name the listener."""
    host = _spelling_of(host)
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


@lru_cache(maxsize=1024)
def _spelling_of(host: str) -> str:
    host = host.strip("[]").partition("%")[0].lower()
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(host)
        # A listener on both families sees dialers of the older one at mapped addresses.
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        host = str(mapped or found)
    return host


def local_name(sock: socket.socket) -> str:
    """Return the name of this end of a TCP connection."""
    return tcp_name(*sock.getsockname()[:2])


def file_name(found: os.stat_result) -> str:
    """Return the name of a Unix socket's file: the same in every mount namespace, and not that of a copy."""
    return f"unix:{found.st_dev}:{found.st_ino}"


@contextlib.contextmanager
def reachable(path: str) -> Iterator[str]:
    """Yield the path, or for a path that is too long for the kernel a shorter one to the same file."""
    if len(os.fsencode(path)) <= UNIX_PATH_LIMIT_BYTES:
        yield path
        return
    # A descriptor of the directory gives the same file a short name; changing the working directory would affect all
    # threads.
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


# Dialing -------------------------------------------------------------------------------------------------------------


async def connect(address: Address) -> tuple[socket.socket, str]:
    """Return a connected, non-blocking socket and the name of what it is connected to, see `fray.net.auth`.

    Raises:
        Refused: nothing is listening there (at every address of the host).
        Unreachable: no route to it.
    """
    errors, targets = [], await _targets(address)
    for family, target in targets:
        try:
            return await (_connect_one if family == socket.AF_UNIX else _connect_again)(family, target)
        except OSError as error:
            errors.append(error)
    # Refused counts as the death of the peer, so every address of the host has to say it. A missing socket file does,
    # too.
    if errors and all(error.errno in _GONE for error in errors):
        raise Refused(
            f"connection refused: nothing is listening on {address.text}",
            address=address.text,
            # At an address of another machine, a firewall may have answered.
            proves_end=bool(address.path) or all(_is_loopback(str(target[0])) for _, target in targets),
        )
    why = errors[-1].strerror or str(errors[-1]) if errors else "the name has no address"
    raise Unreachable(f"{address.text} cannot be reached: {why}", address=address.text)


async def _targets(address: Address) -> list[tuple[int, str | tuple[str, int]]]:
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"{address.text}: no such host: {error.strerror or error}", address=address.text) from None
    return [(family, target) for family, _, _, _, target in found]  # type: ignore[misc]


async def _connect_again(family: int, target: str | tuple[str, int]) -> tuple[socket.socket, str]:
    """Return the first connection that is established; begin another attempt each `CONNECT_EVERY_S`."""
    first = await _begin_connect(family, target)
    try:
        # Without tasks, since almost every connection is established by then.
        with trio.move_on_after(CONNECT_EVERY_S):
            return await _established(first)
    except BaseException:
        first[0].close()
        raise
    found: list[tuple[socket.socket, str]] = []
    errors: list[OSError] = []
    attempts: list[trio.CancelScope] = []
    try:
        async with trio.open_nursery() as nursery:

            async def attempt(scope: trio.CancelScope, started: _Started | None) -> None:
                with scope:
                    try:
                        found.append(await _connect_one(family, target, started))
                    except OSError as error:
                        errors.append(error)
                    nursery.cancel_scope.cancel()

            for started in chain([first], repeat(None)):
                attempts.append(trio.CancelScope())
                nursery.start_soon(attempt, attempts[-1], started)
                if len(attempts) > CONNECT_ATTEMPTS:
                    attempts.pop(0).cancel()
                await trio.sleep(CONNECT_EVERY_S if started is None else 0)
        if not found:
            raise errors[0]
        return found.pop(0)
    finally:
        # Two may have been established before the cancellation was delivered; or this was cancelled from outside.
        for sock, _ in found:
            sock.close()


async def _connect_one(
    family: int, target: str | tuple[str, int], started: _Started | None = None
) -> tuple[socket.socket, str]:
    started = started or await _begin_connect(family, target)
    try:
        return await _established(started)
    except BaseException:
        started[0].close()
        raise


async def _begin_connect(family: int, target: str | tuple[str, int]) -> _Started:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while (started := _start_connect(sock, target))[0] == errno.EAGAIN:  # noqa: ASYNC110 (no event for it)
            # The queue of a Unix listener is full: the kernel reports that at once and never says when there is room.
            await trio.sleep(0.01)
        return sock, *started
    except BaseException:
        sock.close()
        raise


async def _established(started: _Started) -> tuple[socket.socket, str]:
    sock, code, name = started
    if code == errno.EINPROGRESS:
        await trio.lowlevel.wait_writable(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    tune(sock)
    return sock, name or tcp_name(*sock.getpeername()[:2])


def _start_connect(sock: socket.socket, target: str | tuple[str, int]) -> tuple[int, str]:
    """Begin to connect; return the error number, and the name of a Unix socket."""
    if not isinstance(target, str):
        return sock.connect_ex(target), ""
    # Connected through a descriptor, whose file is the one that was named, whatever is at the path by then. It also
    # makes a path short enough for the kernel.
    file = os.open(target, os.O_PATH)
    try:
        return sock.connect_ex(f"/proc/self/fd/{file}"), file_name(os.fstat(file))
    finally:
        os.close(file)


def is_near(sock: socket.socket) -> bool:
    """Return whether the other end of a connected socket is on this machine, by its address alone."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        # An own address of another interface is not recognized, which costs only some latency beside large buffers.
        host = str(sock.getpeername()[0])
    except OSError:
        return False
    return _is_loopback(host)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith(("127.", "::ffff:127."))


def tune(sock: socket.socket) -> None:
    """Set the options of every connection."""
    if sock.family != socket.AF_UNIX:
        # Messages are gathered already; Nagle's algorithm would hold back the second of two until the first is
        # acknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Or the kernel doubles the pauses between retransmissions, and a connection continues long after a cut has
        # ended. An older kernel does not have it; the dialer then replaces the connection.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
        # The kernel counts retransmissions: with short pauses it would end a silent connection after 15 s, which looks
        # as if the peer's machine had ended it. Whether a peer is silent for too long is the channel's decision.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)


# Listening -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(address: Address) -> Iterator[tuple[socket.socket, str]]:
    """Yield a listening socket and its address with the bound port; a Unix socket is private and removed afterwards.

    Raises:
        InvalidRequest: the address cannot be bound (in use, not of this machine, forbidden).
    """
    try:
        sock = _bind(address)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {address.text}: {error.strerror or error}") from None
    file_id = _file_id(address.path)
    try:
        yield sock, _bound(address, sock)
    finally:
        sock.close()
        # Another listener may have replaced the file meanwhile, and its own must stay.
        if address.path and file_id == _file_id(address.path):
            os.unlink(address.path)


def _bind(address: Address) -> socket.socket:
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if address.path:
            _bind_file(sock, address.path)
        else:
            # A restarted listener gets its port back while old connections are in TIME_WAIT; two listeners cannot share
            # one (Linux).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address.host, address.port))
            sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_file(sock: socket.socket, path: str) -> None:
    """Bind a Unix socket, and put its file in its place when it has its mode and accepts connections.

    So no other account can connect before the mode is right, and another listener never takes the file for that of a
    dead one because nothing is accepting yet.
    """
    # In a directory of its own, since the mode of a new socket depends on the umask, which all threads share.
    private = tempfile.mkdtemp(prefix=".fray-", dir=os.path.dirname(path))
    hidden, aside = os.path.join(private, os.path.basename(path)), os.path.join(private, "aside")
    try:
        with reachable(hidden) as short:
            sock.bind(short)
        os.chmod(hidden, 0o600)
        sock.listen(BACKLOG)
        for _ in range(PUBLISH_TRIES):
            try:
                # A link and not a rename: it fails if another listener was faster.
                os.link(hidden, path)
                return
            except FileExistsError:
                _take_stale(path, aside)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    finally:
        for file in (hidden, aside):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        os.rmdir(private)


def _take_stale(path: str, aside: str) -> None:
    """Remove the socket file of a dead listener, by way of ``aside``.

    Raises:
        OSError: something else is there, a living listener mostly.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and _is_dead(path):
            os.rename(path, aside)
            if _is_dead(aside):
                return
            # Another listener has put its own there since it was looked at.
            os.link(aside, path)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _is_dead(path: str) -> bool:
    """Return whether the listener of a socket file has gone: the kernel refuses connections to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return _start_connect(probe, path)[0] == errno.ECONNREFUSED


def _file_id(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path) if path else None
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino) if found else None


def _bound(address: Address, sock: socket.socket) -> str:
    if address.path:
        return address.text
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{'tls' if address.is_tls else 'tcp'}:{host}:{sock.getsockname()[1]}"


async def accept(listener: socket.socket) -> tuple[socket.socket, str]:
    """Return the next connection and its origin."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            sock, peer = listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                # The connection stays in the queue, so the socket stays readable: without a pause this would be a busy
                # loop.
                await trio.sleep(ACCEPT_PAUSE_S)
            elif error.errno not in _TRANSIENT:
                raise ConnectionFailed(f"the listener broke: {error}") from error
            continue
        # Python gives accepted sockets the default time-out, whatever the listener has.
        sock.setblocking(False)
        tune(sock)
        return sock, _remote(sock, peer)


def _remote(sock: socket.socket, peer: object) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:pid={peer_pid(sock)}"
    return f"tcp:{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "tcp:"
