"""Controller of a run: the scope that owns its actors, and the tasks that connect them.

The coordinator decides about samples, `ServerFleet` about servers; the tasks here carry out what they decided.
"""

from __future__ import annotations

import secrets
import shutil
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
from fray.model.specs import ActorConfig
from fray.rl.checkpoint import MODEL_DIRECTORY, RunCheckpoint
from fray.rl.checkpoint_store import CheckpointAtUrl, JournalCopy, below
from fray.rl.coordinator import Coordinator
from fray.rl.core.failures import OnError
from fray.rl.core.server_fleet import RESTARTS as SERVER_RESTARTS
from fray.rl.core.server_fleet import ServerFleet, names_in_order, server_index
from fray.rl.core.server_states import BusyShare, ServerEvent, ServerRecord, ServerState
from fray.rl.core.versions import VersionName
from fray.rl.http_access.access import HttpAccess
from fray.rl.inference.http_settings import HttpPort
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.inference.server import InferenceServer
from fray.rl.messages import COLLECTED, FailureReport, RunStatus, ServerRoute, last_line
from fray.rl.process_start import NOTICE_S
from fray.rl.records.run_files import JOURNAL_DIRECTORY, STATUS_PERIOD_S, RunRecorder, upload_records
from fray.rl.records.run_log import RunLog
from fray.rl.records.run_requests import RunRequest, answer_requests
from fray.rl.rollout.process import RolloutProcess
from fray.rl.run_parts import RESTARTS, RunParts, with_access
from fray.rl.train.errors import EpisodesFailed
from fray.rl.train.settings import GRPO
from fray.rl.trainer_gang import TrainerGang
from fray.rl.trainer_process import RankGroup
from fray.rl.weights.published import KeptWeights, PublishedWeights, WeightSync
from fray.tracebacks import single_errors

REPLACEMENT_DELAY_S = 1.0
MOST_PORTS = 65_536
PROBE_PERIOD_S = 1.0
SUSPECT_S = 5.0
"""Longest wait for an answer of a server, which is suspect then."""
MISSING_S, MISSING_REPEAT_S = 10.0, 60.0
"""Seconds that a part may be missing before the console says so, and until it does so again."""
FAILURES_PERIOD_S = 10.0
"""Least seconds between two lines about episodes that fail."""
POSTS_PERIOD_S = 0.5
"""Least seconds between two fetches of what workers post."""
MODEL_VERSION = VersionName(0, 0)
"""Version of the weights of the model, which each server has loaded by itself."""
TRANSFER_RETRY_S = 0.5
"""Seconds before weights are posted again to a server that could not be reached."""
RELEASE_S = 5.0
"""Seconds after which the release of weights is given up."""
LEAVE_S = 60.0
"""Seconds that a server that leaves has for its requests; what is unfinished then goes to other servers."""


