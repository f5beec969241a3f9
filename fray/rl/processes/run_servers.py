"""Inference servers of a run: created, followed, given weights, replaced, and ended when they leave.

`ServerFleet` decides; the tasks here carry it out, and pass the servers that answer on to the coordinator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio
from attrs import evolve

from fray.api.actors.handle import ActorHandle
from fray.api.actors.monitor import Down, Up, monitor
from fray.api.cluster import Cluster
from fray.api.scope import Scope
from fray.errors import ActorDied, DeadlineExceeded, FrayError, InvalidRequest, ObjectLost
from fray.rl.core.failures import OnError
from fray.rl.core.server_fleet import RESTARTS, ServerFleet, names_in_order, server_index
from fray.rl.core.server_states import BusyShare, ServerEvent, ServerRecord, ServerState
from fray.rl.core.versions import VersionName
from fray.rl.inference.http_settings import HttpPort
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.inference.server import InferenceServer
from fray.rl.messages import ServerRoute, last_line
from fray.rl.process_start import NOTICE_S
from fray.rl.processes.run_processes import RunProcesses
from fray.rl.records.run_log import RunLog
from fray.rl.run_parts import RunParts
from fray.rl.weights.published import KeptWeights, PublishedWeights, WeightSync

REPLACEMENT_DELAY_S = 1.0
MOST_PORTS = 65_536
PROBE_PERIOD_S = 1.0
SUSPECT_S = 5.0
"""Longest wait for an answer of a server, which is suspect then."""
TRANSFER_RETRY_S = 0.5
"""Seconds before weights are posted again to a server that could not be reached."""
LEAVE_S = 60.0
"""Seconds that a server that leaves has for its requests; what is unfinished then goes to other servers."""
_KEY = re.compile(r"(\d+)-(\d+)")
"""Key of the process of a server: its number, and how many processes that server has had."""


class RunServers:
    """The inference servers of a run.

    Args:
        cluster: of the run.
        processes: creates and ends them.
        parts: of the run.
        log: gets what happens to them.
        set_routes: called with the servers that answer requests, when they may have changed.
    """

    def __init__(
        self,
        cluster: Cluster,
        processes: RunProcesses,
        parts: RunParts,
        log: RunLog,
        set_routes: Callable[[list[ServerRoute]], Awaitable[None]],
    ) -> None:
        self._cluster, self._processes, self._parts, self._log = cluster, processes, parts, log
        self._set_routes = set_routes
        self._announcing = trio.Lock()
        self.fleet = ServerFleet(
            least=parts.min_servers,
            freezes=parts.freezes,
            is_endless=parts.plan.on_error is OnError.CONTINUE,
            suspect_s=parts.liveness_s,
            stale_s=parts.health.start_s,
        )
        self.weights = KeptWeights()
        """Weights of the target, if there are any yet, and of the newest version."""
        self.trainer: Any = None
        """The trainer, which sends weights where they go over HTTP; None: there is none yet."""
        self.busy = BusyShare()
        self.changed = trio.Event()
        """Set, and replaced, when something has changed that a task may wait for."""
        self._nursery: trio.Nursery
        self.handles: dict[str, ActorHandle] = {}
        self._incarnations: dict[str, str] = {}
        """The incarnation of each server that was ready last, by the name of the server."""
        self._scopes: dict[str, trio.CancelScope] = {}
        self._made: Counter[int] = Counter()
        """Processes that were created for each server, by its number."""

    async def start(self, nursery: trio.Nursery, number: int) -> None:
        """Take over the servers that an earlier attempt of the run's job has left, and let others join or leave.

        Args:
            number: of the servers that the run shall have.
        """
        self._nursery = nursery
        found = filter(None, map(_KEY.fullmatch, await self._processes.living_keys(InferenceServer)))
        for index, made in sorted((int(match[1]), int(match[2])) for match in found):
            if index in self._made:
                # Another one has replaced it: it was taken for dead.
                await self._processes.end_left(InferenceServer, f"{index}-{self._made[index]}")
            self._made[index] = made
        self._begin(self.fleet.add_numbered(sorted(self._made)))
        if (missing := number - len(self._made)) > 0:
            self._add(missing)
        elif missing:
            nursery.start_soon(self._let_surplus_leave, number)

    async def _let_surplus_leave(self, number: int) -> None:
        while len(self.handles) < len(self.fleet.servers):
            await self.changed.wait()
        if len(self.fleet.staying) > number:
            self.scale(number)

    def scale(self, wanted: int) -> str:
        """Let servers join or leave until there are as many as are wanted; return what changes.

        Raises:
            InvalidRequest: so many are not possible; nothing changed.
        """
        parts = self._parts
        if wanted < parts.min_servers:
            raise InvalidRequest(f"invalid servers {wanted}: expected {parts.min_servers} (min_servers) or more")
        if parts.http is not None and parts.http.port + wanted > MOST_PORTS:
            most = MOST_PORTS - parts.http.port
            raise InvalidRequest(f"invalid servers {wanted}: HTTP ports from {parts.http.port} are for {most} at most")
        before = len(self.fleet.staying)
        if wanted > before:
            changed = f"{', '.join(self._add(wanted - before))} join"
        elif wanted < before:
            leaving = self.fleet.let_leave(before - wanted)
            for server in leaving:
                self._nursery.start_soon(self._end_server, server)
            changed = f"{', '.join(names_in_order(leaving))} leave"
        else:
            changed = "nothing changes"
        text = f"servers: {before} -> {wanted}; {changed}"
        self._log.note(text)
        self.wake()
        return text

    def _add(self, number: int) -> list[str]:
        names = self.fleet.add(number)
        # A process of its own for each, also where one of the same number is being ended.
        self._made.update(map(server_index, names))
        self._begin(names)
        return names

    def _begin(self, names: Sequence[str]) -> None:
        for name in names:
            self._nursery.start_soon(self._keep_server, name)

    async def _end_server(self, server: ServerRecord) -> None:
        """End a server that leaves, when its requests have ended."""
        scope = self._scopes[server.name]
        with trio.move_on_after(LEAVE_S):
            await self.announce()
            if server.version is not None:
                try:
                    await self.handles[server.name].leave()
                except ActorDied:
                    pass  # its requests are sent to others
        scope.cancel()

    async def _keep_server(self, name: str) -> None:
        """Run a server until the run ends or the server leaves."""
        with trio.CancelScope() as self._scopes[name]:
            await self._replace_server(name)
        await self._end_process(name)
        self.fleet.remove(name)
        del self._scopes[name]
        self._log.note(f"{name} has left")
        await self.announce()

    async def _replace_server(self, name: str) -> None:
        """Create a server, and another one when it is retired, until it leaves."""
        server = self.fleet.servers[name]
        while True:
            # A scope for each, so that one that was taken for dead is ended wherever it is.
            async with self._cluster.open_scope(f"rl-{name}", env_vars=self._parts.env_vars) as scope:
                error = await self._follow_server(scope, server)
            await self._end_process(name)
            if server.state is ServerState.LEAVING:
                return
            replacement = self.fleet.replace(name, trio.current_time())
            if replacement is None:
                raise error
            self._log.note(f"{name} is replaced after {server.starts} starts: {last_line(error)}")
            server = replacement
            self._made[server_index(name)] += 1
            await trio.sleep(REPLACEMENT_DELAY_S)

    async def _end_process(self, name: str) -> None:
        handle = self.handles.pop(name, None)
        if handle is not None:
            await self._processes.end(handle)

    async def _follow_server(self, scope: Scope, server: ServerRecord) -> FrayError:
        """Create a server, follow its restarts, and load weights into each incarnation; return why it was retired."""
        parts = self._parts
        index = server_index(server.name)
        handle: Any = await self._processes.create(
            scope,
            InferenceServer,
            f"{index}-{self._made[index]}",
            ModelEngine(
                parts.model,
                slots=parts.slots,
                max_length=parts.max_length,
                device=parts.server_device,
                threads=parts.threads,
                lora=None if parts.trainer is None else parts.trainer.lora,
            ),
            resources=parts.resources.get("server"),
            actor_config=parts.process_settings(RESTARTS, NOTICE_S),
            # Also while no controller sees that it was started again.
            waits=True,
        )
        self.handles[server.name] = handle
        self.wake()
        async with monitor(handle) as events, trio.open_nursery() as nursery:
            nursery.start_soon(self._load_weights, server, handle)
            nursery.start_soon(self._probe_server, server, handle)
            nursery.start_soon(self._end_overdue, server, nursery.cancel_scope)
            async for event in events:
                if isinstance(event, Up):
                    self._incarnations[server.name] = event.incarnation
                    server.observe(ServerEvent.READY, server.incarnation)
                    nursery.start_soon(self._leave_at_preemption, server, handle)
                    if parts.http is not None:
                        port = parts.http.port + index
                        nursery.start_soon(self._serve, handle.serve_http, evolve(parts.http, port=port))
                        nursery.start_soon(self._serve, partial(self._say_url, server.name, handle))
                    if parts.weight_sync is WeightSync.NETWORK:
                        nursery.start_soon(self._serve, handle.serve_weights)
                else:
                    server.observe(ServerEvent.ENDED, server.incarnation)
                    server.observe(
                        ServerEvent.RESTARTED if event.will_restart else ServerEvent.BUDGET_SPENT, server.incarnation
                    )
                await self.announce()
                if isinstance(event, Down) and not event.will_restart:
                    nursery.cancel_scope.cancel()
                    return event.error
        # The nursery was cancelled: a monitor ends with the end of its actor.
        return ActorDied(f"{server.name} missed every deadline for {server.suspect_s:g} s or more")

    async def _end_overdue(self, server: ServerRecord, follow: trio.CancelScope) -> None:
        """Let a server that was taken for dead be retired, by the end of its scope: it may not even hear of it."""
        while not server.is_overdue:
            await self.changed.wait()
        server.observe(ServerEvent.BUDGET_SPENT, server.incarnation)
        await self.announce()
        follow.cancel()

    async def _probe_server(self, server: ServerRecord, handle: Any) -> None:
        """Ask a server for an answer, time and again; one that gives none gets no requests until it does.

        The health check of its node ends one that is frozen; one that only the run cannot reach is taken for dead.
        """
        before: tuple[float, float] | None = None
        """Busy time of this incarnation at the last answer."""
        while True:
            if server.state not in (ServerState.HEALTHY, ServerState.SUSPECT):
                before = None
                await self.changed.wait()
                continue
            incarnation = server.incarnation
            try:
                busy = await handle.busy_time.options(timeout_s=min(SUSPECT_S, self._parts.liveness_s / 4))()
                if before is not None:
                    self.busy.add(before, busy)
                before, has_answered = busy, True
            except DeadlineExceeded:
                has_answered = False
            except ActorDied:
                before = None
                await self.changed.wait()
                continue
            event = ServerEvent.ANSWERED if has_answered else ServerEvent.DEADLINE_MISSED
            if server.observe(event, incarnation, now=trio.current_time()):
                answers = "answers again" if has_answered else "does not answer: its requests go to other servers"
                self._log.note(f"{server.name} {'is taken for dead' if server.is_overdue else answers}")
                await self.announce()
            if has_answered:
                await trio.sleep(PROBE_PERIOD_S)

    async def _leave_at_preemption(self, server: ServerRecord, handle: Any) -> None:
        """Start another server as soon as an incarnation of a server has notice of its end, and let it leave."""
        try:
            await handle.wait_for_preemption()
        except ActorDied:
            return  # its monitor reports it
        if server.state is not ServerState.LEAVING:
            (other,) = self._add(1)
            self._log.note(f"{server.name} is preempted, or its machine leaves: {other} takes its place")
            server.observe(ServerEvent.LEAVE, server.incarnation)
            await self._end_server(server)

    async def _serve(self, serve: Callable[..., Awaitable[None]], *settings: HttpPort) -> None:
        """Serve an HTTP port of one incarnation of a server. A port that is taken does not end the run."""
        try:
            await serve(*settings)
        except ActorDied:
            return  # its monitor reports it
        except OSError as error:
            self._log.note(str(error))

    async def _say_url(self, name: str, handle: Any) -> None:
        self._log.note(f"{name} answers HTTP at {await handle.http_url()}")

    async def _load_weights(self, server: ServerRecord, handle: Any) -> None:
        """Load the target version whenever the server shall have it and has not."""
        lost = None
        while True:
            version, incarnation = self.fleet.target, server.incarnation
            weights = None if version is None else self.weights.kept.get(version)
            is_there = version in self.weights.kept and (weights is None or weights is not lost)
            if version is None or not is_there or server not in self.fleet.to_load(version):
                await self.changed.wait()
                continue
            with trio.move_on_after(self._parts.transfer_s) as patience:
                try:
                    await self._transfer(handle, version, weights)
                except ActorDied:
                    # The monitor reports it; what follows is another incarnation, or the end.
                    await self.changed.wait()
                    continue
                except ObjectLost:
                    # The trainer has died, and its weights with it; or newer ones have replaced them.
                    lost = weights
                    continue
            if patience.cancelled_caught:
                server.observe(ServerEvent.TRANSFER_MISSED, incarnation, now=trio.current_time())
            else:
                self.fleet.note_loaded(server, incarnation, version)
            await self.announce()

    async def _transfer(self, handle: Any, version: VersionName, weights: PublishedWeights | None) -> None:
        """Let a server load a version; return when it has. Raises ActorDied if the server has ended, ObjectLost."""
        if weights is None or self._parts.weight_sync is not WeightSync.NETWORK:
            table, content = (None, None) if weights is None else (weights.table, weights.content)
            await handle.load_weights(version, table, content, self._parts.interrupt)
            return
        while True:
            address = await handle.weight_address()
            try:
                await self.trainer.send_weights(address, version, weights, self._parts.interrupt)
                return
            except ActorDied:
                raise ObjectLost("the trainer has ended, and its weights with it") from None
            except ConnectionError:
                # Until the deadline; a server that has ended says so when it is asked for its address.
                await trio.sleep(TRANSFER_RETRY_S)

    async def announce(self) -> None:
        """Tell the coordinator which servers answer, and wake the tasks here."""
        self.wake()
        # One at a time: of those that wait for a coordinator that is started again, the oldest could arrive last.
        async with self._announcing:
            await self._set_routes(self._routes())

    def _routes(self) -> list[ServerRoute]:
        return [
            ServerRoute(
                one.name, self.handles[one.name], one.version, one.accepts, one.leaves, self._incarnations[one.name]
            )
            for one in self.fleet.routes(is_published=self.fleet.target in self.weights.kept)
            # One that leaves has no process any more while that is being ended.
            if one.name in self.handles
        ]

    def wake(self) -> None:
        """Wake those that wait for `changed`."""
        self.changed.set()
        self.changed = trio.Event()
