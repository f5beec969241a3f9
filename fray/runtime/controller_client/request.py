"""Interface by which the trackers of this package send requests to the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from fray.net.codec import Bytes

OnAnswer: TypeAlias = Callable[[Any, Sequence[Bytes]], object]
"""Called with a reply and its attachments, before any notice that arrived after the reply is handled."""


class SendRequest(Protocol):
    """Sends a message to the controller and waits for the reply: `ControllerClient.request_blobs`."""

    async def __call__(
        self,
        message: Any,
        blobs: Sequence[Bytes] = (),
        *,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> tuple[Any, Sequence[Bytes]]: ...
