"""Requests of one server by id: who waits for each, what of it has arrived, and the answers that a repetition gets."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import trio
from attrs import define, field

from fray.errors import ChannelFull
from fray.rl.inference.decoding import EngineEvent
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent

REQUESTS_LIMIT = 8_192
"""Requests that run or wait in one server."""
REMEMBERED_LIMIT = 1_024
"""Answers that are kept for repetitions of their requests."""
UNREAD_TOKENS_LIMIT = 16_384
"""Tokens that the reader of a stream may be behind."""


class ServerBusy(ChannelFull):
    """The server has as many requests as it may have; send the request to another one, or later."""


class ReaderTooSlow(ChannelFull):
    """A stream was ended because its reader was too far behind."""


@define(eq=False)
class OpenRequest:
    """A request that was sent to the engine.

    Attributes:
        request: the request.
        is_streamed: its tokens are kept for a reader.
        waiters: callers that want the answer.
        completions: those that have ended, by index.
        unread: tokens and completions that the reader of a stream has not taken.
        error: why it failed.
        ended: set at the end.
        news: set when there is something to read.
        batches: those that it is in.
    """

    request: GenerateRequest
    is_streamed: bool
    waiters: int = 0
    completions: dict[int, Completion] = field(factory=dict)
    unread: deque[TokenEvent | Completion] = field(factory=deque)
    error: Exception | None = None
    ended: trio.Event = field(factory=trio.Event)
    news: trio.Event = field(factory=trio.Event)
    batches: list[RequestBatch] = field(factory=list)

    def result(self) -> list[Completion]:
        """Return the completions by index; raises the error if it failed."""
        if self.error is not None:
            raise self.error
        return [self.completions[index] for index in sorted(self.completions)]

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()
        self.news.set()
        batches, self.batches = self.batches, []
        for batch in batches:
            batch.note_end(self)


@define(eq=False)
class RequestBatch:
    """Requests that one caller sent together, and takes the answers of as they end.

    Attributes:
        entries: those whose answers were not taken, by id.
        ended: ids of those of them that have ended.
        news: set when one has ended, or was withdrawn.
    """

    entries: dict[str, OpenRequest] = field(factory=dict)
    ended: list[str] = field(factory=list)
    news: trio.Event = field(factory=trio.Event)

    def add(self, entry: OpenRequest) -> None:
        """Add a request that was attached to."""
        self.entries[entry.request.request_id] = entry
        if entry.ended.is_set():
            self.note_end(entry)
        else:
            entry.batches.append(self)

    def note_end(self, entry: OpenRequest) -> None:
        """Note that a request has ended."""
        if entry.request.request_id in self.entries:
            self.ended.append(entry.request.request_id)
            self.news.set()

    def take(self, token_limit: int) -> list[OpenRequest]:
        """Return requests that have ended: at least one if there is any, then up to so many tokens of answers."""
        taken, tokens = list[OpenRequest](), 0
        while self.ended and tokens < token_limit:
            entry = self.entries.pop(self.ended.pop())
            taken.append(entry)
            tokens += sum(len(each.token_ids) for each in entry.completions.values())
        if not self.ended:
            self.news = trio.Event()
        return taken

    def remove(self, name: str) -> OpenRequest | None:
        """Remove a request whose answer the caller does not want; return it, if it was not taken."""
        if name in self.ended:
            self.ended.remove(name)
        self.news.set()
        return self.entries.pop(name, None)


class RequestTable:
    """Requests of one server.

    Args:
        begin: sends a request to the engine; the second argument: its tokens are streamed.
        cancel: ends one in the engine.
    """

    def __init__(self, begin: Callable[[GenerateRequest, bool], None], cancel: Callable[[str], None]) -> None:
        self._begin, self._cancel = begin, cancel
        self._open: dict[str, OpenRequest] = {}
        self._answered: OrderedDict[str, OpenRequest] = OrderedDict()

    def __len__(self) -> int:
        """Return how many requests have not ended."""
        return len(self._open)

    def attach(self, request: GenerateRequest, *, stream: bool = False) -> OpenRequest:
        """Begin a request, or attach to the one of its id, whose answer it gets; `detach` ends that.

        Raises:
            ValueError: the id names a request with another prompt or sampling, or a stream is wanted of one that is
                under way: its first tokens are gone.
            ServerBusy: too many requests are open.
        """
        name = request.request_id
        known = self._open.get(name) or self._answered.get(name)
        if known is not None:
            if known.request != request:
                raise ValueError(f"request id {name!r} names a request with another prompt or sampling; make a new id")
            if stream:
                raise ValueError(f"request {name!r} was sent before, so its tokens cannot be streamed again")
            known.waiters += 1
            return known
        if len(self._open) >= REQUESTS_LIMIT:
            raise ServerBusy(f"the server has {REQUESTS_LIMIT} open requests; send {name!r} to another one, or later")
        entry = self._open[name] = OpenRequest(request, stream, waiters=1)
        self._begin(request, stream)
        return entry

    def detach(self, entry: OpenRequest) -> None:
        """Note that a caller no longer waits. A request without callers is cancelled, and its id is free."""
        entry.waiters -= 1
        name = entry.request.request_id
        if not entry.waiters and self._open.get(name) is entry:
            del self._open[name]
            self._cancel(name)
            entry.end()

    async def wait_empty(self) -> None:
        """Return when no request is open."""
        while self._open:
            await next(iter(self._open.values())).ended.wait()

    def take(self, event: EngineEvent) -> None:
        """Note a token or a completion."""
        if isinstance(event, TokenEvent):
            entry = self._open.get(event.request_id)
            if entry is not None and entry.is_streamed:
                self._put(entry, event)
            return
        name, completion = event
        entry = self._open.get(name)
        if entry is None:
            return
        entry.completions[completion.index] = completion
        if entry.is_streamed:
            self._put(entry, completion)
        if len(entry.completions) == entry.request.sampling.n:
            del self._open[name]
            # One that was aborted is sent again under its id, and shall run then.
            if all(each.finish_reason != "abort" for each in entry.completions.values()) and not entry.is_streamed:
                self._answered[name] = entry
                if len(self._answered) > REMEMBERED_LIMIT:
                    self._answered.popitem(last=False)
            entry.end()

    def _put(self, entry: OpenRequest, event: TokenEvent | Completion) -> None:
        entry.unread.append(event)
        entry.news.set()
        if len(entry.unread) > UNREAD_TOKENS_LIMIT:
            name = entry.request.request_id
            del self._open[name]
            self._cancel(name)
            entry.unread.clear()
            entry.end(ReaderTooSlow(f"the reader of request {name!r} is {UNREAD_TOKENS_LIMIT} tokens behind"))

    def fail(self, name: str, error: Exception) -> None:
        """End a request with an error."""
        entry = self._open.pop(name, None)
        if entry is not None:
            entry.end(error)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error."""
        for name in list(self._open):
            self.fail(name, error)
