"""``fray dashboard``: serves the page of a cluster, until Ctrl-C."""

from __future__ import annotations

import argparse
import secrets
from functools import partial

from fray.cli.jobs import requester_of
from fray.cli.output import explained_missing
from fray.cli.target import has_token, open_target, spec_of, token_of
from fray.deploy import stored_keys
from fray.deploy.cluster_spec import spec_text
from fray.model.access.roles import AccessRole
from fray.net import daemon_logging


async def dashboard(options: argparse.Namespace) -> int:
    """Run ``fray dashboard``."""
    with explained_missing("fray dashboard", "monitoring"):
        from fray.cli.administration.serving import check_reach, listen_address, secret_in, serve, tls_of
        from fray.monitoring.dashboard import Dashboard, Viewer
    listen_address(options)
    tls = tls_of(options)
    check_reach(options, bool(options.key and tls), "--key FILE, --tls-cert FILE and --tls-key FILE")
    key = secret_in(options.key, "--key") if options.key else secrets.token_hex(16)
    user, role = _identity(options)
    requester = requester_of("fray dashboard", user)
    viewer = Viewer(cluster=spec_text(spec_of(options).address), role=role, user=user, requester=requester)
    daemon_logging.configure(json_lines=False)
    # The key of a file is known to those who may open the page, and a terminal's text is copied.
    path = "/" if options.key else f"/?key={key}"
    await serve(options, Dashboard(partial(open_target, options), viewer, key), tls, path)
    return 0


def _identity(options: argparse.Namespace) -> tuple[str, AccessRole]:
    """Return user and role of the key with which the command connects; the cluster's token has no user."""
    if token_of(options) is not None or has_token():
        return "", AccessRole.ADMIN
    key = stored_keys.find_key(spec_of(options).address)
    assert key is not None
    return key.user, AccessRole(key.role)
