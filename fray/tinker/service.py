"""The service: an actor with the HTTP server, and `serve`, which keeps it alive.

When its process is killed it is started again, at the same port, with the jobs and requests of its store.
"""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, field, frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fray.api.actors.monitor import Down, monitor
from fray.api.cluster import Cluster, current_cluster
from fray.errors import ActorDied, InvalidRequest
from fray.http_server import HttpAddress, serve_http, tls_of_server
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig
from fray.rl.http_access.access import ACCESS_DIRECTORY, AUTHORITY_FILE, LOOPBACK, WILDCARDS, check_host, load_authority
from fray.rl.http_access.place import place_of, reached_at
from fray.rl.model_spec import ModelSpec, TinyLlama
from fray.tinker.api_store import TinkerStore
from fray.tinker.core.engine_scale import EngineRange
from fray.tinker.core.limits import DEFAULT_LIMITS, UserLimits
from fray.tinker.engine_runner import EnginePlan
from fray.tinker.job_directories import JOBS
from fray.tinker.opentinker.answers import Unprocessable, refuse, refuse_body, refuse_job, refuse_store
from fray.tinker.opentinker.inference_routes import inference_routes
from fray.tinker.opentinker.scheduler_routes import scheduler_routes
from fray.tinker.opentinker.training_routes import training_routes
from fray.tinker.operations.operator_file import OPERATOR_FILE, OperatorAccess, default_directory, write_operator_file
from fray.tinker.operations.routes import operator_routes
from fray.tinker.service_jobs import CLIENT_GRACE_S, JobLimits, JobRefused, ServiceJobs
from fray.tinker.store import ServiceStore, StoreFailed
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.openai_routes import openai_routes
from fray.tinker.tinker_api.routes import tinker_routes
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

RESTARTS = 1_000
"""Restarts of the service within `RESTART_PERIOD_S`."""
RESTART_PERIOD_S = 3_600.0
PORT_S = 30.0
"""Seconds for which a service that is started again waits for its port."""
PORT_RETRY_S = 0.1
SERVE_RETRY_S = 0.05
"""Pause before an incarnation of the service that has come, or comes, is asked to serve."""


@frozen
class ServiceSettings:
    """Settings of a service.

    Attributes:
        directory: of the store, with the jobs below it.
        host: address to listen on.
        port: 0: any, which it keeps over restarts.
        limits: about users and jobs.
        models: by name.
        threads: of each engine's computation.
        resources: that each engine reserves.
        session_s: seconds without a heartbeat after which a session of the Tinker API ends.
        tls: files with the certificate and its key.
        has_own_authority: without ``tls``, certificates are of an authority in the directory; else HTTP without TLS.
        engines: of each base model, for the Tinker API, and when their number changes.
    """

    directory: Path
    host: str
    port: int
    limits: JobLimits
    models: dict[str, ModelSpec]
    threads: int | None
    resources: ResourceConfig | None
    session_s: float
    tls: tuple[Path, Path] | None = None
    has_own_authority: bool = False
    engines: EngineRange = field(factory=EngineRange)


