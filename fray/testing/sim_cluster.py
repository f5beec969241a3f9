"""Simulated cluster in one Trio loop: controller, machines with their nodes, drivers, each of which can be killed.

A simulated process is a family of tasks that carry the name of their machine (`current_machine`), so that a machine can
be stopped like by SIGSTOP: none of its tasks runs, timers included, until it is thawed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import trio
from attrs import evolve, frozen

import fray.controller.loop
import fray.net.channel.acceptor
import fray.net.channel.dialer
import fray.node.membership
import fray.runtime.open
from fray.api.cluster import Cluster, cluster_of
from fray.controller.accepted_tokens import AcceptedTokens
from fray.controller.backup import supersede
from fray.controller.provider_driver import ProviderFactory
from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.errors import NodeNameInUse, StoreError
from fray.model.ids import Namespace
from fray.model.messages.client import Role
from fray.model.messages.node import NodeHello
from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity
from fray.net.channel.versions import own_fields
from fray.net.cluster_token import ClusterToken, read_token_file
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
    SLICES,
    SPEND_LIMIT_PER_HOUR,
    TERMS,
    SimCloud,
)
from fray.testing.sim_environments import SimEnvironments
from fray.testing.sim_ports import echoing
from fray.testing.sim_workspaces import SimChunkCache, find

SHARED = Policy(half_life_s=60.0, users={"*": TERMS})
"""Default policy: every driver is a user with this limit."""
CONTROLLER = "controller"
ADDRESS = f"memory:{CONTROLLER}"
TOKEN = "simulated"
RESTART_S = 5.0
"""Seconds after which a rejected node is started again."""
EPOCH_S = 1_700_000_000.0
"""Time of the controllers' clocks at the start of a scenario."""
DRAINS_S = (0.0, 5.0, 30.0)
"""Seconds that nodes give to attempts when they leave."""
OLDER: Mapping[str, Any] = {"release": "0.0.9", "versions": (1, 1), "capabilities": ()}
"""Fields by which a process of the earlier release says what it is (`fray.net.channel.versions`)."""
LOG_LIMIT_BYTES = 6_000
"""Log limit of one attempt on a machine: so low that some of its output is dropped."""

current_machine: ContextVar[str] = ContextVar("fray_sim_machine", default="")
"""Machine that the running task belongs to."""


class ControllerKilled(StoreError):
    """Kill of the controller in the middle of a save."""


# Stopping machines ---------------------------------------------------------------------------------------------------


class Freezer:
    """Stops whole machines: their tasks are not run, even if woken, until `thaw`."""

    def __init__(self, truth: GroundTruth, network: SimNetwork) -> None:
        self._truth, self._network = truth, network
        self._frozen: dict[str, list[Any]] = {}
        self._interception = ExitStack()

    def freeze(self, machine: str) -> None:
        """Stop a machine like SIGSTOP to every process."""
        if not self._frozen:
            self._intercept()
        self._frozen.setdefault(machine, [])
        self._truth.stopped.add(machine)
        self._network.suspend(machine)

    def thaw(self, machine: str) -> None:
        """Continue a machine like SIGCONT: wake-ups of the meantime are delivered, late."""
        self._truth.stopped.discard(machine)
        self._network.resume(machine)
        if machine in self._frozen:
            self._truth.continued_at[machine] = trio.current_time()
        for task in self._frozen.pop(machine, ()):
            task._runner.runq.append(task)
        if not self._frozen:
            self._interception.close()

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Allow `freeze` while the block runs."""
        try:
            yield
        finally:
            self._interception.close()

    def _intercept(self) -> None:
        """Intercept Trio's scheduling of tasks, while a machine is stopped: it costs something at each wake-up."""
        runner_class: Any = trio._core._run.Runner
        original = runner_class.reschedule

        def reschedule(runner: Any, task: Any, *outcome: Any) -> None:
            original(runner, task, *outcome)
            waiting = self._frozen.get(task.context.get(current_machine, ""))
            if waiting is not None:
                assert runner.runq.pop() is task
                waiting.append(task)

        self._interception.enter_context(mock.patch.object(runner_class, "reschedule", reschedule))


# The controller ------------------------------------------------------------------------------------------------------


