"""Certificate authority of a cluster: its files, the certificates that it issues, and their renewal and replacement.

The directory ``ca`` of the store has ``ca.pem``, the key and the certificate of the authority, and after a replacement
``previous.pem``: the previous authority's certificate, and one by which it vouches for the new one. Dialers that know
either fingerprint connect, so nothing has to be restarted; the previous key is not kept. All files have mode 0600. Of a
lab's own authority the directory has ``lab.pem``, its certificate without the key, instead of ``ca.pem``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import trio
from attrs import define, field, frozen

from fray.errors import FrayError, InvalidRequest
from fray.net.atomic_file import write_atomically
from fray.net.tls import certificates
from fray.net.tls.identity import TlsIdentity, fingerprint, read_pem, write_pem
from fray.net.transports.tls_listener import TlsServer

DIRECTORY, OWN, PREVIOUS, LAB = "ca", "ca.pem", "previous.pem", "lab.pem"
CHECK_S = 10.0
"""Seconds between looks at the clock and the files. A short sleep, since the clock of the wall may be set."""

_log = logging.getLogger("fray.controller")


@frozen
class Authority:
    """The current authority, and the previous one if there is one.

    Args:
        previous: PEM of the certificate by which the previous authority vouches for this one, and of its own; empty if
            there is none.
    """

    current: TlsIdentity
    previous: bytes = b""

    @property
    def certificates(self) -> list[bytes]:
        """Certificates (DER) of the current and the previous authority."""
        return [read_pem(self.current.chain)[0], *(read_pem(self.previous)[1:] if self.previous else ())]

    @property
    def pins(self) -> tuple[str, ...]:
        """Fingerprints of both, the current one first."""
        return tuple(fingerprint(each) for each in self.certificates)


# Files ---------------------------------------------------------------------------------------------------------------


def exists(store: Path) -> bool:
    """Return whether the store has an authority."""
    return (store / DIRECTORY / OWN).exists()


def show(store: Path, now: float) -> Authority:
    """Return the authority that the controller of a store uses; that of a lab has no key there. Raises as `load`."""
    try:
        chain = (store / DIRECTORY / LAB).read_bytes()
    except FileNotFoundError:
        return load(store, now)
    return _with_previous(store, TlsIdentity(chain, b""))


def create(store: Path, now: float) -> Authority:
    """Create the authority of a store.

    Raises:
        InvalidRequest: there is one.
        OSError: it cannot be written.
    """
    if exists(store):
        raise InvalidRequest(f"{store / DIRECTORY / OWN} exists: `fray ca rotate` replaces it without a restart")
    authority = Authority(_make(now))
    _write(store, authority)
    return authority


def load(store: Path, now: float) -> Authority:
    """Return the authority of a store.

    Raises:
        InvalidRequest: there is none, or it is that of a lab, or it is damaged or not valid now.
    """
    if (store / DIRECTORY / LAB).exists():
        raise InvalidRequest(
            f"the authority of {store} is that of --ca-cert and --ca-key of fray-controller, whose key is not in the "
            "store: replace both files to rotate it, and issue certificates where its key is"
        )
    file = store / DIRECTORY / OWN
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise InvalidRequest(
            f"{file} does not exist: `fray ca init --store {store}` creates a certificate authority"
        ) from None
    key, mark, chain = text.partition(b"-----BEGIN CERTIFICATE-----")
    return Authority(_checked(TlsIdentity(mark + chain, key), str(file), now), _read_previous(store))


def load_given(certificate: Path, key: Path, now: float) -> TlsIdentity:
    """Return the authority of a lab from its files.

    Raises:
        InvalidRequest: a file cannot be read, or is not what it should be.
    """
    where = f"--ca-cert {certificate} --ca-key {key}"
    try:
        identity = TlsIdentity(certificate.read_bytes(), key.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    return _checked(identity, where, now)


def load_lab(store: Path, certificate: Path, key: Path, now: float, running: Authority | None) -> Authority:
    """Return the authority of a lab from its files. When they were replaced, the one of before is kept in the store,
    for the next start, too.

    Args:
        running: that of this controller so far; None at its start.

    Raises:
        InvalidRequest: see `load_given`.
        OSError: the store cannot be written.
    """
    current = load_given(certificate, key, now)
    if running is None or running.current != current:
        # For `fray ca show`, which has neither the options of the controller nor perhaps its rights.
        write_atomically(_directory(store) / LAB, current.chain, durable=True)
    if running is not None and running.current != current:
        # Only now there is the key of the previous one, by which it vouches for this one.
        authority = replace(running.current, current, now)
        _write_previous(store, authority.previous)
        return authority
    return _with_previous(store, current)


def _with_previous(store: Path, lab: TlsIdentity) -> Authority:
    previous = _read_previous(store)
    # Else it is left from an authority that the lab's files have replaced while no controller ran.
    return Authority(lab, previous if previous and certificates.has_same_key(previous, lab.chain) else b"")


def load_own(store: Path, now: float) -> Authority:
    """Return the authority in the store for a controller without ``--ca-cert``, created if missing. Raises as `load`.

    Raises:
        OSError: the store cannot be written.
    """
    # Left by a controller with that option.
    (store / DIRECTORY / LAB).unlink(missing_ok=True)
    return load(store, now) if exists(store) else create(store, now)


def rotate(store: Path, now: float) -> Authority:
    """Replace the authority of a store by a new one, for which the previous one vouches. Raises as `load`."""
    old, new = load(store, now).current, _make(now)
    authority = replace(old, new, now)
    _write(store, authority)
    return authority


def replace(old: TlsIdentity, new: TlsIdentity, now: float) -> Authority:
    """Return the new authority with the old one as its previous one."""
    return Authority(new, certificates.cross_sign(new, old, now) + write_pem(read_pem(old.chain)[:1]))


def forget_previous(store: Path) -> None:
    """Accept the current authority only."""
    (store / DIRECTORY / PREVIOUS).unlink(missing_ok=True)


def _make(now: float) -> TlsIdentity:
    # With the time in its name: OpenSSL looks for issuers by name first.
    return certificates.make_authority(f"fray {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))}", now)


def _checked(identity: TlsIdentity, where: str, now: float) -> TlsIdentity:
    certificates.check_identity(identity, where, now, authority=True)
    return TlsIdentity(write_pem(read_pem(identity.chain)), identity.key)


def _write(store: Path, authority: Authority) -> None:
    # In this order: between the two writes there is a previous authority that is the current one, which does no harm.
    _write_previous(store, authority.previous)
    write_atomically(store / DIRECTORY / OWN, authority.current.key + authority.current.chain, durable=True)


def _write_previous(store: Path, previous: bytes) -> None:
    directory = _directory(store)
    if previous:
        write_atomically(directory / PREVIOUS, previous, durable=True)


def _directory(store: Path) -> Path:
    directory = store / DIRECTORY
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _read_previous(store: Path) -> bytes:
    try:
        text = (store / DIRECTORY / PREVIOUS).read_bytes()
    except FileNotFoundError:
        return b""
    if len(read_pem(text)) != 2:
        raise InvalidRequest(
            f"{store / DIRECTORY / PREVIOUS} is damaged: remove it, and only the current one is accepted"
        )
    return text


# The running controller ----------------------------------------------------------------------------------------------


@define(eq=False)
class CertificateAuthority:
    """The authority of a running controller. `refresh` is called now and then, by `run`.

    Args:
        read: returns the authority as it is on disk, created if missing; called with the present one, None at first.
        clock: seconds since the epoch, of the wall.
        on_change: called when the fingerprints have changed, and at the start.
        on_replaced: called with the fingerprints before and after a change.
    """

    read: Callable[[Authority | None], Authority] = field(repr=False)
    clock: Callable[[], float] = time.time
    on_change: Callable[[tuple[str, ...]], None] = lambda pins: None
    on_replaced: Callable[[Sequence[str], Sequence[str]], None] = lambda before, after: None
    server: TlsServer = field(factory=TlsServer)
    """Certificates that the listeners of the controller show."""
    authority: Authority = field(init=False, repr=False)
    _renew_s: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self.authority = self.read(None)
        self._issue()
        self.on_change(self.pins)

    @property
    def pins(self) -> tuple[str, ...]:
        """Fingerprints that a dialer may know, the current one first."""
        return self.authority.pins

    def sign(self, node: str, request: str) -> tuple[str, str]:
        """Return the certificate for a node's signing request, and the authorities' certificates, all in PEM.

        Raises:
            InvalidRequest: the request is damaged.
        """
        signed = certificates.issue_node(self.authority.current, node, request.encode(), self.clock())
        return signed.decode(), write_pem(self.authority.certificates).decode()

    def refresh(self) -> None:
        """Take over an authority that was replaced; renew the controller's own certificate at half of its time."""
        try:
            found = self.read(self.authority)
        except (FrayError, OSError) as error:
            _log.error("the certificate authority cannot be read; keeping the previous one: %s", error)
            found = self.authority
        changed = found != self.authority
        if changed:
            _log.warning("the certificate authority was replaced", extra={"fingerprints": list(found.pins)})
            before, self.authority = self.pins, found
        if changed or self.clock() >= self._renew_s:
            self._issue()
        if changed:
            self.on_change(self.pins)
            self.on_replaced(before, self.pins)

    def _issue(self) -> None:
        own = certificates.issue_controller(self.authority.current, self.clock())
        self._renew_s = certificates.read_certificate(own.chain).half_life_s
        leaf, *above = read_pem(own.chain)
        # The certificate for the new authority before that authority's own: OpenSSL takes the first issuer that fits,
        # and a dialer that knows the previous one only must not be led to one that has signed itself.
        chain = write_pem([leaf]) + self.authority.previous + write_pem(above)
        self.server.replace(TlsIdentity(chain, own.key), self.authority.certificates, self.pins)

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await trio.sleep(CHECK_S)
            self.refresh()
