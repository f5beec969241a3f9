"""`RayClient`: jobs and actors of `fray.v2` on a cluster of Ray, which it may start on this machine."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import uuid
from typing import Any
from weakref import WeakSet

from fray.missing_names import V2_CLIENT_LINES, ExplainsMissing
from fray.tracebacks import short_tracebacks
from fray.v2.interface import HostedActor, _current_client_var, take_environment
from fray.v2.job import JobAlreadyExists, refuse_async
from fray.v2.types import (
    ActorConfig,
    Entrypoint,
    EnvironmentConfig,
    JobRequest,
    ResourceConfig,
    TpuConfig,
    check_request,
    refuse_iris_only,
)

try:
    import ray
    from ray.exceptions import AuthenticationError, RayActorError

    from fray.v2.ray_backend import auth, process_context
    from fray.v2.ray_backend.environments import runtime_env
    from fray.v2.ray_backend.handles import RayActorGroup, RayActorHandle, RayJobHandle
    from fray.v2.ray_backend.hosted_actor import serve
    from fray.v2.ray_backend.registry_access import MAX_CALLS, find_registry, registry_call
    from fray.v2.ray_backend.resources import HEAD_NODE, actor_options, failures, job_options, slice_request, tries
    from fray.v2.ray_backend.specs import ActorSpec, RayJobSpec
    from fray.v2.ray_backend.uploads import with_uploaded_workspace
except ModuleNotFoundError as missing:
    if missing.name != "ray":
        raise
    _HAVE_RAY = False
else:
    _HAVE_RAY = True

_numbers = itertools.count()
_living: WeakSet[RayClient] = WeakSet()


def _at_exit() -> None:
    """Shut down all clients before Ray's own handler runs, which was registered earlier: threads that wait would get
    Ray's errors instead of Fray's."""
    for client in list(_living):
        client.shutdown(wait=False)


if _HAVE_RAY:
    atexit.register(_at_exit)


@short_tracebacks
class RayClient(ExplainsMissing):
    """Jobs and actors on Ray; see `fray.v2.Client`.

    If Ray is initialized already, the client uses it. Everything that a client made ends with it, and with the job or
    actor whose code made it. A pickled client becomes, in a job, the client of that job.

    Args:
        address: as for ``ray.init``. Default: ``RAY_ADDRESS``, else a Ray that runs on this machine already, else a new
            one on this machine.
        namespace: namespace of the names of Ray actors. Default: a new one, if this client connects to Ray.
        init: further arguments of ``ray.init``, such as ``num_cpus`` of a new Ray.

    Raises:
        RuntimeError: Ray is not installed, or refuses the connection.
        ConnectionError: there is no Ray at ``address``.
    """

    _meant = V2_CLIENT_LINES

    def __init__(self, address: str | None = None, *, namespace: str | None = None, **init: Any) -> None:
        if not _HAVE_RAY:
            raise RuntimeError("RayClient needs Ray, which is not installed here: pip install 'fray[ray]'")
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            _connect(address, {"namespace": namespace or f"fray-{uuid.uuid4().hex[:8]}", **init})
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        # A path: what a job makes is owned by "job/client", so ending a job ends everything whose owner begins with it.
        self._owner = f"{process_context.owner() or 'driver'}/{uuid.uuid4().hex[:8]}-{next(_numbers)}"
        self._handles: WeakSet[RayJobHandle] = WeakSet()
        _living.add(self)

    # Jobs ------------------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> RayJobHandle:
        """Submit a job, and return at once. See `fray.v2.Client.submit`.

        Raises:
            JobAlreadyExists: a living job of this driver has the name, and ``adopt_existing`` is False.
            ValueError: no entrypoint or an async one, replicas that are not whole TPU slices, or a value that cannot be
                pickled.
            RuntimeError: the client was shut down.
        """
        check_request(request)
        refuse_iris_only(request)
        # First: it raises if the client was shut down or forked.
        registry = self._registry()
        entrypoint: Entrypoint | None = request.entrypoint
        if entrypoint is None or not (entrypoint.callable_entrypoint or entrypoint.binary_entrypoint):
            raise ValueError(
                f"job {request.name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one"
            )
        if entrypoint.callable_entrypoint is not None:
            refuse_async(entrypoint.callable_entrypoint.callable, f"job {request.name!r}")
        spec = self._job_spec(request)
        job_id = registry_call(registry.submit.remote(spec, _put_work((entrypoint,), f"job {request.name!r}")))
        handle = RayJobHandle(job_id)
        if job_id != spec.job_id and not adopt_existing:
            raise JobAlreadyExists(request.name, handle)
        self._handles.add(handle)
        return handle

    def _job_spec(self, request: JobRequest) -> RayJobSpec:
        resources = request.resources
        here = request.environment is not None and request.environment.workspace is not None and _one_machine()
        wanted, directory = runtime_env(request.environment, resources.image, one_machine=here)
        made = with_uploaded_workspace(wanted)
        return RayJobSpec(
            job_id=_unique_id(request.name),
            name=request.name,
            owner=self._owner,
            options=job_options(resources) | ({"runtime_env": made} if made else {}),
            tries=tries(request),
            failures=failures(request),
            replicas=request.replicas or 1,
            slices=slice_request(request),
            own_process=resources.device.chip_count() > 0,
            directory=directory,
        )

    # Actors ----------------------------------------------------------------------------------------------------------

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 (as callers read the signature)
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> RayActorHandle:
        """Make an actor, and return at once. See `fray.v2.Client.create_actor`.

        Raises:
            ValueError: a living actor has this name, or an argument cannot be pickled.
        """
        environment = take_environment(actor_class, kwargs)
        options = _actor_options(resources, actor_config, environment)
        self._create(name, [name], actor_class, options, _put_work((actor_class, args, kwargs), f"actor {name!r}"))
        return RayActorHandle(name)

    def create_actor_group(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> RayActorGroup:
        """Make ``count`` actors, ``{name}-0``, ``{name}-1``, …; raises as `create_actor`."""
        environment = take_environment(actor_class, kwargs)
        options = _actor_options(resources, actor_config, environment)
        names = [f"{name}-{index}" for index in range(count)]
        work = _put_work((actor_class, args, kwargs), f"group {name!r}")
        return RayActorGroup(name, self._create(name, names, actor_class, options, work))

    def host_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor:
        """Make an actor in this process. Callers reach it through a Ray actor that queues their calls until this
        process fetches them.

        Raises:
            BaseException: what its constructor raises.
            ValueError: a living actor has this name.
        """
        registry = self._registry()
        client = _current_client_var.get()
        if client is None:
            client = client_here()
        server = serve(name, actor_class, args, kwargs, actor_config.max_concurrency, client)
        options = {"num_cpus": 0, "max_concurrency": MAX_CALLS}
        [job_id] = self._create(name, [name], server.instance, options, [], hosted=True)
        # After the Ray actor exists, from which the calls are fetched.
        server.begin(registry_call(registry.find.remote(name, 0.0)).host)
        return HostedActor(RayActorHandle(name), RayJobHandle(job_id).terminate)

    def _create(
        self, group: str, names: list[str], cls: Any, options: dict[str, Any], work: list[Any], hosted: bool = False
    ) -> list[str]:
        # Sent along, so that handles can refuse an unknown method without a call.
        methods = frozenset(n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n, None)))
        specs = [
            ActorSpec(_unique_id(name), name, self._owner, group, index, methods, options, hosted, RayActorHandle(name))
            for index, name in enumerate(names)
        ]
        used = registry_call(self._registry().create.remote(specs, work))
        if used is not None:
            raise ValueError(f"a living actor has the name {used!r}: choose another name, or end that actor first")
        return [spec.job_id for spec in specs]

    # The end ---------------------------------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """End what this client made, with ``wait`` after its running jobs have ended; and Ray, if this client started
        it or the connection to it. May be repeated."""
        with self._lock:
            # Only the first caller ends things; a second one, such as the exit handler, finds nothing to do.
            closed, self._closed = self._closed, True
        if closed or self._pid != os.getpid() or not ray.is_initialized():
            return
        try:
            registry_call(find_registry().end_all_of.remote(self._owner, wait))
            # After `ray.shutdown` nothing can be asked any more, so the last states are stored.
            for handle in list(self._handles) if self._started_ray else ():
                handle.freeze()
        except (RuntimeError, RayActorError):
            pass  # the registry has ended, and everything it started with it
        if self._started_ray:
            ray.shutdown()

    def _registry(self) -> Any:
        if self._closed:
            raise RuntimeError("this RayClient was shut down: make another")
        if self._pid != os.getpid():
            raise RuntimeError("this RayClient was made before a fork, which Ray does not survive: make one after it")
        return find_registry()

    def __enter__(self) -> RayClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __reduce__(self) -> tuple[Any, ...]:
        return client_here, ()

    def __repr__(self) -> str:
        return f"<RayClient{' (shut down)' if self._closed else ''}>"


def _connect(address: str | None, init: dict[str, Any]) -> None:
    auth.prepare()
    # Nothing here uses the dashboard, and the registry collects the output of jobs (`logs`).
    quiet = {"include_dashboard": False, "log_to_driver": False}
    try:
        if address is not None and address != "local":
            ray.init(address, log_to_driver=False, **{k: v for k, v in init.items() if k != "log_to_driver"})
            return
        if address is None:
            # A Ray that runs on this machine is used, as `ray.init` does; a new one is started only if there is none.
            try:
                ray.init("auto", namespace=init["namespace"], log_to_driver=False)
                return
            except ConnectionError:
                if os.environ.get("RAY_ADDRESS"):
                    raise
        # Jobs that are not preemptible ask for this resource; in a Ray of one machine its only node has it.
        resources = {HEAD_NODE: 1, **init.pop("resources", {})}
        ray.init("local", resources=resources, **(quiet | init))
    except (AuthenticationError, ConnectionError, RuntimeError) as error:
        if not auth.refused(error):
            raise
        raise auth.refusal() from None


def _one_machine() -> bool:
    """Return whether all of Ray runs on this machine."""
    machines = {node["NodeManagerAddress"] for node in process_context.untyped.nodes() if node["Alive"]}
    return machines == {process_context.untyped.util.get_node_ip_address()}


def _unique_id(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def _actor_options(
    resources: ResourceConfig, config: ActorConfig, environment: EnvironmentConfig | None
) -> dict[str, Any]:
    if isinstance(resources.device, TpuConfig) and resources.device.vm_count() > 1:
        raise ValueError(f"an actor has one machine, and {resources.device.variant} has several: submit a job")
    options = actor_options(resources, config)
    if environment is None:
        return options
    wanted, _ = runtime_env(environment, resources.image, one_machine=_one_machine())
    return options | {"runtime_env": with_uploaded_workspace(wanted)}


def _put_work(parts: tuple[Any, ...], what: str) -> list[Any]:
    """Return a reference to the code and its arguments, with the current client if it can be pickled.

    It is in a list, as Ray replaces a bare reference among arguments by its value.

    Raises:
        ValueError: the code or an argument cannot be pickled.
    """
    client = _current_client_var.get()
    # The client may hold what cannot be pickled; then code in the job gets that process's own client.
    for sent_client in (client, _ClientHere()) if client is not None else (_ClientHere(),):
        try:
            return [ray.put((sent_client, *parts))]
        except TypeError as error:
            refused = error
    why = str(refused).splitlines()[0]
    raise ValueError(f"{what} cannot be pickled, so it cannot go to Ray: {why}") from None


_shared: dict[str, RayClient] = {}


def shared_ray_client(spec: str) -> RayClient:
    """Return the client of this process for ``ray`` or ``ray://host:port``; in a job or an actor, its own client.

    Raises:
        RuntimeError: Ray is not installed.
    """
    key = f"{os.getpid()} {process_context.owner() if _HAVE_RAY else ''}"
    found = _shared.get(key)
    if found is None or found._closed or not ray.is_initialized():
        _shared.clear()
        found = _shared[key] = RayClient(spec if spec.startswith("ray://") else None)
    return found


def client_here() -> RayClient:
    """Return what a pickled `RayClient` becomes in the process where it arrives."""
    return shared_ray_client("ray")


class _ClientHere:
    """Placeholder that unpickles to the client of the process where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return client_here, ()