class _FencedStore:
    """Store as seen by one process of the controller; after a crash it writes nothing more."""

    def __init__(self, store: Store, on_saved: Callable[[int], None]) -> None:
        self._store, self._on_saved = store, on_saved
        self.fenced = False
        self.crash_point: str = ""
        """Point of the next crash: ``before`` or ``after`` the next transaction; empty: none."""
        self.is_full: Callable[[], bool] = lambda: False
        self.keeps_blobs: Callable[[], bool] = lambda: False
        self.saves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.fenced:
            raise StoreError("the store of a controller that has been killed")
        if self.is_full():
            raise StoreError("the store cannot be written: database or disk is full")
        when, self.crash_point = self.crash_point, ""
        if when == "before":
            self.fenced = True
            raise ControllerKilled("the controller was killed in a save")
        self._store.save(*args, **kwargs)
        self.saves += 1
        self._on_saved(self.saves)
        if when == "after":
            self.fenced = True
            raise ControllerKilled("the controller was killed in a save")

    def put_blob(self, data: Any) -> Any:
        if self.fenced:
            raise StoreError("the store of a controller that has been killed")
        return self._store.put_blob(data)

    def delete_blobs(self, blobs: Any) -> None:
        if not self.fenced and not self.keeps_blobs():
            self._store.delete_blobs(blobs)


class SimController:
    """Controller processes, one after another on the same store."""

    def __init__(self, sim: SimCluster, open_store: Callable[[], Store]) -> None:
        self._sim = sim
        self._open_store = open_store
        self._store: Store | None = None
        self._fenced_store: _FencedStore | None = None
        self._scope = trio.CancelScope()
        self._down = trio.Event()
        self._starting = trio.Lock()
        self.starts = 0
        self.is_disk_full = False
        self._backup: sqlite3.Connection | None = None
        self.restores = 0
        """Number of times that a backup took the place of the store."""
        self.running: RunningController | None = None
        self.up_since: float | None = None

    async def start(self) -> None:
        """Start the controller unless it is running; return when it serves."""
        async with self._starting:
            if self.running is None:
                await self._start()

    async def _start(self) -> None:
        self._sim.network.revive(CONTROLLER)
        self._scope, self._down = trio.CancelScope(), trio.Event()
        self.starts += 1
        self._store = self._open_store()
        self._fenced_store = _FencedStore(self._store, self._saved)
        self._fenced_store.is_full = lambda: self.is_disk_full
        self._fenced_store.keeps_blobs = lambda: self._backup is not None
        await self._sim.nursery.start(self._run, self._fenced_store)
        if self.running is not None:
            self.up_since = trio.current_time()

    async def _run(
        self, fenced_store: _FencedStore, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        current_machine.set(CONTROLLER)
        sim = self._sim
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.running = await nursery.start(
                        partial(
                            run_controller,
                            cast(Store, fenced_store),
                            sim.network.at(CONTROLLER),
                            [ADDRESS],
                            sim.controller_token(),
                            clock=lambda: EPOCH_S + sim.clock_ahead_s + trio.current_time(),
                            rng=sim.seed.stream(f"controller/{self.starts}"),
                            declared=sim.declared,
                            declares_all_nodes=bool(sim.declared),
                            rules=sim.rules,
                            policy=sim.policy,
                            provider_factories=sim.provider_factories,
                        )
                    )
                    task_status.started()
        except BaseException as error:  # classified below
            if self.running is None:
                raise
            if not _is_kill(error):
                sim.truth.breach("error", f"the controller failed: {_leaf_errors(error)!r}")
        finally:
            self._is_down(fenced_store)

    def _saved(self, saves: int) -> None:
        if self.running is not None:
            self._sim.on_saved(saves, self.running.state)

    def _is_down(self, fenced_store: _FencedStore) -> None:
        if not self._down.is_set():
            self._sim.network.kill(CONTROLLER)
            fenced_store.fenced = True
            self.running, self.up_since = None, None
            if self._store is not None:
                self._store.close()
            self._down.set()

    async def try_to_start(self) -> bool:
        """Start the controller; return False if its store refuses to be written."""
        try:
            await self.start()
        except Exception as error:
            if not _is_kill(error):
                raise
        return self.running is not None

    def back_up(self) -> None:
        """Copy the store, which must be in memory."""
        assert self._store is not None
        self._backup = sqlite3.connect(":memory:")
        self._store._db.backup(self._backup)

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    async def restore(self) -> None:
        """Kill the controller, and start another one on the backup, as ``fray backup --restore`` prepares it."""
        await self.crash()
        assert self._store is not None
        assert self._backup is not None
        self._backup.backup(self._store._db)
        supersede(self._store, EPOCH_S + self._sim.clock_ahead_s + trio.current_time())
        self._backup = None
        self.restores += 1
        await self.start()

    def crash_at_save(self, when: str) -> None:
        """Kill it ``before`` or ``after`` its next save."""
        if self._fenced_store is not None:
            self._fenced_store.crash_point = when

    async def wait_down(self) -> None:
        await self._down.wait()

    async def crash(self) -> None:
        """Kill the process."""
        if self._fenced_store is not None and not self._down.is_set():
            self._fenced_store.fenced = True
            self._sim.network.kill(CONTROLLER)
            self._sim.freezer.thaw(CONTROLLER)
            self._scope.cancel()
            await self._down.wait()


def _is_kill(error: BaseException) -> bool:
    return all(isinstance(leaf, ControllerKilled | StoreError) for leaf in _leaf_errors(error))


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaf_errors(each)]
    return [error]


