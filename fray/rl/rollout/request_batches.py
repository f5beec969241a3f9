"""Requests of a rollout process to its servers: those that begin together are one message, and so are their answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import count

import trio
from attrs import define, field

from fray.errors import ActorDied
from fray.rl.inference.requests import Completion, GenerateRequest
from fray.rl.messages import ServerRoute
from fray.rl.rollout.server_choice import RequestGivenUp

BATCH_TOKENS = 1 << 17
"""Tokens of prompts that are sent in one message, if it has several requests."""


@define(eq=False)
class _Sent:
    """A request whose answer is awaited."""

    route: ServerRoute
    request: GenerateRequest
    batch: _Batch | None = None
    answer: list[Completion] | Exception | None = None
    answered: trio.Event = field(factory=trio.Event)

    def end(self, answer: list[Completion] | Exception) -> None:
        self.answer = answer
        self.answered.set()


@define(eq=False)
class _Batch:
    """Requests that were sent in one message, and are not answered."""

    name: str
    route: ServerRoute
    waiting: dict[str, _Sent]
    withdrawn: list[str] = field(factory=list)
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class RequestBatches:
    """Sends requests to servers.

    Args:
        nursery: for the tasks that send them and receive answers.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._unsent: list[_Sent] = []
        self._open: set[_Batch] = set()
        # A server knows the batches of several processes.
        self._process, self._numbers = secrets.token_hex(8), count()

    async def generate(self, route: ServerRoute, request: GenerateRequest) -> list[Completion]:
        """Return the completions of a request, by index; one whose caller is cancelled is cancelled in the server.

        That does not wait for the server to confirm it: a frozen one never does.

        Raises:
            ActorDied: the server was lost; the request may be sent again.
            RequestGivenUp: `give_up` has ended it.
            ValueError, ServerBusy, ActorFailed: as `InferenceServer.generate`.
        """
        sent = _Sent(route, request)
        if not self._unsent:
            self._nursery.start_soon(self._send)
        self._unsent.append(sent)
        try:
            await sent.answered.wait()
        finally:
            if not sent.answered.is_set():
                self._withdraw(sent)
        assert sent.answer is not None
        if isinstance(sent.answer, Exception):
            raise sent.answer
        return sent.answer

    def give_up(self, route: ServerRoute) -> None:
        """End the requests that a server has not answered: `generate` raises `RequestGivenUp` for each."""
        given_up = [sent for sent in self._unsent if sent.route.name == route.name]
        self._unsent = [sent for sent in self._unsent if sent.route.name != route.name]
        for batch in self._open:
            if batch.route.name == route.name:
                given_up += batch.waiting.values()
                batch.waiting.clear()
                batch.scope.cancel()
        for sent in given_up:
            sent.end(RequestGivenUp())

    async def _send(self) -> None:
        """Send the requests that were made since this task was started: those of all tasks that were ready with it."""
        unsent, self._unsent = self._unsent, []
        by_server: dict[str, list[_Sent]] = {}
        for sent in unsent:
            by_server.setdefault(sent.route.name, []).append(sent)
        for of_server in by_server.values():
            for part in _parts(of_server):
                name = f"{self._process}/{next(self._numbers)}"
                batch = _Batch(name, part[0].route, {one.request.request_id: one for one in part})
                for sent in part:
                    sent.batch = batch
                self._open.add(batch)
                self._nursery.start_soon(self._receive, batch, [sent.request for sent in part])

    async def _receive(self, batch: _Batch, requests: Sequence[GenerateRequest]) -> None:
        try:
            with batch.scope:
                route = batch.route
                async with route.handle.generate_each.stream(batch.name, requests, route.incarnation) as answers:
                    async for few in answers:
                        for name, answer in few:
                            if (sent := batch.waiting.pop(name, None)) is not None:
                                sent.end(answer)
        except ActorDied as error:
            for sent in batch.waiting.values():
                sent.end(ActorDied(str(error)))
        # Whatever the server failed with is the error of its requests.
        except Exception as error:  # noqa: BLE001
            for sent in batch.waiting.values():
                sent.end(error)
        finally:
            self._open.discard(batch)

    def _withdraw(self, sent: _Sent) -> None:
        batch = sent.batch
        if batch is None:
            self._unsent.remove(sent)
        elif batch.waiting.pop(sent.request.request_id, None) is not None:
            if not batch.withdrawn:
                self._nursery.start_soon(self._send_withdrawn, batch)
            batch.withdrawn.append(sent.request.request_id)

    async def _send_withdrawn(self, batch: _Batch) -> None:
        withdrawn, batch.withdrawn = batch.withdrawn, []
        if not batch.waiting:
            batch.scope.cancel()
            return
        try:
            await batch.route.handle.withdraw(batch.name, withdrawn)
        except ActorDied:
            return  # it takes its requests along


def _parts(requests: Sequence[_Sent]) -> Iterator[list[_Sent]]:
    """Yield requests in parts of at most `BATCH_TOKENS` tokens, or of one request."""
    part, tokens = list[_Sent](), 0
    for sent in requests:
        length = len(sent.request.prompt_ids)
        if part and tokens + length > BATCH_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(sent)
        tokens += length
    if part:
        yield part
