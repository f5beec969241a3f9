"""Transfer of content in parts to and from the controller: workspaces, and values too large for a message.

Both directions are requests, a few at a time: the next part is read when an earlier one was answered, so neither end
nor the controller holds more than those. A request that a lost connection or a restarted controller leaves unanswered
is repeated by `fray.net.channel.requests`; parts are named by their hash, so a repeated one changes nothing, and an
offer says what is missing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio

from fray.errors import ChannelFull, FrayError
from fray.model.ids import BlobId
from fray.model.messages.bundles import BundleState, OfferBundle, OfferValue, PutChunk
from fray.net.transport import Bytes

# More would fill the send queue, in which requests of the driver wait behind them.
PARTS_AT_ONCE = 4
"""Number of parts of one transfer on their way: at most 4 MiB, behind which other messages of the connection wait."""
ROUNDS = 8
"""Maximum number of times the controller may answer that it lacks parts."""
BUSY_S = 0.2
"""Seconds to wait while the controller has too many parts to write."""


class RequestController(Protocol):
    """Sends a request with attachments to the controller; returns the reply and its attachments. Raises FrayError."""

    def __call__(self, message: object, blobs: Sequence[Bytes] = (), /) -> Awaitable[tuple[Any, Sequence[Bytes]]]: ...


async def send_missing(
    request: RequestController, offer: OfferBundle | OfferValue, read: Callable[[BlobId], Awaitable[Bytes]]
) -> None:
    """Offer content to the controller and send the parts it lacks, until it has all of them.

    Raises:
        StoreError: the controller has no room for it.
        FrayError: the controller does not get all of it, or the conversation has ended.
        Exception: ``read`` raised it.
    """

    async def put(part: BlobId) -> None:
        await request_when_free(request, PutChunk(chunk=part), await read(part))

    for _ in range(ROUNDS):
        # The controller keeps no record of uploads: it is asked each time what it lacks. So a restart of it needs no
        # special case.
        state, _ = await request(offer)
        assert isinstance(state, BundleState)
        if state.complete:
            return
        await for_each_part(put, state.missing)
    what = f"bundle {offer.bundle}" if isinstance(offer, OfferBundle) else f"value {offer.value}"
    raise FrayError(f"the controller still lacks parts of {what} after {ROUNDS} rounds: its log may say why")


async def for_each_part(step: Callable[[BlobId], Awaitable[None]], parts: Sequence[BlobId]) -> None:
    """Run ``step`` for each part, a few at a time. Raises the first exception that a step raised, as it is."""
    # One iterator for all tasks: each takes the next part as soon as it is done with one.
    left = iter(parts)
    failure: Exception | None = None

    async def run_next() -> None:
        nonlocal failure
        try:
            for part in left:
                await step(part)
        except Exception as error:  # noqa: BLE001 - raised outside of the nursery, which would wrap it in a group
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(min(PARTS_AT_ONCE, len(parts))):
            nursery.start_soon(run_next)
    if failure is not None:
        raise failure


async def request_when_free(request: RequestController, message: object, *blobs: Bytes) -> tuple[Any, Sequence[Bytes]]:
    """Send a request, again as long as the controller has too many parts to write. Raises FrayError."""
    while True:
        try:
            return await request(message, blobs)
        # The controller's disk is the limit; it asks its peers to slow down.
        except ChannelFull:
            await trio.sleep(BUSY_S)