class TrainingService:
    """Actor with the HTTP server, the store and the jobs. `run` serves.

    Args:
        settings: of the service.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._store = ServiceStore(settings.directory)
        # Here, and not by an engine, whose umask may leave it open: other accounts may enter the directory above it.
        models = settings.directory / "models"
        models.mkdir(mode=0o700, exist_ok=True)
        plan = EnginePlan(
            settings.models, settings.directory / JOBS, settings.threads, settings.resources, settings.limits.user
        )
        self._jobs = ServiceJobs(self._store, plan, settings.limits)
        self._api_store = TinkerStore(settings.directory)
        self._runs = TinkerRuns(
            self._api_store,
            AdapterPlan(
                settings.models,
                models,
                settings.threads,
                settings.resources,
                settings.session_s,
                settings.engines,
            ),
            self._jobs.usage.add,
            settings.limits.user,
            lambda: self._jobs.weights,
        )
        self._ready = trio.Event()
        self._url = ""

    async def run(self) -> None:
        """Serve until cancelled. Raises OSError if the port is taken; one that served before waits `PORT_S` first."""
        app = Starlette(
            routes=_by_path(
                *scheduler_routes(self._jobs),
                *training_routes(self._jobs),
                *inference_routes(self._jobs),
                *operator_routes(self._jobs, self._runs),
                *tinker_routes(self._jobs, self._runs),
                *openai_routes(self._jobs, self._runs),
            ),
            exception_handlers={
                HTTPException: refuse,
                Unprocessable: refuse_body,
                JobRefused: refuse_job,
                StoreFailed: refuse_store,
            },
        )
        settings, port_file = self._settings, self._settings.directory / "port"
        last_port = int(port_file.read_text()) if port_file.is_file() else 0
        port = settings.port or last_port
        async with trio.open_nursery() as nursery:
            await nursery.start(self._jobs.run, current_cluster())
            await nursery.start(self._runs.run, current_cluster())
            host, bind, tls, certificate = await trio.to_thread.run_sync(_place_of, settings)
            address = await self._start_server(nursery, partial(serve_http, app, host=bind, port=port, tls=tls))
            if last_port != address.port:
                port_file.write_text(str(address.port))
            address = evolve(address, host=host)
            self._url = address.url
            access = OperatorAccess(address.url, self._jobs.operator_key, certificate)
            write_operator_file(settings.directory, access)
            self._ready.set()

    async def _start_server(self, nursery: trio.Nursery, serve: Any) -> HttpAddress:
        deadline = trio.current_time() + PORT_S
        has_served = await trio.Path(self._settings.directory / OPERATOR_FILE).exists()
        while True:
            try:
                address: HttpAddress = await nursery.start(serve)
                return address
            except OSError as error:
                # The system may have given the port to a connection of another program, or of a client of this
                # service that tries again, while nothing listened on it.
                if error.errno != errno.EADDRINUSE or not has_served or trio.current_time() > deadline:
                    raise
            await trio.sleep(PORT_RETRY_S)

    async def url(self) -> str:
        """Wait until the service accepts connections; return its address."""
        await self._ready.wait()
        return self._url

    async def status(self) -> dict[str, Any]:
        """Return ``url``, ``pid``, ``users``, ``jobs`` (each with its id, state, user and requests), and ``models``.

        Those are the models of the Tinker API whose sessions have not ended.
        """
        await self._ready.wait()
        jobs = [
            {
                "job_id": job.job_id,
                "status": job.state.value,
                "user_id": job.user_id,
                "message": self._jobs.message_of(job),
                "requests": runner.requests if (runner := self._jobs.runners.get(job.job_id)) else None,
                "executed": runner.executed if runner else None,
                "global_steps": runner.global_steps if runner else None,
            }
            for job in self._jobs.jobs.values()
        ]
        return {
            "url": self._url,
            "pid": os.getpid(),
            "users": len(self._jobs.users),
            "jobs": jobs,
            "models": self._runs.shown_models(),
        }

    async def create_key(self, name: str, is_admin: bool = False) -> str:
        """Create a user and return the key. Raises InvalidRequest if the name is taken."""
        await self._ready.wait()
        try:
            return (await self._jobs.create_user(name, is_admin=is_admin))[1]
        except JobRefused as error:
            raise InvalidRequest(str(error)) from None

    def __fray_cleanup__(self) -> None:
        self._api_store.close()
        self._store.close()


class RunningService:
    """A service that runs.

    Args:
        url: its address.
        actor: its actor.
        directory: of its store.
        models: names of its models.
        ca_file: certificate of its own authority, which clients trust; None: it has none.
    """

    def __init__(
        self, url: str, actor: Any, directory: Path, models: tuple[str, ...], ca_file: Path | None = None
    ) -> None:
        self.url, self._actor, self.directory, self.models, self.ca_file = url, actor, directory, models, ca_file

    async def status(self) -> dict[str, Any]:
        """Return numbers about the service and its jobs, as `TrainingService.status`."""
        status: dict[str, Any] = await self._actor.status.options(idempotent=True)()
        return status

    async def create_key(self, name: str, *, is_admin: bool = False) -> str:
        """Create a user and return the key, which is not kept. Raises InvalidRequest if the name is taken."""
        key: str = await self._actor.create_key(name, is_admin)
        return key


def named_models(models: Sequence[ModelSpec] | Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return models by the names that clients give. Looks at the disk.

    That of a directory is its last part, that of another model its own; a `TinyLlama` is ``tiny``.

    Raises:
        InvalidRequest: there is none, or two have one name.
    """
    named: dict[str, ModelSpec] = {}
    pairs = models.items() if isinstance(models, Mapping) else [(None, model) for model in models]
    for given, model in pairs:
        name, spec = "tiny" if given is None else given, model
        if not isinstance(model, TinyLlama):
            directory = Path(model).expanduser()
            # The engines' processes have other working directories.
            spec = str(directory.absolute()) if directory.is_dir() else model
            if given is None:
                name = directory.resolve().name if directory.is_dir() else model
        if name in named:
            raise InvalidRequest(
                f"{named[name]!s:.200} and {spec!s:.200} both have the name {name!r}: "
                "rename a directory, or give names with serve(models={name: model})"
            )
        named[name] = spec
    if not named:
        raise InvalidRequest("models=[]: a service has at least one, such as models=['Qwen/Qwen3-0.6B']")
    return named


