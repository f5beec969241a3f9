"""Releases, versions of the wire format and capabilities: what two processes of neighbouring releases have in common.

Pure. Hello, welcome and refusal carry the release of their sender, the oldest and newest version of the wire format
that it speaks, and its capabilities. The newest version that both speak counts; without one the listener refuses.

A version stands for what everything may rely on; a capability for one thing that a peer of the same version may lack:
a message, a value of an enumeration, a field that may not be ignored. CONTRIBUTING.md has the rules for a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any

from attrs import evolve, field, fields, frozen, has

from fray.errors import ProtocolMismatch, Unsupported
from fray.model.messages.session import VERSION, Hello, Refuse, Welcome
from fray.model.specs import EndReason

WIRE_VERSIONS = (1, 2)
"""Oldest and newest version of the wire format that this release speaks. Version 1: everything before versions were
sent; it ends a channel at the first message that it does not know."""
CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "accounts": ("EndReason.no_account",),
    "capacity": ("GetCapacity", "CapacityHistory", "CapacitySample"),
    "commands": ("RunCommand", "OpenTunnel.command"),
    "counts": ("GetCounts", "ClusterCounts"),
    "history": (
        *("GetAttempts", "AttemptPage", "AttemptRecord", "GetNodeHistory", "NodeHistory", "NodeRecord"),
        *("FindEvents", "EventPage"),
    ),
    "job-specs": ("GetJobSpec", "RequestedJob"),
    "launches-for": ("GetLaunchUsers", "LaunchUsers", "Launch.on_behalf_of"),
    "loop-delay": ("LoopDelay",),
    "moved-nodes": ("NodeMoved",),
    "requeue": ("Requeue", "RequeueResult"),
    "reservation-history": ("GetReservationHistory", "ReservationPage", "RecordedReservation"),
    "sums": ("SumAttempts", "AttemptSums", "AttemptSum"),
    "traces": ("Kind.TRACE",),
    "unsupported": (),
}
"""Capability: the messages that may be sent only to a peer that has it, as ``Message``; values of enumerations, as
``Enumeration.value`` (see `SUBSTITUTES`); what its senders themselves have to look at, as ``Message.field``.
``unsupported``: unknown requests are answered with `Unsupported`, unknown notices ignored."""
SUBSTITUTES: Mapping[str, Mapping[StrEnum, StrEnum]] = {"accounts": {EndReason.NO_ACCOUNT: EndReason.PORT_TAKEN}}
"""Capability: what a peer without it is sent instead of a value, wherever that is in a message. (An attempt without an
account or a port was not started, and counts against no budget.)"""

_NAME_LIMIT = 40
_VERSION_LIMIT = 9_999


@frozen(kw_only=True)
class Release:
    """Release, versions and capabilities of the process at one end of a channel."""

    name: str = VERSION
    versions: tuple[int, int] = WIRE_VERSIONS
    capabilities: frozenset[str] = frozenset(CAPABILITIES)
    _replaced: dict[tuple[type, str], StrEnum] = field(init=False, eq=False, repr=False)

    @_replaced.default
    def _find_replaced(self) -> dict[tuple[type, str], StrEnum]:
        # With their type: members of other enumerations, and texts, may be equal to them.
        missing = [SUBSTITUTES[name] for name in SUBSTITUTES.keys() - self.capabilities]
        return {(type(value), value): other for values in missing for value, other in values.items()}

    def __str__(self) -> str:
        # From the peer, and printed: in one line, without control characters.
        name = "".join(each for each in self.name if each.isprintable())
        return f"fray {name}" if name else "an earlier fray"

    def adapt(self, message: object) -> object:
        """Return a message as a process of this release knows it: unchanged, or with substitutes for new values.

        Raises:
            Unsupported: it does not know the message, so it must not be sent.
        """
        what = type(message).__name__
        capability = _guards.get(what)
        if capability is not None and capability not in self.capabilities:
            raise Unsupported(
                f"{what} is not known to the other side, which runs {self} without the capability {capability!r}: it "
                f"needs the release that runs here (fray {VERSION}) or a later one there",
                what=what,
                capability=capability,
                release=self.name,
            )
        return _replace(message, self._replaced) if self._replaced else message


def _replace(value: Any, replaced: Mapping[tuple[type, str], StrEnum]) -> Any:
    """Return a value with all it consists of; the same object if nothing in it is replaced."""
    if isinstance(value, StrEnum):
        return replaced.get((type(value), value), value)
    if has(type(value)):
        found = {each.name: _replace(getattr(value, each.name), replaced) for each in fields(type(value))}
        changes = {name: new for name, new in found.items() if new is not getattr(value, name)}
        return evolve(value, **changes) if changes else value
    if isinstance(value, dict):
        new = {key: _replace(each, replaced) for key, each in value.items()}
        return new if any(new[key] is not each for key, each in value.items()) else value
    if isinstance(value, tuple | list):
        parts = [_replace(each, replaced) for each in value]
        is_new = any(part is not each for part, each in zip(parts, value, strict=True))
        return type(value)(parts) if is_new else value
    return value


_guards = {what: capability for capability, guarded in CAPABILITIES.items() for what in guarded}


def own_release() -> Release:
    """Return the release of this process."""
    return _make_own(WIRE_VERSIONS)


@cache
def _make_own(versions: tuple[int, int]) -> Release:
    return Release(versions=versions)


_CAPABILITY_NAMES = tuple(sorted(CAPABILITIES))


def own_fields() -> dict[str, Any]:
    """Return the fields of a hello, a welcome or a refusal that say what this process runs."""
    return {"release": VERSION, "versions": WIRE_VERSIONS, "capabilities": _CAPABILITY_NAMES}


def release_of(message: Hello | Welcome | Refuse) -> Release:
    """Return the release of the sender."""
    # What the peer says is stored with the channel and printed, so it is bounded; only known capabilities matter.
    oldest, newest = (max(0, min(each, _VERSION_LIMIT)) for each in message.versions)
    return Release(
        name=message.release[:_NAME_LIMIT],
        versions=(oldest, newest),
        capabilities=frozenset(CAPABILITIES).intersection(message.capabilities),
    )


def common_version(dialer: Release, listener: Release) -> int:
    """Return the newest version of the wire format that both speak.

    Raises:
        ProtocolMismatch: there is none; the message, the same on both sides, says which side to upgrade first.
    """
    version = min(dialer.versions[1], listener.versions[1])
    if version >= max(dialer.versions[0], listener.versions[0]):
        return version
    older = "dialing" if dialer.versions[1] < listener.versions[1] else "listening"
    raise ProtocolMismatch(
        f"no common version of the wire format: {dialer} dials and speaks {_range(dialer)}, {listener} listens and "
        f"speaks {_range(listener)}; upgrade the {older} side first, without leaving out a minor release "
        "(docs/upgrade.md)",
        wire_versions=[list(dialer.versions), list(listener.versions)],
    )


def is_version_refusal(error: Exception) -> bool:
    """Return whether the error is that of `common_version`."""
    return isinstance(error, ProtocolMismatch) and "wire_versions" in error.details


def _range(release: Release) -> str:
    oldest, newest = release.versions
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def explain_unsupported(error: Unsupported, sender: Release) -> Unsupported:
    """Return the answer to a message of ``sender`` that this process does not know."""
    # Passed on from a third process, or raised by `Release.adapt`.
    if "needs" in error.details or "capability" in error.details:
        return error
    return Unsupported(
        f"unsupported: {error}. It needs the release of its sender, {sender} (wire version {sender.versions[1]}), or a "
        f"later one; this process runs fray {VERSION} (wire version {WIRE_VERSIONS[1]}): upgrade it first "
        "(docs/upgrade.md)",
        needs=sender.name,
        runs=VERSION,
    )
