"""User code of simulated jobs and actors, which records every execution in the book (`fray.testing.ground_truth`).

All of it is importable, so that it travels by name and its bytes are the same in every run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import trio
from attrs import frozen

import fray
from fray import ActorHandle, Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig, Secret
from fray.runtime.runtime import current
from fray.testing.ground_truth import GroundTruth

SMALL = ResourceConfig(cpu=0.5, memory="100MB")
_books: list[GroundTruth] = []


@contextmanager
def book(truth: GroundTruth) -> Iterator[None]:
    """Make the ground truth in which workloads record their executions, within the context."""
    _books.append(truth)
    try:
        yield
    finally:
        _books.pop()


class Boom(Exception):
    """Error of workloads that are to fail; ``token`` identifies the act."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.token = token


@contextmanager
def running(token: str) -> Iterator[None]:
    """Record one execution of ``token`` by the process this code runs in."""
    truth = _books[-1]
    run = truth.run_begins(token, current().session)
    try:
        yield
    finally:
        truth.run_ends(run)


# Jobs ----------------------------------------------------------------------------------------------------------------


async def give(token: str, value: int, sleep_s: float) -> int:
    """Sleep, then return."""
    with running(token):
        await trio.sleep(sleep_s)
        return value


def give_at_once(token: str, value: int) -> int:
    """Return at once: sync code."""
    with running(token):
        return value


async def fail(token: str, sleep_s: float) -> None:
    """Sleep, then raise."""
    with running(token):
        await trio.sleep(sleep_s)
        raise Boom(token)


async def stumble(token: str, fails: int, sleep_s: float) -> int:
    """Sleep, then raise, in the first few executions; a later one returns."""
    with running(token):
        await trio.sleep(sleep_s)
        if _books[-1].times_run(token) <= fails:
            raise Boom(token)
        return fails


async def count_in_own_actor(token: str, fails: int, sleep_s: float) -> tuple[ActorHandle, int]:
    """Count in an actor that the job owns, and raise in the first few executions; a later one returns the count."""
    with running(token):
        number = _books[-1].times_run(token)
        actor = await fray.current_cluster().create_actor(
            Counter, name=f"{token}.own", lifetime="job", get_if_exists=True, max_restarts=-1
        )
        count = await actor.add.options(idempotent=True)(f"{token}.{number}")
        await trio.sleep(sleep_s)
        if number <= fails:
            raise Boom(token)
        return actor, count


async def give_unless_first(token: str, value: int) -> int:
    """Raise in the first of all executions; the others return after a while."""
    with running(token):
        if _books[-1].times_run(token) == 1:
            raise Boom(token)
        await trio.sleep(1.0)
        return value


async def linger(token: str, cleanup_s: float) -> None:
    """Stay until cancelled, then take a while to leave."""
    with running(token):
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(cleanup_s)


async def leave(token: str, left_s: float) -> None:
    """Launch a detached job, and stay until cancelled."""
    with running(token):
        left = f"{token}.left"
        await fray.current_cluster().launch(request(left, give, left, 1, left_s, detached=True))
        await trio.sleep_forever()


async def wait_for_one_below(token: str, value: int, sleep_s: float, resources: ResourceConfig) -> int:
    """Launch a job that needs as much as this one, and return its value."""
    with running(token):
        below = f"{token}.below"
        job = await fray.current_cluster().launch(
            request(below, give, below, value, sleep_s, resources=resources, max_retries_failure=2)
        )
        return int(await job.wait())


async def dawdle(token: str, pauses_s: Sequence[float], for_ever: bool) -> None:
    """Report progress after each pause; then stay, if it is for ever."""
    with running(token):
        for done, pause_s in enumerate(pauses_s, 1):
            await trio.sleep(pause_s)
            fray.progress(done, len(pauses_s), "pauses")
        if for_ever:
            await trio.sleep_forever()


async def fall_ill(token: str, after_s: float) -> None:
    """Answer well for a while, and badly from then on."""
    with running(token):
        await trio.sleep(after_s)
        _books[-1].unhealthy.add(current().session)
        await trio.sleep_forever()


async def waver(token: str, spans_s: Sequence[float]) -> int:
    """Answer health checks badly for the first span, well for the next, and so on; return after the last."""
    with running(token):
        me = current().session
        for number, span_s in enumerate(spans_s):
            (_books[-1].unhealthy.discard if number % 2 else _books[-1].unhealthy.add)(me)
            await trio.sleep(span_s)
        return len(spans_s)


