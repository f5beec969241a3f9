"""Entry point of the daemon ``fray-controller``."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from fray import gc_tuning
from fray.controller.accepted_tokens import AcceptedTokens
from fray.controller.options import Options, make_token_reader, parse, write_pins
from fray.controller.policy_file import read_policy_file, reload_on_hangup
from fray.controller.serve import run_controller, unwrap_single_error
from fray.controller.store import Store
from fray.errors import FrayError, InvalidRequest
from fray.model.policy.policy import Policy
from fray.net import daemon_logging, file_limits
from fray.net.memory_protection import forbid_inspection
from fray.net.service_manager import keep_watchdog, notify
from fray.net.switch_interval import shorten_switch_interval
from fray.scheduler.effects import PolicyChanged

if TYPE_CHECKING:
    from fray.controller.certificate_authority import CertificateAuthority

_log = logging.getLogger("fray.controller")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fray-controller``. Return the exit status: 0 after SIGTERM or SIGINT, 1 if it cannot serve, 2 for bad
    usage."""
    shorten_switch_interval()
    try:
        options = parse(argv)
        # Before anything is opened: a typo in the policy is bad usage (2), not a failed start of the cluster (1).
        policy = read_policy_file(options.policy_file) if options.policy_file is not None else Policy()
    except InvalidRequest as error:
        return _report_error(error, 2)
    forbid_inspection()
    # The default soft limit of 1,024 descriptors is reached with about as many connections.
    file_limits.raise_limit()
    try:
        daemon_logging.configure(options.json_lines, options.log_file, quiet=options.quiet)
        trio.run(_serve, options, policy)
    except (FrayError, OSError) as error:
        return _report_error(error, 1)
    return 0


def _report_error(error: Exception, status: int) -> int:
    print(f"fray-controller: {error}", file=sys.stderr)
    return status


async def _serve(options: Options, policy: Policy) -> None:
    """Serve until SIGTERM or SIGINT. Peers see a lost connection and wait for the next controller."""
    # Here, so that `fray-controller --help` and bad usage need not wait for the import of the network.
    from fray.net.transports.websocket import WebSocketNetwork

    store = Store(options.store, history_limit=options.history_limit)
    try:
        tokens = AcceptedTokens(make_token_reader(options))
        authority = _open_authority(options)
        server = authority.server if authority is not None else None
        network = WebSocketNetwork(names=options.names, tls_server=server)
        with unwrap_single_error():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
                serve = partial(
                    run_controller,
                    rules=options.rules,
                    policy=policy,
                    retention=options.retention,
                    env_vars=options.env_vars,
                    authority=authority,
                )
                # Around the start, in which the store's rows become objects that stay.
                with gc_tuning.gc_frozen():
                    running = await nursery.start(serve, store, network, options.listen, tokens)
                notify("READY=1")
                nursery.start_soon(keep_watchdog)
                if options.policy_file is not None:
                    on_policy = lambda policy: running.loop.post(PolicyChanged(policy=policy))  # noqa: E731
                    nursery.start_soon(reload_on_hangup, options.policy_file, on_policy)
    finally:
        store.close()


def _open_authority(options: Options) -> CertificateAuthority | None:
    """Return the certificate authority; None if everything is on this machine.

    Raises:
        InvalidRequest, OSError: it cannot be used.
    """
    if not any(address.startswith("tls:") for address in options.listen):
        return None
    from fray.controller import certificate_authority  # 45 ms

    def read(running: certificate_authority.Authority | None) -> certificate_authority.Authority:
        if options.ca_cert is not None and options.ca_key is not None:
            files = options.ca_cert, options.ca_key
            return certificate_authority.load_lab(options.store, *files, time.time(), running)
        return certificate_authority.load_own(options.store, time.time())

    def on_change(pins: tuple[str, ...]) -> None:
        write_pins(options, pins)
        _log.info("fingerprint of the certificate authority: %s", pins[0], extra={"fingerprints": list(pins)})

    return certificate_authority.CertificateAuthority(read, on_change=on_change)


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            _log.info("shutting down on %s; running jobs continue", signal.Signals(number).name)
            scope.cancel()
            return


if __name__ == "__main__":
    sys.exit(main())
