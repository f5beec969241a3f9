"""Connections in their handshake: a limited number, of which each remote address has a limited share.

A newcomer is always admitted, and the oldest connection in its place is dropped: genuine dialers need milliseconds for
a handshake, so the oldest ones are those that do not complete it. Dialers of dropped connections try again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from attrs import define, field

# Each costs a descriptor and a task before it is authenticated.
PENDING_LIMIT = 1024
"""Limit of concurrent handshakes at one listener."""
SHARE_LIMIT = 256
"""The same of one remote address."""
GREETING_S = 2.0
"""Longest wait for the first bytes of a dialer on another machine; its first message is in flight by then."""


@define(eq=False)
class PendingConnections:
    """Handshakes of one listener, by their origin."""

    limit: int = PENDING_LIMIT
    share: int = SHARE_LIMIT
    _by_origin: dict[str, dict[int, Callable[[], object]]] = field(factory=dict, init=False)
    """Callbacks that drop them, oldest first."""
    _count: int = field(default=0, init=False)
    _numbered: int = field(default=0, init=False)

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def holding(self, remote: str, drop: Callable[[], object]) -> Iterator[None]:
        """Hold a place for one handshake; ``drop`` is called if another one needs it."""
        origin = origin_of(remote)
        if len(self._by_origin.get(origin, ())) >= self.share:
            self._drop_oldest(origin)
        elif self._count >= self.limit:
            # Of the one with the most: an address that keeps many cannot push out one that has few.
            self._drop_oldest(max(self._by_origin, key=lambda each: len(self._by_origin[each])))
        self._numbered += 1
        number = self._numbered
        self._by_origin.setdefault(origin, {})[number] = drop
        self._count += 1
        try:
            yield
        finally:
            self._remove(origin, number)

    def _drop_oldest(self, origin: str) -> None:
        number, drop = next(iter(self._by_origin[origin].items()))
        # At once, since its task may not run before the next newcomer.
        self._remove(origin, number)
        drop()

    def _remove(self, origin: str, number: int) -> None:
        pending = self._by_origin.get(origin, {})
        if pending.pop(number, None) is not None:
            self._count -= 1
            if not pending:
                del self._by_origin[origin]


def origin_of(remote: str) -> str:
    """Return what shares a limit: an IP address, or the network of 64 bits that one machine has in version 6, or a
    process of this machine."""
    return _origin_of_host(remote.removeprefix("tcp:").rpartition(":")[0].partition("%")[0]) or remote


@lru_cache(maxsize=1024)
def _origin_of_host(host: str) -> str:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return host
