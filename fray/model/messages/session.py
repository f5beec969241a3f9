"""Messages that open and end a connection of a session (`fray.net.channel.session`).

Hello, welcome and refusal are read by every release: their fields are never renamed, removed or given another type, and
new ones have a default, so that releases without a common version still read why they cannot work together.
"""

from __future__ import annotations

from typing import Any

from fray.model.frozen import frozen

VERSION = "0.1.0"
"""Version of Fray, as controller and nodes report it: ``fray.__version__``, which no module below it imports."""


@frozen(kw_only=True)
class Hello:
    """First frame of a dialer. Its greeting (opaque to this layer) is attached."""

    protocol: tuple[int, int]
    session: str
    incarnation: str
    """Incarnation of the dialer's process."""
    resume: bool = False
    instance: str = ""
    """Channel instance to resume; empty on the first connection."""
    received: int = 0
    expects: str | None = None
    """Expected incarnation of the listener; None: any."""
    dial: int = 0
    """Number of the dial in this session: an older hello that arrives late is stale."""
    release: str = ""
    """Release of Fray that the sender runs; empty: one from before wire version 2."""
    versions: tuple[int, int] = (1, 1)
    """Oldest and newest version of the wire format that the sender speaks (`fray.net.channel.versions`)."""
    capabilities: tuple[str, ...] = ()


@frozen(kw_only=True)
class Welcome:
    """The listener accepts or resumes the session. Its greeting is attached."""

    protocol: tuple[int, int]
    incarnation: str
    instance: str
    resumed: bool
    received: int = 0
    heartbeat_s: float | None = None
    """Seconds of silence after which the dialer is to ping while it waits for something; None: its own default."""
    seen_from: str = ""
    """IP address of the dialer as the listener sees it; empty: none, or not known."""
    release: str = ""
    """Release of Fray that the sender runs; empty: one from before wire version 2."""
    versions: tuple[int, int] = (1, 1)
    """Oldest and newest version of the wire format that the sender speaks (`fray.net.channel.versions`)."""
    capabilities: tuple[str, ...] = ()


@frozen(kw_only=True)
class Refuse:
    """The listener rejects the session; ``error`` says why."""

    protocol: tuple[int, int]
    incarnation: str
    error: dict[str, Any]
    release: str = ""
    """Release of Fray that the sender runs; empty: one from before wire version 2."""
    versions: tuple[int, int] = (1, 1)
    """Oldest and newest version of the wire format that the sender speaks (`fray.net.channel.versions`)."""
    capabilities: tuple[str, ...] = ()


@frozen(kw_only=True)
class Goodbye:
    """Last frame of a channel. ``error`` is set unless it was closed in order."""

    reason: str = ""
    error: dict[str, Any] | None = None
