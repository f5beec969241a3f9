"""A whole cluster in one Trio loop: controller, machines with their nodes, drivers, each of which can be killed.

Processes here are families of tasks that carry the name of their machine (`here`), so that a machine can be stopped as
SIGSTOP does it: none of its tasks runs, timers included, until it is thawed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from unittest import mock

import trio
from attrs import evolve, frozen

import fray.controller.loop
import fray.runtime.open
from fray.api.cluster import Cluster, cluster_of
from fray.controller.provider_driver import ProviderFactory
from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.errors import NodeNameInUse, StoreError
from fray.model.ids import Namespace
from fray.model.messages.client import Role
from fray.model.messages.node import NodeHello
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity
from fray.net.transport import Credential
from fray.node.config import NodeConfig
from fray.node.logs.store import MemoryLogs
from fray.node.run import run_node
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.threads.executor import InlineExecutor
from fray.scheduler.effects import Effect, Event
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.scheduler.step import step
from fray.testing.fakes import SimLauncher, SimNetwork
from fray.testing.ground_truth import GroundTruth, secret_value
from fray.testing.seed import Seed
from fray.testing.sim_cloud import (
    GROUPS,
    PROVIDER,
    SPEND_LIMIT_PER_HOUR,
    TERMS,
    SimCloud,
)
from fray.testing.sim_environments import SimEnvironments
from fray.testing.sim_ports import echoing
from fray.testing.sim_workspaces import SimShelf, find

SHARED = Policy(half_life_s=60.0, users={"*": TERMS})
"""Every driver is a user, and nobody may have more than this."""
CONTROLLER = "controller"
ADDRESS = f"memory:{CONTROLLER}"
TOKEN = "simulated"
RESTART_S = 5.0
"""A node that was turned away is started again after this."""
EPOCH_S = 1_700_000_000.0
"""What the controllers' clocks say when the story begins."""
LOG_LIMIT_BYTES = 6_000
"""What a machine keeps of what one attempt prints: so little that some of it is dropped."""

here: ContextVar[str] = ContextVar("fray_sim_machine", default="")
"""The machine that the running task belongs to."""


class ControllerKilled(Exception):
    """Raised in the middle of a save: the controller's process is gone."""


# Stopping machines ---------------------------------------------------------------------------------------------------