def _by_path(*routes: BaseRoute) -> list[BaseRoute]:
    """Return one route for each path, so that an answer 405 lists all methods that there are; mounts are as before."""
    paths: dict[str, list[Route]] = {}
    found: list[BaseRoute] = []
    for route in routes:
        if not isinstance(route, Route):
            found.append(route)
            continue
        if route.path not in paths:
            found.append(route)
        paths.setdefault(route.path, []).append(route)
    return [_joined(paths[each.path]) if isinstance(each, Route) else each for each in found]


def _joined(routes: Sequence[Route]) -> Route:
    if len(routes) == 1:
        return routes[0]
    endpoints = {method: route.endpoint for route in routes for method in route.methods or ()}

    async def endpoint(request: Request) -> Response:
        answer: Response = await endpoints[request.method](request)
        return answer

    return Route(routes[0].path, endpoint, methods=list(endpoints))


def _place_of(settings: ServiceSettings) -> tuple[str, str, ssl.SSLContext | None, str]:
    """Return the host of the URL, the address to listen at, the context, and the file of a certificate to trust."""
    if settings.has_own_authority:
        place = place_of(settings.host, load_authority(settings.directory))
        return place.host, place.bind, place.tls, str(_authority_file(settings.directory))
    tls = tls_of_server(*settings.tls) if settings.tls else None
    return *reached_at(settings.host), tls, str(settings.tls[0]) if settings.tls else ""


def _authority_file(directory: Path) -> Path:
    return directory / ACCESS_DIRECTORY / AUTHORITY_FILE


