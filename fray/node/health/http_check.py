"""HTTP health check: GET a path of a port of this machine and look at the status."""

from __future__ import annotations

import trio

HEAD_LIMIT_BYTES = 4096
"""Bytes of an answer that are read."""


class BadAnswer(Exception):
    """Failed health check; the message says what was wrong."""


async def check_path(port: int, path: str, host: str = "127.0.0.1") -> None:
    """Send a GET for the path. Statuses from 200 to 399 are good; redirects are not followed. The caller sets the
    timeout.

    Raises:
        BadAnswer: another status, not HTTP, connection refused.
    """
    try:
        # By hand: only the status line counts, and Fray has no HTTP client among its requirements.
        stream = await trio.open_tcp_stream(host, port)
    except OSError as error:
        raise BadAnswer(f"connection refused at port {port} ({_reason(error)})") from error
    async with stream:
        try:
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            line = await _first_line(stream)
        except trio.BrokenResourceError as error:
            raise BadAnswer("the connection broke before an answer came") from error
    status = status_of(line)
    if status is None:
        raise BadAnswer(f"not an HTTP response: {line[:60]!r}")
    if not 200 <= status < 400:
        raise BadAnswer(f"status {' '.join(shown(line).split()[1:])[:60]}")


async def _first_line(stream: trio.SocketStream) -> bytes:
    data = b""
    while b"\n" not in data and len(data) < HEAD_LIMIT_BYTES:
        more = await stream.receive_some(HEAD_LIMIT_BYTES)
        if not more:
            break
        data += more
    return data.partition(b"\n")[0].rstrip(b"\r")


def status_of(line: bytes) -> int | None:
    """Return the status of ``HTTP/1.1 200 OK``; None for anything else."""
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return None
    return int(words[1])


def shown(line: bytes) -> str:
    """Return the line for a terminal, without control characters."""
    return "".join(char if char.isprintable() else " " for char in line.decode("latin-1"))


def _reason(error: OSError) -> str:
    first = error.__cause__.exceptions[0] if isinstance(error.__cause__, BaseExceptionGroup) else error
    return str(getattr(first, "strerror", None) or first)