class Freezer:
    """Stops whole machines: their tasks are not run, whatever wakes them, until `thaw`."""

    def __init__(self, stopped: set[str]) -> None:
        self._frozen: dict[str, list[Any]] = {}
        self._stopped = stopped

    def freeze(self, machine: str) -> None:
        """As SIGSTOP to every process."""
        self._frozen.setdefault(machine, [])
        self._stopped.add(machine)

    def thaw(self, machine: str) -> None:
        """As SIGCONT: what woke them meanwhile is delivered, late."""
        self._stopped.discard(machine)
        for task in self._frozen.pop(machine, ()):
            task._runner.runq.append(task)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Between Trio and its tasks."""
        kind: Any = trio._core._run.Runner
        really = kind.reschedule

        def reschedule(runner: Any, task: Any, *outcome: Any) -> None:
            really(runner, task, *outcome)
            waiting = self._frozen.get(task.context.get(here, "")) if self._frozen else None
            if waiting is not None:
                assert runner.runq.pop() is task
                waiting.append(task)

        with mock.patch.object(kind, "reschedule", reschedule):
            yield


# The controller ------------------------------------------------------------------------------------------------------


class _FencedStore:
    """The store as one life of the controller sees it; after a crash it writes nothing more."""

    def __init__(self, store: Store, on_saved: Callable[[int], None]) -> None:
        self._store, self._on_saved = store, on_saved
        self.severed = False
        self.dies_at_save: str = ""
        """``before`` or ``after`` the next transaction."""
        self.saves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.severed:
            raise StoreError("the store of a controller that has been killed")
        when, self.dies_at_save = self.dies_at_save, ""
        if when == "before":
            self.severed = True
            raise ControllerKilled
        self._store.save(*args, **kwargs)
        self.saves += 1
        self._on_saved(self.saves)
        if when == "after":
            self.severed = True
            raise ControllerKilled

    def put_blob(self, data: Any) -> Any:
        if self.severed:
            raise StoreError("the store of a controller that has been killed")
        return self._store.put_blob(data)

    def delete_blobs(self, blobs: Any) -> None:
        if not self.severed:
            self._store.delete_blobs(blobs)


class SimController:
    """Where the controller runs, one life after another on the same store."""

    def __init__(self, house: SimCluster, open_store: Callable[[], Store]) -> None:
        self._house = house
        self._open_store = open_store
        self._store: Store | None = None
        self._lease: _FencedStore | None = None
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._starting = trio.Lock()
        self.lives = 0
        self.running: RunningController | None = None
        self.up_since: float | None = None

    async def start(self) -> None:
        """Begin a life, unless one is there; returns when it serves."""
        async with self._starting:
            if self.running is None:
                await self._start()

    async def _start(self) -> None:
        self._house.network.revive(CONTROLLER)
        self._scope, self._over = trio.CancelScope(), trio.Event()
        self.lives += 1
        self._store = self._open_store()
        self._lease = _FencedStore(self._store, self._saved)
        await self._house.nursery.start(self._live, self._lease)
        if self.running is not None:
            self.up_since = trio.current_time()

    async def _live(self, lease: _FencedStore, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        here.set(CONTROLLER)
        house = self._house
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.running = await nursery.start(
                        partial(
                            run_controller,
                            cast(Store, lease),
                            house.network.at(CONTROLLER),
                            [ADDRESS],
                            TOKEN,
                            clock=lambda: EPOCH_S + trio.current_time(),
                            rng=house.seed.stream(f"controller/{self.lives}"),
                            declared=house.declared,
                            declares_all_nodes=bool(house.declared),
                            rules=house.rules,
                            policy=house.policy,
                            provider_factories=house.makers,
                        )
                    )
                    task_status.started()
        except BaseException as error:  # sorted out below
            if self.running is None:
                raise
            if not _was_killed(error):
                house.truth.breach("house", f"the controller failed: {_leaves(error)!r}")
        finally:
            self._is_down(lease)

    def _saved(self, saves: int) -> None:
        if self.running is not None:
            self._house.on_saved(saves, self.running.state)

    def _is_down(self, lease: _FencedStore) -> None:
        if not self._over.is_set():
            self._house.network.kill(CONTROLLER)
            lease.severed = True
            self.running, self.up_since = None, None
            if self._store is not None:
                self._store.close()
            self._over.set()

    def crash_at_save(self, when: str) -> None:
        """Have it die ``before`` or ``after`` its next save, without another word."""
        if self._lease is not None:
            self._lease.dies_at_save = when

    async def wait_down(self) -> None:
        await self._over.wait()

    async def crash(self) -> None:
        """SIGKILL."""
        if self._lease is not None and not self._over.is_set():
            self._lease.severed = True
            self._house.network.kill(CONTROLLER)
            self._house.freezer.thaw(CONTROLLER)
            self._scope.cancel()
            await self._over.wait()


def _was_killed(error: BaseException) -> bool:
    return all(isinstance(leaf, ControllerKilled | StoreError) for leaf in _leaves(error))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


# Machines ------------------------------------------------------------------------------------------------------------


class SimMachine:
    """One machine: while it is up, a node runs on it."""

    def __init__(self, house: SimCluster, name: str, capacity: Capacity) -> None:
        self.name, self.capacity = name, capacity
        house.truth.offered[name] = capacity
        self.lives = 0
        self.gone = False
        """It was given back: nobody starts it again."""
        self.launcher: SimLauncher | None = None
        self.down_since: float | None = None
        self.disk = MemoryLogs(lambda: EPOCH_S + trio.current_time(), limit_bytes=LOG_LIMIT_BYTES)
        """Outlives its nodes."""
        self._house = house
        self._host = ""
        self._shelf, self._environments = SimShelf(), SimEnvironments(house.seed.stream(f"environments/{name}"))
        self._scope = trio.CancelScope()

    @property
    def up(self) -> bool:
        return self.launcher is not None

    def boot(self) -> None:
        """Power on, or start the node again: another incarnation, which holds nothing."""
        assert not self.up
        if self.gone:
            return
        self.lives += 1
        self._host = f"{self.name}.node{self.lives}"
        self._house.network.light(self.name)
        rng = self._house.seed.stream(f"launcher/{self._host}")
        network, truth = self._house.network, self._house.truth
        self.launcher = SimLauncher(self.name, network, truth, rng, self.disk, self._shelf, self._environments)
        self.down_since = None
        self._scope = trio.CancelScope()
        self._house.nursery.start_soon(self._live, self._host, self.launcher, self._scope)

    async def _live(self, host: str, launcher: SimLauncher, scope: trio.CancelScope) -> None:
        here.set(self.name)
        house = self._house
        config = NodeConfig(
            name=self.name,
            controller=ADDRESS,
            token=TOKEN,
            capacity=self.capacity,
            state_dir="",
            lease_s=house.rules.lease_s,
        )
        try:
            with scope:
                network = house.network.process(host, self.name)
                await run_node(config, network, launcher, rng=house.seed.stream(host))
        except NodeNameInUse:
            if self.launcher is launcher:  # as the service manager of a machine would: try again
                self.kill()
                house.nursery.start_soon(self._boot_later)
        except Exception as error:  # noqa: BLE001  # nothing may come out of there: written down
            if self.launcher is launcher:
                house.truth.breach("house", f"the node {self.name} failed: {_leaves(error)!r}")
        finally:
            if self.launcher is launcher:
                self.kill()

    async def _boot_later(self) -> None:
        await trio.sleep(RESTART_S)
        if not self.up:
            self.boot()

    def kill(self, *, silent: bool = False) -> None:
        """All of it is gone, without a word. ``silent``: as when the power fails, nobody's connection breaks."""
        launcher, self.launcher = self.launcher, None
        if launcher is None:
            return
        self.down_since = trio.current_time()
        self._house.network.kill(self._host, silent=silent)
        launcher.lose("with its machine", silent=silent)
        self._house.freezer.thaw(self.name)
        self._scope.cancel()