# Machines ------------------------------------------------------------------------------------------------------------


class SimMachine:
    """One machine; while it is up, a node runs on it."""

    def __init__(self, sim: SimCluster, name: str, capacity: Capacity) -> None:
        self.name, self.capacity = name, capacity
        sim.truth.offered[name] = capacity
        self.starts = 0
        self.removed = False
        """Removed for good: it is never started again."""
        self.launcher: SimLauncher | None = None
        self.down_since: float | None = None
        self.disk = MemoryLogs(lambda: EPOCH_S + trio.current_time(), limit_bytes=LOG_LIMIT_BYTES)
        """Logs, which survive its nodes."""
        self._sim = sim
        self._host = ""
        self._chunk_cache = SimChunkCache()
        self._environments = SimEnvironments(sim.seed.stream(f"environments/{name}"))
        self._scope = trio.CancelScope()
        self._leave = trio.Event()
        self.drain_s = 0.0
        """Seconds that its node gives to its attempts when it is asked to leave (`NodeConfig.drain_s`)."""

    @property
    def up(self) -> bool:
        return self.launcher is not None

    def boot(self) -> None:
        """Start the machine's node: a new incarnation without attempts."""
        assert not self.up
        if self.removed:
            return
        self.starts += 1
        self._host = f"{self.name}.node{self.starts}"
        self._sim.network.restore_power(self.name)
        rng = self._sim.seed.stream(f"launcher/{self._host}")
        network, truth = self._sim.network, self._sim.truth
        self.launcher = SimLauncher(self.name, network, truth, rng, self.disk, self._chunk_cache, self._environments)
        self.down_since = None
        self.drain_s = self._sim.seed.stream(f"drain/{self._host}").choice(DRAINS_S)
        self._scope, self._leave = trio.CancelScope(), trio.Event()
        self._sim.nursery.start_soon(self._run, self._host, self.launcher, self._scope)

    def leave(self) -> None:
        """Ask its node to shut down in order, as a service manager does: the machine is down afterwards."""
        self._leave.set()

    async def _run(self, host: str, launcher: SimLauncher, scope: trio.CancelScope) -> None:
        current_machine.set(self.name)
        sim = self._sim
        config = NodeConfig(
            name=self.name,
            controller=ADDRESS,
            token=TOKEN,
            token_file=str(sim.token_file or ""),
            capacity=self.capacity,
            state_dir="",
            lease_s=sim.rules.lease_s,
            drain_s=self.drain_s,
            finds_address=True,
        )
        try:
            with scope:
                network = sim.network.process(host, self.name)
                await run_node(config, network, launcher, rng=sim.seed.stream(host), leave=self._leave)
        except NodeNameInUse:
            if self.launcher is launcher:  # like the service manager of a machine: try again
                self.kill()
                sim.nursery.start_soon(self._boot_later)
        except Exception as error:  # noqa: BLE001  # the node must not raise: recorded as a violation
            if self.launcher is launcher:
                sim.truth.breach("error", f"the node {self.name} failed: {_leaf_errors(error)!r}")
        finally:
            if self.launcher is launcher:
                self.kill()

    async def _boot_later(self) -> None:
        await trio.sleep(RESTART_S)
        if not self.up:
            self.boot()

    def kill(self, *, silent: bool = False) -> None:
        """Kill the whole machine. ``silent``: like a power failure: no connection breaks."""
        launcher, self.launcher = self.launcher, None
        if launcher is None:
            return
        self.down_since = trio.current_time()
        self._sim.network.kill(self._host, silent=silent)
        launcher.lose("with its machine", silent=silent)
        self._sim.freezer.thaw(self.name)
        self._scope.cancel()


