"""Environment servers for OpenTinker's agent loop: a class with the rules of a game, behind HTTP.

`run` serves one until Ctrl-C, `serve` inside a program; `batch_of` makes the batches of its client. See docs/tinker.md.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import trio
from attrs import define, field, frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.errors import InvalidRequest
from fray.http_server import serve_http
from fray.tinker.opentinker.answers import Unprocessable, fields_of, json_of, refuse, refuse_body
from fray.tinker.wire.dataproto import DataProto

BODY_LIMIT_BYTES = 1 << 20
"""Bytes of a request."""
INSTANCE_ID_LIMIT = 256
"""Characters of an instance's id, and of a job's."""
JOBS_LIMIT = 1_000
"""Jobs whose numbers are kept; of more, those whose requests are oldest are forgotten."""
FIRST_PORT = 8_082

log = logging.getLogger("fray.tinker")


@frozen
class StepResult:
    """Answer of a game to an action.

    Attributes:
        observation: text that the model reads next.
        reward: of this action; that of an episode is the sum.
        done: the game has ended.
        info: JSON values for readers.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(factory=dict)


class Game(Protocol):
    """Rules of a game; each instance has one of its own. Its methods may block: they run in threads.

    `get_system_prompt` and `get_initial_user_message` are those of all instances, before `reset`.
    """

    def reset(self, **task: Any) -> str | None:
        """Begin, and return the first observation, which the model reads after its prompt; None or "": none.

        Args:
            task: of this episode, from the batch (``interaction_kwargs``).
        """

    def step(self, action: str) -> StepResult:
        """Take a reply of the model."""

    def get_system_prompt(self) -> str:
        """Return the first message of each conversation; empty: none."""

    def get_initial_user_message(self) -> str:
        """Return the user's first message; empty: none."""


def batch_of(game: Callable[[], Game], tasks: Sequence[Mapping[str, Any]]) -> DataProto:
    """Return a batch of a game: its prompt for each task, which `Game.reset` of each episode gets.

    Raises:
        ValueError: the game has neither a system prompt nor an initial message.
    """
    made = game()
    texts = {"system": made.get_system_prompt(), "user": made.get_initial_user_message()}
    messages = [{"role": role, "content": text} for role, text in texts.items() if text]
    if not messages:
        raise ValueError(f"{_name_of(game)}: expected a system prompt or an initial user message, or both")
    prompts, given = np.empty(len(tasks), object), np.empty(len(tasks), object)
    for row, task in enumerate(tasks):
        prompts[row], given[row] = messages, dict(task)
    return DataProto({}, {"raw_prompt": prompts, "interaction_kwargs": given})


def run(game: Callable[[], Game], *, host: str = "127.0.0.1", port: int = FIRST_PORT, **options: Any) -> None:
    """Serve a game until Ctrl-C. Arguments and errors as `serve`."""

    async def forever() -> None:
        async with serve(game, host=host, port=port, **options):
            await trio.sleep_forever()

    try:
        trio.run(forever)
    except KeyboardInterrupt:
        return


@frozen
class RunningGame:
    """Servers of a game that run."""

    urls: tuple[str, ...]

    @property
    def url(self) -> str:
        """Address of the first: ``env_endpoint``."""
        return self.urls[0]


