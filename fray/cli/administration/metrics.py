"""``fray metrics``: serves the numbers of a cluster to Prometheus, until Ctrl-C."""

from __future__ import annotations

import argparse
from functools import partial

from fray.cli.output import explained_missing
from fray.cli.target import open_target
from fray.net import daemon_logging


async def metrics(options: argparse.Namespace) -> int:
    """Run ``fray metrics``."""
    with explained_missing("fray metrics", "monitoring"):
        from fray.cli.administration.serving import check_reach, listen_address, secret_in, serve, tls_of
        from fray.monitoring.exporter import Exporter
    listen_address(options)
    token = secret_in(options.scrape_token, "--scrape-token") if options.scrape_token else ""
    tls = tls_of(options)
    missing = "--scrape-token FILE, --tls-cert FILE and --tls-key FILE (or --insecure, where only Prometheus can)"
    check_reach(options, options.insecure or bool(token and tls), missing)
    daemon_logging.configure(json_lines=False)
    await serve(options, Exporter(partial(open_target, options), token), tls, "/metrics")
    return 0
