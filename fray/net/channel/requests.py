"""Requests over a channel: by id, answered once each, sent again when the peer has lost its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from attrs import define, field

from fray.errors import DeadlineExceeded, FrayError, ProtocolMismatch
from fray.net import codec
from fray.net.channel.channel import Channel
from fray.net.codec import Bytes, Kind

Answer = tuple[Any, list[memoryview]]
OnAnswer = Callable[[Any, list[memoryview]], object]


@define
class _Pending:
    body: bytes
    what: str
    on_answer: OnAnswer | None = None
    answered: trio.Event = field(factory=trio.Event)
    answer: Answer | None = None
    error: FrayError | None = None

    def complete(self, answer: Answer | None, error: FrayError | None) -> None:
        self.answer, self.error = answer, error
        # Set before the callback: an exception of the callback ends the channel, and `on_end` does not fail this
        # request, which is not pending any more.
        self.answered.set()
        if answer is not None and self.on_answer is not None:
            self.on_answer(*answer)


class Requests:
    """Pending requests of ``channel``. The channel's handler forwards its events: `on_frame`, `on_reset`, `on_end`."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._pending: dict[int, _Pending] = {}
        self._last_ref = 0
        self._ended: FrayError | None = None

    def __repr__(self) -> str:
        return f"<Requests over {self.channel!r}: {len(self._pending)} unanswered>"

    def __len__(self) -> int:
        return len(self._pending)

    async def request(
        self,
        message: object,
        blobs: Sequence[Bytes] = (),
        *,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> Answer:
        """Send a request and wait for the reply and its attachments.

        A request that is cancelled or times out may have taken effect; a late answer is dropped.

        Args:
            on_answer: called with the reply as it arrives, before any later frame is dispatched; the awaiting task may
                run only after later notices have been handled.

        Raises:
            DeadlineExceeded: no answer within ``timeout_s``.
            ChannelFull, MessageTooLarge: it could not be sent.
            Unsupported: the peer runs a release that does not know it, or a value in it.
            FrayError: the error in the peer's answer, or the reason for the channel's end.
        """
        what = type(message).__name__
        # Encoded once: the same bytes are sent again after a reset, whatever the caller does to the message meanwhile.
        body = codec.encode_message(self.channel.peer_release.adapt(message), blobs)
        # Waiting for room is part of the deadline: a peer that does not read delays a request only that long.
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            await self.channel.wait_room()
            return await self._send_and_wait(_Pending(body, what, on_answer))
        raise DeadlineExceeded(
            f"{self.channel.incarnation} at {self.channel.remote} did not answer {what} within {timeout_s} s",
            timeout_s=timeout_s,
        )

    async def _send_and_wait(self, pending: _Pending) -> Answer:
        if self._ended is not None:
            raise copy_error(self._ended)
        self._last_ref += 1
        ref = self._last_ref
        # Sent before it is entered: a send that raises leaves nothing behind, and no answer is read without a
        # checkpoint.
        self.channel.send_nowait(Kind.REQUEST, ref, pending.body)
        self._pending[ref] = pending
        try:
            await pending.answered.wait()
        finally:
            self._pending.pop(ref, None)
        if pending.error is not None:
            raise copy_error(pending.error)
        assert pending.answer is not None
        return pending.answer

    # From the handler of the channel

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> bool:
        """Handle an answer; return False for other frames. Answers without a waiter are dropped."""
        if kind not in (Kind.REPLY, Kind.ERROR):
            return False
        pending = self._pending.pop(ref, None)
        # Its author was cancelled or timed out. The peer is not notified of that, so the answer comes anyway.
        if pending is None:
            return True
        try:
            if kind == Kind.ERROR:
                pending.complete(None, codec.decode_error(body))
            else:
                pending.complete(codec.decode_message(body), None)
        # The frame itself was intact, so only this request fails and the channel continues.
        except ProtocolMismatch as error:
            pending.complete(None, error)
        return True

    def on_reset(self) -> None:
        """Send all pending requests again under the same refs, after the peer has lost its state."""
        # In the order in which they were made, which a dict keeps: later requests may depend on earlier ones.
        for ref, pending in self._pending.items():
            self.channel.send_nowait(Kind.REQUEST, ref, pending.body)

    def on_end(self, error: FrayError) -> None:
        """Fail all pending requests."""
        self._ended = error
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            pending.complete(None, error)


def copy_error(error: FrayError) -> FrayError:
    """Return a copy to raise: one error that ends many waits must not collect all their tracebacks."""
    # Rebuilt as by pickle, which keeps class, text and details but no traceback.
    copy = error.__reduce__()
    fresh: FrayError = copy[0](*copy[1])
    fresh.__cause__ = error.__cause__
    return fresh