def joining_config(token: str, name: str) -> NodeConfig:
    """Return the configuration of a machine that has a join token, and no disk."""
    return NodeConfig(
        name=name, controller=ADDRESS, token="", join_token=token, capacity=Capacity(1000, 1, 1), state_dir=""
    )


# Drivers -------------------------------------------------------------------------------------------------------------


class DriverProcess:
    """One process of a driver; host and machine have the same name."""

    def __init__(self, sim: SimCluster, name: str) -> None:
        self.name = name
        self.session = ""
        self.killed = False
        self.has_left = False
        self._sim = sim
        self._scope = trio.CancelScope()

    async def run(self, body: Callable[[Cluster], Any], *, namespace: Namespace | None, grace_s: float) -> None:
        """Open the cluster, run ``body`` in it, leave in order. Return without an error if killed."""
        current_machine.set(self.name)
        with self._scope:
            try:
                async with self._open(namespace, grace_s) as cluster:
                    await body(cluster)
            finally:
                self.has_left = True
                if not self.killed:
                    self._sim.truth.driver_ended(self.session, vanished=False)

    @asynccontextmanager
    async def _open(self, namespace: Namespace | None, grace_s: float) -> AsyncIterator[Cluster]:
        sim = self._sim
        async with open_runtime(
            sim.network.process(self.name, self.name),
            [ADDRESS],
            ClusterToken((TOKEN,), str(sim.token_file or "")),
            RuntimeConfig(role=Role.DRIVER, namespace=namespace, grace_s=grace_s, user=self.name.partition(".")[0]),
            rng=sim.seed.stream(self.name),
        ) as runtime:
            self.session = runtime.session
            runtime.find_workspace = find
            runtime.client.jobs.secret_of = secret_value
            sim.truth.driver_began(runtime.session, self.name, grace_s)
            cluster = cluster_of(runtime)
            yield cluster
            await cluster._root.wait_jobs_then_end_actors()

    def kill(self) -> None:
        """Kill the process."""
        if not self.killed and not self.has_left:
            self.killed = True
            self._sim.network.kill(self.name)
            self._sim.truth.driver_ended(self.session, vanished=True)
            self._sim.freezer.thaw(self.name)
            self._scope.cancel()


# All of it -----------------------------------------------------------------------------------------------------------


@frozen
class MachineSpec:
    """Description of a machine to simulate."""

    name: str
    capacity: Capacity


Watcher = Callable[[State, Event, Sequence[Effect]], None]
"""Callback for every step of the scheduler, with the state after it."""


class SimCluster:
    """The simulated cluster. Created by `open_sim_cluster`."""

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
        self.freezer = Freezer(truth, network)
        self.on_saved: Callable[[int, State], None] = lambda saves, state: None
        self.declared: tuple[NodeHello, ...] = ()
        if declares:
            self.declared = tuple(
                NodeHello(node=spec.name, incarnation="", boot_id="", capacity=spec.capacity) for spec in machines
            )
        self.policy: Policy = SHARED
        """Policy as its operator has written it: of each controller that starts."""
        self.first_policy = self.policy
        self.limits_ordered_at = 0.0
        """Time of the last order to the controller that changes limits of machine groups."""
        self.provider_factories: Mapping[str, ProviderFactory] | None = None
        self.cloud: SimCloud | None = None
        self.clock_jump_s, self.clock_drift = 0.0, 0.0
        """Seconds by which the controller's machine has its clock set forward, and its seconds too many per second."""
        self.addresses: dict[str, str] = {}
        """IP address of each machine that has got another one."""
        self.older: set[str] = set()
        """Machines (and the controller) whose processes are of an earlier release."""
        self.token_file: Path | None = None
        """File of the cluster's token, if it is to be replaced."""
        self.controller = SimController(self, open_store)
        self.machines = {spec.name: SimMachine(self, spec.name, spec.capacity) for spec in machines}
        self.truth.slices = {spec.name: spec.capacity.attributes.get("slice", "") for spec in machines}

    def open_cloud(self, groups: Sequence[GroupConfig]) -> None:
        """Enable machine groups, before the first start of the controller."""
        cloud = self.cloud = SimCloud(self, self.seed.stream("cloud"), groups=groups)
        self.policy = evolve(self.policy, groups=tuple(groups), spend_limit_per_hour=SPEND_LIMIT_PER_HOUR)
        self.provider_factories = {PROVIDER: lambda setting: cloud}

    @property
    def clock_ahead_s(self) -> float:
        """Seconds by which the clock of the controller's machine is ahead of the scenario's."""
        return self.clock_jump_s + self.clock_drift * trio.current_time()

    def controller_token(self) -> str | AcceptedTokens:
        """Return the token of a controller that starts."""
        file = self.token_file
        return TOKEN if file is None else AcceptedTokens(lambda: read_token_file(str(file))[0])

    def add_machine(self, name: str, capacity: Capacity) -> SimMachine:
        """Add a machine, which is not up yet."""
        machine = self.machines[name] = SimMachine(self, name, capacity)
        self.truth.slices[name] = capacity.attributes.get("slice", "")
        return machine

    def remove_machine(self, name: str) -> None:
        """Remove a machine for good, with all processes there."""
        machine = self.machines[name]
        machine.removed = True
        machine.kill()

    def enter(self, machine: str) -> None:
        """Make the current task a task of this machine."""
        current_machine.set(machine)


