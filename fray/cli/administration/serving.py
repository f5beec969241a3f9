"""Options of verbs that serve HTTP: the address, a secret in a file, TLS. Needs ``fray[monitoring]``."""

from __future__ import annotations

import argparse
import signal
import ssl
import sys
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fray.cli.output import note, say_json
from fray.errors import InvalidRequest
from fray.http_server import HttpAddress, serve_http, tls_of_server
from fray.net.controller_address import is_loopback

SECRET_BYTES = 16
"""Shortest secret."""


def listen_address(options: argparse.Namespace) -> tuple[str, int]:
    """Return host and port of ``--listen``. Raises InvalidRequest."""
    text: str = options.listen
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"invalid --listen {text!r}; expected HOST:PORT (port 0 takes a free one)")
    return host.strip("[]"), int(port)


def secret_in(file: Path, option: str) -> str:
    """Return the secret in a file that only its owner can read. Raises InvalidRequest."""
    try:
        secret = file.read_text().strip()
        is_private = not file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{option} {file}: {getattr(error, 'strerror', None) or error}") from None
    if not is_private:
        raise InvalidRequest(f"{option} {file}: other users can read it; use chmod 600")
    if len(secret) < SECRET_BYTES or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise InvalidRequest(
            f"{option} {file}: expected {SECRET_BYTES} or more printable ASCII characters without spaces, as "
            "`openssl rand -hex 16` makes them"
        )
    return secret


def tls_of(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the context of ``--tls-cert`` and ``--tls-key``; None without them. Raises InvalidRequest."""
    if bool(options.tls_cert) != bool(options.tls_key):
        raise InvalidRequest("--tls-cert and --tls-key belong together: the certificate and its key, in PEM")
    return tls_of_server(options.tls_cert, options.tls_key) if options.tls_cert else None


def check_reach(options: argparse.Namespace, is_protected: bool, missing: str) -> None:
    """Check that only this machine can reach the address, or that it is protected. Raises InvalidRequest."""
    if not (is_loopback(listen_address(options)[0]) or is_protected):
        raise InvalidRequest(f"--listen {options.listen}: other machines can reach it; add {missing}")


async def serve(options: argparse.Namespace, source: Any, tls: ssl.SSLContext | None, path: str) -> None:
    """Run ``source``, and serve its ``app`` until Ctrl-C; print the URL with ``path``.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        FrayError: the first connection of ``source`` fails.
        InvalidRequest: the address cannot be listened on.
    """
    # Received as a signal: Trio would raise it in whatever task runs, and Hypercorn takes it for an error of a request.
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_start, nursery, options, source, tls, path)
            await anext(signals)
            nursery.cancel_scope.cancel()
    raise KeyboardInterrupt


async def _start(
    nursery: trio.Nursery, options: argparse.Namespace, source: Any, tls: ssl.SSLContext | None, path: str
) -> None:
    host, port = listen_address(options)
    await nursery.start(source.run)
    try:
        address: HttpAddress = await nursery.start(partial(serve_http, source.app, host=host, port=port, tls=tls))
    except OSError as error:
        raise InvalidRequest(f"--listen {options.listen}: {error.strerror or error}") from None
    if options.json:
        say_json({"url": f"{address.url}{path}"})
        sys.stdout.flush()
    else:
        note(f"serving {address.url}{path}")