class RunController:
    """Runs a run on a cluster.

    Args:
        cluster: for its actors.
        parts: what the run consists of.
        log: gets what the run reports.
    """

    def __init__(self, cluster: Cluster, parts: RunParts, log: RunLog) -> None:
        self._cluster, self._parts, self._log = cluster, parts, log
        self._fleet = ServerFleet(
            least=parts.min_servers,
            freezes=parts.freezes,
            is_endless=parts.plan.on_error is OnError.CONTINUE,
            suspect_s=parts.liveness_s,
            stale_s=parts.health.start_s,
        )
        self._handles: dict[str, ActorHandle] = {}
        self._server_scopes: dict[str, trio.CancelScope] = {}
        self._sync_began, self._sync_s = 0.0, 0.0
        """Time at which the target became this, and seconds of the syncs that ended since the last update."""
        self._busy = BusyShare()
        self._weights = KeptWeights()
        """Weights of the target, if there are any yet, and of the newest version."""
        self._shown_failures: FailureReport | None = None
        """The last report that is on the console."""
        self._line = 0
        """Incarnation of the trainer."""
        self._changed = trio.Event()
        self._coordinator: Any = None
        self._trainer: Any = None
        self._is_training = False
        """True while batches are asked for."""
        self._is_stopping = False
        self._nursery: trio.Nursery
        self._cancel_scope = trio.CancelScope()

    async def run(self) -> RunStatus:
        """Run until there is nothing more to train or to collect; return the last status.

        Raises:
            BaseException: the error of a constructor, or of the trainer.
            ActorDied: a part of the run failed more often than it may be restarted.
        """
        with single_errors():
            return await self._run()

    async def stop(self) -> None:
        """Let the run end after the update under way, which is saved; at once if none can be under way."""
        self._is_stopping = True
        if self._is_training:
            await self._ask("stop")
        else:
            self._cancel_scope.cancel()

    async def add_rows(self, rows: Sequence[dict[str, Any]], in_front: bool) -> None:
        """Add rows to the data. Raises InvalidRequest if it is too late, or too early."""
        if self._coordinator is None:
            raise InvalidRequest("no row can be added: the run has not begun")
        await self._ask("add_rows", secrets.token_hex(8), rows, in_front)

    async def status(self) -> RunStatus | None:
        """Return what the run does; None before it has begun."""
        return None if self._coordinator is None else await self._ask("status")

    async def _run(self) -> RunStatus:
        self._parts = await trio.to_thread.run_sync(with_access, self._parts)
        with RunRecorder(self._parts) as recorder:
            status = await self._run_recorded(recorder)
        await self._upload_records()
        return status

    async def _run_recorded(self, recorder: RunRecorder) -> RunStatus:
        parts = self._parts
        if parts.weight_files is not None:
            # Of a run that was killed.
            await trio.to_thread.run_sync(partial(shutil.rmtree, parts.weight_files, ignore_errors=True))
        async with self._cluster.open_scope("rl-run", env_vars=parts.env_vars) as scope:
            # Without a journal, a coordinator that is restarted would have forgotten the run.
            restarts = 0 if parts.output is None else RESTARTS
            host = await scope.create_host("rl-main", max_restarts=restarts, health=parts.health)
            journal = None if parts.output is None else parts.output / JOURNAL_DIRECTORY
            self._coordinator = await host.create_actor(
                Coordinator,
                parts.plan,
                parts.rows,
                journal,
                parts.validation_rows,
                None if parts.url is None else JournalCopy(f"{parts.url}/{JOURNAL_DIRECTORY}", secrets.token_hex(8)),
                actor_config=ActorConfig(max_restarts=RESTARTS),
            )
            status: RunStatus = await self._ask("status")
            async with trio.open_nursery() as nursery:
                self._nursery, self._cancel_scope = nursery, nursery.cancel_scope
                nursery.start_soon(self._ask, "expire_leases")
                nursery.start_soon(self._follow_coordinator)
                nursery.start_soon(self._follow_failures)
                nursery.start_soon(self._end_at_failures)
                nursery.start_soon(self._follow_posts)
                nursery.start_soon(self._follow_target)
                nursery.start_soon(self._sync_weights)
                nursery.start_soon(self._release_weights)
                nursery.start_soon(self._say_missing)
                nursery.start_soon(self._record_status, recorder)
                nursery.start_soon(self._follow_requests, nursery)
                self._add_servers(nursery, parts.servers)
                for _ in range(parts.processes):
                    nursery.start_soon(self._keep_rollout_process, scope)
                await (self._collect() if parts.trainer is None else self._train_and_validate(scope, parts.trainer))
                self._log.add_posts(await self._ask("fetch_posts"))
                status = await self._ask("status")
                recorder.write(status, self._fleet.servers.values())
                nursery.cancel_scope.cancel()
            if self._is_stopping:
                recorder.note_stop()
            return status

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._coordinator, method).options(idempotent=True)(*arguments)

    async def _record_status(self, recorder: RunRecorder) -> None:
        """Write what the run does, for those who look from other processes."""
        while recorder.is_on:
            recorder.write(await self._ask("status"), self._fleet.servers.values())
            await trio.sleep(STATUS_PERIOD_S)

    async def _follow_coordinator(self) -> None:
        """Send the table of servers to each coordinator that starts."""
        async with monitor(self._coordinator) as events:
            async for event in events:
                if isinstance(event, Up):
                    await self._announce()
                elif not event.will_restart:
                    raise event.error

    async def _follow_failures(self) -> None:
        """Say on the console which episodes fail."""
        while True:
            known = self._shown_failures
            self._show_failures(await self._ask("wait_for_failures", 0 if known is None else known.total))
            await trio.sleep(FAILURES_PERIOD_S)

    def _show_failures(self, report: FailureReport) -> None:
        known = self._shown_failures
        if known is None or known.total != report.total:
            self._log.note(report.text_since(known))
        self._shown_failures = report

    async def _follow_posts(self) -> None:
        while True:
            self._log.add_posts(await self._ask("wait_for_posts"))
            await trio.sleep(POSTS_PERIOD_S)

    async def _end_at_failures(self) -> None:
        report: FailureReport = await self._ask("wait_for_stop")
        self._show_failures(report)  # those since the last line, or all of them where episodes fail fast
        raise EpisodesFailed(f"{report.stop_reason}. The last error:\n{report.last.rstrip()}")

    # Training

    async def _train_and_validate(self, scope: Scope, settings: GRPO) -> None:
        """Train to the end, and report each validation, of which the last one may end after the last update."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_training, scope, settings)
            while (result := await self._ask("next_validation")) is not None:
                # Not that of a trainer which was lost since.
                if result.version.incarnation >= self._line:
                    self._log.add_validation(result)
                await self._ask("end_validation", result.version)

    async def _keep_training(self, scope: Scope, settings: GRPO) -> None:
        """Create the trainer, train to the end, and continue from the last checkpoint when the trainer is lost."""
        gang = TrainerGang(scope, self._parts, settings, self._coordinator, self._log.note)
        checkpoint = await self._checkpoint()
        version: VersionName = await self._ask("version")
        continues = checkpoint is not None or version != VersionName(0, 0)

        async def train(trainer: Any, group: RankGroup | None) -> None:
            nonlocal checkpoint, version, continues
            if continues:
                checkpoint = await self._checkpoint()
                path = None if checkpoint is None else checkpoint.path
                version = await self._ask("rewind", path, version.incarnation)
                self._line = version.incarnation
                self._log.rewind(version.number)
            continues, self._trainer = True, trainer
            await trainer.start(version.incarnation, None if checkpoint is None else checkpoint.model, group)
            await self._train(trainer, version, gang)

        await gang.keep(train)

    async def _train(self, trainer: Any, version: VersionName, gang: TrainerGang) -> None:
        parts, line = self._parts, version.incarnation
        await self._publish(trainer, version, version)
        self._is_training = True
        await self._announce()
        while (step := await trainer.train_next()) is not None:
            if step.skipped:
                await self._ask("skip_update", line, step.number, step.skipped)
            else:
                version, is_due, target = await self._ask("finish_update", line, step.number, step.without_effect)
                # Before the next update changes them.
                if is_due:
                    await self._publish(trainer, version, target)
            step.metrics["sync_pause_s"], self._sync_s = self._sync_s, 0.0
            if (busy := self._busy.take()) is not None:
                step.metrics["servers_busy_share"] = busy
            # Before it is saved: a run that continues from there does not report this update again.
            self._log.add_step(step, await self._ask("status"))
            is_preempted = gang.is_preempted and not step.skipped and parts.checkpoints is not None
            if is_preempted or (not step.skipped and step.number % parts.save_every == 0):
                await self._save(trainer, step.number)
            if is_preempted:
                self._log.note(f"the trainer is preempted, or its machine leaves: saved after step {step.number}")
                raise ActorDied("the trainer is preempted")
        if version.number and version.number % parts.save_every:
            await self._save(trainer, version.number)

    async def _save(self, trainer: Any, step: int) -> None:
        store = self._parts.checkpoints
        if store is None:
            return
        unfinished = await trio.to_thread.run_sync(store.begin, step)
        # So that the loss of the trainer is an ActorDied here, too.
        with single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trainer.save, below(unfinished, MODEL_DIRECTORY))
                nursery.start_soon(self._ask, "save_record", unfinished, self._parts.state_facts)
        # A run that continues from this checkpoint has the metrics of its updates.
        await self._upload_records()
        path = await trio.to_thread.run_sync(store.finish, unfinished, step)
        if not self._parts.keep_checkpoints:
            await trio.to_thread.run_sync(store.remove_older, path)

    async def _upload_records(self) -> None:
        if self._parts.url is not None and self._parts.output is not None:
            await trio.to_thread.run_sync(upload_records, self._parts.output, self._parts.url)

    async def _checkpoint(self) -> RunCheckpoint | CheckpointAtUrl | None:
        store = self._parts.checkpoints
        return None if store is None else await trio.to_thread.run_sync(store.latest)

    async def _collect(self) -> None:
        self._keep(MODEL_VERSION, None, MODEL_VERSION)
        self._is_training = True
        while (batch := await self._ask("next_batch", 0)) is not None:
            self._log.add_samples(batch.groups)
            await self._ask("skip_update", 0, batch.number, COLLECTED)

    # Weights

    async def _publish(self, trainer: Any, version: VersionName, target: VersionName) -> None:
        """Let servers load the trainer's weights, or keep them until a validation ends.

        Args:
            target: the version that servers shall have, as of the update that made ``version``.
        """
        if version == MODEL_VERSION or self._parts.weight_sync is WeightSync.NONE:
            self._keep(MODEL_VERSION, None, target)
            return
        directory = self._parts.weight_files
        path = None if directory is None else directory / f"{version}.safetensors"
        self._keep(version, await trainer.publish(path), target)
        if self._parts.freezes:
            await self._announce()

    def _keep(self, version: VersionName, weights: PublishedWeights | None, target: VersionName) -> None:
        self._weights.add(version, weights, (target, self._fleet.target))
        self._wake()

    async def _release_weights(self) -> None:
        """Release weights that are not kept any more."""
        while True:
            while self._weights.dropped:
                # A trainer that has ended took its weights along; one that hangs must not stop this.
                with trio.move_on_after(RELEASE_S):
                    await self._weights.dropped.pop().content.release()
            await self._changed.wait()

    async def _follow_target(self) -> None:
        known: VersionName | None = None
        while True:
            known = await self._ask("wait_for_target", known)
            self._sync_began = trio.current_time()
            is_synced = self._parts.weight_sync is not WeightSync.NONE
            has_changed = self._fleet.aim(known if is_synced else MODEL_VERSION)
            if not is_synced:
                await self._ask("finish_sync", known)
            self._wake()
            if has_changed:
                await self._announce()

    async def _sync_weights(self) -> None:
        """Report to the coordinator when all servers that answer have the target version."""
        reported = None
        while True:
            version = self._fleet.target
            if version is None or version == reported or not self._fleet.has_loaded(version):
                await self._changed.wait()
                continue
            await self._ask("finish_sync", version)
            # That of the first version would be the start of the servers.
            if version != MODEL_VERSION:
                self._sync_s += trio.current_time() - self._sync_began
            self._fleet.end_transfer(version, trio.current_time())
            reported = version

    # Servers

    async def _follow_requests(self, nursery: trio.Nursery) -> None:
        """Do what the commands of others ask for, until cancelled."""

        def follow(request: RunRequest) -> str:
            if request.servers is not None:
                return self._scale(nursery, request.servers)
            self._log.note("is asked to stop")
            nursery.start_soon(self.stop)
            return (
                "ends after the update under way, which is saved"
                if self._is_training
                else "ends before its first update"
            )

        output = self._parts.output
        if output is None:
            return
        while True:
            await answer_requests(output, follow)
            await trio.sleep(STATUS_PERIOD_S)

    def _scale(self, nursery: trio.Nursery, wanted: int) -> str:
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
        before = len(self._fleet.staying)
        if wanted > before:
            changed = f"{', '.join(self._add_servers(nursery, wanted - before))} join"
        elif wanted < before:
            leaving = self._fleet.let_leave(before - wanted)
            for server in leaving:
                nursery.start_soon(self._end_server, server)
            changed = f"{', '.join(names_in_order(leaving))} leave"
        else:
            changed = "nothing changes"
        text = f"servers: {before} -> {wanted}; {changed}"
        self._log.note(text)
        self._wake()
        return text

    def _add_servers(self, nursery: trio.Nursery, number: int) -> list[str]:
        names = self._fleet.add(number)
        for name in names:
            nursery.start_soon(self._keep_server, name)
        return names

    async def _end_server(self, server: ServerRecord) -> None:
        """End a server that leaves, when its requests have ended."""
        scope = self._server_scopes[server.name]
        with trio.move_on_after(LEAVE_S):
            await self._announce()
            if server.version is not None:
                try:
                    await self._handles[server.name].leave()
                except ActorDied:
                    pass  # its requests are sent to others
        scope.cancel()

    async def _keep_server(self, name: str) -> None:
        """Run a server until the run ends or the server leaves."""
        with trio.CancelScope() as self._server_scopes[name]:
            await self._replace_server(name)
        self._fleet.remove(name)
        del self._server_scopes[name]
        self._handles.pop(name, None)
        self._log.note(f"{name} has left")
        await self._announce()

    async def _replace_server(self, name: str) -> None:
        """Create a server, and another one when it is retired, until it leaves."""
        server = self._fleet.servers[name]
        while True:
            # A scope for each, so that one that was taken for dead is ended wherever it is.
            async with self._cluster.open_scope(f"rl-{name}", env_vars=self._parts.env_vars) as scope:
                error = await self._follow_server(scope, server)
            if server.state is ServerState.LEAVING:
                return
            replacement = self._fleet.replace(name, trio.current_time())
            if replacement is None:
                raise error
            self._log.note(f"{name} is replaced after {server.starts} starts: {last_line(error)}")
            server = replacement
            await trio.sleep(REPLACEMENT_DELAY_S)

    async def _follow_server(self, scope: Scope, server: ServerRecord) -> FrayError:
        """Create a server, follow its restarts, and load weights into each incarnation; return why it was retired."""
        parts = self._parts
        handle: Any = await scope.create_actor(
            InferenceServer,
            ModelEngine(
                parts.model,
                slots=parts.slots,
                max_length=parts.max_length,
                device=parts.server_device,
                threads=parts.threads,
                lora=None if parts.trainer is None else parts.trainer.lora,
            ),
            resources=parts.resources.get("server"),
            actor_config=parts.process_settings(SERVER_RESTARTS, NOTICE_S),
            on_failure="absorb",
        )
        self._handles[server.name] = handle
        async with monitor(handle) as events, trio.open_nursery() as nursery:
            nursery.start_soon(self._load_weights, server, handle)
            nursery.start_soon(self._probe_server, server, handle)
            nursery.start_soon(self._end_overdue, server, nursery.cancel_scope)
            async for event in events:
                if isinstance(event, Up):
                    server.observe(ServerEvent.READY, server.incarnation)
                    nursery.start_soon(self._leave_at_preemption, server, handle)
                    if parts.http is not None:
                        port = parts.http.port + server_index(server.name)
                        nursery.start_soon(self._serve, handle.serve_http, evolve(parts.http, port=port))
                        nursery.start_soon(self._serve, partial(self._say_url, server.name, handle))
                    if parts.weight_sync is WeightSync.NETWORK:
                        nursery.start_soon(self._serve, handle.serve_weights)
                else:
                    server.observe(ServerEvent.ENDED, server.incarnation)
                    server.observe(
                        ServerEvent.RESTARTED if event.will_restart else ServerEvent.BUDGET_SPENT, server.incarnation
                    )
                await self._announce()
                if isinstance(event, Down) and not event.will_restart:
                    nursery.cancel_scope.cancel()
                    return event.error
        # The nursery was cancelled: a monitor ends with the end of its actor.
        return ActorDied(f"{server.name} missed every deadline for {server.suspect_s:g} s or more")

    async def _end_overdue(self, server: ServerRecord, follow: trio.CancelScope) -> None:
        """Let a server that was taken for dead be retired, by the end of its scope: it may not even hear of it."""
        while not server.is_overdue:
            await self._changed.wait()
        server.observe(ServerEvent.BUDGET_SPENT, server.incarnation)
        await self._announce()
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
                await self._changed.wait()
                continue
            incarnation = server.incarnation
            try:
                busy = await handle.busy_time.options(timeout_s=min(SUSPECT_S, self._parts.liveness_s / 4))()
                if before is not None:
                    self._busy.add(before, busy)
                before, has_answered = busy, True
            except DeadlineExceeded:
                has_answered = False
            except ActorDied:
                before = None
                await self._changed.wait()
                continue
            event = ServerEvent.ANSWERED if has_answered else ServerEvent.DEADLINE_MISSED
            if server.observe(event, incarnation, now=trio.current_time()):
                answers = "answers again" if has_answered else "does not answer: its requests go to other servers"
                self._log.note(f"{server.name} {'is taken for dead' if server.is_overdue else answers}")
                await self._announce()
            if has_answered:
                await trio.sleep(PROBE_PERIOD_S)

    async def _leave_at_preemption(self, server: ServerRecord, handle: Any) -> None:
        """Start another server as soon as an incarnation of a server has notice of its end, and let it leave."""
        try:
            await handle.wait_for_preemption()
        except ActorDied:
            return  # its monitor reports it
        if server.state is not ServerState.LEAVING:
            (other,) = self._add_servers(self._nursery, 1)
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
            version, incarnation = self._fleet.target, server.incarnation
            weights = None if version is None else self._weights.kept.get(version)
            is_there = version in self._weights.kept and (weights is None or weights is not lost)
            if version is None or not is_there or server not in self._fleet.to_load(version):
                await self._changed.wait()
                continue
            with trio.move_on_after(self._parts.transfer_s) as patience:
                try:
                    await self._transfer(handle, version, weights)
                except ActorDied:
                    # The monitor reports it; what follows is another incarnation, or the end.
                    await self._changed.wait()
                    continue
                except ObjectLost:
                    # The trainer has died, and its weights with it; or newer ones have replaced them.
                    lost = weights
                    continue
            if patience.cancelled_caught:
                server.observe(ServerEvent.TRANSFER_MISSED, incarnation, now=trio.current_time())
            else:
                self._fleet.note_loaded(server, incarnation, version)
            await self._announce()

    async def _transfer(self, handle: Any, version: VersionName, weights: PublishedWeights | None) -> None:
        """Let a server load a version; return when it has. Raises ActorDied if the server has ended, ObjectLost."""
        if weights is None or self._parts.weight_sync is not WeightSync.NETWORK:
            table, content = (None, None) if weights is None else (weights.table, weights.content)
            await handle.load_weights(version, table, content, self._parts.interrupt)
            return
        while True:
            address = await handle.weight_address()
            try:
                await self._trainer.send_weights(address, version, weights, self._parts.interrupt)
                return
            except ActorDied:
                raise ObjectLost("the trainer has ended, and its weights with it") from None
            except ConnectionError:
                # Until the deadline; a server that has ended says so when it is asked for its address.
                await trio.sleep(TRANSFER_RETRY_S)

    async def _announce(self) -> None:
        """Tell the coordinator which servers answer, and wake the tasks here."""
        self._wake()
        routes = [
            ServerRoute(one.name, self._handles[one.name], one.version, one.accepts, one.leaves)
            for one in self._fleet.routes(is_published=self._fleet.target in self._weights.kept)
        ]
        await self._ask("set_routes", routes, self._missing_text())

    def _missing_text(self) -> str:
        """Return which parts are waited for; empty if enough servers answer."""
        if self._parts.trainer is not None and not self._is_training:
            return "the run waits for its trainer to start"
        return self._fleet.missing_text()

    async def _say_missing(self) -> None:
        """Say on the console which parts are missing for long."""
        while True:
            while not self._missing_text():
                await self._changed.wait()
            with trio.move_on_after(MISSING_S) as patience:
                while self._missing_text():
                    await self._changed.wait()
            if patience.cancelled_caught:
                self._log.note(self._missing_text())
                with trio.move_on_after(MISSING_REPEAT_S):
                    while self._missing_text():
                        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # Rollouts

    async def _keep_rollout_process(self, scope: Scope) -> None:
        """Create a rollout process, run each incarnation of it, and give back what a lost one had."""
        parts = self._parts
        handle: Any = await scope.create_actor(
            RolloutProcess,
            parts.episodes,
            self._coordinator,
            resources=parts.resources.get("rollout"),
            actor_config=parts.process_settings(notice_s=NOTICE_S),
        )
        async with monitor(handle) as events, trio.open_nursery() as nursery:
            async for event in events:
                if isinstance(event, Up):
                    nursery.start_soon(_roll_out, handle, parts.access)
                    continue
                await self._ask("lose_worker", event.incarnation)
                if not event.will_restart:
                    raise event.error


async def _roll_out(handle: Any, access: HttpAccess | None) -> None:
    try:
        await handle.run(access)
    except ActorDied:
        return  # its monitor reports it