@asynccontextmanager
async def serve(
    game: Callable[[], Game],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    count: int = 1,
    instances: int = 10_000,
    idle_s: float = 600.0,
    call_s: float = 60.0,
    threads: int = 64,
) -> AsyncIterator[RunningGame]:
    """Serve a game: ``async with game.serve(Copy) as server``, whose ``url`` is the ``env_endpoint``.

    Args:
        game: makes an instance: a class, or a function without arguments.
        host: address to listen on. Servers ask for no key: let those who reach it be those who may play.
        port: of the first server; 0: any.
        count: servers on consecutive ports, between which clients divide the instances by their ids.
        instances: of each server at a time; further ones are answered 503.
        idle_s: seconds without a request after which an instance is removed.
        call_s: seconds for one call of the game; then the instance is removed, and its request answered 504.
        threads: calls at a time, of each server.

    Raises:
        InvalidRequest: several servers without a first port, or a number below 1.
        ExceptionGroup: of OSError: a port is taken.
    """
    if count < 1 or instances < 1 or threads < 1:
        raise InvalidRequest(f"count={count}, instances={instances}, threads={threads}: expected 1 or more each")
    if count > 1 and not port:
        raise InvalidRequest(f"count={count} servers have consecutive ports: give port, the first of them")
    servers = [GameServer(game, instances, idle_s, call_s, threads) for _ in range(count)]
    async with trio.open_nursery() as nursery:
        urls = []
        for index, server in enumerate(servers):
            at = port + index if port else 0
            address = await nursery.start(partial(serve_http, server.app(), host=host, port=at))
            nursery.start_soon(server.remove_idle)
            urls.append(address.url)
        yield RunningGame(tuple(urls))
        nursery.cancel_scope.cancel()


@define(eq=False)
class _Instance:
    """Episode of a client."""

    game: Game
    job_id: str
    seen_at: float
    lock: trio.Lock = field(factory=trio.Lock)
    turns: int = 0
    """Actions that were executed."""
    reward: float = 0.0
    answer: dict[str, Any] | None = None
    """Answer to the last action."""
    has_ended: bool = False


@define
class _Numbers:
    """Counts of episodes."""

    games: int = 0
    finished: int = 0
    turns: int = 0
    errors: int = 0
    reward_sum: float = 0.0
    reward_min: float = math.inf
    reward_max: float = -math.inf

    def finish(self, reward: float) -> None:
        """Count the end of an episode."""
        self.finished += 1
        self.reward_sum += reward
        self.reward_min, self.reward_max = min(self.reward_min, reward), max(self.reward_max, reward)

    def shown(self) -> dict[str, Any]:
        """Return them as JSON; rewards and turns of episodes that have ended, null without any."""
        return {
            "games": self.games,
            "finished": self.finished,
            "turns": self.turns,
            "errors": self.errors,
            "mean_reward": self.reward_sum / self.finished if self.finished else None,
            "min_reward": self.reward_min if self.finished else None,
            "max_reward": self.reward_max if self.finished else None,
        }


@define
class _JobNumbers:
    """Counts of a job: since the last reset of them, and of all."""

    step: _Numbers = field(factory=_Numbers)
    cumulative: _Numbers = field(factory=_Numbers)