@asynccontextmanager
async def serve(
    models: Sequence[ModelSpec] | Mapping[str, ModelSpec],
    *,
    directory: str | Path | None = None,
    cluster: Cluster | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    auth: bool | None = None,
    open_registration: bool | None = None,
    virtual_gpus: int = 0,
    engines: int | EngineRange = 1,
    threads: int | None = None,
    resources: ResourceConfig | None = None,
    session_s: float = 300.0,
    user_limits: UserLimits | None = None,
    client_grace_s: float = CLIENT_GRACE_S,
    tls: tuple[str | Path, str | Path] | None = None,
    insecure: bool = False,
) -> AsyncIterator[RunningService]:
    """Serve training: ``async with fray.tinker.serve(models=["Qwen/Qwen3-0.6B"]) as svc``.

    It is an actor of a scope of its own; leaving the block ends it and its engines. The same directory continues
    with the same port, users, jobs and requests.

    Args:
        models: that jobs may train: names, directories or `TinyLlama`, or a dict of them by name. A directory has its
            last part as name.
        directory: store, snapshots and checkpoints; all machines with engines must reach it. Default: that of
            `fray.tinker.operations.operator_file.default_directory`, where commands look for it.
        cluster: where it runs. Default: the cluster that is open.
        host: address to listen on; ``"auto"``: that by which other machines reach the one where it runs.
        port: 0: any free one.
        auth: keys are required. Default: beyond loopback.
        open_registration: ``POST /register`` makes users. Default: on loopback.
        virtual_gpus: CPU engines that count as GPUs, for clients that ask for some; a job then has one by default.
        engines: processes with each base model, for the Tinker API. Each model is trained by one of them; samples are
            made by any, and by another one at once when one is killed. An `EngineRange` has their number follow the
            load.
        threads: of each engine's computation; None: as many as torch takes.
        resources: that each engine reserves, which quotas count. Default: none.
        session_s: seconds without a heartbeat after which a session of the Tinker API ends.
        user_limits: of each user. Default: `fray.tinker.core.limits.UserLimits()`.
        client_grace_s: seconds without a request after which a job whose client is gone ends; 0: never. Default: 1 h.
        tls: files (PEM) with the certificate of the service and its key. Default: beyond loopback, one by an authority
            of its own, ``DIRECTORY/http/ca.pem``, which clients trust.
        insecure: for tests: no TLS beyond loopback.

    Raises:
        InvalidRequest: no models or two of one name, no engine, a directory that another service uses, keys switched
            off beyond loopback, an invalid host, or a certificate that cannot be used.
        ExceptionGroup: of OSError: the port is taken.
    """
    if isinstance(engines, int):
        if engines < 1:
            raise InvalidRequest(f"engines={engines}: expected at least 1")
        engines = EngineRange(engines, engines)
    is_loopback = host in LOOPBACK
    if auth is False and not is_loopback:
        raise InvalidRequest(f"auth=False with host={host!r}: beyond loopback keys are required")
    if host not in WILDCARDS:
        check_host("host", host)
    files = None if tls is None else (await _absolute(tls[0]), await _absolute(tls[1]))
    if files is not None:
        # Refused here, and not by each start of the service.
        await trio.to_thread.run_sync(tls_of_server, *files)
    if not 0 <= client_grace_s < float("inf"):
        raise InvalidRequest(f"client_grace_s={client_grace_s}: expected seconds, or 0: jobs do not end by themselves")
    limits = JobLimits(
        has_auth=not is_loopback if auth is None else auth,
        has_registration=is_loopback if open_registration is None else open_registration,
        gpus=virtual_gpus,
        default_gpus=min(virtual_gpus, 1),
        user=user_limits or DEFAULT_LIMITS,
        client_grace_s=client_grace_s,
    )
    named = await trio.to_thread.run_sync(named_models, models)
    place = await _absolute(directory or default_directory())
    has_authority = files is None and not is_loopback and not insecure
    if has_authority and await trio.Path(place).exists():
        # Refused here. A new directory is made by the service, which may have another account than this process.
        await trio.to_thread.run_sync(load_authority, place)
    settings = ServiceSettings(
        *(place, host, port, limits, named, threads, resources, session_s, files),
        has_own_authority=has_authority,
        engines=engines,
    )
    async with (
        (cluster or current_cluster()).open_scope("tinker") as scope,
        trio.open_nursery() as nursery,
    ):
        config = ActorConfig(max_restarts=RESTARTS, restart_period_s=RESTART_PERIOD_S, must_start=True)
        actor: Any = await scope.create_actor(TrainingService, settings, name="tinker-service", actor_config=config)
        await nursery.start(_keep_serving, actor)
        url = await actor.url.options(idempotent=True)()
        ca_file = _authority_file(place) if has_authority else None
        yield RunningService(url, actor, place, tuple(named), ca_file)
        nursery.cancel_scope.cancel()


async def _absolute(path: str | Path) -> Path:
    return Path(await trio.Path(path).absolute())


async def _keep_serving(actor: Any, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Have each incarnation of the service serve, until the actor is gone for good. Raises its error then."""
    async with monitor(actor) as events, trio.open_nursery() as nursery:
        task_status.started()
        nursery.start_soon(_serve_again, actor)
        async for event in events:
            if isinstance(event, Down) and not event.will_restart:
                raise event.error


async def _serve_again(actor: Any) -> None:
    # One call at a time, and again after each loss. A call for each `Up` may reach the next incarnation, when several
    # are lost within a short time: one then serves twice, and another one never.
    while True:
        try:
            await actor.run()
        except ActorDied:
            await trio.sleep(SERVE_RETRY_S)
