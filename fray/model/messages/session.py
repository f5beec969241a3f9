"""Messages that open and end a connection of a session (`fray.net.channel.session`)."""

from __future__ import annotations

from typing import Any

from fray.model.frozen import frozen


@frozen(kw_only=True)
class Hello:
    """First frame of a dialler. Its greeting (opaque to this layer) is attached."""

    protocol: tuple[int, int]
    session: str
    incarnation: str
    """Of the dialler's process."""
    resume: bool = False
    instance: str = ""
    """The life to resume; empty at first."""
    received: int = 0
    expects: str | None = None
    """Incarnation the listener must have; None: any."""
    dial: int = 0
    """Grows with each dial of this session: an older hello that arrives late is stale."""


@frozen(kw_only=True)
class Welcome:
    """The listener takes the session (up again). Its greeting is attached."""

    protocol: tuple[int, int]
    incarnation: str
    instance: str
    resumed: bool
    received: int = 0


@frozen(kw_only=True)
class Refuse:
    """The listener will not talk, and why."""

    protocol: tuple[int, int]
    incarnation: str
    error: dict[str, Any]


@frozen(kw_only=True)
class Goodbye:
    """The conversation is over. ``error`` is set when it ended for something else than an orderly close."""

    reason: str = ""
    error: dict[str, Any] | None = None
