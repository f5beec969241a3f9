"""Controller of a run: the scope that owns its actors, and the tasks that connect them.

The coordinator decides about samples, `ServerFleet` about servers; the tasks here carry out what they decided.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from fray.api.actors.monitor import Up, monitor
from fray.api.cluster import Cluster
from fray.api.scope import Scope
from fray.errors import ActorDied, InvalidRequest
from fray.model.specs import ActorConfig
from fray.rl.checkpoint import MODEL_DIRECTORY, RunCheckpoint
from fray.rl.checkpoint_store import CheckpointAtUrl, JournalCopy, below
from fray.rl.coordinator import Coordinator
from fray.rl.core.versions import VersionName
from fray.rl.http_access.access import HttpAccess
from fray.rl.journal_file import claim_journal
from fray.rl.messages import COLLECTED, FailureReport, RunStanding, RunStatus, ServerRoute, ValidationResult
from fray.rl.nexrl.experiment_posts import FetchedPosts
from fray.rl.process_start import NOTICE_S
from fray.rl.processes.run_processes import RunProcesses, raise_end
from fray.rl.processes.run_servers import RunServers
from fray.rl.records.run_files import JOURNAL_DIRECTORY, STATUS_PERIOD_S, RunRecorder, upload_records
from fray.rl.records.run_log import RunLog
from fray.rl.records.run_requests import RunRequest, answer_requests
from fray.rl.rollout.process import RolloutProcess
from fray.rl.run_parts import RESTARTS, RunParts, with_access
from fray.rl.train.errors import EpisodesFailed
from fray.rl.train.settings import GRPO
from fray.rl.trainer_gang import TrainerGang
from fray.rl.trainer_process import RankGroup, TrainerStanding
from fray.rl.weights.published import PublishedWeights, WeightSync
from fray.tracebacks import single_errors

MISSING_S, MISSING_REPEAT_S = 10.0, 60.0
"""Seconds that a part may be missing before the console says so, and until it does so again."""
FAILURES_PERIOD_S = 10.0
"""Least seconds between two lines about episodes that fail."""
POSTS_PERIOD_S = 0.5
"""Least seconds between two fetches of what workers post."""
MODEL_VERSION = VersionName(0, 0)
"""Version of the weights of the model, which each server has loaded by itself."""


class RunController:
    """Runs a run on a cluster.

    Args:
        cluster: for its actors.
        parts: what the run consists of.
        log: gets what the run reports.
        job: id of the job that owns the processes of the run, whose next attempt takes them over. Default: they end
            with the call of `run`.
    """

    def __init__(self, cluster: Cluster, parts: RunParts, log: RunLog, job: str = "") -> None:
        self._cluster, self._parts, self._log = cluster, parts, log
        self._job, self._processes = job, RunProcesses(cluster, job)
        self._servers: RunServers
        self._sync_began, self._sync_s = 0.0, 0.0
        """Time at which the target became this, and seconds of the syncs that ended since the last update."""
        self._shown_failures: FailureReport | None = None
        """The last report that is on the console."""
        self._line = 0
        """Incarnation of the trainer."""
        self._lost_workers: list[str] = []
        """Incarnations of rollout processes."""
        self._posts_handled = 0
        """Number of the posts of workers that were given to the log last."""
        self._coordinator: Any = None
        self._is_training = False
        """True while batches are asked for."""
        self._is_stopping = False
        self._cancel_scope = trio.CancelScope()

    async def run(self) -> RunStatus | None:
        """Run until there is nothing more to train or to collect; return the last status.

        None: it was stopped before its coordinator had started.

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

    async def _run(self) -> RunStatus | None:
        parts = self._parts = await trio.to_thread.run_sync(with_access, self._parts)
        self._servers = RunServers(self._cluster, self._processes, parts, self._log, self._set_routes)
        status: RunStatus | None = None
        # A stop ends the start, too.
        with self._cancel_scope, RunRecorder(self._parts) as recorder:
            status = await self._run_recorded(recorder)
        await self._upload_records()
        return status

    async def _run_recorded(self, recorder: RunRecorder) -> RunStatus:
        parts = self._parts
        async with self._cluster.open_scope("rl-run", env_vars=parts.env_vars) as scope:
            # Without a journal, a coordinator that is restarted would have forgotten the run.
            restarts = 0 if parts.output is None else RESTARTS
            journal = None if parts.output is None else parts.output / JOURNAL_DIRECTORY
            # Each attempt of a job is of one start: the next one takes the coordinator over. With a URL, the directory
            # is that of each machine.
            start = "" if journal is None or parts.url is not None else self._job or secrets.token_hex(8)
            if journal is not None and start:
                await trio.to_thread.run_sync(claim_journal, journal, start)
            self._coordinator = await self._processes.create(
                scope,
                Coordinator,
                "0",
                parts.plan,
                parts.rows,
                journal,
                parts.validation_rows,
                None if parts.url is None else JournalCopy(f"{parts.url}/{JOURNAL_DIRECTORY}", secrets.token_hex(8)),
                start,
                # Two incarnations must not write one journal: this one is not started while another may live.
                actor_config=ActorConfig(max_restarts=restarts, must_start=True, health=parts.health),
            )
            standing: RunStanding = await self._ask("standing")
            self._is_stopping = standing.is_stopping
            status: RunStatus = await self._ask("status")
            async with trio.open_nursery() as nursery:
                self._cancel_scope = nursery.cancel_scope
                nursery.start_soon(self._ask, "expire_leases")
                nursery.start_soon(self._follow_coordinator)
                nursery.start_soon(self._follow_failures)
                nursery.start_soon(self._end_at_failures)
                nursery.start_soon(self._follow_posts)
                nursery.start_soon(self._follow_target)
                nursery.start_soon(self._sync_weights)
                nursery.start_soon(self._say_missing)
                nursery.start_soon(self._record_status, recorder)
                nursery.start_soon(self._follow_requests, nursery)
                await self._servers.start(nursery, standing.servers or parts.servers)
                for number in range(parts.processes):
                    nursery.start_soon(self._keep_rollout_process, scope, number)
                await (self._collect() if parts.trainer is None else self._train_and_validate(scope, parts.trainer))
                self._add_posts(*await self._ask("fetch_posts", self._posts_handled))
                status = await self._ask("status")
                recorder.write(status, self._servers.fleet.servers.values())
                nursery.cancel_scope.cancel()
            await self._processes.end_all()
            if self._is_stopping:
                recorder.note_stop()
            return status

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._coordinator, method).options(idempotent=True)(*arguments)

    async def _record_status(self, recorder: RunRecorder) -> None:
        """Write what the run does, for those who look from other processes."""
        while recorder.is_on:
            recorder.write(await self._ask("status"), self._servers.fleet.servers.values())
            await trio.sleep(STATUS_PERIOD_S)

    async def _follow_coordinator(self) -> None:
        """Send the table of servers, and the processes that were lost, to each coordinator that starts."""
        async with monitor(self._coordinator) as events:
            async for event in events:
                if isinstance(event, Up):
                    await self._servers.announce()
                    for worker in self._lost_workers:
                        await self._ask("lose_worker", worker)
                else:
                    await raise_end(self._coordinator, event)

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
            self._add_posts(*await self._ask("wait_for_posts", self._posts_handled))
            await trio.sleep(POSTS_PERIOD_S)

    def _add_posts(self, number: int, posts: FetchedPosts) -> None:
        if number != self._posts_handled:
            self._posts_handled = number
            self._log.add_posts(posts)

    async def _end_at_failures(self) -> None:
        report: FailureReport = await self._ask("wait_for_stop")
        self._show_failures(report)  # those since the last line, or all of them where episodes fail fast
        raise EpisodesFailed(f"{report.stop_reason}. The last error:\n{report.last.rstrip()}")

    # Training

    async def _train_and_validate(self, scope: Scope, settings: GRPO) -> None:
        """Train to the end, and report each validation, of which the last one may end after the last update."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_validations)
            await self._keep_training(scope, settings)
            nursery.cancel_scope.cancel()

    async def _report_validations(self) -> None:
        while True:
            result: ValidationResult = await self._ask("next_validation")
            # Not that of a trainer which was lost since.
            if result.version.incarnation >= self._line:
                self._log.add_validation(result)
            await self._ask("end_validation", result.version)

    async def _keep_training(self, scope: Scope, settings: GRPO) -> None:
        """Create the trainer, train and validate to the end; continue from the last checkpoint when it is lost."""
        gang = TrainerGang(self._processes, scope, self._parts, settings, self._coordinator, self._log.note)
        checkpoint = await self._checkpoint()
        version: VersionName = (await self._ask("standing")).version
        continues = checkpoint is not None or version != VersionName(0, 0)

        async def train(trainer: Any, group: RankGroup | None) -> None:
            nonlocal checkpoint, version, continues
            self._servers.trainer = trainer
            found: TrainerStanding = await trainer.standing()
            run: RunStanding = await self._ask("standing")
            if found.line == run.version.incarnation and found.members == gang.members:
                await self._take_over(trainer, found, run)
                await self._train(trainer, run.version, gang, None)
                return
            if continues:
                checkpoint = await self._checkpoint()
                path = None if checkpoint is None else checkpoint.path
                version = await self._ask("rewind", path, run.version.incarnation)
                self._line = version.incarnation
                self._log.rewind(version.number)
            continues = True
            if self._parts.weight_files is not None:
                # Of a trainer that was lost.
                await trio.to_thread.run_sync(partial(shutil.rmtree, self._parts.weight_files, ignore_errors=True))
            await trainer.start(version.incarnation, None if checkpoint is None else checkpoint.model, group)
            await self._publish(trainer, version, version)
            await self._train(trainer, version, gang, 0)

        await gang.keep(train)

    async def _take_over(self, trainer: Any, found: TrainerStanding, run: RunStanding) -> None:
        """Continue with a trainer that has worked on while the controller was away."""
        self._line = run.version.incarnation
        self._log.take_over(run.version.number)
        self._servers.weights.kept = dict(found.published)
        if run.target == MODEL_VERSION or self._parts.weight_sync is WeightSync.NONE:
            self._keep(MODEL_VERSION, None, run.target)
        elif run.target not in found.published:
            # The controller was lost before it had published what the trainer has, and the trainer waits for that.
            await self._publish(trainer, run.version, run.target)
        self._servers.wake()

    async def _train(self, trainer: Any, version: VersionName, gang: TrainerGang, handled: int | None) -> None:
        """Train to the end, and keep the trainer while a validation may need its weights.

        Args:
            handled: as of `TrainerProcess.train_next`.
        """
        parts, line = self._parts, version.incarnation
        self._is_training = True
        await self._servers.announce()
        while (step := await trainer.train_next(handled)) is not None:
            if step.skipped:
                await self._ask("skip_update", line, step.number, step.skipped)
            else:
                version, is_due, target = await self._ask("finish_update", line, step.number, step.without_effect)
                # Before the next update changes them.
                if is_due:
                    await self._publish(trainer, version, target)
            step.metrics["sync_pause_s"], self._sync_s = self._sync_s, 0.0
            if (busy := self._servers.busy.take()) is not None:
                step.metrics["servers_busy_share"] = busy
            # Before it is saved: a run that continues from there does not report this update again.
            self._log.add_step(step, await self._ask("status"))
            is_preempted = gang.is_preempted and not step.skipped and parts.checkpoints is not None
            if is_preempted or (not step.skipped and step.number % parts.save_every == 0):
                await self._save(trainer, step.number)
            if is_preempted:
                self._log.note(f"the trainer is preempted, or its machine leaves: saved after step {step.number}")
                raise ActorDied("the trainer is preempted")
            handled = step.serial
        if version.number and version.number % parts.save_every:
            await self._save(trainer, version.number)
        # By the trainer, so that its loss is noticed: the weights that servers may still need are lost with it.
        await trainer.wait_for_last_validation()

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
        needed = [name for name in (target, self._servers.fleet.target) if name is not None]
        self._keep(version, await trainer.publish(version, path, needed), target)
        if self._parts.freezes:
            await self._servers.announce()

    def _keep(self, version: VersionName, weights: PublishedWeights | None, target: VersionName) -> None:
        self._servers.weights.add(version, weights, (target, self._servers.fleet.target))
        self._servers.wake()

    async def _follow_target(self) -> None:
        known: VersionName | None = None
        while True:
            known = await self._ask("wait_for_target", known)
            self._sync_began = trio.current_time()
            is_synced = self._parts.weight_sync is not WeightSync.NONE
            has_changed = self._servers.fleet.aim(known if is_synced else MODEL_VERSION)
            if not is_synced:
                await self._ask("finish_sync", known)
            self._servers.wake()
            if has_changed:
                await self._servers.announce()

    async def _sync_weights(self) -> None:
        """Report to the coordinator when all servers that answer have the target version."""
        reported = None
        while True:
            version = self._servers.fleet.target
            if version is None or version == reported or not self._servers.fleet.has_loaded(version):
                await self._servers.changed.wait()
                continue
            await self._ask("finish_sync", version)
            # That of the first version would be the start of the servers.
            if version != MODEL_VERSION:
                self._sync_s += trio.current_time() - self._sync_began
            self._servers.fleet.end_transfer(version, trio.current_time())
            reported = version

    # Commands, and what is missing

    async def _follow_requests(self, nursery: trio.Nursery) -> None:
        """Do what the commands of others ask for, until cancelled."""

        async def follow(request: RunRequest) -> str:
            if request.servers is not None:
                changed = self._servers.scale(request.servers)
                await self._ask("want_servers", request.servers)
                return changed
            self._log.note("is asked to stop")
            if self._is_training:
                # Before the answer: it holds whatever is lost from then on.
                await self.stop()
                return "ends after the update under way, which is saved"
            nursery.start_soon(self.stop)
            return "ends before its first update"

        output = self._parts.output
        if output is None:
            return
        while True:
            await answer_requests(output, follow)
            await trio.sleep(STATUS_PERIOD_S)

    async def _set_routes(self, routes: list[ServerRoute]) -> None:
        await self._ask("set_routes", routes, self._missing_text())

    def _missing_text(self) -> str:
        """Return which parts are waited for; empty if enough servers answer."""
        if self._parts.trainer is not None and not self._is_training:
            return "the run waits for its trainer to start"
        return self._servers.fleet.missing_text()

    async def _say_missing(self) -> None:
        """Say on the console which parts are missing for long."""
        while True:
            while not self._missing_text():
                await self._servers.changed.wait()
            with trio.move_on_after(MISSING_S) as patience:
                while self._missing_text():
                    await self._servers.changed.wait()
            if patience.cancelled_caught:
                self._log.note(self._missing_text())
                with trio.move_on_after(MISSING_REPEAT_S):
                    while self._missing_text():
                        await self._servers.changed.wait()

    # Rollouts

    async def _keep_rollout_process(self, scope: Scope, number: int) -> None:
        """Create a rollout process, run each incarnation of it, and give back what a lost one had."""
        parts = self._parts
        handle: Any = await self._processes.create(
            scope,
            RolloutProcess,
            str(number),
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
                self._lost_workers.append(event.incarnation)
                await self._ask("lose_worker", event.incarnation)
                await raise_end(handle, event)


async def _roll_out(handle: Any, access: HttpAccess | None) -> None:
    try:
        await handle.run(access)
    except ActorDied:
        return  # its monitor reports it