def joining_config(token: str, name: str) -> NodeConfig:
    """Of a machine that has a join token, and no disk."""
    return NodeConfig(
        name=name, controller=ADDRESS, token="", join_token=token, capacity=Capacity(1000, 1, 1), state_dir=""
    )


# Drivers -------------------------------------------------------------------------------------------------------------


class DriverProcess:
    """One process of a driver; its name is its host's and its machine's."""

    def __init__(self, house: SimCluster, name: str) -> None:
        self.name = name
        self.session = ""
        self.killed = False
        self.left = False
        self._house = house
        self._scope = trio.CancelScope()

    async def run(self, body: Callable[[Cluster], Any], *, namespace: Namespace | None, grace_s: float) -> None:
        """Open the cluster, run ``body`` in it, leave in order. Ends quietly if it is killed."""
        here.set(self.name)
        with self._scope:
            try:
                async with self._open(namespace, grace_s) as cluster:
                    await body(cluster)
            finally:
                self.left = True
                if not self.killed:
                    self._house.truth.driver_ended(self.session, vanished=False)

    @asynccontextmanager
    async def _open(self, namespace: Namespace | None, grace_s: float) -> AsyncIterator[Cluster]:
        house = self._house
        async with open_runtime(
            house.network.process(self.name, self.name),
            [ADDRESS],
            Credential("cluster", TOKEN),
            RuntimeConfig(role=Role.DRIVER, namespace=namespace, grace_s=grace_s, user=self.name.partition(".")[0]),
            rng=house.seed.stream(self.name),
        ) as runtime:
            self.session = runtime.session
            runtime.find_workspace = find
            runtime.link.jobs.secret_of = secret_value
            house.truth.driver_began(runtime.session, self.name, grace_s)
            cluster = cluster_of(runtime)
            yield cluster
            await cluster._root.wait_jobs_then_end_actors()

    def kill(self) -> None:
        """SIGKILL."""
        if not self.killed and not self.left:
            self.killed = True
            self._house.network.kill(self.name)
            self._house.truth.driver_ended(self.session, vanished=True)
            self._house.freezer.thaw(self.name)
            self._scope.cancel()


# All of it -----------------------------------------------------------------------------------------------------------


@frozen
class MachineSpec:
    """A machine to be simulated."""

    name: str
    capacity: Capacity


Watcher = Callable[[State, Event, Sequence[Effect]], None]
"""Told of every step of the law, with the state after it."""


