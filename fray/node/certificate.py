"""Certificate of this node: requested from the controller, renewed at half of its time, kept in the state directory.

The node connects without it, too, with its key alone: so a controller that was away while the certificate expired gets
its nodes back, and they get new ones. What the controller says about its authorities is kept as well, so that a node
knows the successor of the authority of which its token has the fingerprint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from fray.errors import FrayError
from fray.model.messages.node import SignCertificate, SignedCertificate
from fray.net.atomic_file import write_atomically
from fray.net.tls.identity import PINS_LIMIT, TlsIdentity, fingerprint, read_pem
from fray.net.transports.tls_dialer import TlsDialer

FILE, AUTHORITIES = "node-certificate.pem", "authorities.pem"
CHECK_S = 60.0
"""Seconds between looks at the clock of the wall, which may be set while the node sleeps."""
RETRY_S = 30.0
"""Seconds after which a request that failed is repeated."""

log = logging.getLogger("fray.node")


@define(eq=False)
class NodeCertificate:
    """The certificate of one node. Files that cannot be read count as missing.

    Args:
        dialer: shows the certificate.
        directory: state directory of the node; empty: nothing is stored.
        controller: address of the controller, which has a fingerprint of its authority.
        clock: seconds since the epoch, of the wall.
    """

    dialer: TlsDialer
    directory: str
    controller: str
    clock: Callable[[], float] = time.time
    _identity: TlsIdentity | None = field(default=None, init=False, repr=False)
    _latest: tuple[str, ...] = field(default=(), init=False)
    """Fingerprints of the authorities that the controller has named last."""
    _renew_s: float = field(default=0.0, init=False)

    def load(self) -> None:
        """Show the stored certificate, if it is still valid, and accept the stored authorities."""
        # The first is missing beside a certificate of `fray ca issue`.
        for file, use in ((AUTHORITIES, self._learn), (FILE, self._read)):
            try:
                use(self._file(file).read_bytes())
            except (OSError, FrayError) as error:
                log.debug("nothing usable in %s: %s", file, error)

    def _read(self, text: bytes) -> None:
        key, mark, chain = text.partition(b"-----BEGIN CERTIFICATE-----")
        self._show(TlsIdentity(mark + chain, key))

    def _learn(self, authorities: bytes) -> None:
        found = read_pem(authorities)[:PINS_LIMIT]
        self.dialer.learn(self._pins(), found)
        self._latest = tuple(map(fingerprint, found))

    def _file(self, name: str) -> Path:
        return Path(self.directory or "/nonexistent", name)

    @property
    def address(self) -> str:
        """Address of the controller with the fingerprints of its present authorities, for jobs."""
        place, _, _ = self.controller.partition("#")
        return f"{place}#{','.join(self._latest or self._pins())}"

    def _pins(self) -> tuple[str, ...]:
        return tuple(self.controller.partition("#")[2].split(","))

    def _show(self, identity: TlsIdentity) -> None:
        from fray.net.tls.certificates import read_certificate  # 45 ms

        info = read_certificate(identity.chain)
        if info.not_before_s <= self.clock() <= info.not_after_s:
            self._identity, self._renew_s = identity, info.half_life_s
            self.dialer.identity = identity

    async def run(self, request: Callable[[object], Awaitable[tuple[Any, Any]]]) -> None:
        """Keep the certificate valid by requests to the controller, until cancelled."""
        while True:
            # The dialer drops a certificate that the controller has refused.
            if self._identity is not None and self._identity is self.dialer.identity and self.clock() < self._renew_s:
                await trio.sleep(max(0.0, min(CHECK_S, self._renew_s - self.clock())))
                continue
            try:
                await self._renew(request)
            except FrayError as error:
                log.warning("no certificate from the controller: %s; this node connects with its key", error)
                await trio.sleep(RETRY_S)

    async def _renew(self, request: Callable[[object], Awaitable[tuple[Any, Any]]]) -> None:
        from fray.net.tls.certificates import make_key, make_request  # 45 ms

        key = make_key()
        signed, _ = await request(SignCertificate(request=make_request(key).decode()))
        if not isinstance(signed, SignedCertificate):
            raise FrayError(f"expected SignedCertificate, got {type(signed).__name__}")
        identity, authorities = TlsIdentity(signed.certificate.encode(), key), signed.authorities.encode()
        self._learn(authorities)
        self._show(identity)
        if self._identity is not identity:
            raise FrayError(
                "its times are not valid by the clock of this machine: set the clocks, for example with NTP"
            )
        if self.directory:
            write_atomically(self._file(AUTHORITIES), authorities)
            write_atomically(self._file(FILE), key + identity.chain)
        log.info("the controller has issued a certificate for this node")