@asynccontextmanager
async def open_sim_cluster(
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
    slices: bool = False,
    policy: Policy | None = None,
    run_in_thread: Callable[..., Awaitable[Any]] | None = None,
    token_file: Path | None = None,
) -> AsyncIterator[SimCluster]:
    """Run a cluster; everything in it is killed on exit.

    Args:
        slices: the cloud has slices of several hosts, too.
        run_in_thread: takes the place of `trio.to_thread.run_sync`. Default: it is refused.
        token_file: file with `TOKEN`, which may be replaced. Default: the token stays.
    """
    memory = Store.memory()
    async with trio.open_nursery() as nursery:
        opener = open_store or (lambda: memory)
        sim = SimCluster(seed, network, truth, machines, rules, declares, opener, nursery)
        sim.policy = policy or sim.policy
        sim.token_file = token_file
        if cloud:
            sim.open_cloud((*GROUPS, SLICES) if slices else GROUPS)
        sim.first_policy = sim.policy
        with (
            sim.freezer.enabled(),
            _watched_steps(watch, truth),
            _no_threads(run_in_thread or _refuse),
            _moving_machines(sim),
            _releases(sim),
            echoing(truth, current_machine.get),
        ):
            await sim.controller.start()
            for machine in sim.machines.values():
                machine.boot()
            yield sim
            for machine in sim.machines.values():
                machine.removed = True
                machine.kill()
            await sim.controller.crash()
            nursery.cancel_scope.cancel()


@contextmanager
def _moving_machines(sim: SimCluster) -> Iterator[None]:
    """Give nodes the addresses that their machines have now."""

    def own_address(seen_from: str) -> str:
        return sim.addresses.get(current_machine.get(), "")

    with mock.patch.object(fray.node.membership, "own_address", own_address):
        yield


@contextmanager
def _releases(sim: SimCluster) -> Iterator[None]:
    """Let processes of an earlier release say so at each connection."""

    def fields() -> Mapping[str, Any]:
        return OLDER if current_machine.get() in sim.older else own_fields()

    with (
        mock.patch.object(fray.net.channel.dialer, "own_fields", fields),
        mock.patch.object(fray.net.channel.acceptor, "own_fields", fields),
    ):
        yield


@contextmanager
def _watched_steps(watch: Watcher, truth: GroundTruth) -> Iterator[None]:
    def watched(state: State, event: Event, now: float) -> list[Effect]:
        try:
            effects = step(state, event, now)
            watch(state, event, effects)
        except Exception as error:
            # The loop refuses the event and continues, which must not hide a defect from a test.
            truth.breach("error", f"the scheduler failed at {event}: {error!r}")
            raise
        return effects

    with mock.patch.object(fray.controller.loop, "step", watched):
        yield


@contextmanager
def _no_threads(run_in_thread: Callable[..., Awaitable[Any]]) -> Iterator[None]:
    """Run actors of drivers inline, without the real clock and without threads, whose timing no seed can decide."""

    def make_runner(name: str, threads: int) -> InlineExecutor:
        return InlineExecutor()

    host = partial(ActorHostServer, clock=lambda: 0.0, make_executor=make_runner)
    with (
        mock.patch.object(fray.runtime.open, "ActorHostServer", host),
        mock.patch.object(trio.to_thread, "run_sync", run_in_thread),
    ):
        yield


async def _refuse(function: object, *args: object, **options: object) -> None:
    raise AssertionError(f"{function!r} in a thread: the scenario would not be reproducible")