class SimCluster:
    """The cluster. Made by `open_house`."""

    def __init__(
        self,
        seed: Seed,
        network: SimNetwork,
        truth: GroundTruth,
        machines: Sequence[MachineSpec],
        rules: SchedulerConfig,
        declares: bool,
        open_store: Callable[[], Store],
        nursery: trio.Nursery,
    ) -> None:
        self.seed, self.network, self.truth, self.rules, self.nursery = seed, network, truth, rules, nursery
        self.freezer = Freezer(truth.stopped)
        self.on_saved: Callable[[int, State], None] = lambda saves, state: None
        self.declared: tuple[NodeHello, ...] = ()
        if declares:
            self.declared = tuple(
                NodeHello(node=spec.name, incarnation="", boot_id="", capacity=spec.capacity) for spec in machines
            )
        self.policy: Policy = SHARED
        self.makers: Mapping[str, ProviderFactory] | None = None
        self.cloud: SimCloud | None = None
        self.controller = SimController(self, open_store)
        self.machines = {spec.name: SimMachine(self, spec.name, spec.capacity) for spec in machines}
        self.truth.slices = {spec.name: spec.capacity.attributes.get("slice", "") for spec in machines}

    def open_cloud(self) -> None:
        """Before the controller's first life: there are machines that can be had."""
        cloud = self.cloud = SimCloud(self, self.seed.stream("cloud"))
        self.policy = evolve(self.policy, groups=GROUPS, spend_limit_per_hour=SPEND_LIMIT_PER_HOUR)
        self.makers = {PROVIDER: lambda setting: cloud}

    def hire(self, name: str, capacity: Capacity) -> SimMachine:
        """A machine more, that is not up yet."""
        machine = self.machines[name] = SimMachine(self, name, capacity)
        return machine

    def fire(self, name: str) -> None:
        """It is gone for good, with all that runs there."""
        machine = self.machines[name]
        machine.gone = True
        machine.kill()

    def enter(self, machine: str) -> None:
        """The task is one of this machine from now on."""
        here.set(machine)


@asynccontextmanager
async def open_house(
    seed: Seed,
    network: SimNetwork,
    truth: GroundTruth,
    machines: Sequence[MachineSpec],
    *,
    rules: SchedulerConfig,
    declares: bool = False,
    open_store: Callable[[], Store] | None = None,
    watch: Watcher = lambda state, event, effects: None,
    cloud: bool = False,
    policy: Policy | None = None,
) -> AsyncIterator[SimCluster]:
    """A running cluster; everything in it is killed on exit."""
    memory = Store.memory()
    async with trio.open_nursery() as nursery:
        opener = open_store or (lambda: memory)
        house = SimCluster(seed, network, truth, machines, rules, declares, opener, nursery)
        house.policy = policy or house.policy
        if cloud:
            house.open_cloud()
        with house.freezer.installed(), _watched_law(watch), _no_threads(), echoing(truth, here.get):
            await house.controller.start()
            for machine in house.machines.values():
                machine.boot()
            yield house
            for machine in house.machines.values():
                machine.gone = True
                machine.kill()
            await house.controller.crash()
            nursery.cancel_scope.cancel()


@contextmanager
def _watched_law(watch: Watcher) -> Iterator[None]:
    def watched(state: State, event: Event, now: float) -> list[Effect]:
        effects = step(state, event, now)
        watch(state, event, effects)
        return effects

    with mock.patch.object(fray.controller.loop, "step", watched):
        yield


@contextmanager
def _no_threads() -> Iterator[None]:
    """Actors of drivers run inline, nobody looks at the real clock, and nothing is done in threads: how long these
    take is no part of a seed."""

    def make_runner(name: str, threads: int) -> InlineExecutor:
        return InlineExecutor()

    host = partial(ActorHostServer, clock=lambda: 0.0, make_executor=make_runner)
    with (
        mock.patch.object(fray.runtime.open, "ActorHostServer", host),
        mock.patch.object(trio.to_thread, "run_sync", _refuse),
    ):
        yield


async def _refuse(function: object, *args: object, **options: object) -> None:
    raise AssertionError(f"{function!r} in a thread: no story with it would be told twice the same")
