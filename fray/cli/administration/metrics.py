"""``fray metrics``: serves the numbers of a cluster to Prometheus, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import trio

from fray.cli.output import explained_missing, note, say_json
from fray.cli.target import open_target
from fray.errors import InvalidRequest
from fray.net import daemon_logging
from fray.net.controller_address import is_loopback

TOKEN_BYTES = 16
"""Shortest token of scrapes."""


async def metrics(options: argparse.Namespace) -> int:
    """Run ``fray metrics``."""
    with explained_missing("fray metrics", "monitoring"):
        from fray.http_server import HttpAddress, serve_http, tls_of_server
        from fray.monitoring.exporter import Exporter
    if bool(options.tls_cert) != bool(options.tls_key):
        raise InvalidRequest("--tls-cert and --tls-key belong together: the certificate and its key, in PEM")
    host, port = _address(options.listen)
    token = _scrape_token(options.scrape_token) if options.scrape_token else ""
    tls = tls_of_server(options.tls_cert, options.tls_key) if options.tls_cert else None
    if not (is_loopback(host) or options.insecure or (token and tls)):
        raise InvalidRequest(
            f"--listen {options.listen}: other machines can reach it; add --scrape-token FILE, --tls-cert FILE and "
            "--tls-key FILE (or --insecure, on a network that only Prometheus is in)"
        )
    daemon_logging.configure(json_lines=False)
    exporter = Exporter(partial(open_target, options), token)
    async with trio.open_nursery() as nursery:
        await nursery.start(exporter.run)
        try:
            serve = partial(serve_http, exporter.app, host=host, port=port, tls=tls)
            address: HttpAddress = await nursery.start(serve)
        except OSError as error:
            raise InvalidRequest(f"--listen {options.listen}: {error.strerror or error}") from None
        if options.json:
            say_json({"url": f"{address.url}/metrics"})
            sys.stdout.flush()
        else:
            note(f"serving {address.url}/metrics")
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"invalid --listen {text!r}; expected HOST:PORT (port 0 takes a free one)")
    return host.strip("[]"), int(port)


def _scrape_token(file: Path) -> str:
    try:
        token = file.read_text().strip()
        is_private = not file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--scrape-token {file}: {getattr(error, 'strerror', None) or error}") from None
    if not is_private:
        raise InvalidRequest(f"--scrape-token {file}: other users can read it; use chmod 600")
    if len(token) < TOKEN_BYTES or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"--scrape-token {file}: expected {TOKEN_BYTES} or more printable ASCII characters without spaces, as "
            "`openssl rand -hex 16` makes them"
        )
    return token