class GameServer:
    """One server: instances, their calls, and numbers about them. Arguments as of `serve`."""

    def __init__(self, game: Callable[[], Game], instances: int, idle_s: float, call_s: float, threads: int) -> None:
        self._game, self._limit, self._idle_s, self._call_s = game, instances, idle_s, call_s
        self._instances: dict[str, _Instance] = {}
        self._beginning = 0
        """Instances whose `Game.reset` is called."""
        self._jobs: OrderedDict[str, _JobNumbers] = OrderedDict()
        self._threads = trio.CapacityLimiter(threads)

    def app(self) -> Starlette:
        """Return the app of its routes."""
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/reset", self._reset),
            ("POST", "/step", self._step),
            ("POST", "/finalize", self._finalize),
            ("GET", "/health", self._health),
            ("GET", "/stats", partial(self._stats, ("step", "cumulative"))),
            ("GET", "/stats/step", partial(self._stats, ("step",))),
            ("GET", "/stats/cumulative", partial(self._stats, ("cumulative",))),
            ("GET", "/stats/jobs", self._stats_jobs),
            ("POST", "/stats/reset", self._stats_reset),
            ("POST", "/stats/reset_all", self._stats_reset_all),
            ("DELETE", "/stats/job/{job_id}", self._stats_delete),
        ]
        return Starlette(
            routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in routes],
            exception_handlers={HTTPException: refuse, Unprocessable: refuse_body},
        )

    async def remove_idle(self) -> None:
        """Remove instances without requests, until cancelled."""
        while True:
            await trio.sleep(min(self._idle_s / 4, 10.0))
            oldest = trio.current_time() - self._idle_s
            for name, instance in list(self._instances.items()):
                if instance.seen_at < oldest and not instance.lock.locked():
                    del self._instances[name]

    # Episodes ---------------------------------------------------------------------------------------------------------

    async def _reset(self, request: Request) -> Response:
        body = await json_of(request, BODY_LIMIT_BYTES)
        name, job_id = _names_of(body)
        if name not in self._instances and len(self._instances) + self._beginning >= self._limit:
            raise HTTPException(503, f"{self._limit} instances are under way, the limit of this server")
        task = {key: value for key, value in body.items() if key not in ("instance_id", "job_id")}
        numbers = self._numbers_of(job_id)

        def begin() -> tuple[Game, Any]:
            game = self._game()
            return game, game.reset(**task)

        self._beginning += 1
        try:
            game, observation = await self._call(begin, "reset", name, job_id)
        finally:
            self._beginning -= 1
        if observation is not None and not isinstance(observation, str):
            raise HTTPException(500, f"reset returned {type(observation).__name__}; expected a text, or None")
        # An id that is used begins a new episode.
        self._instances[name] = _Instance(game, job_id, trio.current_time())
        for each in (numbers.step, numbers.cumulative):
            each.games += 1
        return JSONResponse({"instance_id": name, "observation": observation or "", "repeats_turns": True})

    async def _step(self, request: Request) -> Response:
        body = await json_of(request, BODY_LIMIT_BYTES)
        given = fields_of(body, action="str", turn="int?")
        name, _ = _names_of(body)
        instance = self._found(name)
        async with instance.lock:
            instance.seen_at = trio.current_time()
            turn = instance.turns if given["turn"] is None else given["turn"]
            if turn == instance.turns - 1 and instance.answer is not None:
                # Sent again: the answer was lost.
                return JSONResponse(instance.answer)
            if instance.has_ended:
                raise HTTPException(409, f"instance {name!r} has ended: reset it")
            if turn != instance.turns:
                raise HTTPException(409, f"instance {name!r}: turn {turn}; expected {instance.turns}")
            result = await self._call(partial(instance.game.step, given["action"]), "step", name, instance.job_id)
            instance.answer = answer = self._answer_of(result, instance.job_id)
            instance.turns, instance.reward = instance.turns + 1, instance.reward + answer["reward"]
            instance.seen_at = trio.current_time()
            numbers = self._numbers_of(instance.job_id)
            for each in (numbers.step, numbers.cumulative):
                each.turns += 1
            if answer["done"]:
                self._end(instance)
        return JSONResponse(answer)

    async def _finalize(self, request: Request) -> Response:
        name, _ = _names_of(await json_of(request, BODY_LIMIT_BYTES))
        instance = self._instances.pop(name, None)
        if instance is not None:
            self._end(instance)
        return JSONResponse({"instance_id": name, "status": "finalized" if instance is not None else "unknown"})

    def _end(self, instance: _Instance) -> None:
        """Count the end of an episode, once."""
        if instance.has_ended:
            return
        instance.has_ended = True
        numbers = self._numbers_of(instance.job_id)
        for each in (numbers.step, numbers.cumulative):
            each.finish(instance.reward)

    def _found(self, name: str) -> _Instance:
        instance = self._instances.get(name)
        if instance is None:
            text = f"no instance {name!r}: reset it first; one without a request for {self._idle_s:g} s is removed"
            raise HTTPException(404, text)
        return instance

    async def _call(self, function: Callable[[], Any], what: str, name: str, job_id: str) -> Any:
        """Call the game in a thread.

        Raises HTTPException 500 if it raises, and 504 if it takes too long; the instance is removed then.
        """
        try:
            with trio.move_on_after(self._call_s):
                return await trio.to_thread.run_sync(function, limiter=self._threads, abandon_on_cancel=True)
            status, problem = 504, f"{what} did not return within {self._call_s:g} s"
        except Exception as error:
            log.warning("instance %.100r: %s raised", name, what, exc_info=error)
            status, problem = 500, f"{what} raised {type(error).__name__}: {error!s:.500}"
        self._instances.pop(name, None)
        self._count_error(job_id)
        raise HTTPException(status, problem)

    def _answer_of(self, result: Any, job_id: str) -> dict[str, Any]:
        """Return the answer that a result is. Raises HTTPException 500 for something else."""
        try:
            answer = {
                "observation": result.observation or "",
                "reward": float(result.reward),
                "done": bool(result.done),
                "info": dict(getattr(result, "info", None) or {}),
            }
            json.dumps(answer, allow_nan=False)
            if not isinstance(answer["observation"], str):
                raise TypeError(f"observation is {type(answer['observation']).__name__}, and not a text")
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            self._count_error(job_id)
            text = f"step returned {result!r:.200}; expected StepResult(observation, reward, done): {error!s:.200}"
            raise HTTPException(500, text) from None
        return answer

    def _count_error(self, job_id: str) -> None:
        numbers = self._numbers_of(job_id)
        for each in (numbers.step, numbers.cumulative):
            each.errors += 1

    # Numbers ----------------------------------------------------------------------------------------------------------

    def _numbers_of(self, job_id: str) -> _JobNumbers:
        """Return the numbers of a job, which is then the newest."""
        numbers = self._jobs.setdefault(job_id, _JobNumbers())
        self._jobs.move_to_end(job_id)
        if len(self._jobs) > JOBS_LIMIT:
            self._jobs.popitem(last=False)
        return numbers

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy", "game": _name_of(self._game), "instances": len(self._instances)})

    async def _stats(self, kinds: Sequence[str], request: Request) -> Response:
        job_id = request.query_params.get("job_id")
        if job_id is not None:
            return JSONResponse({"job_id": job_id, **self._shown(job_id, kinds)})
        under_way = sum(not each.has_ended for each in self._instances.values())
        return JSONResponse({"instances": under_way, "jobs": {name: self._shown(name, kinds) for name in self._jobs}})

    def _shown(self, job_id: str, kinds: Sequence[str]) -> dict[str, Any]:
        numbers = self._jobs.get(job_id)
        if numbers is None:
            raise HTTPException(404, f"no job {job_id!r:.300} here")
        return {kind: getattr(numbers, kind).shown() for kind in kinds}

    async def _stats_jobs(self, request: Request) -> Response:
        return JSONResponse({"jobs": list(self._jobs)})

    async def _stats_reset(self, request: Request) -> Response:
        """Set the numbers ``step`` of a job to zero, or those of all."""
        job_id = request.query_params.get("job_id")
        if job_id is not None and job_id not in self._jobs:
            raise HTTPException(404, f"no job {job_id!r:.300} here")
        for name, numbers in self._jobs.items():
            if job_id in (None, name):
                numbers.step = _Numbers()
        return JSONResponse({"status": "reset", "job_id": job_id})

    async def _stats_reset_all(self, request: Request) -> Response:
        """Set all numbers of all jobs to zero."""
        for name in self._jobs:
            self._jobs[name] = _JobNumbers()
        return JSONResponse({"status": "reset"})

    async def _stats_delete(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        if self._jobs.pop(job_id, None) is None:
            raise HTTPException(404, f"no job {job_id!r:.300} here")
        return JSONResponse({"status": "deleted", "job_id": job_id})


def _names_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ids of instance and job. Raises Unprocessable or HTTPException 400."""
    given = fields_of(body, instance_id="str", job_id="str?")
    names = given["instance_id"], given["job_id"] or "default"
    if any(not 0 < len(name) <= INSTANCE_ID_LIMIT for name in names):
        raise HTTPException(400, f"instance_id and job_id: expected 1 to {INSTANCE_ID_LIMIT} characters")
    return names


def _name_of(game: Any) -> str:
    return getattr(game, "__qualname__", type(game).__qualname__)
