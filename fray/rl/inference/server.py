"""Actor that generates with a model: requests, streams, new weights between two decoding steps."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio
from attrs import evolve

from fray.api.actors.current_actor import CurrentActor, current_actor
from fray.errors import ActorDied, ActorFailed, FrayError, InvalidRequest
from fray.rl.core.versions import VersionName
from fray.rl.http_access.place import place_of
from fray.rl.inference.decoding import (
    Decoder,
    DecodingEngine,
    DecodingOutcome,
    Done,
    InterruptMode,
    WeightUpdate,
    checked_mode,
)
from fray.rl.inference.decoding_thread import Command, DecodingThread
from fray.rl.inference.http_settings import HttpPort, WeightAddress
from fray.rl.inference.request_table import OpenRequest, RequestBatch, RequestTable, ServerBusy
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent
from fray.rl.process_start import loading, wait_for_preemption
from fray.rl.processes.actor_tasks import ActorTask, ActorTasks

RATE_WINDOW_S = 10.0
"""Seconds over which tokens per second and the busy share are counted."""
ANSWER_TOKENS = 1 << 17
"""Tokens of answers that are sent in one message, if it has several answers."""
END_S = 4.0
"""Seconds that the thread has to finish its step when the actor ends."""

log = logging.getLogger("fray.rl.inference")


def _resume(decoder: Decoder, done: Done) -> None:
    decoder.resume()
    done(None)


def _make_and_freeze(make_engine: Callable[[], DecodingEngine]) -> DecodingEngine:
    with loading():
        return make_engine()


def _do_all(commands: Sequence[Command], decoder: Decoder) -> None:
    for command in commands:
        command(decoder)


class InferenceServer:
    """Generates completions with the weights that it has, and says which.

    An actor (``scope.create_actor(InferenceServer, make_engine)``), or an object of a Trio program: then `aclose` ends
    it. A failing engine fails its requests and the actor.

    Args:
        make_engine: makes the engine, in the thread that will use it; in an actor it is pickled.
        name: for messages and logs.
        waits: whether requests wait for the first `load_weights`: the weights of the engine may be old. Default False.
    """

    def __init__(
        self, make_engine: Callable[[], DecodingEngine], *, name: str = "inference server", waits: bool = False
    ) -> None:
        self._name = name
        self._may_answer = trio.Event()
        if not waits:
            self._may_answer.set()
        self._failure: Exception | None = None
        self._actor: CurrentActor | None = None
        try:
            self._actor = current_actor()
        except FrayError:
            pass
        self._tasks = None if self._actor is None else ActorTasks()
        self._serving: dict[str, ActorTask[None]] = {}
        """Ports that are served, by the name of the method."""
        # A program that has a server as an object may do other things in its process.
        make = make_engine if self._actor is None else partial(_make_and_freeze, make_engine)
        self._thread = DecodingThread(make, name, self._take, self._end)
        self._requests = RequestTable(
            lambda request, stream: self._send(lambda decoder: decoder.add(request, stream)),
            lambda name: self._thread.send(lambda decoder: decoder.cancel(name)),
        )
        self._batches: dict[str, RequestBatch] = {}
        self._held: list[Command] | None = None
        """Commands that are sent to the thread together; None: each at once."""
        self._waits: set[trio.Event] = set()
        """Events of commands that the thread has not done yet."""
        self._tokens = 0
        self._url, self._listens = "", trio.Event()
        self._weight_address: WeightAddress | None = None
        self._takes_weights = trio.Event()
        self._samples: deque[tuple[float, int, float]] = deque([(trio.current_time(), 0, 0.0)])
        """(time, tokens, busy seconds), for the rates."""

    # Requests --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions of a request, by index.

        A request whose id is known attaches to the first: it runs once in this server. One that every caller has
        cancelled ends in the engine, too.

        Raises:
            ValueError: the engine can never answer it (too long), or its id names another request.
            ServerBusy: too many requests are open.
            ActorFailed: the engine has failed; the cause is its error.
        """
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Return the completions of each request, when all have ended; one message for many requests.

        Raises:
            ValueError, ServerBusy, ActorFailed: as `generate`, of the first request that fails; the others are
                cancelled.
        """
        entries: list[OpenRequest] = []
        await self._may_answer.wait()
        try:
            for request in requests:
                self._check()
                entries.append(self._requests.attach(request))
            results = []
            for entry in entries:
                await entry.ended.wait()
                results.append(entry.result())
            return results
        finally:
            for entry in entries:
                self._requests.detach(entry)

    async def generate_each(
        self, batch: str, requests: Sequence[GenerateRequest], incarnation: str = ""
    ) -> AsyncIterator[list[tuple[str, list[Completion] | Exception]]]:
        """Generate the completions of many requests, of each as soon as it has ended; closing it cancels the others.

        A caller with many requests has one message in each direction for those that begin, or end, together.

        Args:
            batch: name of the requests together, for `withdraw`.
            incarnation: of the actor, for which the requests are. Default: any.

        Yields:
            Ids of requests that have ended, with their completions by index, or the error (ValueError, ServerBusy or
            ActorFailed, as of `generate`).

        Raises:
            ActorDied: this is another incarnation.
            ActorFailed: the engine had failed before.
        """
        # A call that has not reached an incarnation before its end is delivered to the next one. Waiting for the first
        # weights would not do: they may be old when they are there, and its caller does not know this one's version.
        if incarnation and (self._actor is None or self._actor.incarnation != incarnation):
            raise ActorDied(f"{self._name}: the incarnation for which the requests are has ended")
        await self._may_answer.wait()
        self._check()
        own = self._batches[batch] = RequestBatch()
        try:
            if refused := self._attach_all(own, requests):
                yield refused
            while own.entries:
                await own.news.wait()
                if ended := own.take(ANSWER_TOKENS):
                    yield [(entry.request.request_id, entry.error or entry.result()) for entry in ended]
        finally:
            del self._batches[batch]
            for entry in own.entries.values():
                self._requests.detach(entry)

    async def withdraw(self, batch: str, names: Sequence[str]) -> None:
        """Cancel requests of a `generate_each` that continues; those that have ended are left out."""
        own = self._batches.get(batch)
        for name in names if own is not None else ():
            assert own is not None
            if (entry := own.remove(name)) is not None:
                self._requests.detach(entry)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        """Generate tokens as they are made, and each completion when it has ended. Closing it cancels the request.

        Raises:
            ValueError, ServerBusy, ActorFailed: as `generate`.
            ReaderTooSlow: the reader was too many tokens behind.
        """
        await self._may_answer.wait()
        self._check()
        entry = self._requests.attach(request, stream=True)
        try:
            while True:
                await entry.news.wait()
                while entry.unread:
                    yield entry.unread.popleft()
                if entry.ended.is_set():
                    entry.result()
                    return
                entry.news = trio.Event()
        finally:
            self._requests.detach(entry)

    # Weights and pauses ----------------------------------------------------------------------------------------------

    async def load_weights(self, version: VersionName, table: Any, weights: Any, mode: InterruptMode = "keep") -> None:
        """Load weights between two decoding steps; returns when the next token is made by them.

        Loading the version that the server has does nothing.

        Args:
            version: name of the weights.
            table: `fray.rl.weights_table.WeightTable` of the buffer.
            weights: the buffer, or a reference that gives it when awaited. It is read before this returns, not later.
            mode: requests in flight continue (``keep``), finish first (``wait``) or end with "abort" (``abort``).

        Raises:
            ValueError: the table is of another model, the version is older than that of the server, the mode is
                unknown, or requests would have to finish while the server is paused. The weights are as before.
            ActorFailed: the engine has failed.
        """
        checked = checked_mode(mode)
        self._check()
        decoder = self._thread.decoder
        if decoder is not None and decoder.engine.version == version:
            # No request in flight is to be ended, or waited for, because of it.
            self._may_answer.set()
            return
        buffer = await weights if inspect.isawaitable(weights) else weights
        update = WeightUpdate(version, table, buffer, checked)
        refusal = await self._command(lambda decoder, done: decoder.update(update, done))
        if refusal is not None:
            raise refusal
        self._may_answer.set()

    async def pause(self, mode: InterruptMode = "wait") -> None:
        """Stop decoding; new requests wait for `resume`. Returns when no token is made any more.

        Args:
            mode: requests in flight stay where they are (``keep``), finish first (``wait``) or end with "abort".

        Raises:
            ValueError: the mode is unknown.
            ActorFailed: the engine has failed.
        """
        checked = checked_mode(mode)
        await self._command(lambda decoder, done: decoder.pause(checked, done))

    async def resume(self) -> None:
        """Decode again after `pause`; nothing happens to a server that is not paused. Raises ActorFailed as `pause`."""
        await self._command(_resume)

    async def is_paused(self) -> bool:
        """Return whether the server is paused. Raises ActorFailed as `pause`."""
        await self._ready()
        assert self._thread.decoder is not None
        return self._thread.decoder.is_paused

    async def ping(self) -> None:
        """Return: the process answers. For health checks."""

    async def busy_time(self) -> tuple[float, float]:
        """Return the clock of this process and the time spent in decoding steps since the start, both in seconds."""
        decoder = self._thread.decoder
        return trio.current_time(), 0.0 if decoder is None else decoder.busy_s

    async def wait_for_preemption(self) -> None:
        """Return when the cluster has given notice that it ends this process, such as with its machine."""
        await wait_for_preemption()

    async def leave(self) -> None:
        """End the actor when every request has ended. For a server that gets no further ones."""
        await self._requests.wait_empty()
        current_actor().shutdown()

    async def status(self) -> dict[str, Any]:
        """Return numbers about the server, when its engine is ready.

        ``version`` (a `VersionName`), ``paused``, ``running`` and ``waiting`` (requests), ``max_length`` (tokens),
        ``tokens`` (of ended completions), ``steps``, ``busy_s`` (seconds in decoding steps) since the start; and
        ``tokens_per_s`` and ``busy_share`` (0 to 1) over the last `RATE_WINDOW_S` seconds.

        Raises:
            ActorFailed: the engine has failed.
        """
        await self._ready()
        decoder = self._thread.decoder
        assert decoder is not None
        self._sample()
        (then, tokens, busy_s), (now, tokens_now, busy_now) = self._samples[0], self._samples[-1]
        elapsed = max(now - then, 1e-9)
        return {
            "version": decoder.engine.version,
            "paused": decoder.is_paused,
            "running": len(decoder.running),
            "waiting": len(self._requests) - len(decoder.running),
            "max_length": decoder.engine.max_length,
            "tokens": tokens_now,
            "steps": decoder.steps,
            "busy_s": busy_now,
            "tokens_per_s": (tokens_now - tokens) / elapsed,
            "busy_share": min((busy_now - busy_s) / elapsed, 1.0),
        }

    # HTTP ------------------------------------------------------------------------------------------------------------

    async def serve_http(self, settings: HttpPort) -> None:
        """Serve OpenAI's API and control routes until cancelled, on loopback or as the settings' ``access`` says.

        That of an actor is served until the actor ends; a further call waits for the same end.

        Raises:
            InvalidRequest: a package or the tokenizer of the model is missing, or this machine has no address for
                others.
            OSError: the port cannot be listened on.
        """
        await self._serve("http", partial(self._serve_http, settings))

    async def _serve(self, name: str, serve: Callable[[], Awaitable[None]]) -> None:
        if self._tasks is None:
            await serve()
            return
        if name not in self._serving:
            self._serving[name] = self._tasks.start(serve)
        try:
            await self._serving[name].wait()
        except OSError:
            # The next call tries again: the port may be free by then.
            self._serving.pop(name, None)
            raise

    async def _serve_http(self, settings: HttpPort) -> None:
        try:
            from fray.http_server import HttpAddress, serve_http
            from fray.rl.inference.http_port import server_app
        except ImportError as error:
            raise InvalidRequest(f"the HTTP port needs {error.name}: pip install 'fray[rl]'") from None
        app = server_app(self, settings)
        place = None if settings.access is None else place_of(settings.access.host, settings.access.authority)
        bind, tls = ("127.0.0.1", None) if place is None else (place.bind, place.tls)
        async with trio.open_nursery() as nursery:
            address: HttpAddress = await nursery.start(partial(serve_http, app, host=bind, port=settings.port, tls=tls))
            self._url = address.url if place is None else evolve(address, host=place.host).url
            self._listens.set()

    async def http_url(self) -> str:
        """Return ``http://127.0.0.1:PORT``, or ``https://HOST:PORT`` for other machines, when `serve_http` listens."""
        await self._listens.wait()
        return self._url

    async def serve_weights(self) -> None:
        """Serve a port that takes new weights and nothing else: see `weight_address`; until when, see `serve_http`.

        Raises:
            InvalidRequest: a package is missing.
        """
        await self._serve("weights", self._serve_weights)

    async def _serve_weights(self) -> None:
        def note(address: WeightAddress) -> None:
            self._weight_address = address
            self._takes_weights.set()

        try:
            from fray.rl.inference.http_port import serve_weight_port

            await serve_weight_port(self, note)
        except ImportError as error:
            raise InvalidRequest(f"weights over HTTP need {error.name}: pip install 'fray[rl]'") from None

    async def weight_address(self) -> WeightAddress:
        """Return where `serve_weights` listens, as soon as it does. Who has it may replace the weights."""
        await self._takes_weights.wait()
        assert self._weight_address is not None
        return self._weight_address

    # End -------------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the thread, at most `END_S` seconds later; requests that are open fail.

        A thread that still makes its engine is not waited for: it ends by itself as soon as that is made.
        """
        self._thread.stop()
        if not self._thread.ready.is_set():
            self._fail(ActorFailed(f"{self._name} has ended"))
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + END_S):
            await self._thread.ended.wait()
        if not self._thread.ended.is_set():
            log.warning("%s: its decoding step takes more than %g s; its thread is abandoned", self._name, END_S)
        self._fail(ActorFailed(f"{self._name} has ended"))

    async def __fray_cleanup__(self) -> None:
        if self._tasks is not None:
            await self._tasks.aclose()
        await self.aclose()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _attach_all(
        self, batch: RequestBatch, requests: Sequence[GenerateRequest]
    ) -> list[tuple[str, list[Completion] | Exception]]:
        """Begin requests in one decoding step; return those that are refused, with their errors."""
        refused: list[tuple[str, list[Completion] | Exception]] = []
        # One by one, the thread would decode the first alone while the others are sent.
        held = self._held = list[Command]()
        try:
            for request in requests:
                try:
                    batch.add(self._requests.attach(request))
                except (ValueError, ServerBusy) as error:
                    refused.append((request.request_id, error))
        finally:
            self._held = None
            self._thread.send(lambda decoder: _do_all(held, decoder))
        return refused

    def _send(self, command: Command) -> None:
        if self._held is None:
            self._thread.send(command)
        else:
            self._held.append(command)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _ready(self) -> None:
        await self._thread.ready.wait()
        self._check()

    async def _command(self, run: Callable[[Decoder, Done], None]) -> ValueError | None:
        """Run a command in the thread and return what it passes to ``done``; a failure of the server ends the wait.

        A cancelled caller waits until the thread no longer uses what the command has, such as a buffer.
        """
        self._check()
        event, refusals = trio.Event(), list[ValueError | None]()
        self._waits.add(event)

        def done(refusal: ValueError | None) -> None:
            refusals.append(refusal)
            self._thread.call_soon(event.set)

        try:
            self._thread.send(lambda decoder: run(decoder, done))
            try:
                await event.wait()
            except trio.Cancelled:
                self._thread.send(lambda decoder: decoder.withdraw(done))
                with trio.CancelScope(shield=True):
                    await event.wait()
                raise
        finally:
            self._waits.discard(event)
        self._check()
        return refusals[0]

    def _take(self, outcome: DecodingOutcome) -> None:
        for event in outcome.events:
            if not isinstance(event, TokenEvent):
                self._tokens += len(event[1].token_ids)
            self._requests.take(event)
        for name, refusal in outcome.refused:
            self._requests.fail(name, refusal)
        self._sample()

    def _sample(self) -> None:
        assert self._thread.decoder is not None
        now = trio.current_time()
        if now - self._samples[-1][0] >= RATE_WINDOW_S / 20 or len(self._samples) == 1:
            self._samples.append((now, self._tokens, self._thread.decoder.busy_s))
        else:
            self._samples[-1] = (now, self._tokens, self._thread.decoder.busy_s)
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW_S:
            self._samples.popleft()

    def _end(self, error: BaseException | None) -> None:
        """Note the end of the thread; ``error`` is that of the engine."""
        if error is None:
            self._fail(ActorFailed(f"{self._name} has ended"))
            return
        log.error("%s: its engine failed", self._name, exc_info=error)
        failure = ActorFailed(f"{self._name}: its engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail(failure)
        if self._actor is not None:
            self._actor.fail(failure)

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        self._requests.fail_all(self._failure)
        for event in self._waits:
            event.set()
