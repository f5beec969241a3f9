"""The daemon ``fray-controller``."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

import trio

from fray.controller.options import Options, find_token, parse
from fray.controller.serve import one_error, run_controller
from fray.controller.store import Store
from fray.errors import FrayError, InvalidRequest
from fray.net import descriptors, journal

_log = logging.getLogger("fray.controller")


def main(argv: Sequence[str] | None = None) -> int:
    """``fray-controller``. Exit status: 0 after SIGTERM or SIGINT, 1 if it cannot (go on to) serve, 2 for bad usage."""
    sys.setswitchinterval(0.0005)
    try:
        options = parse(argv)
    except InvalidRequest as error:
        return _complain(error, 2)
    journal.configure(options.json_lines)
    descriptors.raise_limit()
    try:
        trio.run(_serve, options)
    except (FrayError, OSError) as error:
        return _complain(error, 1)
    return 0


def _complain(error: Exception, status: int) -> int:
    print(f"fray-controller: {error}", file=sys.stderr)
    return status


async def _serve(options: Options) -> None:
    """Serve until a signal says to leave. Peers see a lost connection and wait for the next controller."""
    from fray.net.websocket import WebSocketNetwork

    store = Store(options.store)
    try:
        token = find_token(options)
        with one_error():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_leave_on_signal, nursery.cancel_scope)
                await run_controller(
                    store,
                    WebSocketNetwork(),
                    options.listen,
                    token,
                    rules=options.rules,
                    keeping=options.keeping,
                    env_vars=options.env_vars,
                )
    finally:
        store.close()


async def _leave_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            _log.info("leaving; running jobs go on", extra={"signal": signal.Signals(number).name})
            scope.cancel()
            return


if __name__ == "__main__":
    sys.exit(main())
