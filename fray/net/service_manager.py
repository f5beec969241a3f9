"""Messages of a daemon to the service manager that started it: sd_notify(3) of systemd. Without one, none is sent."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

import trio

VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"})
"""Variables of the daemon alone, which programs that it starts do not get."""

_log = logging.getLogger("fray.net")


def notify(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send a message, such as ``READY=1``. A manager that does not receive it does not end the daemon."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            # A first @ stands for the zero byte of an abstract address.
            sender.sendto(text.encode(), f"\0{address[1:]}" if address[0] == "@" else address)
    except OSError as error:
        _log.warning("the service manager at %s was not notified of %s: %s", address, text, error)


async def keep_watchdog(environ: Mapping[str, str] = os.environ) -> None:
    """Send a sign of life twice in each period of the watchdog, until cancelled; return if the unit has none.

    From the event loop: if that stands still, the manager ends the daemon and starts it again.
    """
    period_us, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not period_us.isdecimal() or int(period_us) <= 0 or pid not in ("", str(os.getpid())):
        return
    while True:
        notify("WATCHDOG=1", environ)
        await trio.sleep(int(period_us) / 2e6)