@frozen
class Child:
    """Child job of `family`, with its own children."""

    token: str
    value: int
    sleep_s: float
    fails: bool = False
    children: tuple[Child, ...] = ()

    def total(self) -> int:
        """Sum of the family's values if nothing fails."""
        return self.value + sum(child.total() for child in self.children)

    def tokens(self) -> Iterator[str]:
        """Tokens of the child and all below."""
        yield self.token
        for child in self.children:
            yield from child.tokens()

    def booms(self) -> Iterator[str]:
        """Tokens of those that fail."""
        if self.fails:
            yield self.token
        for child in self.children:
            yield from child.booms()


async def family(me: Child) -> int:
    """Launch the children in a scope, sleep, and return the sum of all values; or raise."""
    with running(me.token):
        async with fray.current_cluster().open_scope(me.token) as scope:
            jobs = [await scope.launch(request(child.token, family, child)) for child in me.children]
            await trio.sleep(me.sleep_s)
            if me.fails:
                raise Boom(me.token)
        total = me.value
        for job in jobs:
            total += await job.wait()
        return total


def request(
    name: str,
    fn: object,
    *args: object,
    resources: ResourceConfig = SMALL,
    replicas: int | None = None,
    max_retries_failure: int = 0,
    detached: bool = False,
    ports: Sequence[str] = (),
    secrets: Sequence[str] = (),
) -> JobRequest:
    """Return a job that runs a workload."""
    return JobRequest(
        name=name,
        resources=resources,
        entrypoint=Entrypoint.from_callable(fn, args),  # type: ignore[arg-type]
        replicas=replicas,
        max_retries_failure=max_retries_failure,
        detached=detached,
        ports=ports,
        environment=EnvironmentConfig.create(env_vars={name: Secret(name) for name in secrets}),
    )


# Actors --------------------------------------------------------------------------------------------------------------


class Counter:
    """Counter of tokens with async methods."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, token: str) -> int:
        """Count one."""
        with running(token):
            self.count += 1
            return self.count

    def look(self) -> int:
        """Return the count."""
        return self.count

    async def slow_add(self, token: str, sleep_s: float) -> int:
        """Sleep, then count one."""
        with running(token):
            await trio.sleep(sleep_s)
            self.count += 1
            return self.count

    async def relay(self, token: str, others: Sequence[ActorHandle], sleep_s: float) -> int:
        """Count one, and have the others count, one after another, nested."""
        with running(token):
            self.count += 1
            if not others:
                await trio.sleep(sleep_s)
                return 1
            return 1 + int(await others[0].relay(f"{token}+", others[1:], sleep_s))

    async def numbers(self, token: str, count: int, pause_s: float) -> AsyncIterator[int]:
        """Yield so many numbers."""
        with running(token):
            for number in range(count):
                yield number
                await trio.sleep(pause_s)

    async def doubled(self, token: str, numbers: fray.Stream) -> int:
        """Answer each number with its double, and return how many there were."""
        with running(token):
            count = 0
            async for number in numbers:
                await numbers.send(2 * number)
                count += 1
            return count

    async def boom(self, token: str) -> None:
        """Raise."""
        with running(token):
            await trio.lowlevel.checkpoint()
            raise Boom(token)


class Fragile(Counter):
    """Actor that fails when asked to."""

    async def quit(self, token: str) -> None:
        """End the whole actor."""
        with running(token):
            raise SystemExit(1)


class StatefulActor:
    """Actor that collects tokens, and stores them over restarts."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def add(self, token: str) -> list[str]:
        """Add a token, and return all."""
        with running(token):
            self.tokens.append(token)
            return list(self.tokens)

    async def keep(self, token: str) -> list[str]:
        """Store the state, and return it."""
        with running(token):
            tokens = list(self.tokens)
            await fray.current_actor().checkpoint()
            return tokens

    async def look(self) -> list[str]:
        """Return all tokens."""
        return list(self.tokens)

    async def quit(self, token: str) -> None:
        """End the whole actor."""
        with running(token):
            raise SystemExit(1)

    def __fray_checkpoint__(self) -> list[str]:
        return self.tokens

    def __fray_restore__(self, tokens: list[str]) -> None:
        self.tokens = tokens


class Tally:
    """Counter without async methods: on one thread, here the loop."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, token: str) -> int:
        """Count one."""
        with running(token):
            self.count += 1
            return self.count

    def look(self) -> int:
        """Return the count."""
        return self.count

    def boom(self, token: str) -> None:
        """Raise."""
        with running(token):
            raise Boom(token)
